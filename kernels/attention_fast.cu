// The fast path of attention.h (after FlashAttention-2, Dao 2023), bf16.
//
// Plan. A block of four warps has kQueries queries (or, for dk and dv, a tile of keys) of one row and head; a
// warp owns 16 or 32 of them for the whole walk over tiles of the other side, so that scores, probabilities
// and sums are its accumulators and left operands, and never leave registers. The tiles walked over come by
// cp.async, one ahead; one barrier a tile. A tile outside every query's document or past the diagonal is
// never loaded, one that only some see is masked, the rest go without a test.
//
// The reverse pass is two kernels, one that owns queries (dq) and one that owns keys (dk, dv), seven products
// in place of five: each sum is one warp's, in order, so that results repeat bit for bit without another
// pass. Tile borders are multiples of 64 whatever the documents: one document's numbers do not change
// another's rounding.
#include "kernels/attention_fast.cuh"

#include "kernels/mma.cuh"
#include "kernels/rows.cuh"

namespace prism::cuda {

namespace {

constexpr int kThreads = 128, kTile = 64;  // tokens of a tile that is walked over
constexpr float kLog2e = 1.44269504f;

// Row tiles of 16 that a warp owns. In the reverse pass at width 128, registers (dk and dv) and shared memory
// (of two blocks) have room for one.
constexpr int kForwardTiles = 2, kQueries = 64 * kForwardTiles;
template <int W>
constexpr int kReverseTiles = W == 64 ? 2 : 1;
template <int W>
constexpr int kReverseRows = 64 * kReverseTiles<W>;

__device__ inline float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Four bytes from global to shared memory, in the background; zeros when not `valid`.
__device__ inline void copy_word(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(valid ? 4 : 0));
}

// c[m][n] += <row m of a, row n of b>
template <int W, int MT, int NT>
__device__ void add_scores(Accumulator (&c)[MT][NT], const Tile& a, int m, const Tile& b, int n) {
#pragma unroll
  for (int k = 0; k < W; k += 16) {
    FragmentA x[MT];
#pragma unroll
    for (int i = 0; i < MT; ++i) a.a(x[i], m + 16 * i, k);
#pragma unroll
    for (int j = 0; j < NT; j += 2) {
      uint32_t y[4];
      b.b_transposed(y, k, n + 8 * j);
#pragma unroll
      for (int i = 0; i < MT; ++i) mma(c[i][j], x[i], y[0], y[1]), mma(c[i][j + 1], x[i], y[2], y[3]);
    }
  }
}

// c[m] += sum_n p[m][n] (row n of b)
template <int W, int MT, int NT>
__device__ void add_weighted(Accumulator (&c)[MT][W / 8], const Accumulator (&p)[MT][NT], const Tile& b,
                             int n) {
#pragma unroll
  for (int j = 0; j < NT; j += 2) {
    FragmentA x[MT];
#pragma unroll
    for (int i = 0; i < MT; ++i) to_a(x[i], p[i][j], p[i][j + 1]);
#pragma unroll
    for (int w = 0; w < W / 8; w += 2) {
      uint32_t y[4];
      b.b(y, n + 8 * j, 8 * w);
#pragma unroll
      for (int i = 0; i < MT; ++i) mma(c[i][w], x[i], y[0], y[1]), mma(c[i][w + 1], x[i], y[2], y[3]);
    }
  }
}

// Calls fn(i, r, row) for the rows of a warp that this lane has numbers of: row 16 i + 8 r + g.
template <int MT, class F>
__device__ __forceinline__ void each_row(F&& fn) {
  const int g = static_cast<int>(threadIdx.x) % kWarp / 4;
#pragma unroll
  for (int i = 0; i < MT; ++i)
#pragma unroll
    for (int r = 0; r < 2; ++r) fn(i, r, 16 * i + 8 * r + g);
}

// Writes the first `count` of the warp's rows, from `to` on, each times factor(i, r).
template <int W, int MT, class F>
__device__ void store_rows(bf16* to, int64_t stride, int count, const Accumulator (&c)[MT][W / 8],
                           F&& factor) {
  const int t = static_cast<int>(threadIdx.x) % 4;
  each_row<MT>([&](int i, int r, int row) {
    const float x = factor(i, r);
#pragma unroll
    for (int w = 0; w < W / 8; w += 4) {
      uint32_t words[4];
#pragma unroll
      for (int s = 0; s < 4; ++s) words[s] = pack_bf16(x * c[i][w + s][2 * r], x * c[i][w + s][2 * r + 1]);
      transpose_quad(words);
      if (row < count) store_words(to + row * stride + 8 * (w + t), words);
    }
  });
}

// One row and head, and the warp's place in it.
struct Pair {
  const AttentionArgs<bf16>& a;
  int64_t b = blockIdx.z, h = blockIdx.y;
  int T = static_cast<int>(a.T_len), warp = static_cast<int>(threadIdx.x) / kWarp;

