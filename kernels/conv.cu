// Two paths, chosen by shape. Fast: a thread owns N neighbouring channels (16 bytes) and walks kWalk tokens
// of one row of the batch with the last W inputs in registers, so that each input is read once and the
// reverse pass stores no gradient of s; a head's norm is a shuffle over its lanes. Simple: a warp per token
// and head reads every tap from memory; any width, any head, any alignment.
#include "kernels/conv.h"

#include "kernels/rows.cuh"

namespace prism::cuda {

namespace {

constexpr int kWalk = 32;  // tokens a thread walks; kSumTile / kWalk threads share a tile
constexpr int kAhead = 4;  // tokens read ahead of their use
constexpr float kEps = static_cast<float>(kL2NormEps);

template <class T>
__device__ int64_t first_token(const ConvArgs<T>& a, int64_t b, int64_t t) {
  return a.start ? a.start[b * a.T_len + t] : 0;
}
// The input of token t, which may lie before the row, as a token of the document that begins at `first` sees
// it: null for 0.
template <class T>
__device__ const T* input(const ConvArgs<T>& a, int64_t b, int64_t t, int64_t first, int64_t channel) {
  if (t >= 0) return t >= first ? a.x[b * a.T_len + t] + channel : nullptr;
  if (first > 0 || !a.cache_in) return nullptr;
  return a.cache_in + (b * (a.W - 1) + a.W - 1 + t) * a.channels + channel;
}

__device__ inline float silu_slope(float x, float open) { return open * (1.f + x * (1.f - open)); }

// --- Fast path
// ------------------------------------------------------------------------------------------------

// Where a thread stands: channels [channel, channel + N) and tokens [begin, end) of row b. A thread beyond
// the channels or tokens has begin == end and still joins the shuffles.
template <int N, int W, class T>
struct Walk {
  int64_t b, channel, begin, end;
  float weight[W][N];  // weight[j] multiplies x_{t-j}
  float x[W][N];       // x[j] is x_{t-j}, 0 in another document

