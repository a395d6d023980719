// Two paths, chosen by shape. Fast: a thread owns N neighbouring channels (8 or 16 bytes) and walks kWalk
// tokens of one row of the batch with the last W inputs in registers, so that each input is read once and the
// reverse pass stores no gradient of s; a head's norm is a shuffle over its lanes. Simple: a warp per token
// and head reads every tap from memory; any width, any head, any alignment.
#include "kernels/conv.h"

#include "kernels/rows.cuh"

namespace prism::cuda {

namespace {

constexpr int kWalk = 64;  // tokens a thread walks; kSumTile / kWalk threads share a tile
constexpr int kAhead = 4;  // tokens read ahead of their use; as W = 4, so that windows turn without moves
constexpr int kFastThreads = kWarp * (kSumTile / kWalk);
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

// --- Fast path ---

// Where a thread stands: channels [channel, channel + N) and `count` tokens of row b from `begin` on. A
// thread beyond the channels or tokens has none and still joins the shuffles.
template <int N, int W, class T>
struct Walk {
  int64_t b, channel, begin;
  int count, reach;    // reach: its tokens and the W - 1 after them, in the row
  float weight[W][N];  // weight[j] multiplies x_{t-j}
  float x[W][N];       // x[j] is x_{t-j}, 0 in another document

