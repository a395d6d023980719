// Plan: a launch starts while the one before still runs (programmatic dependent launch, sm_90), asks for its
// weights to come to the L2, and only then waits for the numbers it depends on.
#include "kernels/decode.h"

#include <nv/target>

#include "kernels/scalars.cuh"

namespace prism::cuda {

namespace {

constexpr int kThreads = 128, kWarps = kThreads / kWarp, kRowsAWarp = 2, kRows = kWarps * kRowsAWarp;
constexpr int kMixThreads = 256, kMixWarps = kMixThreads / kWarp;
constexpr int kSlice = 32,
              kSliceRows = kSlice / kMixWarps;  // values of a head a block has, and rows of S a warp
constexpr int kMostK = 256;

// Lets the next launch begin, and waits until the one before has finished.
__device__ void wait_for_previous() {
  NV_IF_TARGET(NV_PROVIDES_SM_90,
               (cudaTriggerProgrammaticLaunchCompletion(); cudaGridDependencySynchronize();))
}
__device__ void prefetch(const void* line) { asm volatile("prefetch.global.L2 [%0];" ::"l"(line)); }
// All of a block's threads ask for `count` numbers from x on.
template <class T>
__device__ void prefetch_all(const T* x, int64_t count) {
  constexpr int64_t kLine = 128 / sizeof(T);
  for (int64_t i = threadIdx.x * kLine; i < count; i += blockDim.x * kLine) prefetch(x + i);
}

// SiLU of the convolution's sum for channel c, whose newest input is x.
template <class T>
__device__ float convolved(float x, const float* taps, const T* cache, int64_t c, int64_t channels,
                           int64_t W) {
  float sum = taps[c * W + W - 1] * x;
  for (int64_t j = 0; j < W - 1; ++j) sum += taps[c * W + j] * load(cache + j * channels + c);
  return sum * sigmoid(sum);
}

// --- products

template <class T>
__device__ void form_norm(const StepVector<T>& v, float* to, bool keep) {
  float total = 0;
  for (int64_t i = threadIdx.x; i < v.width; i += kThreads) {
    const float x = v.y ? rounded<T>(load(v.x + i) + load(v.y + i)) : load(v.x + i);
    to[i] = x, total += x * x;
    if (keep && v.sum) store(v.sum + i, x);
  }
  const float rstd = rsqrtf(block_sum(total) / v.width + v.eps);
  for (int64_t i = threadIdx.x; i < v.width; i += kThreads) {
    to[i] = rounded<T>(to[i] * (rstd * v.weight[i]));
    if (keep && v.xn) store(v.xn + i, to[i]);
    if (v.kind == StepVector<T>::anchor)
      to[i] = rounded<T>(convolved(to[i], v.taps, v.cache, i, v.width, v.W));
  }
}

template <class T>
__device__ void form_gated_norm(const StepVector<T>& v, float* to) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int64_t h = threadIdx.x / kWarp; h < v.width / v.V; h += kWarps) {
    const T *o = v.x + h * v.V, *gate = v.y + h * v.V;
    float total = 0;
    for (int64_t i = lane; i < v.V; i += kWarp) total += load(o + i) * load(o + i);
    const float rstd = rsqrtf(warp_sum(total) / v.V + v.eps);
    for (int64_t i = lane; i < v.V; i += kWarp) {
      const float u = load(gate + i);
      to[h * v.V + i] = rounded<T>(load(o + i) * (rstd * v.weight[i] * u * sigmoid(u)));
    }
  }
}

// A warp's lanes along a row.
template <class T>
__device__ float dot(const T* row, const float* x, int64_t width) {
  float sum = 0;
#pragma unroll 4
  for (int64_t c = threadIdx.x % kWarp * kVec<T>; c < width; c += kWarp * kVec<T>) {
    float w[kVec<T>];
    load_vec(row + c, w);
    each<kVec<T>>([&](int i) { sum += w[i] * x[c + i]; });
  }
  return warp_sum(sum);
}