  __device__ Walk(const ConvArgs<T>& a, int64_t walks) {
    const unsigned walk = blockIdx.x * blockDim.y + threadIdx.y;
    b = walk / static_cast<unsigned>(walks);
    begin = (walk - b * walks) * kWalk;
    channel = (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * N;
    const bool live = b < a.B && channel < a.channels && begin < a.T_len;
    end = live ? min(begin + kWalk, a.T_len) : begin;
    float taps[W * N];
    each<W * N>([&](int i) { taps[i] = 1.f; });
    if (live && a.weight) load_n<W * N>(a.weight + channel * W, taps);
    each<W, N>([&](int j, int i) { weight[j][i] = taps[i * W + W - 1 - j]; });
    if (live) look_back(a, begin, first_token(a, b, begin), x);
  }
  // The window as the token t finds it: back[j] is x_{t-j}, j >= 1.
  __device__ void look_back(const ConvArgs<T>& a, int64_t t, int64_t first, float (&back)[W][N]) const {
#pragma unroll
    for (int j = 1; j < W; ++j) {
      const T* in = input(a, b, t - j, first, channel);
      each<N>([&](int i) { back[j][i] = 0.f; });
      if (in) load_n<N>(in, back[j]);
    }
  }
  __device__ void shift() {
#pragma unroll
    for (int j = W - 1; j > 0; --j) each<N>([&](int i) { x[j][i] = x[j - 1][i]; });
  }
  __device__ void forget() {
#pragma unroll
    for (int j = 1; j < W; ++j) each<N>([&](int i) { x[j][i] = 0.f; });
  }
  __device__ void convolve(float (&s)[N]) const {
    each<N>([&](int i) { s[i] = weight[0][i] * x[0][i]; });
#pragma unroll
    for (int j = 1; j < W; ++j) each<N>([&](int i) { s[i] += weight[j][i] * x[j][i]; });
  }
};

template <int N, int W, class T>
__global__ void __launch_bounds__(128)
    conv_forward_kernel(ConvArgs<T> a, int64_t walks, int steps, int lanes) {
  Walk<N, W, T> walk(a, walks);
  if (a.cache_out && walk.begin == 0 &&
      walk.end > 0) {  // this thread alone has read the cache it may overwrite
    float back[W][N];
    walk.look_back(a, a.T_len, first_token(a, walk.b, a.T_len - 1), back);
#pragma unroll
    for (int j = 1; j < W; ++j)
      store_n<N>(a.cache_out + (walk.b * (W - 1) + W - 1 - j) * a.channels + walk.channel, back[j]);
  }
  for (int from = 0; from < steps; from += kAhead) {
    Packed<N, T> in[kAhead];
    bool opens[kAhead];
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      const int64_t t = walk.begin + from + u;
      in[u].clear();
      if (t < walk.end) in[u].load(a.x[walk.b * a.T_len + t] + walk.channel);
      opens[u] = t < walk.end && t > 0 && a.start && a.start[walk.b * a.T_len + t] == t;
    }
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      const int64_t t = walk.begin + from + u;
      in[u].unpack(walk.x[0]);
      if (opens[u]) walk.forget();
      float s[N], square = 0;
      walk.convolve(s);
      each<N>([&](int i) {
        s[i] *= sigmoid(s[i]);
        square += s[i] * s[i];
      });
      if (a.head) {
        const float factor = a.scale * rsqrtf(team_sum(square, lanes) + kEps);
        each<N>([&](int i) { s[i] *= factor; });
      }
      if (t < walk.end) store_n<N>(a.y + (walk.b * a.T_len + t) * a.channels + walk.channel, s);
      walk.shift();
    }
  }
}

// Walks W - 1 tokens beyond its own, whose ds reach back into them. later[j] gathers dx_{t-j}.
template <int N, int W, class T>
__global__ void __launch_bounds__(128)
    conv_backward_kernel(ConvArgs<T> a, ConvGrads<T> g, int64_t walks, int steps, int lanes) {
  Walk<N, W, T> walk(a, walks);
  float dweight[W][N], later[W][N];
  each<W, N>([&](int j, int i) { dweight[j][i] = later[j][i] = 0.f; });
  const int64_t reach = walk.begin < walk.end ? min(walk.end + W - 1, a.T_len) : walk.end;
  for (int from = 0; from < steps; from += kAhead) {
    Packed<N, T> in[kAhead], dy[kAhead];
    int64_t age[kAhead];  // tokens of its document before it, in this row
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      const int64_t t = walk.begin + from + u;
      in[u].clear(), dy[u].clear();
      if (t < reach) {
        in[u].load(a.x[walk.b * a.T_len + t] + walk.channel);
        dy[u].load(g.dy + (walk.b * a.T_len + t) * a.channels + walk.channel);
      }
      age[u] = t < reach && a.start ? t - a.start[walk.b * a.T_len + t] : t;
    }
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      const int64_t t = walk.begin + from + u;
      in[u].unpack(walk.x[0]);
      if (age[u] == 0 && t > 0) walk.forget();
      float s[N], d[N], square = 0, along = 0;
      walk.convolve(s);
      dy[u].unpack(d);
      each<N>([&](int i) {
        const float y = s[i] * sigmoid(s[i]);
        square += y * y;
        along += y * d[i];
      });
      float factor = 1.f, back = 0.f;
      if (a.head) {  // y = scale z / |z|: dz = scale / |z| (dy - z <z, dy> / |z|^2)
        const float inverse = rsqrtf(team_sum(square, lanes) + kEps);
        factor = a.scale * inverse;
        back = team_sum(along, lanes) * inverse * inverse;
      }
      each<N>([&](int i) {
        const float open = sigmoid(s[i]);
        d[i] = factor * (d[i] - s[i] * open * back) * silu_slope(s[i], open);
        later[0][i] = walk.weight[0][i] * d[i];
      });
#pragma unroll
      for (int j = 1; j < W; ++j)
        if (age[u] >= j) each<N>([&](int i) { later[j][i] += walk.weight[j][i] * d[i]; });
      if (t < walk.end) each<W, N>([&](int j, int i) { dweight[j][i] += d[i] * walk.x[j][i]; });
      const int64_t done = t - (W - 1);
      if (done >= walk.begin && done < walk.end)
        store_n<N>(g.dx[walk.b * a.T_len + done] + walk.channel, later[W - 1]);
#pragma unroll
      for (int j = W - 1; j > 0; --j) each<N>([&](int i) { later[j][i] = later[j - 1][i]; });
      walk.shift();
    }
  }
  if (!g.dweight) return;
  // The walks of a tile are added in order.
  __shared__ float sums[128][N * W + 1];
  const int me = threadIdx.y * blockDim.x + threadIdx.x;
  each<W, N>([&](int j, int i) { sums[me][i * W + W - 1 - j] = dweight[j][i]; });
  __syncthreads();
  if (walk.channel >= a.channels) return;
  float* partial = g.partial + (static_cast<int64_t>(blockIdx.x) * a.channels + walk.channel) * W;
  for (int c = threadIdx.y; c < N * W; c += blockDim.y) {
    float sum = 0;
    for (int y = 0; y < blockDim.y; ++y) sum += sums[y * blockDim.x + threadIdx.x][c];
    partial[c] = sum;
  }
}

