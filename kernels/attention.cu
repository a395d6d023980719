// The simple path: a warp has one query (or, for dk and dv, one key) and meets 32 keys (queries) at a time,
// one a lane for the scores, then one after the other with a column a lane for the sums. Any width, any
// alignment.
// The fast path is kernels/attention_fast.cu.
#include <type_traits>

#include "kernels/attention_fast.cuh"
#include "kernels/rows.cuh"

namespace prism::cuda {

namespace {

constexpr int kWarps = 4;  // of a block

// N pairs of one token, in every head.
template <int N, class T>
__global__ void rotary_kernel(RotaryArgs<T> r) {
  const int64_t half = r.W / 2, vectors = half / N;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t token = i / vectors, pair = i % vectors * N, b = token / r.T_len;
  if (b >= r.B) return;
  const int64_t first = r.start ? r.start[token] : 0;
  const int64_t position = token % r.T_len - first + (first == 0 && r.past ? r.past[b] : 0);
  float cosine[N], sine[N];
  each<N>([&](int e) {
    const double exponent = -2 * static_cast<double>(pair + e) / static_cast<double>(r.W);
    double turns =
        static_cast<double>(position) * pow(kRotaryBase, exponent) * (0.5 / 3.14159265358979323846);
    turns -= rint(turns);  // in double: a position may be large
    sincospif(static_cast<float>(2 * turns), &sine[e], &cosine[e]);
    if (r.inverse) sine[e] = -sine[e];
  });
#pragma unroll 4
  for (int64_t head = 0; head < r.heads; ++head) {
    T* const at = r.x[token] + head * r.W + pair;
    float x[N], y[N];
    load_n<N>(at, x), load_n<N>(at + half, y);
    each<N>([&](int e) {
      const float turned = x[e] * cosine[e] - y[e] * sine[e];
      y[e] = y[e] * cosine[e] + x[e] * sine[e];
      x[e] = turned;
    });
    store_n<N>(at, x), store_n<N>(at + half, y);
  }
}

// A warp's own token t of row b, head h.
template <class T>
struct Place {
  const AttentionArgs<T>& a;
  int64_t b, h, t;
  int lane = threadIdx.x % kWarp;