template <class T>
__device__ void move_on(const StepCaches<T>& caches) {
  for (int i = 0; i < StepCaches<T>::kMost; ++i)
    for (int64_t c = threadIdx.x; caches.cache[i] && c < caches.channels[i]; c += kThreads) {
      T* const column = caches.cache[i] + c;
      for (int64_t j = 0; j < caches.W - 2; ++j)
        column[j * caches.channels[i]] = column[(j + 1) * caches.channels[i]];
      column[(caches.W - 2) * caches.channels[i]] = caches.input[i][c];
    }
}

// The first blocks have a's rows, the next b's, the last one, if there is one more, the caches.
template <class T>
__global__ void __launch_bounds__(kThreads)
    product_kernel(const __grid_constant__ StepProduct<T> a, const __grid_constant__ StepProduct<T> b,
                   const __grid_constant__ StepCaches<T> caches, int64_t a_blocks, int64_t blocks) {
  extern __shared__ float x[];
  const bool second = blockIdx.x >= a_blocks;
  const StepProduct<T>& p = second ? b : a;
  const int64_t block = blockIdx.x - (second ? a_blocks : 0), width = p.x.width;
  const int64_t begin = block * kRows, end = min(begin + kRows, p.rows);
  if (blockIdx.x >= blocks) {
    wait_for_previous();
    return move_on(caches);
  }
  prefetch_all(p.weight + begin * width, (end - begin) * width);
  if (p.swiglu) prefetch_all(p.weight + (p.rows + begin) * width, (end - begin) * width);
  wait_for_previous();

  if (p.x.kind == StepVector<T>::gated_norm)
    form_gated_norm(p.x, x);
  else if (p.x.kind != StepVector<T>::plain)
    form_norm(p.x, x, blockIdx.x == 0);
  else
    for (int64_t i = threadIdx.x; i < width; i += kThreads) x[i] = load(p.x.x + i);
  __syncthreads();

#pragma unroll
  for (int r = 0; r < kRowsAWarp; ++r) {
    const int64_t row = begin + threadIdx.x / kWarp * kRowsAWarp + r;
    if (row >= end) break;
    float y = dot(p.weight + row * width, x, width);
    if (p.swiglu) {
      const float gate = rounded<T>(y), up = rounded<T>(dot(p.weight + (p.rows + row) * width, x, width));
      y = gate * (sigmoid(gate) * up);
    }
    if (threadIdx.x % kWarp == 0) store(p.out + row, y);
  }
}

// --- the mixer

// row . z over R numbers, by one thread.
template <class T>
__device__ float low_rank(const T* row, const float* z, int64_t R) {
  float sum = 0;
#pragma unroll 4
  for (int64_t r = 0; r < R; r += kVec<T>) {
    float w[kVec<T>];
    load_vec(row + r, w);
    each<kVec<T>>([&](int i) { sum += w[i] * z[r + i]; });
  }
  return rounded<T>(sum);
}

// What a block of step_mix holds in shared memory.
struct Shared {
  float *q, *k, *kappa, *w, *y, *v, *anchor, *down;

  __device__ Shared(float* at, int64_t K, int64_t L) {
    const auto take = [&](int64_t count) { return at += count, at - count; };
    q = take(K), k = take(K), kappa = take((L - 1) * K);
    w = take(L * kSlice), y = take((L - 1) * kSlice), v = take(kSlice), anchor = take(kSlice), down = at;
  }
};
size_t shared_bytes(int64_t K, int64_t L, int64_t down) {
  return static_cast<size_t>((1 + L) * K + (2 * L + 1) * kSlice + down) * sizeof(float);
}
template <class T>
__host__ __device__ int64_t down_width(const StepMix<T>& m) {
  return (m.L - 1) * (2 * m.R + m.H) + (m.residual_up ? m.R : 0);
}

