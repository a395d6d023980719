// Plan: a launch starts while the one before still runs (programmatic dependent launch, sm_90), asks for its
// weights to come to the L2, and only then waits for the numbers it depends on.
#include "kernels/decode.h"

#include <nv/target>

#include "kernels/scalars.cuh"

namespace prism::cuda {

namespace {

constexpr int kThreads = 128, kWarps = kThreads / kWarp;
constexpr int kMixThreads = 256, kMixWarps = kMixThreads / kWarp;
constexpr int kSlice = 32, kSliceRows = kSlice / kMixWarps;  // values of a head a block, rows of S a warp
constexpr int kMostK = 256, kMostW = 8;
// Loads in flight: a loop whose trips are not known goes in passes of as many, those beyond its end left out.
constexpr int kAhead = 4;

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
__device__ float convolved(float x, const float* taps, const T* cache, int c, int channels, int W) {
  float sum = taps[c * W + W - 1] * x;
#pragma unroll
  for (int j = 0; j < kMostW - 1; ++j)
    if (j < W - 1) sum += taps[c * W + j] * load(cache + j * channels + c);
  return sum * sigmoid(sum);
}

// --- products

// f(c) for every kVec-th c below width, one a thread.
template <class T, class F>
__device__ void by_vectors(int width, F&& f) {
  for (int c = static_cast<int>(threadIdx.x) * kVec<T>; c < width; c += kThreads * kVec<T>) f(c);
}

template <class T>
__device__ void form_norm(const StepVector<T>& v, float* to, bool keep) {
  const int width = static_cast<int>(v.width), W = static_cast<int>(v.W);
  float total = 0;
  by_vectors<T>(width, [&](int c) {
    float x[kVec<T>], y[kVec<T>] = {};
    load_vec(v.x + c, x);
    if (v.y) load_vec(v.y + c, y);
    each<kVec<T>>([&](int i) { to[c + i] = x[i] = rounded<T>(x[i] + y[i]), total += x[i] * x[i]; });
    if (keep && v.sum) store_vec(v.sum + c, x);
  });
  const float rstd = rsqrtf(block_sum(total) / width + v.eps);
  by_vectors<T>(width, [&](int c) {
    float x[kVec<T>];
    each<kVec<T>>([&](int i) { to[c + i] = x[i] = rounded<T>(to[c + i] * (rstd * v.weight[c + i])); });
    if (keep && v.xn) store_vec(v.xn + c, x);
  });
  if (v.kind != StepVector<T>::anchor) return;
  __syncthreads();
#pragma unroll 8
  for (int c = static_cast<int>(threadIdx.x); c < width; c += kThreads)
    to[c] = rounded<T>(convolved(to[c], v.taps, v.cache, c, width, W));
}

template <class T>
__device__ void form_gated_norm(const StepVector<T>& v, float* to) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, V = static_cast<int>(v.V);
  for (int h = static_cast<int>(threadIdx.x) / kWarp; h * V < v.width; h += kWarps) {
    float total = 0, o[kVec<T>], u[kVec<T>];
    for (int c = lane * kVec<T>; c < V; c += kWarp * kVec<T>) {
      load_vec(v.x + h * V + c, o), load_vec(v.y + h * V + c, u);
      each<kVec<T>>([&](int i) {
        total += o[i] * o[i];
        to[h * V + c + i] = o[i] * u[i] * sigmoid(u[i]) * v.weight[c + i];
      });
    }
    const float rstd = rsqrtf(warp_sum(total) / V + v.eps);
    for (int c = lane * kVec<T>; c < V; c += kWarp * kVec<T>)
      each<kVec<T>>([&](int i) { to[h * V + c + i] = rounded<T>(to[h * V + c + i] * rstd); });
  }
}

// Two rows of a weight times x, a warp's lanes along them.
template <class T>
__device__ void dot_two(const T* const (&row)[2], const float* x, int width, float (&sum)[2]) {
  constexpr int kStep = kWarp * kVec<T>;
  for (int pass = static_cast<int>(threadIdx.x) % kWarp * kVec<T>; pass < width; pass += kAhead * kStep) {
    Packed<kVec<T>, T> w[2][kAhead];
    each<2, kAhead>([&](int r, int i) {
      if (pass + i * kStep < width) w[r][i].load(row[r] + pass + i * kStep);
    });
    each<kAhead, kVec<T>>([&](int i, int e) {
      if (pass + i * kStep >= width) return;
      const float value = x[pass + i * kStep + e];
      sum[0] += w[0][i][e] * value, sum[1] += w[1][i][e] * value;
    });
  }
  sum[0] = warp_sum(sum[0]), sum[1] = warp_sum(sum[1]);
}

// One channel a thread, `index` counted over all caches.
template <class T>
__device__ void move_on(const StepCaches<T>& caches, int64_t index) {
#pragma unroll
  for (int i = 0; i < StepCaches<T>::kMost; ++i) {
    const int64_t channels = caches.cache[i] ? caches.channels[i] : 0, c = index;
    index -= channels;
    if (c < 0 || c >= channels) continue;
    T kept[kMostW];
#pragma unroll
    for (int j = 0; j < kMostW - 1; ++j)
      if (j < caches.W - 2) kept[j] = caches.cache[i][(j + 1) * channels + c];
    const T newest = caches.input[i][c];
#pragma unroll
    for (int j = 0; j < kMostW - 1; ++j)
      if (j < caches.W - 1) caches.cache[i][j * channels + c] = j < caches.W - 2 ? kept[j] : newest;
  }
}

// Outputs of a block: a warp has two rows of the weight.
template <class T>
__host__ __device__ int64_t rows_a_block(const StepProduct<T>& p) {
  return kWarps * (p.swiglu ? 1 : 2);
}

// The first blocks have a's rows, the next b's, those from `blocks` on the caches.
template <class T>
__global__ void __launch_bounds__(kThreads)
    product_kernel(const __grid_constant__ StepProduct<T> a, const __grid_constant__ StepProduct<T> b,
                   const __grid_constant__ StepCaches<T> caches, int a_blocks, int blocks) {
  extern __shared__ float x[];
  const int index = static_cast<int>(blockIdx.x);
  if (index >= blocks) {
    wait_for_previous();
    return move_on(caches, (index - blocks) * kThreads + threadIdx.x);
  }
  const StepProduct<T>& p = index < a_blocks ? a : b;
  const int width = static_cast<int>(p.x.width), warp = static_cast<int>(threadIdx.x) / kWarp;
  const int64_t begin = (index < a_blocks ? index : index - a_blocks) * rows_a_block(p);
  const int64_t row = begin + warp * (p.swiglu ? 1 : 2), other = p.swiglu ? p.rows + row : row + 1;
  const int64_t count = min(rows_a_block(p), p.rows - begin);
  prefetch_all(p.weight + begin * width, count * width);
  if (p.swiglu) prefetch_all(p.weight + (p.rows + begin) * width, count * width);
  wait_for_previous();

  if (p.x.kind == StepVector<T>::gated_norm)
    form_gated_norm(p.x, x);
  else if (p.x.kind != StepVector<T>::plain)
    form_norm(p.x, x, index == 0);
  else
    by_vectors<T>(width, [&](int c) {
      float part[kVec<T>];
      load_vec(p.x.x + c, part);
      each<kVec<T>>([&](int i) { x[c + i] = part[i]; });
    });
  __syncthreads();

  if (row >= p.rows) return;
  const bool both = p.swiglu || other < p.rows;
  const T* const weights[2] = {p.weight + row * width, p.weight + (both ? other : row) * width};
  float y[2] = {0, 0};
  dot_two(weights, x, width, y);
  if (threadIdx.x % kWarp > 0) return;
  if (p.swiglu) {
    const float gate = rounded<T>(y[0]);
    store(p.out + row, gate * (sigmoid(gate) * rounded<T>(y[1])));
  } else {
    store(p.out + row, y[0]);
    if (both) store(p.out + other, y[1]);
  }
}

// --- the mixer

// row . z over R numbers, by one thread.
template <class T>
__device__ float low_rank(const T* row, const float* z, int R) {
  constexpr int kPieces = 8;
  float sum = 0;
  for (int pass = 0; pass < R; pass += kPieces * kVec<T>) {
    Packed<kVec<T>, T> w[kPieces];
    each<kPieces>([&](int i) {
      if (pass + i * kVec<T> < R) w[i].load(row + pass + i * kVec<T>);
    });
    each<kPieces, kVec<T>>([&](int i, int e) {
      if (pass + i * kVec<T> < R) sum += w[i][e] * z[pass + i * kVec<T> + e];
    });
  }
  return rounded<T>(sum);
}

// What a block of step_mix holds in shared memory.
struct Shared {
  float *q, *k, *kappa, *w, *y, *v, *anchor, *down;