  __device__ explicit Place(const AttentionArgs<T>& args) : a(args) {
    const int64_t warp = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
    t = warp % a.T_len, h = warp / a.T_len % a.H, b = warp / a.T_len / a.H;
  }
  __device__ int64_t row(int64_t at) const { return b * a.T_len + at; }
  __device__ int64_t first(int64_t at) const { return a.start ? a.start[row(at)] : 0; }
  __device__ int64_t past() const { return a.cache.keys ? a.cache.past[b] : 0; }
  template <class X>
  __device__ X* of(const Rows<X>& x, int64_t at) const {
    return x[row(at)] + h * a.W;
  }
  template <class X>
  __device__ X* of(X* x, int64_t at) const {
    return x + (row(at) * a.H + h) * a.W;
  }
  // Token j's key or value; j < 0: in the cache.
  __device__ const T* of(const Rows<const T>& x, const T* cached, int64_t j) const {
    return j >= 0 ? of(x, j) : cached + ((b * a.cache.capacity + past() + j) * a.H + h) * a.W;
  }
  __device__ float& number(float* x, int64_t at) const { return x[(b * a.H + h) * a.T_len + at]; }
  // f(column) for the lane's columns.
  template <class F>
  __device__ void columns(F&& f) const {
    for (int64_t c = lane; c < a.W; c += kWarp) f(c);
  }
  __device__ float dot(const float* x, const T* y) const {
    float sum = 0;
    for (int64_t c = 0; c < a.W; ++c) sum += x[c] * load(y + c);
    return sum;
  }
  // The i-th vector of W numbers of this warp in shared memory, of `count`.
  __device__ float* shared(int i, int count) const {
    extern __shared__ float memory[];
    return memory + (threadIdx.x / kWarp * count + i) * a.W;
  }
};

__device__ inline float broadcast(float x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }

template <class T>
__global__ void attention_simple_kernel(AttentionArgs<T> a, float scale) {
  const Place<T> at(a);
  if (at.b >= a.B) return;
  float *q = at.shared(0, 2), *o = at.shared(1, 2), most = -INFINITY, sum = 0;
  at.columns([&](int64_t c) { q[c] = scale * load(at.of(a.q, at.t) + c), o[c] = 0; });
  __syncwarp();
  const int64_t first = at.first(at.t);
  for (int64_t from = first == 0 ? -at.past() : first; from <= at.t; from += kWarp) {
    const int64_t j = from + at.lane;
    const float s = j <= at.t ? at.dot(q, at.of(a.k, a.cache.keys, j)) : -INFINITY;
    const float higher = fmaxf(most, warp_max(s)), shrink = expf(most - higher), p = expf(s - higher);
    most = higher, sum = sum * shrink + warp_sum(p);
    at.columns([&](int64_t c) { o[c] *= shrink; });
    for (int i = 0; i < kWarp && from + i <= at.t; ++i) {
      const float weight = broadcast(p, i);
      const T* v = at.of(a.v, a.cache.values, from + i);
      at.columns([&](int64_t c) { o[c] += weight * load(v + c); });
    }
  }
  at.columns([&](int64_t c) { store(at.of(a.o, at.t) + c, o[c] / sum); });
  if (at.lane == 0) at.number(a.lse, at.t) = most + logf(sum);
}

// delta, then dq.
template <class T>
__global__ void attention_simple_dq_kernel(AttentionArgs<T> a, AttentionGrads<T> g, float scale) {
  const Place<T> at(a);
  if (at.b >= a.B) return;
  float *q = at.shared(0, 3), *d_o = at.shared(1, 3), *dq = at.shared(2, 3), delta = 0;
  at.columns([&](int64_t c) {
    q[c] = scale * load(at.of(a.q, at.t) + c), d_o[c] = load(at.of(g.d_o, at.t) + c), dq[c] = 0;
    delta += d_o[c] * load(at.of(a.o, at.t) + c);
  });
  delta = warp_sum(delta);
  if (at.lane == 0) at.number(g.delta, at.t) = delta;
  __syncwarp();
  const float lse = at.number(a.lse, at.t);
  for (int64_t from = at.first(at.t); from <= at.t; from += kWarp) {
    const int64_t j = from + at.lane;
    float ds = 0;
    if (j <= at.t) ds = scale * expf(at.dot(q, at.of(a.k, j)) - lse) * (at.dot(d_o, at.of(a.v, j)) - delta);
    for (int i = 0; i < kWarp && from + i <= at.t; ++i) {
      const float d = broadcast(ds, i);
      const T* k = at.of(a.k, from + i);
      at.columns([&](int64_t c) { dq[c] += d * load(k + c); });
    }
  }
  at.columns([&](int64_t c) { store(at.of(g.dq, at.t) + c, dq[c]); });
}

template <class T>
__global__ void attention_simple_dkv_kernel(AttentionArgs<T> a, AttentionGrads<T> g, float scale) {
  const Place<T> at(a);
  if (at.b >= a.B) return;
  float *k = at.shared(0, 4), *v = at.shared(1, 4), *dk = at.shared(2, 4), *dv = at.shared(3, 4);
  at.columns([&](int64_t c) {
    k[c] = scale * load(at.of(a.k, at.t) + c), v[c] = load(at.of(a.v, at.t) + c), dk[c] = dv[c] = 0;
  });
  __syncwarp();
  // The queries that see this key, up to its document's end.
  for (int64_t from = at.t; from < a.T_len && at.first(from) <= at.t; from += kWarp) {
    const int64_t t = from + at.lane;
    float p = 0, ds = 0;
    if (t < a.T_len && at.first(t) <= at.t) {
      p = expf(at.dot(k, at.of(a.q, t)) - at.number(a.lse, t));
      ds = scale * p * (at.dot(v, at.of(g.d_o, t)) - at.number(g.delta, t));
    }
    for (int i = 0; i < kWarp && from + i < a.T_len && at.first(from + i) <= at.t; ++i) {
      const float weight = broadcast(p, i), d = broadcast(ds, i);
      const T *q = at.of(a.q, from + i), *d_o = at.of(g.d_o, from + i);
      at.columns([&](int64_t c) { dk[c] += d * load(q + c), dv[c] += weight * load(d_o + c); });
    }
  }
  at.columns([&](int64_t c) { store(at.of(g.dk, at.t) + c, dk[c]), store(at.of(g.dv, at.t) + c, dv[c]); });
}

// One number of a key and of a value a thread.
template <class T>
__global__ void append_kernel(AttentionArgs<T> a) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x, columns = a.H * a.W;
  const int64_t token = i / columns, c = i % columns, b = token / a.T_len, t = token % a.T_len;
  if (b >= a.B) return;
  const int64_t first = a.start ? a.start[(b + 1) * a.T_len - 1] : 0;
  if (t < first) return;
  const int64_t place = b * a.cache.capacity + t - first + (first == 0 ? a.cache.past[b] : 0);
  a.cache.keys[place * columns + c] = a.k[token][c], a.cache.values[place * columns + c] = a.v[token][c];
}

// Shared memory of `vectors` vectors a warp.
template <class T>
size_t shared_bytes(const AttentionArgs<T>& a, int vectors) {
  const int64_t widest = (48 << 10) / (kWarps * vectors * static_cast<int64_t>(sizeof(float)));
  PRISM_CHECK(a.W <= widest, "attention: expected heads of width ", widest, " at most, got ", a.W);
  return static_cast<size_t>(kWarps * vectors * a.W) * sizeof(float);
}
template <class T>
unsigned simple_grid(const AttentionArgs<T>& a) {
  return grid_for(a.B * a.H * a.T_len, kWarps);
}

}  // namespace