  __device__ explicit Pair(const AttentionArgs<bf16>& args) : a(args) {}
  __device__ int first(int t) const { return a.start ? a.start[b * T + t] : 0; }
  template <class X>
  __device__ X* of(const Rows<X>& x, int t) const {
    return x[b * T + t] + h * a.W;
  }
  template <class X>
  __device__ X* of(X* x, int t) const {
    return x + ((b * T + t) * a.H + h) * a.W;
  }
  __device__ float* numbers(float* x, int t) const { return x + (b * a.H + h) * T + t; }
};

// The keys that a query sees, [from, to), as the first and the last query of a warp have them.
struct Sight {
  int any_from, any_to, all_from, all_to;
  __device__ bool nothing(int k0) const { return k0 + kTile <= any_from || k0 >= any_to; }
  __device__ bool everything(int k0) const { return k0 >= all_from && k0 + kTile <= all_to; }
};

template <int W>
constexpr int kTileBytes = kTile* W * 2;

template <int W>
__global__ void __launch_bounds__(kThreads, 2) forward_kernel(AttentionArgs<bf16> a, float scale) {
  extern __shared__ __align__(128) char memory[];
  constexpr int MT = kForwardTiles, NT = kTile / 8;
  const Pair at(a);
  const int T = at.T,
            t0 = static_cast<int>(gridDim.x - 1 - blockIdx.x) * kQueries;  // the longest walks first
  const Tile queries{shared_address(memory), W / 8};
  const auto key = [&](int i) {
    return Tile{queries.at + 2 * kQueries * W + (i & 1) * 2 * kTileBytes<W>, W / 8};
  };
  const auto value = [&](int i) { return Tile{key(i).at + kTileBytes<W>, W / 8}; };

  // Tiles of the cache, then of this pass.
  const int low = at.first(t0), past = low == 0 && a.cache.keys ? a.cache.past[at.b] : 0;
  const int cached = (past + kTile - 1) / kTile, begin = low / kTile;
  const int tiles = cached + (min(t0 + kQueries, T) - 1) / kTile + 1 - begin;
  const auto first_key = [&](int i) { return (i < cached ? i : begin + i - cached) * kTile; };
  const auto load = [&](int i) {
    const int k0 = first_key(i);
    const bool in_cache = i < cached;
    const int64_t row = ((at.b * a.cache.capacity + k0) * a.H + at.h) * W;
    const auto bring = [&](const Tile& to, const Rows<const bf16>& pass, const bf16* cache) {
      load_rows<kTile>(to, in_cache ? cache + row : at.of(pass, k0), in_cache ? a.H * W : pass.stride,
                       (in_cache ? past : T) - k0, W);
    };
    bring(key(i), a.k, a.cache.keys), bring(value(i), a.v, a.cache.values);
  };
  load_rows<kQueries>(queries, at.of(a.q, t0), a.q.stride, T - t0, W);
  load(0);
  commit_copies();

  const int mine = at.warp * 16 * MT, t_first = t0 + mine, t_last = min(t_first + 16 * MT, T) - 1;
  const bool idle = t_first >= T;
  const int doc_first = idle ? 0 : at.first(t_first), doc_last = idle ? 0 : at.first(t_last);
  int doc[MT][2];
  float most[MT][2], sum[MT][2];
  each_row<MT>([&](int i, int r, int row) {
    doc[i][r] = at.first(min(t_first + row, T - 1)), most[i][r] = -INFINITY, sum[i][r] = 0;
  });
  const float c = scale * kLog2e;
  Accumulator o[MT][W / 8] = {};
  for (int i = 0; i < tiles; ++i) {
    wait_copies<0>();
    __syncthreads();  // this tile is here, and nobody still reads the one before
    if (i + 1 < tiles) load(i + 1), commit_copies();
    const int k0 = first_key(i);
    const bool in_cache = i < cached;
    const Sight sight = in_cache ? Sight{0, doc_first == 0 ? past : 0, 0, doc_last == 0 ? past : 0}
                                 : Sight{doc_first, t_last + 1, doc_last, t_first + 1};
    if (idle || sight.nothing(k0)) continue;
    Accumulator s[MT][NT] = {};
    add_scores<W>(s, queries, mine, key(i), 0);
    const int column = k0 + 2 * (static_cast<int>(threadIdx.x) % 4);
    if (!sight.everything(k0))
      each_row<MT>([&](int m, int r, int row) {
        const int from = in_cache ? 0 : doc[m][r], to = !in_cache ? t_first + row + 1 : doc[m][r] ? 0 : past;
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int j = column + 8 * n + e;
            if (j < from || j >= to) s[m][n][2 * r + e] = -INFINITY;
          }
      });
    each_row<MT>([&](int m, int r, int) {
      float higher = most[m][r];
#pragma unroll
      for (int n = 0; n < NT; ++n) higher = fmaxf(higher, fmaxf(s[m][n][2 * r], s[m][n][2 * r + 1]));
      higher = warp_max<4>(higher);
      const bool none = higher == -INFINITY;
      const float shrink = none ? 1.f : exp2_of((most[m][r] - higher) * c), base = none ? 0.f : higher * c;
      most[m][r] = higher, sum[m][r] *= shrink;
#pragma unroll
      for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int e = 2 * r; e < 2 * r + 2; ++e) {
          s[m][n][e] = exp2_of(s[m][n][e] * c - base);
          sum[m][r] += s[m][n][e];
        }
#pragma unroll
      for (int w = 0; w < W / 8; ++w) o[m][w][2 * r] *= shrink, o[m][w][2 * r + 1] *= shrink;
    });
    add_weighted<W>(o, s, value(i), 0);
  }
  each_row<MT>([&](int i, int r, int row) {
    sum[i][r] = warp_sum<4>(sum[i][r]);
    if (threadIdx.x % 4 == 0 && t_first + row < T)
      *at.numbers(a.lse, t_first + row) = most[i][r] * scale + logf(sum[i][r]);
  });
  store_rows<W>(at.of(a.o, t_first), a.H * W, T - t_first, o, [&](int i, int r) { return 1 / sum[i][r]; });
}