// Everything before norms: q, k and v convolved, kappa, y and the anchor raised from the low rank.
template <class T>
__device__ void form_inputs(const StepMix<T>& m, const Shared& s, int64_t h, int64_t v0) {
  const int64_t steps = m.L - 1, width = min(static_cast<int64_t>(kSlice), m.V - v0);
  for (int64_t c = threadIdx.x; c < m.K; c += kMixThreads) {
    const int64_t at = h * m.K + c, channels = m.H * m.K;
    s.q[c] = convolved(load(m.q + at), m.taps_q, m.cache_q, at, channels, m.W);
    s.k[c] = convolved(load(m.k + at), m.taps_k, m.cache_k, at, channels, m.W);
  }
  for (int64_t c = threadIdx.x; c < width; c += kMixThreads) {
    const int64_t at = h * m.V + v0 + c;
    s.v[c] = rounded<T>(convolved(load(m.v + at), m.taps_v, m.cache_v, at, m.H * m.V, m.W));
    const float* z = s.down + steps * (2 * m.R + m.H);
    s.anchor[c] = m.residual_up ? low_rank(m.residual_up + at * m.R, z, m.R) : 0.f;
  }
  for (int64_t i = threadIdx.x; i < steps * m.K; i += kMixThreads) {
    const int64_t l = i / m.K, c = i % m.K;
    s.kappa[i] = low_rank(m.key_up + ((l * m.H + h) * m.K + c) * m.R, s.down + l * m.R, m.R);
  }
  for (int64_t i = threadIdx.x; i < steps * kSlice; i += kMixThreads) {
    const int64_t l = i / kSlice, c = i % kSlice;
    if (c < width)
      s.y[i] = low_rank(m.gain_up + ((l * m.H + h) * m.V + v0 + c) * m.R, s.down + (steps + l) * m.R, m.R);
  }
}

// A warp: x = scale x / |x|, rounded.
template <class T>
__device__ void normalise(float* x, int64_t K, float scale, bool norm) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  float total = 0;
  for (int64_t i = lane; i < K; i += kWarp) total += x[i] * x[i];
  if (norm) scale *= rsqrtf(warp_sum(total) + static_cast<float>(kL2NormEps));
  for (int64_t i = lane; i < K; i += kWarp) x[i] = rounded<T>(x[i] * scale);
}

// The writes of one value a lane.
template <class T>
__device__ void solve(const StepMix<T>& m, const Shared& s, int64_t h, float beta) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  float r = s.v[lane] - s.anchor[lane];
  const float r2 = r;
  s.w[lane] = rounded<T>(beta * s.v[lane]);
  for (int64_t l = 1; l < m.L; ++l) {
    const int64_t at = (l - 1) * m.H + h;
    const float delta = step_forward(m.gain, s.y[(l - 1) * kSlice + lane], r, r2);
    const float open = sigmoid(s.down[2 * (m.L - 1) * m.R + at] + m.gate_bias[at]);
    r -= delta;
    s.w[l * kSlice + lane] = rounded<T>(open * (m.scale ? m.scale[at] : 1.f) * delta);
  }
}