  __device__ Walk(const ConvArgs<T>& a, int64_t walks, unsigned strips) {
    // Blocks that follow each other share tokens: neighbouring strips of channels meet in the L2 cache.
    const unsigned walk = blockIdx.x / strips * blockDim.y + threadIdx.y, strip = blockIdx.x % strips;
    b = walk / static_cast<unsigned>(walks);
    begin = (walk - b * walks) * kWalk;
    channel = (static_cast<int64_t>(strip) * blockDim.x + threadIdx.x) * N;
    const bool live = b < a.B && channel < a.channels && begin < a.T_len;
    count = live ? static_cast<int>(min(static_cast<int64_t>(kWalk), a.T_len - begin)) : 0;
    reach = live ? static_cast<int>(min(static_cast<int64_t>(count + W - 1), a.T_len - begin)) : 0;
    float taps[W * N];
    each<W * N>([&](int i) { taps[i] = 1.f; });
    if (live && a.weight) load_n<W * N>(a.weight + channel * W, taps);
    each<W, N>([&](int j, int i) { weight[j][i] = taps[i * W + W - 1 - j]; });
    if (live) look_back(a, begin, first_token(a, b, begin), x);
  }
  __device__ int64_t row(const ConvArgs<T>& a) const { return b * a.T_len + begin; }
  // The window as token t finds it: back[j] is x_{t-j}, j >= 1.
  __device__ void look_back(const ConvArgs<T>& a, int64_t t, int64_t first, float (&back)[W][N]) const {
#pragma unroll
    for (int j = 1; j < W; ++j) {
      const T* in = input(a, b, t - j, first, channel);
      each<N>([&](int i) { back[j][i] = 0.f; });
      if (in) load_n<N>(in, back[j]);
    }
  }
  // Tokens of its document before token i of the walk, in this row.
  __device__ int age(const ConvArgs<T>& a, int i) const {
    const int t = static_cast<int>(begin) + i;
    return a.start && i < reach ? t - a.start[row(a) + i] : t;
  }
  // The first token of the last document in the batch [from, from + kAhead).
  __device__ int last_start(const ConvArgs<T>& a, int from) const {
    return a.start && from + kAhead <= count ? a.start[row(a) + from + kAhead - 1] : 0;
  }
  // Whether the batch is the walk's own and in one document with the `depth` tokens before it. Asked by whole
  // warps, which then leave out every test.
  __device__ bool plain(int from, int last_start, int depth) const {
    const bool mine = from + kAhead <= count && last_start <= max(static_cast<int>(begin) + from - depth, 0);
    return __all_sync(0xffffffffu, mine);
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

template <int W, int N>
__device__ void shift(float (&window)[W][N]) {
#pragma unroll
  for (int j = W - 1; j > 0; --j) each<N>([&](int i) { window[j][i] = window[j - 1][i]; });
}

// kLanes: lanes of a head; 0: no norm; kAnyLanes: `lanes`, at run time.
constexpr int kAnyLanes = -1;
template <int kLanes>
__device__ float head_sum(float x, int lanes) {
  return team_sum(x, kLanes == kAnyLanes ? lanes : kLanes);
}

template <int N, int W, int kLanes, class T>
__global__ void __launch_bounds__(kFastThreads)
    conv_forward_kernel(ConvArgs<T> a, int64_t walks, unsigned strips, int steps, int lanes) {
  Walk<N, W, T> walk(a, walks, strips);
  if (a.cache_out && walk.begin == 0 && walk.count > 0) {  // no other thread reads what it may overwrite
    float back[W][N];
    walk.look_back(a, a.T_len, first_token(a, walk.b, a.T_len - 1), back);
#pragma unroll
    for (int j = 1; j < W; ++j)
      store_n<N>(a.cache_out + (walk.b * (W - 1) + W - 1 - j) * a.channels + walk.channel, back[j]);
  }
  const T* x = a.x[walk.row(a)] + walk.channel;
  T* y = a.y + walk.row(a) * a.channels + walk.channel;
  Packed<N, T> in[kAhead], next[kAhead];
  const auto read = [&](int from) {
#pragma unroll
    for (int u = 0; u < kAhead; ++u, x += a.x.stride) {
      next[u].clear();
      if (from + u < walk.count) next[u].load(x);
    }
    return walk.last_start(a, from);
  };
  int next_start = read(0);
  for (int from = 0; from < steps; from += kAhead) {
    const int last_start = next_start;
    each<kAhead>([&](int u) { in[u] = next[u]; });
    next_start = read(from + kAhead);
    const auto run = [&](auto plain) {
#pragma unroll
      for (int u = 0; u < kAhead; ++u, y += a.channels) {
        in[u].unpack(walk.x[0]);
        if (!plain && walk.begin + from + u > 0 && walk.age(a, from + u) == 0) walk.forget();
        float s[N], square = 0;
        walk.convolve(s);
        each<N>([&](int i) {
          s[i] *= sigmoid(s[i]);
          square += s[i] * s[i];
        });
        if constexpr (kLanes != 0) {
          const float factor = a.scale * rsqrtf(head_sum<kLanes>(square, lanes) + kEps);
          each<N>([&](int i) { s[i] *= factor; });
        }
        if (plain || from + u < walk.count) store_n<N>(y, s);
        shift(walk.x);
      }
    };
    walk.plain(from, last_start, 1) ? run(std::true_type{}) : run(std::false_type{});
  }
}

// Walks W - 1 tokens beyond its own, whose ds reach back into them. later[j] gathers dx_{t-j}.
template <int N, int W, int kLanes, class T>
__global__ void __launch_bounds__(kFastThreads, N * sizeof(T) == 8 ? 6 : 4)
    conv_backward_kernel(ConvArgs<T> a, ConvGrads<T> g, int64_t walks, unsigned strips, int steps,
                         int lanes) {
  Walk<N, W, T> walk(a, walks, strips);
  float dweight[W][N], later[W][N];
  each<W, N>([&](int j, int i) { dweight[j][i] = later[j][i] = 0.f; });
  const T* x = a.x[walk.row(a)] + walk.channel;
  const T* dy = g.dy + walk.row(a) * a.channels + walk.channel;
  T* dx = g.dx[walk.row(a) - (W - 1)] + walk.channel;
  Packed<N, T> in[kAhead], back[kAhead], next[kAhead], next_back[kAhead];
  const auto read = [&](int from) {
#pragma unroll
    for (int u = 0; u < kAhead; ++u, x += a.x.stride, dy += a.channels) {
      next[u].clear(), next_back[u].clear();
      if (from + u < walk.reach) next[u].load(x), next_back[u].load(dy);
    }
    return walk.last_start(a, from);
  };
  int next_start = read(0);
  for (int from = 0; from < steps; from += kAhead) {
    const int last_start = next_start;
    each<kAhead>([&](int u) { in[u] = next[u], back[u] = next_back[u]; });
    next_start = read(from + kAhead);
    const auto run = [&](auto plain) {
#pragma unroll
      for (int u = 0; u < kAhead; ++u, dx += g.dx.stride) {
        const int age = plain ? W : walk.age(a, from + u), done = from + u - (W - 1);
        in[u].unpack(walk.x[0]);
        if (!plain && walk.begin + from + u > 0 && age == 0) walk.forget();
        float s[N], open[N], d[N], square = 0, along = 0;
        walk.convolve(s);
        back[u].unpack(d);
        each<N>([&](int i) {
          open[i] = sigmoid(s[i]);
          const float z = s[i] * open[i];
          square += z * z;
          along += z * d[i];
        });
        if constexpr (kLanes != 0) {  // y = scale z / |z|: dz = scale / |z| (dy - z <z, dy> / |z|^2)
          const float inverse = rsqrtf(head_sum<kLanes>(square, lanes) + kEps), factor = a.scale * inverse;
          along = head_sum<kLanes>(along, lanes) * inverse * inverse;
          each<N>([&](int i) { d[i] = factor * (d[i] - s[i] * open[i] * along); });
        }
        each<N>([&](int i) {
          d[i] *= silu_slope(s[i], open[i]);
          later[0][i] = walk.weight[0][i] * d[i];
        });
#pragma unroll
        for (int j = 1; j < W; ++j)
          if (age >= j) each<N>([&](int i) { later[j][i] += walk.weight[j][i] * d[i]; });
        if (plain || from + u < walk.count)
          each<W, N>([&](int j, int i) { dweight[j][i] += d[i] * walk.x[j][i]; });
        if (plain || (done >= 0 && done < walk.count)) store_n<N>(dx, later[W - 1]);
        shift(later);
        shift(walk.x);
      }
    };
    from > 0 && walk.plain(from, last_start, W - 1) ? run(std::true_type{}) : run(std::false_type{});
  }
  if (!g.dweight) return;
  // The walks of a tile are added in order.
  __shared__ float sums[kFastThreads][N * W + 1];
  const int me = static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x);
  each<W, N>([&](int j, int i) { sums[me][i * W + W - 1 - j] = dweight[j][i]; });
  __syncthreads();
  if (walk.channel >= a.channels) return;
  float* partial = g.partial + (static_cast<int64_t>(blockIdx.x / strips) * a.channels + walk.channel) * W;
  for (int c = static_cast<int>(threadIdx.y); c < N * W; c += static_cast<int>(blockDim.y)) {
    float sum = 0;
    for (int y = 0; y < static_cast<int>(blockDim.y); ++y) sum += sums[y * blockDim.x + threadIdx.x][c];
    partial[c] = sum;
  }
}

// --- Simple path ---

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

template <int N, class T>
struct FastLaunch {
  int64_t walks;    // of a row
  unsigned strips;  // of block.x threads each, over the channels
  int lanes;        // of a head
  dim3 block{1, kSumTile / kWalk}, grid;
  explicit FastLaunch(const ConvArgs<T>& a)
      : walks(sum_tiles(a.T_len) * (kSumTile / kWalk)), lanes(static_cast<int>(a.head / N)) {
    const int64_t vectors = a.channels / N;
    while (block.x < kWarp && block.x < vectors) block.x *= 2;
    strips = grid_for(vectors, static_cast<int>(block.x));
    grid = grid_for(conv_partials(a.B, a.T_len) * strips, 1);
  }
};

// Calls fn(FastLaunch<N, T>, Int<N>, Int<W>, Int<kLanes>) when the fast path can take this shape, and says
// whether it did. 8 bytes a thread leave room for more threads; a head wider than a warp of them takes 16.
template <class T, class Fn>
bool fast(const ConvArgs<T>& a, bool rows_aligned, Fn&& fn) {
  if (!rows_aligned || a.channels % kVec<T> != 0 || a.head % kVec<T> != 0) return false;
  const auto with_n = [&](auto n) {
    const FastLaunch<n, T> launch(a);
    if (launch.lanes > kWarp || (launch.lanes & (launch.lanes - 1)) != 0) return false;
    const auto with_w = [&](auto w) {
      if (launch.lanes == 0)
        fn(launch, n, w, Int<0>{});
      else if (launch.lanes == kWarp)
        fn(launch, n, w, Int<kWarp>{});
      else
        fn(launch, n, w, Int<kAnyLanes>{});
      return true;
    };
    if (a.W == 4 && a.weight) return with_w(Int<4>{});
    return a.W == 1 && with_w(Int<1>{});
  };
  return with_n(Int<4>{}) || (kVec<T> == 8 && with_n(Int<kVec<T>>{}));
}

}  // namespace

template <class T>
void conv_forward(const ConvArgs<T>& a) {
  if (a.B * a.T_len * a.channels == 0) return;
  const bool done = fast(a, aligned(a.y, a.cache_out, a.x, a.weight, a.cache_in),
                         [&](const auto& launch, auto N, auto W, auto lanes) {
                           const int steps = static_cast<int>(std::min<int64_t>(kWalk, a.T_len));
                           conv_forward_kernel<N, W, lanes><<<launch.grid, launch.block, 0, stream()>>>(
                               a, launch.walks, launch.strips, steps, launch.lanes);
                         });
  CUDA_CHECK_LAUNCH();
  if (done) return;
  const int64_t warps = a.B * a.T_len * (a.head ? a.channels / a.head : 1);
  conv_simple_kernel<<<grid_for(warps * kWarp, 256), 256, 0, stream()>>>(a, ConvGrads<T>{});
  CUDA_CHECK_LAUNCH();
  if (a.cache_out && a.W > 1) conv_cache_kernel<<<grid_for(a.B * a.channels, 256), 256, 0, stream()>>>(a);
  CUDA_CHECK_LAUNCH();
}

template <class T>
void conv_backward(const ConvArgs<T>& a, const ConvGrads<T>& g) {
  if (a.B * a.T_len * a.channels == 0) return;
  const bool done = fast(a, aligned(g.dx, g.dy, a.x, a.weight, a.cache_in),
                         [&](const auto& launch, auto N, auto W, auto lanes) {
                           const int steps = static_cast<int>(std::min<int64_t>(kWalk, a.T_len)) + W - 1;
                           conv_backward_kernel<N, W, lanes><<<launch.grid, launch.block, 0, stream()>>>(
                               a, g, launch.walks, launch.strips, steps, launch.lanes);
                         });
  if (!done) {
    const int64_t warps = a.B * a.T_len * (a.head ? a.channels / a.head : 1);
    conv_simple_kernel<<<grid_for(warps * kWarp, 256), 256, 0, stream()>>>(a, g);
    CUDA_CHECK_LAUNCH();
    const int64_t threads = conv_partials(a.B, a.T_len) * a.channels;
    conv_simple_backward_kernel<<<grid_for(threads, 256), 256, 0, stream()>>>(a, g);
  }
  CUDA_CHECK_LAUNCH();
  add_tiles(g.partial, conv_partials(a.B, a.T_len), 1, a.channels * a.W, g.dweight);
}

PRISM_ON_CUDA(conv_forward);
PRISM_ON_CUDA(conv_backward);

}  // namespace prism::cuda