// dq of a tile of queries, and delta.
template <int W>
__global__ void __launch_bounds__(kThreads, 2)
    query_kernel(AttentionArgs<bf16> a, AttentionGrads<bf16> g, float scale) {
  extern __shared__ __align__(128) char memory[];
  constexpr int MT = kReverseTiles<W>, kRows = kReverseRows<W>,
                NT = kTile / 16;  // half a tile's scores at a time
  const Pair at(a);
  const int T = at.T, t0 = static_cast<int>(gridDim.x - 1 - blockIdx.x) * kRows;
  const Tile queries{shared_address(memory), W / 8}, d_o{queries.at + 2 * kRows * W, W / 8};
  const auto key = [&](int i) { return Tile{d_o.at + 2 * kRows * W + (i & 1) * 2 * kTileBytes<W>, W / 8}; };
  const auto value = [&](int i) { return Tile{key(i).at + kTileBytes<W>, W / 8}; };
  const int begin = at.first(t0) / kTile, end = (min(t0 + kRows, T) - 1) / kTile + 1;
  const auto load = [&](int i) {
    load_rows<kTile>(key(i), at.of(a.k, i * kTile), a.k.stride, T - i * kTile, W);
    load_rows<kTile>(value(i), at.of(a.v, i * kTile), a.v.stride, T - i * kTile, W);
  };
  load_rows<kRows>(queries, at.of(a.q, t0), a.q.stride, T - t0, W);
  load_rows<kRows>(d_o, at.of(g.d_o, t0), a.H * W, T - t0, W);
  load(begin);
  commit_copies();

  const int mine = at.warp * 16 * MT, t_first = t0 + mine, t_last = min(t_first + 16 * MT, T) - 1;
  const bool idle = t_first >= T;
  const Sight sight{idle ? 0 : at.first(t_first), t_last + 1, idle ? 0 : at.first(t_last), t_first + 1};
  int doc[MT][2];
  float lse[MT][2], delta[MT][2];
  each_row<MT>([&](int i, int r, int row) {
    const int t = min(t_first + row, T - 1);
    doc[i][r] = at.first(t), lse[i][r] = *at.numbers(a.lse, t) * kLog2e, delta[i][r] = 0;
#pragma unroll
    for (int w = static_cast<int>(threadIdx.x) % 4 * 8; w < W; w += 32) {
      float x[8], y[8];
      load_vec(at.of(a.o, t) + w, x), load_vec(at.of(g.d_o, t) + w, y);
      each<8>([&](int e) { delta[i][r] += x[e] * y[e]; });
    }
    delta[i][r] = warp_sum<4>(delta[i][r]);
    if (threadIdx.x % 4 == 0 && t_first + row < T) *at.numbers(g.delta, t) = delta[i][r];
  });
  const float c = scale * kLog2e;
  Accumulator dq[MT][W / 8] = {};
  for (int tile = begin; tile < end; ++tile) {
    wait_copies<0>();
    __syncthreads();
    if (tile + 1 < end) load(tile + 1), commit_copies();
    const int k0 = tile * kTile;
    if (idle || sight.nothing(k0)) continue;
    const bool masked = !sight.everything(k0);
#pragma unroll 1
    for (int half = 0; half < kTile; half += kTile / 2) {
      Accumulator s[MT][NT] = {}, dp[MT][NT] = {};
      add_scores<W>(s, queries, mine, key(tile), half);
      add_scores<W>(dp, d_o, mine, value(tile), half);
      const int column = k0 + half + 2 * (static_cast<int>(threadIdx.x) % 4);
      each_row<MT>([&](int m, int r, int row) {
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int j = column + 8 * n + e;
            float p = exp2_of(s[m][n][2 * r + e] * c - lse[m][r]);
            if (masked && (j < doc[m][r] || j > t_first + row)) p = 0;
            s[m][n][2 * r + e] = p * (dp[m][n][2 * r + e] - delta[m][r]);
          }
      });
      add_weighted<W>(dq, s, key(tile), half);
    }
  }
  store_rows<W>(at.of(g.dq, t_first), g.dq.stride, T - t_first, dq, [&](int, int) { return scale; });
}