  __device__ Shared(float* at, int K, int L) {
    const auto take = [&](int count) { return at += count, at - count; };
    q = take(K), k = take(K), kappa = take((L - 1) * K);
    w = take(L * kSlice), y = take((L - 1) * kSlice), v = take(kSlice), anchor = take(kSlice), down = at;
  }
};
size_t shared_bytes(int64_t K, int64_t L, int64_t down) {
  return static_cast<size_t>((1 + L) * K + (2 * L + 1) * kSlice + down) * sizeof(float);
}

// The sizes as 32-bit numbers, and where a block stands: head h, values from v0.
struct Sizes {
  int H, K, V, L, R, W, h, v0, steps, values, gates, residual, down;

  template <class T>
  __host__ __device__ Sizes(const StepMix<T>& m, int block)
      : H(static_cast<int>(m.H)),
        K(static_cast<int>(m.K)),
        V(static_cast<int>(m.V)),
        L(static_cast<int>(m.L)),
        R(static_cast<int>(m.R)),
        W(static_cast<int>(m.W)),
        h(block % H),
        v0(block / H * kSlice),
        steps(L - 1),
        values(V - v0 < kSlice ? V - v0 : kSlice),
        gates(2 * steps * R),
        residual(gates + steps * H),
        down(residual + (m.residual_up ? R : 0)) {}
};

// f(i) for i below count, one a thread, the first of them by thread `from`.
template <class F>
__device__ void from_thread(int from, int count, F&& f) {
  for (int i = (static_cast<int>(threadIdx.x) + kMixThreads - from) % kMixThreads; i < count;
       i += kMixThreads)
    f(i);
}

// Everything before norms: q, k and v convolved, kappa, y and the anchor raised from the low rank.
template <class T>
__device__ void form_inputs(const StepMix<T>& m, const Sizes& n, const Shared& s) {
  from_thread(0, n.K, [&](int c) {
    const int at = n.h * n.K + c;
    s.q[c] = convolved(load(m.q + at), m.taps_q, m.cache_q, at, n.H * n.K, n.W);
  });
  from_thread(128, n.K, [&](int c) {
    const int at = n.h * n.K + c;
    s.k[c] = convolved(load(m.k + at), m.taps_k, m.cache_k, at, n.H * n.K, n.W);
  });
  for (int l = 0; l < n.steps; ++l) {
    const int head = l * n.H + n.h;
    from_thread(l * n.K, n.K, [&](int c) {
      s.kappa[l * n.K + c] = low_rank(m.key_up + (head * n.K + c) * n.R, s.down + l * n.R, n.R);
    });
    from_thread(l * kSlice, n.values, [&](int c) {
      const T* row = m.gain_up + (head * n.V + n.v0 + c) * n.R;
      s.y[l * kSlice + c] = low_rank(row, s.down + (n.steps + l) * n.R, n.R);
    });
  }
  from_thread(192, n.values, [&](int c) {
    const int at = n.h * n.V + n.v0 + c;
    s.v[c] = rounded<T>(convolved(load(m.v + at), m.taps_v, m.cache_v, at, n.H * n.V, n.W));
  });
  from_thread(224, n.values, [&](int c) {
    const T* row = m.residual_up + (n.h * n.V + n.v0 + c) * n.R;
    s.anchor[c] = m.residual_up ? low_rank(row, s.down + n.residual, n.R) : 0.f;
  });
}

// A warp: x = scale x / |x|, rounded.
template <class T>
__device__ void normalise(float* x, int K, float scale, bool norm) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  float total = 0;
  for (int i = lane; i < K; i += kWarp) total += x[i] * x[i];
  if (norm) scale *= rsqrtf(warp_sum(total) + static_cast<float>(kL2NormEps));
  for (int i = lane; i < K; i += kWarp) x[i] = rounded<T>(x[i] * scale);
}