// --- Simple path
// ----------------------------------------------------------------------------------------------

// A warp's work: one token and one head, or all its channels when there is no norm.
template <class T>
struct Place {
  int64_t b, t, first, begin, end;
  int lane = threadIdx.x % kWarp;
  __device__ Place(const ConvArgs<T>& a, int64_t warp) {
    const int64_t width = a.head ? a.head : a.channels, heads = a.channels / width;
    b = warp / heads / a.T_len, t = warp / heads % a.T_len;
    first = b < a.B ? first_token(a, b, t) : 0;
    begin = warp % heads * width;
    end = b < a.B ? begin + width : begin;
  }
};

template <class T>
__device__ float convolve(const ConvArgs<T>& a, const Place<T>& at, int64_t channel) {
  if (!a.weight) return load(a.x[at.b * a.T_len + at.t] + channel);
  float s = 0;
  for (int64_t j = 0; j < a.W; ++j)
    if (const T* in = input(a, at.b, at.t - j, at.first, channel))
      s += a.weight[channel * a.W + a.W - 1 - j] * load(in);
  return s;
}

// y, or ds when g.dy is given.
template <class T>
__global__ void conv_simple_kernel(ConvArgs<T> a, ConvGrads<T> g) {
  const Place<T> at(a, (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kWarp);
  const int64_t row = (at.b * a.T_len + at.t) * a.channels;
  float square = 0, along = 0;
  for (int64_t c = at.begin + at.lane; a.head && c < at.end; c += kWarp) {
    const float s = convolve(a, at, c), y = s * sigmoid(s);
    square += y * y;
    if (g.dy) along += y * load(g.dy + row + c);
  }
  const float inverse = rsqrtf(warp_sum(square) + kEps), factor = a.head ? a.scale * inverse : 1.f;
  const float back = warp_sum(along) * inverse * inverse;
  for (int64_t c = at.begin + at.lane; c < at.end; c += kWarp) {
    const float s = convolve(a, at, c), open = sigmoid(s);
    if (g.dy)
      store(g.ds + row + c, factor * (load(g.dy + row + c) - s * open * back) * silu_slope(s, open));
    else
      store(a.y + row + c, factor * s * open);
  }
}

// One channel of one row of the batch a thread, oldest input first: cache_out may be cache_in.
template <class T>
__global__ void conv_cache_kernel(ConvArgs<T> a) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x, b = i / a.channels;
  if (b >= a.B) return;
  for (int64_t j = 0; j < a.W - 1; ++j) {
    const T* in = input(a, b, a.T_len - (a.W - 1) + j, first_token(a, b, a.T_len - 1), i % a.channels);
    store(a.cache_out + (b * (a.W - 1) + j) * a.channels + i % a.channels, in ? load(in) : 0.f);
  }
}

// One channel of one tile a thread: dx from the ds that lie after it, and the tile's part of dweight.
template <class T>
__global__ void conv_simple_backward_kernel(ConvArgs<T> a, ConvGrads<T> g) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t c = i % a.channels, tile = i / a.channels, tiles = ceil_div(a.T_len, kSumTile),
                b = tile / tiles;
  if (b >= a.B) return;
  const int64_t begin = tile % tiles * kSumTile, end = min(begin + kSumTile, a.T_len);
  const auto ds = [&](int64_t t) { return load(g.ds + (b * a.T_len + t) * a.channels + c); };
  const auto weight = [&](int64_t j) {
    return a.weight ? a.weight[c * a.W + a.W - 1 - j] : j == 0 ? 1.f : 0.f;
  };
  for (int64_t t = begin; t < end; ++t) {
    float dx = 0;
    for (int64_t j = 0; j < a.W && t + j < a.T_len && first_token(a, b, t + j) <= t; ++j)
      dx += weight(j) * ds(t + j);
    store(g.dx[b * a.T_len + t] + c, dx);
  }
  for (int64_t j = 0; j < a.W && g.dweight; ++j) {
    float sum = 0;
    for (int64_t t = begin; t < end; ++t)
      if (const T* in = input(a, b, t - j, first_token(a, b, t), c)) sum += ds(t) * load(in);
    g.partial[(tile * a.channels + c) * a.W + a.W - 1 - j] = sum;
  }
}