// dk and dv of a tile of keys: the scores transposed, a key a row.
template <int W>
__global__ void __launch_bounds__(kThreads, 2)
    key_kernel(AttentionArgs<bf16> a, AttentionGrads<bf16> g, float scale) {
  extern __shared__ __align__(128) char memory[];
  constexpr int MT = kReverseTiles<W>, kKeys = kReverseRows<W>, NT = kTile / 16;
  const Pair at(a);
  const int T = at.T, k0 = static_cast<int>(blockIdx.x) * kKeys, k_end = min(k0 + kKeys, T);
  const Tile keys{shared_address(memory), W / 8}, values{keys.at + 2 * kKeys * W, W / 8};
  constexpr int kStage = 2 * kTileBytes<W> + 3 * kTile * 4;
  const auto query = [&](int i) { return Tile{values.at + 2 * kKeys * W + (i & 1) * kStage, W / 8}; };
  const auto d_o = [&](int i) { return Tile{query(i).at + kTileBytes<W>, W / 8}; };
  // A stage's lse, delta and start.
  const auto vectors = [&](int i) {
    return reinterpret_cast<const float*>(memory + (d_o(i).at + kTileBytes<W> - keys.at));
  };
  const auto load = [&](int i) {
    const int t0 = i * kTile;
    load_rows<kTile>(query(i), at.of(a.q, t0), a.q.stride, T - t0, W);
    load_rows<kTile>(d_o(i), at.of(g.d_o, t0), a.H * W, T - t0, W);
    const int n = static_cast<int>(threadIdx.x) % kTile, t = min(t0 + n, T - 1);
    const uint32_t to = shared_address(vectors(i)) + 4 * threadIdx.x;
    copy_word(to, at.numbers(threadIdx.x < kTile ? a.lse : g.delta, t), t0 + n < T);
    if (a.start && threadIdx.x < kTile) copy_word(to + 8 * kTile, a.start + at.b * T + t, true);
  };
  load_rows<kKeys>(keys, at.of(a.k, k0), a.k.stride, T - k0, W);
  load_rows<kKeys>(values, at.of(a.v, k0), a.v.stride, T - k0, W);
  const int begin = k0 / kTile, end = (T + kTile - 1) / kTile;
  load(begin);
  commit_copies();

  const auto first_of = [&](int i) { return i < end ? at.first(i * kTile) : T; };
  int next_first = first_of(begin + 1);  // read a tile before its use
  const int mine = at.warp * 16 * MT, j_first = k0 + mine, j_last = min(j_first + 16 * MT, T) - 1;
  const float c = scale * kLog2e;
  Accumulator dk[MT][W / 8] = {}, dv[MT][W / 8] = {};
  bool more = true;
  for (int tile = begin; more; ++tile) {
    wait_copies<0>();
    __syncthreads();
    more = next_first < k_end;
    if (more) load(tile + 1), commit_copies();
    next_first = first_of(tile + 2);
    const float *lse = vectors(tile), *delta = lse + kTile;
    const int* start = reinterpret_cast<const int*>(delta + kTile);
#pragma unroll
    for (int half = 0; half < kTile; half += kTile / 2) {
      const int t0 = tile * kTile + half;
      const int doc_first = a.start ? start[half] : 0, doc_last = a.start ? start[half + kTile / 2 - 1] : 0;
      if (j_first >= T || t0 + kTile / 2 <= j_first || doc_first > j_last) continue;
      const bool masked = t0 < j_last || doc_last > j_first;
      Accumulator s[MT][NT] = {}, dp[MT][NT] = {};
      add_scores<W>(s, keys, mine, query(tile), half);
      add_scores<W>(dp, values, mine, d_o(tile), half);
      const int column = half + 2 * (static_cast<int>(threadIdx.x) % 4);
#pragma unroll
      for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int i = column + 8 * n + e, t = tile * kTile + i, doc = masked && a.start ? start[i] : 0;
          const float base = lse[i] * kLog2e, back = delta[i];
          each_row<MT>([&](int m, int r, int row) {
            float p = exp2_of(s[m][n][2 * r + e] * c - base);
            if (masked && (j_first + row < doc || j_first + row > t)) p = 0;
            s[m][n][2 * r + e] = p;
            dp[m][n][2 * r + e] = p * (dp[m][n][2 * r + e] - back);
          });
        }
      add_weighted<W>(dv, s, d_o(tile), half);
      add_weighted<W>(dk, dp, query(tile), half);
    }
  }
  const auto with = [&](float factor) { return [=](int, int) { return factor; }; };
  store_rows<W>(at.of(g.dk, j_first), g.dk.stride, T - j_first, dk, with(scale));
  store_rows<W>(at.of(g.dv, j_first), g.dv.stride, T - j_first, dv, with(1));
}