// The writes of one value a lane.
template <class T>
__device__ void solve(const StepMix<T>& m, const Sizes& n, const Shared& s, float beta) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  if (lane >= n.values) return;
  float r = s.v[lane] - s.anchor[lane];
  const float r2 = r;
  s.w[lane] = rounded<T>(beta * s.v[lane]);
  for (int l = 1; l < n.L; ++l) {
    const int at = (l - 1) * n.H + n.h;
    const float delta = step_forward(m.gain, s.y[(l - 1) * kSlice + lane], r, r2);
    const float open = sigmoid(s.down[n.gates + at] + m.gate_bias[at]);
    r -= delta;
    s.w[l * kSlice + lane] = rounded<T>(open * (m.scale ? m.scale[at] : 1.f) * delta);
  }
}

// A block has kSlice values of one head; a warp kSliceRows rows of S, in registers.
template <class T>
__global__ void __launch_bounds__(kMixThreads) mix_kernel(const __grid_constant__ StepMix<T> m) {
  extern __shared__ float shared[];
  const Sizes n(m, static_cast<int>(blockIdx.x));
  const Shared s(shared, n.K, n.L);
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  constexpr int kPieces = kMostK / kWarp;
  float S[kSliceRows][kPieces];
  const int first = warp * kSliceRows;  // of the block's values
  float* const rows = m.S + static_cast<int64_t>(n.h * n.V + n.v0 + first) * n.K + lane;
  each<kSliceRows, kPieces>([&](int r, int i) {
    const bool there = first + r < n.values && lane + i * kWarp < n.K;
    S[r][i] = there ? rows[r * n.K + i * kWarp] : 0.f;
  });
  for (int l = 0; l < n.steps; ++l) {
    prefetch_all(m.key_up + (l * n.H + n.h) * n.K * n.R, n.K * n.R);
    prefetch_all(m.gain_up + ((l * n.H + n.h) * n.V + n.v0) * n.R, n.values * n.R);
  }
  const float rate = m.a ? m.A_log[n.h] : 0.f, bias = m.a ? m.dt_bias[n.h] : 0.f;
  wait_for_previous();

  const float beta = sigmoid(load(m.b + n.h)), a = m.a ? load(m.a + n.h) : 0.f;
  if (n.steps > 0) from_thread(0, n.down, [&](int i) { s.down[i] = load(m.down + i); });
  __syncthreads();
  form_inputs(m, n, s);
  __syncthreads();
  if (warp == kMixWarps - 1) solve(m, n, s, beta);
  for (int i = warp; i <= n.L; i += kMixWarps)
    normalise<T>(s.q + i * n.K, n.K, i == 0 ? rsqrtf(static_cast<float>(n.K)) : 1.f, i < 2 || m.key_norm);
  __syncthreads();

  const float alpha = !m.decay ? 1.f : expf(m.a ? learned_log_decay(rate, a + bias) : fixed_log_decay(n.h));
#pragma unroll
  for (int r = 0; r < kSliceRows; ++r) {
    if (first + r >= n.values) break;
    float along = 0, out = 0;
    each<kPieces>([&](int i) {
      const int key = lane + i * kWarp;
      S[r][i] *= alpha;
      if (key < n.K) along += S[r][i] * s.k[key];
    });
    const float write = s.w[first + r] - (m.erase ? beta * warp_sum(along) : 0.f);
    each<kPieces>([&](int i) {
      const int key = lane + i * kWarp;
      if (key >= n.K) return;
      S[r][i] += write * s.k[key];
      for (int l = 1; l < n.L; ++l) S[r][i] += s.w[l * kSlice + first + r] * s.kappa[(l - 1) * n.K + key];
      out += S[r][i] * s.q[key];
      rows[r * n.K + i * kWarp] = S[r][i];
    });
    out = warp_sum(out);
    if (lane == 0) store(m.o + n.h * n.V + n.v0 + first + r, out);
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
  if (shared > 48 << 10) allow_shared_memory(kernel);
  CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, args...));
}

}  // namespace