// Calls fn(Int<W>) when the fast path can take this shape, and says whether it did.
template <class T, class Fn>
bool fast(const ConvArgs<T>& a, bool rows_aligned, Fn&& fn) {
  const int64_t lanes = a.head / kVec<T>;
  if (!rows_aligned || a.channels % kVec<T> != 0 || a.head % kVec<T> != 0) return false;
  if (lanes > kWarp || (lanes & (lanes - 1)) != 0) return false;
  if (a.weight && a.W == 4) return fn(Int<4>{}), true;
  if (a.W == 1) return fn(Int<1>{}), true;
  return false;
}
template <class T>
struct FastLaunch {
  int64_t walks;  // of a row
  dim3 block, grid;
  int lanes = 1;
  explicit FastLaunch(const ConvArgs<T>& a) {
    const int64_t vectors = a.channels / kVec<T>;
    walks = sum_tiles(a.T_len) * (kSumTile / kWalk);
    block = dim3(1, kSumTile / kWalk);
    while (block.x < kWarp && block.x < vectors) block.x *= 2;
    grid = dim3(grid_for(a.B * walks, block.y), grid_for(vectors, block.x));
    if (a.head) lanes = static_cast<int>(a.head / kVec<T>);
  }
};

}  // namespace

template <class T>
void conv_forward(const ConvArgs<T>& a) {
  if (a.B * a.T_len * a.channels == 0) return;
  if (!fast(a, aligned(a.y, a.cache_out, a.x, a.weight, a.cache_in), [&](auto W) {
        const FastLaunch<T> launch(a);
        const int steps = static_cast<int>(std::min<int64_t>(kWalk, a.T_len));
        conv_forward_kernel<kVec<T>, W>
            <<<launch.grid, launch.block, 0, stream()>>>(a, launch.walks, steps, launch.lanes);
      })) {
    const int64_t warps = a.B * a.T_len * (a.head ? a.channels / a.head : 1);
    conv_simple_kernel<<<grid_for(warps * kWarp, 256), 256, 0, stream()>>>(a, ConvGrads<T>{});
    CUDA_CHECK_LAUNCH();
    if (a.cache_out) conv_cache_kernel<<<grid_for(a.B * a.channels, 256), 256, 0, stream()>>>(a);
  }
  CUDA_CHECK_LAUNCH();
}

template <class T>
void conv_backward(const ConvArgs<T>& a, const ConvGrads<T>& g) {
  if (a.B * a.T_len * a.channels == 0) return;
  if (!fast(a, aligned(g.dx, g.dy, a.x, a.weight, a.cache_in), [&](auto W) {
        const FastLaunch<T> launch(a);
        const int steps = static_cast<int>(std::min<int64_t>(kWalk, a.T_len)) + W - 1;
        conv_backward_kernel<kVec<T>, W>
            <<<launch.grid, launch.block, 0, stream()>>>(a, g, launch.walks, steps, launch.lanes);
      })) {
    const int64_t warps = a.B * a.T_len * (a.head ? a.channels / a.head : 1);
    conv_simple_kernel<<<grid_for(warps * kWarp, 256), 256, 0, stream()>>>(a, g);
    CUDA_CHECK_LAUNCH();
    const int64_t threads = conv_partials(a.B, a.T_len) * a.channels;
    conv_simple_backward_kernel<<<grid_for(threads, 256), 256, 0, stream()>>>(a, g);
  }
  CUDA_CHECK_LAUNCH();
  add_tiles(g.partial, conv_partials(a.B, a.T_len), 1, a.channels * a.W, g.dweight);
}

#define PRISM_INSTANTIATE(T)                      \
  template void conv_forward(const ConvArgs<T>&); \
  template void conv_backward(const ConvArgs<T>&, const ConvGrads<T>&)
PRISM_INSTANTIATE(float);
PRISM_INSTANTIATE(bf16);

}  // namespace prism::cuda