template <class T>
void rotary(const RotaryArgs<T>& r) {
  const int64_t tokens = r.B * r.T_len;
  if (tokens == 0) return;
  with_vectors<T>(aligned(r.x), r.W / 2, [&](auto n) {
    rotary_kernel<n><<<grid_for(tokens * (r.W / 2 / n), 256), 256, 0, stream()>>>(r);
  });
  CUDA_CHECK_LAUNCH();
}

template <class T>
void attention_forward(const AttentionArgs<T>& a) {
  if (a.B * a.T_len == 0) return;
  bool done = false;
  if constexpr (std::is_same_v<T, bf16>) done = fast_attention_forward(a);
  if (!done)
    attention_simple_kernel<<<simple_grid(a), kWarps * kWarp, shared_bytes(a, 2), stream()>>>(
        a, static_cast<float>(a.scale()));
  CUDA_CHECK_LAUNCH();
  if (a.cache.keys) append_kernel<<<grid_for(a.B * a.T_len * a.H * a.W, 256), 256, 0, stream()>>>(a);
  CUDA_CHECK_LAUNCH();
}

template <class T>
void attention_backward(const AttentionArgs<T>& a, const AttentionGrads<T>& g) {
  if (a.B * a.T_len == 0) return;
  if constexpr (std::is_same_v<T, bf16>)
    if (fast_attention_backward(a, g)) return;
  const float scale = static_cast<float>(a.scale());
  const unsigned grid = simple_grid(a);
  attention_simple_dq_kernel<<<grid, kWarps * kWarp, shared_bytes(a, 3), stream()>>>(a, g, scale);
  CUDA_CHECK_LAUNCH();
  attention_simple_dkv_kernel<<<grid, kWarps * kWarp, shared_bytes(a, 4), stream()>>>(a, g, scale);
  CUDA_CHECK_LAUNCH();
}

PRISM_ON_CUDA(rotary);
PRISM_ON_CUDA(attention_forward);
PRISM_ON_CUDA(attention_backward);

}  // namespace prism::cuda