// A block has kSlice values of one head; a warp kSliceRows rows of S, in registers.
template <class T>
__global__ void __launch_bounds__(kMixThreads) mix_kernel(StepMix<T> m) {
  extern __shared__ float shared[];
  const Shared s(shared, m.K, m.L);
  const int64_t h = blockIdx.x % m.H, v0 = blockIdx.x / m.H * kSlice;
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  constexpr int kPieces = kMostK / kWarp;
  float S[kSliceRows][kPieces];
  const auto row_of = [&](int r) { return v0 + warp * kSliceRows + r; };
  each<kSliceRows, kPieces>([&](int r, int i) {
    const int64_t key = lane + i * kWarp;
    S[r][i] = row_of(r) < m.V && key < m.K ? m.S[(h * m.V + row_of(r)) * m.K + key] : 0.f;
  });
  for (int64_t l = 0; l < m.L - 1; ++l) {
    prefetch_all(m.key_up + (l * m.H + h) * m.K * m.R, m.K * m.R);
    prefetch_all(m.gain_up + ((l * m.H + h) * m.V + v0) * m.R,
                 min(m.V - v0, static_cast<int64_t>(kSlice)) * m.R);
  }
  wait_for_previous();

  for (int64_t i = threadIdx.x; i < (m.L > 1 ? down_width(m) : 0); i += kMixThreads)
    s.down[i] = load(m.down + i);
  __syncthreads();
  form_inputs(m, s, h, v0);
  __syncthreads();
  const float beta = sigmoid(load(m.b + h));
  if (warp == kMixWarps - 1) solve(m, s, h, beta);
  for (int64_t i = warp; i <= m.L; i += kMixWarps)
    normalise<T>(s.q + i * m.K, m.K, i == 0 ? rsqrtf(static_cast<float>(m.K)) : 1.f, i < 2 || m.key_norm);
  __syncthreads();

  const float g = !m.decay ? 0.f
                  : m.a    ? learned_log_decay(m.A_log[h], load(m.a + h) + m.dt_bias[h])
                           : fixed_log_decay(h);
  const float alpha = expf(g);
#pragma unroll
  for (int r = 0; r < kSliceRows; ++r) {
    float along = 0, out = 0;
    const int c = warp * kSliceRows + r;
    each<kPieces>([&](int i) {
      const int64_t key = lane + i * kWarp;
      S[r][i] *= alpha;
      if (key < m.K) along += S[r][i] * s.k[key];
    });
    const float first = s.w[c] - (m.erase ? beta * warp_sum(along) : 0.f);
    each<kPieces>([&](int i) {
      const int64_t key = lane + i * kWarp;
      if (key >= m.K) return;
      S[r][i] += first * s.k[key];
      for (int64_t l = 1; l < m.L; ++l) S[r][i] += s.w[l * kSlice + c] * s.kappa[(l - 1) * m.K + key];
      out += S[r][i] * s.q[key];
      if (row_of(r) < m.V) m.S[(h * m.V + row_of(r)) * m.K + key] = S[r][i];
    });
    out = warp_sum(out);
    if (lane == 0 && row_of(r) < m.V) store(m.o + h * m.V + row_of(r), out);
  }
}

bool starts_early() {
  static const int major = [] {
    int value = 0;
    CUDA_CHECK(cudaDeviceGetAttribute(&value, cudaDevAttrComputeCapabilityMajor, 0));
    return value;
  }();
  return major >= 9;
}

template <class... Params, class... Args>
void launch(void (*kernel)(Params...), int64_t blocks, int threads, size_t shared, const Args&... args) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>(blocks), config.blockDim = static_cast<unsigned>(threads);
  config.dynamicSmemBytes = shared, config.stream = stream();
  if (starts_early()) config.attrs = &early, config.numAttrs = 1;
  PRISM_CHECK(shared <= context().shared_memory, "decode: ", shared,
              " bytes of shared memory a block needed, ", context().shared_memory, " there");
  if (shared > 48 << 10)
    CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)));
  CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, args...));
}

}  // namespace

template <class T>
void step_product(const StepProduct<T>& a, const StepProduct<T>& b, const StepCaches<T>& caches) {
  const int64_t first = ceil_div(a.rows, kRows), blocks = first + ceil_div(b.rows, kRows);
  const size_t shared = static_cast<size_t>(std::max(a.x.width, b.x.width)) * sizeof(float);
  launch(product_kernel<T>, blocks + (caches.cache[0] ? 1 : 0), kThreads, shared, a, b, caches, first,
         blocks);
}

template <class T>
void step_mix(const StepMix<T>& m) {
  PRISM_CHECK(m.K <= kMostK, "decode: expected K of at most ", kMostK, ", got ", m.K);
  launch(mix_kernel<T>, m.H * ceil_div(m.V, kSlice), kMixThreads,
         shared_bytes(m.K, m.L, m.L > 1 ? down_width(m) : 0), m);
}

#define PRISM_INSTANTIATE(T)                                                                      \
  template void step_product(const StepProduct<T>&, const StepProduct<T>&, const StepCaches<T>&); \
  template void step_mix(const StepMix<T>&)
PRISM_INSTANTIATE(float);
PRISM_INSTANTIATE(bf16);

}  // namespace prism::cuda