// One block a tile of `tokens` of each row and head.
template <class Kernel, class... Args>
void launch(Kernel kernel, const AttentionArgs<bf16>& a, int tokens, int shared, const Args&... args) {
  CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
  const dim3 grid(grid_for(a.T_len, tokens), static_cast<unsigned>(a.H), static_cast<unsigned>(a.B));
  kernel<<<grid, kThreads, static_cast<size_t>(shared), stream()>>>(a, args...);
  CUDA_CHECK_LAUNCH();
}

// Calls run(Int<W>) when the fast kernels cover this shape, and says whether they do.
template <class Run, class... Pointers>
bool fast(const AttentionArgs<bf16>& a, Run&& run, const Pointers&... pointers) {
  if (kernel_choice != KernelChoice::fast || a.B >= 65536 || a.H >= 65536) return false;
  if (!aligned(a.q, a.k, a.v, a.o, pointers...) || (a.W != 64 && a.W != 128)) return false;
  a.W == 64 ? run(Int<64>{}) : run(Int<128>{});
  return true;
}

}  // namespace

bool fast_attention_forward(const AttentionArgs<bf16>& a) {
  const auto run = [&](auto W) {
    launch(forward_kernel<W>, a, kQueries, 2 * kQueries * W + 4 * kTileBytes<W>,
           static_cast<float>(a.scale()));
  };
  return fast(a, run, a.cache.keys, a.cache.values);
}

bool fast_attention_backward(const AttentionArgs<bf16>& a, const AttentionGrads<bf16>& g) {
  const auto run = [&](auto W) {
    constexpr int rows = kReverseRows<W>;
    constexpr int shared = 4 * rows * W + 4 * kTileBytes<W>;
    const float scale = static_cast<float>(a.scale());
    launch(query_kernel<W>, a, rows, shared, g, scale);
    launch(key_kernel<W>, a, rows, shared + 6 * kTile * 4, g, scale);
  };
  return fast(a, run, g.dq, g.dk, g.dv, g.d_o);
}

}  // namespace prism::cuda