template <class T>
void step_product(const StepProduct<T>& a, const StepProduct<T>& b, const StepCaches<T>& caches) {
  const int64_t first = ceil_div(a.rows, rows_a_block(a)), blocks = first + ceil_div(b.rows, rows_a_block(b));
  const size_t shared = static_cast<size_t>(std::max(a.x.width, b.x.width)) * sizeof(float);
  int64_t channels = 0;
  for (int i = 0; i < StepCaches<T>::kMost; ++i) channels += caches.cache[i] ? caches.channels[i] : 0;
  launch(product_kernel<T>, blocks + ceil_div(channels, kThreads), kThreads, shared, a, b, caches,
         static_cast<int>(first), static_cast<int>(blocks));
}

template <class T>
void step_mix(const StepMix<T>& m) {
  PRISM_CHECK(m.K <= kMostK && m.W <= kMostW, "decode: expected K of at most ", kMostK, " and W of at most ",
              kMostW, ", got ", m.K, " and ", m.W);
  launch(mix_kernel<T>, m.H * ceil_div(m.V, kSlice), kMixThreads,
         shared_bytes(m.K, m.L, m.L > 1 ? Sizes(m, 0).down : 0), m);
}

PRISM_ON_CUDA(step_product);
PRISM_ON_CUDA(step_mix);

}  // namespace prism::cuda
