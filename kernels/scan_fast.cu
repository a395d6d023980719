// The fast scan's forward walk (see scan_fast.cuh), its segments, and what the reverse pass needs of it.
//
// Plan of the walk, K 128, V 256: 8 warps of 32 rows of S, 128 accumulators a lane; a stage of shared memory
// holds a chunk's k and q (16 KiB each), w (32), T and Gamma . P (8 each): 81 KiB, twice, so that cp.async
// brings the next chunk while this one is computed; one barrier a chunk. Each further write adds 64 KiB: one
// stage then. A warp's chunk at rank 1: 128 + 128 mma for S K^T and S Q^T, 80 for T R and the outputs of the
// chunk's own writes, 128 for the new state; 15 MFLOP a chunk, 62 GFLOP at B 32, T 2048, H 4; 112 KiB in, 32
// out.
//
// Few pairs: blocks take fewer rows of S each; if even that leaves the card idle, time is cut into segments.
// A segment maps its incoming state linearly, S -> S Phi + Psi. A first walk runs all segments from 0 for Psi
// and from the identity, without writes, for Phi; a short sequential pass chains them; a second walk starts
// right.
#include <algorithm>

#include "kernels/scan_walk.cuh"

namespace prism::cuda {

namespace {

// One chunk's shared memory: tiles of 64 rows.
template <int KP>
struct Stage {
  uint32_t at;
  int extra, value_units;
  bool output;

  static __host__ __device__ int bytes(int extra, int value_units, bool output) {
    const int squares = 1 + 2 * extra + output;
    return kChunk * ((1 + extra + output) * KP * 2 + (1 + extra) * value_units * 16) + squares * kSquare * 2 +
           3 * kChunk * static_cast<int>(sizeof(float));
  }
  __device__ Tile key(int m) const { return {at + m * kChunk * KP * 2, KP / 8}; }
  __device__ Tile q() const { return key(1 + extra); }
  __device__ Tile value(int m) const {
    return {at + (1 + extra + output) * kChunk * KP * 2 + m * kChunk * value_units * 16, value_units};
  }
  // T; Gamma^- . X_m of m >= 1; Gamma . P_m
  __device__ Tile square(int i) const { return {value(1 + extra).at + i * kSquare * 2, kChunk / 8}; }
  __device__ Tile x(int m) const { return square(m); }
  __device__ Tile p(int m) const { return square(1 + extra + m); }
  __device__ uint32_t vectors() const { return square(1 + extra + (output ? 1 + extra : 0)).at; }
};

enum class Walk { output, states, transition };

// Or, with `prefetch`, only brings it nearer.
template <int KP, bool output, bool prefetch = false>
__device__ void load_stage(const Stage<KP>& stage, const FastScan& f, const Line& line, int64_t chunk,
                           int64_t v0) {
  const int64_t c0 = chunk * kChunk, V = f.args.V;
  const int n = f.tokens(chunk), K = static_cast<int>(f.args.K);
  const int width = static_cast<int>(max(min(V - v0, int64_t{stage.value_units * 8}), int64_t{0}));
  const auto fetch = [](const Tile& tile, const bf16* from, int64_t stride, int rows, int columns) {
    prefetch ? prefetch_tile(from, stride, rows, min(columns, tile.units * 8))
             : load_tile(tile, from, stride, rows, columns);
  };
  for (int m = 0; m <= f.extra; ++m) {
    fetch(stage.key(m), f.key(m, line, c0), f.key_stride(m), n, K);
    if (f.has_value(m))
      fetch(stage.value(m), f.args.w + f.value(m, line, c0) + v0, f.value_stride(), n, width);
    fetch(stage.x(m), f.square(line, chunk, m ? square_x(m) : square_T), kChunk, kChunk, kChunk);
    if constexpr (output) fetch(stage.p(m), f.square(line, chunk, square_p(m)), kChunk, kChunk, kChunk);
  }
  if constexpr (output) fetch(stage.q(), f.args.q + f.at(line, c0) * K, f.key_stride(0), n, K);
  if constexpr (prefetch) return;
  const int i = static_cast<int>(threadIdx.x);
  if (i < 3 * kChunk / 4) copy_async(stage.vectors() + i * 16, f.vector(line, chunk) + i * 4, true);
  commit_copies();
}

// A warp's share of one chunk: U, O if wanted, and the new state. `a` heads the chunk's vectors; rows from
// warp_v of the block's V, `height` of them, which begin at `at` in a tensor [B,T,H,V].
template <int KP, int MT, Walk walk>
__device__ void forward_chunk(StateRegisters<MT, KP>& S, const Stage<KP>& stage, const FastScan& f,
                              const float* a, int n, int warp_v, int height, int64_t at) {
  const float *b = a + kChunk, *beta = b + kChunk;
  const int lane_column = 2 * (static_cast<int>(threadIdx.x) % 4);
  // R = W_1 - diag(beta) (diag(a) K S^T + sum_m (Gamma^- . X_m) W_m)
  HalfSums<MT> x;
  TokenOperand<MT> u, o;
  const bool has_value = f.has_value(0);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    clear<MT>(x);
    add_state_key<MT, KP>(x, S, stage.key(0), h);
    scale_tokens<MT>(x, a, h);
    for (int m = 1; m <= f.extra; ++m)
      add_lower<MT, false>(x, FromTile<MT>{stage.value(m), warp_v}, stage.x(m), h);
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        FragmentA w = {};
        if (has_value) stage.value(0).a_transposed(w, warp_v + 16 * mt, 32 * h + 16 * p);
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // the words of an A fragment are those of two accumulators
          const float2 s =
              *reinterpret_cast<const float2*>(beta + 32 * h + 16 * p + 8 * (i / 2) + lane_column);
          Accumulator& c = x[mt][2 * p + i / 2];
          c[i % 2 * 2] = low_bf16(w[i]) - s.x * c[i % 2 * 2];
          c[i % 2 * 2 + 1] = high_bf16(w[i]) - s.y * c[i % 2 * 2 + 1];
        }
      }
    to_operand<MT>(u, x, h);
  }
  // U = T R
  multiply_lower<MT, false>(u, stage.x(0));
  if constexpr (walk == Walk::states) store_tokens<MT>(f.u + at, f.args.H * f.args.V, u, n, height, 0, 4);
  // O = diag(a) Q S^T + sum_m (Gamma . P_m) W_m
  if constexpr (walk == Walk::output)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      clear<MT>(x);
      add_state_key<MT, KP>(x, S, stage.q(), h);
      scale_tokens<MT>(x, a, h);
      add_lower<MT, false>(x, FromRegisters<MT>{u}, stage.p(0), h);
      for (int m = 1; m <= f.extra; ++m)
        add_lower<MT, false>(x, FromTile<MT>{stage.value(m), warp_v}, stage.p(m), h);
      to_operand<MT>(o, x, h);
      store_tokens<MT>(f.args.o + at, f.args.H * f.args.V, o, n, height, 2 * h, 2 * h + 2);
    }
  // S' = a_n S + sum_m (diag(b) W_m)^T kappa_m
  scale_state<MT, KP>(S, a[n - 1]);
  scale_operand<MT>(u, b);
  add_outer<MT, KP>(S, FromRegisters<MT>{u}, stage.key(0));
  for (int m = 1; m <= f.extra; ++m)
    add_outer<MT, KP>(S, FromTile<MT>{stage.value(m), warp_v, b}, stage.key(m));
}

template <int KP, int MT, Walk walk>
__global__ void __launch_bounds__(kWalkThreads, 1) forward_walk(FastScan f, int value_units, int stages) {
  extern __shared__ __align__(128) char memory[];
  constexpr bool output = walk == Walk::output;
  const int stage_bytes = Stage<KP>::bytes(f.extra, value_units, output);
  const Line line = f.line(blockIdx.x);
  const int64_t segment = blockIdx.y, V = f.args.V;
  const int K = static_cast<int>(f.args.K);
  // Rows of S in this block, and this warp's. Blocks past V carry the identity through a transition.
  const int64_t value_blocks = ceil_div(V, value_units * 8);
  const bool identity = blockIdx.z >= value_blocks;
  const int64_t v0 = (blockIdx.z - (identity ? value_blocks : 0)) * value_units * 8;
  const int warp_v = static_cast<int>(threadIdx.x) / kWarp * 16 * MT;
  const int height = static_cast<int>(max((identity ? K : V) - v0 - warp_v, int64_t{0}));
  const int64_t first = segment * f.segment_chunks, last = min(first + f.segment_chunks, f.chunks);
  const auto stage_at = [&](int64_t chunk) {
    const int which = stages == 2 ? static_cast<int>(chunk & 1) : 0;
    return Stage<KP>{shared_address(memory) + which * stage_bytes, f.extra, value_units, output};
  };
  const int64_t load_v0 = identity ? V : v0;  // nothing to load for the identity: zeros

  StateRegisters<MT, KP> S = {};
  const int64_t row = (v0 + warp_v) * K;  // where this warp's part of a state begins
  const float* from = walk == Walk::transition ? nullptr
                      : segment > 0            ? f.segment(line, segment)
                      : f.args.initial_state   ? f.args.initial_state + line.pair * V * K
                                               : nullptr;
  each_state<MT, KP>(S, K, height, [&](int v, int k, float& x0, float& x1) {
    if (from) x0 = from[row + v * K + k], x1 = from[row + v * K + k + 1];
    if (identity) x0 = v0 + warp_v + v == k, x1 = v0 + warp_v + v == k + 1;
  });

  if (stages == 2) load_stage<KP, output>(stage_at(first), f, line, first, load_v0);
  for (int64_t chunk = first; chunk < last; ++chunk) {
    const Stage<KP> stage = stage_at(chunk);
    const int n = f.tokens(chunk);
    if (stages == 1) load_stage<KP, output>(stage, f, line, chunk, load_v0);
    wait_copies<0>();
    __syncthreads();  // this chunk is here, and nobody still reads the one before
    if (stages == 2 && chunk + 1 < last)
      load_stage<KP, output>(stage_at(chunk + 1), f, line, chunk + 1, load_v0);
    if (stages == 1 && chunk + 1 < last) load_stage<KP, output, true>(stage, f, line, chunk + 1, load_v0);
    const float* a = reinterpret_cast<const float*>(memory + (stage.vectors() - shared_address(memory)));
    if constexpr (walk == Walk::states)
      store_state<MT, KP>(f.states() + (line.pair * f.chunks + chunk) * V * K + row, K, S, height);

    forward_chunk<KP, MT, walk>(S, stage, f, a, n, warp_v, height,
                                f.at(line, chunk * kChunk) * V + v0 + warp_v);
    if (stages == 1) __syncthreads();
  }

  float* to = walk == Walk::transition ? f.segment(line, segment) + (identity ? V * K : 0)
              : last == f.chunks && f.args.final_state && output ? f.args.final_state + line.pair * V * K
                                                                 : nullptr;
  if (to)
    each_state<MT, KP>(S, K, height, [&](int v, int k, float& x0, float& x1) {
      *reinterpret_cast<float2*>(to + row + v * K + k) = {x0, x1};
      if (identity) to[K * K + k * K + v0 + warp_v + v] = x0, to[K * K + (k + 1) * K + v0 + warp_v + v] = x1;
    });
}

// S <- S Phi + Psi from segment to segment, or S <- S Phi^T + Psi backwards; each S takes its Psi's place. A
// block has 8 rows of S of one pair; thread (column, part) sums a quarter of the products for one column of
// them.
constexpr int kChainRows = 8, kChainParts = 4;
__global__ void __launch_bounds__(1024) chain_kernel(FastScan f, const float* boundary, bool reverse) {
  extern __shared__ float4 shared_S[];  // [K][8], then the parts' sums, [4][8][K]
  const int K = static_cast<int>(f.args.K), column = static_cast<int>(threadIdx.x),
            part = static_cast<int>(threadIdx.y);
  float *S = reinterpret_cast<float*>(shared_S), *sums = S + K * kChainRows;
  const Line line = f.line(blockIdx.x);
  const int64_t at = blockIdx.y * kChainRows * K + column;
  for (int r = part; r < kChainRows; r += kChainParts)
    S[column * kChainRows + r] = boundary ? boundary[line.pair * f.args.V * K + at + r * K] : 0.f;
  for (int i = 0; i < f.segment_count; ++i) {
    float* psi = f.segment(line, reverse ? f.segment_count - 1 - i : i);
    const float* phi = psi + (f.args.V + (reverse ? K : 0)) * K + column;
    psi += at;
    float next[kChainRows] = {};
#pragma unroll
    for (int r = 0; r < kChainRows; ++r)
      if (r % kChainParts == part) next[r] = psi[r * K];
    __syncthreads();
#pragma unroll 16
    for (int k = part * (K / kChainParts); k < (part + 1) * (K / kChainParts); ++k) {
      const float p = phi[k * K];
      const float4 x = shared_S[2 * k], y = shared_S[2 * k + 1];
      next[0] += x.x * p, next[1] += x.y * p, next[2] += x.z * p, next[3] += x.w * p;
      next[4] += y.x * p, next[5] += y.y * p, next[6] += y.z * p, next[7] += y.w * p;
    }
#pragma unroll
    for (int r = 0; r < kChainRows; ++r) sums[(part * kChainRows + r) * K + column] = next[r];
    __syncthreads();
    for (int r = part; r < kChainRows; r += kChainParts) {
      float sum = 0.f;
      for (int q = 0; q < kChainParts; ++q) sum += sums[(q * kChainRows + r) * K + column];
      psi[r * K] = S[column * kChainRows + r];
      S[column * kChainRows + r] = sum;
    }
  }
}

// How a walk is cut: blocks of 8 * value_units rows of S, 8, 4 or 2 warps each.
template <int KP, int MT, Walk walk>
void launch_walk(const FastScan& f) {
  constexpr bool output = walk == Walk::output;
  const int value_units = f.walk_units;
  const auto kernel = forward_walk<KP, MT, walk>;
  const int bytes = Stage<KP>::bytes(f.extra, value_units, output);
  const int stages = 2 * bytes <= static_cast<int>(context().shared_memory) ? 2 : 1;
  allow_shared_memory(kernel);
  const int64_t blocks = ceil_div(f.args.V, 8 * value_units) +
                         (walk == Walk::transition ? ceil_div(f.args.K, 8 * value_units) : 0);
  const dim3 grid(static_cast<unsigned>(f.pairs), static_cast<unsigned>(f.segment_count),
                  static_cast<unsigned>(blocks));
  kernel<<<grid, value_units * 8 / (16 * MT) * kWarp, stages * bytes, stream()>>>(f, value_units, stages);
  CUDA_CHECK_LAUNCH();
}

template <Walk walk>
void launch_walk(const FastScan& f) {
  if (f.args.K <= 64)
    launch_walk<64, 2, walk>(f);
  else if (f.args.K <= 128)
    launch_walk<128, 2, walk>(f);
  else
    launch_walk<256, 1, walk>(f);
}

int walk_bytes(const ScanArgs<bf16>& args, int units) {
  const int extra = static_cast<int>(args.extra_keys());
  return args.K <= 64    ? Stage<64>::bytes(extra, units, true)
         : args.K <= 128 ? Stage<128>::bytes(extra, units, true)
                         : Stage<256>::bytes(extra, units, true);
}

// Cuts the problem for this card and lays out the workspace; returns its size.
size_t plan(FastScan& f, const ScanArgs<bf16>& args, bool backward) {
  f.args = args, f.backward = backward;
  f.pairs = args.B * args.H, f.chunks = args.chunks(), f.extra = static_cast<int>(args.extra_keys());
  const int64_t processors = context().multiprocessors,
                available = static_cast<int64_t>(context().shared_memory);
  f.walk_units = args.K <= 128 ? 32 : 16;
  while (f.walk_units > 8 && (walk_bytes(args, f.walk_units) > available || 4 * f.walk_units >= args.V))
    f.walk_units /= 2;
  const auto blocks = [&] { return f.pairs * ceil_div(args.V, 8 * f.walk_units); };
  // A second block for a row pays once half the card is idle; segments, which cost a walk more, once it stays
  // so.
  const int64_t least = ceil_div(args.V, 64);
  f.segment_count = 1;
  if (f.pairs * least * 2 <= processors)
    f.segment_count = static_cast<int>(std::min(processors / blocks(), f.chunks / 4));
  if (f.segment_count <= 1) f.segment_count = 1;
  while (f.walk_units > 8 && blocks() * f.segment_count * 2 <= processors) f.walk_units /= 2;
  f.segment_chunks = ceil_div(f.chunks, f.segment_count);
  f.segment_count = static_cast<int>(ceil_div(f.chunks, f.segment_chunks));

  char* at = static_cast<char*>(args.workspace);
  const auto take = [&](auto*& pointer, int64_t count) {
    pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(at);
    at += ceil_div(count * static_cast<int64_t>(sizeof(*pointer)), 256) * 256;
  };
  take(f.squares, f.pairs * f.chunks * f.squares_per_chunk() * kSquare);
  take(f.vectors, f.pairs * f.chunks * 3 * kChunk);
  if (f.segment_count > 1) take(f.segments, f.pairs * f.segment_count * (args.V + 2 * args.K) * args.K);
  const int64_t tokens = args.B * args.T_len * args.H;
  if (backward) take(f.u, tokens * args.V);
  if (backward && args.own_first_key) take(f.y, tokens * args.V);
  if (backward) {
    take(f.sums, f.pairs * f.chunks * (1 + f.extra) * FastScan::kSums);
    take(f.dots, f.pairs * f.chunks * f.key_parts() * FastScan::kDots);
  }
  return static_cast<size_t>(at - static_cast<char*>(args.workspace));
}

void start(const FastScan& f) {
  launch_prepare(f);
  if (f.segment_count == 1) return;
  launch_walk<Walk::transition>(f);
  chain_segments(f, f.args.initial_state, false);
}

}  // namespace

void chain_segments(const FastScan& f, const float* boundary, bool reverse) {
  const dim3 grid(static_cast<unsigned>(f.pairs), static_cast<unsigned>(f.args.V / kChainRows));
  const auto K = static_cast<unsigned>(f.args.K);
  const size_t bytes = K * kChainRows * (1 + kChainParts) * sizeof(float);
  chain_kernel<<<grid, dim3(K, kChainParts), bytes, stream()>>>(f, boundary, reverse);
  CUDA_CHECK_LAUNCH();
}

bool fast_covers(const ScanArgs<bf16>& args, bool backward) {
  const int available = static_cast<int>(context().shared_memory);
  return walk_bytes(args, 8) <= available && (!backward || gradients_cover(args)) &&
         args.B * args.H * args.chunks() < int64_t{1} << 28;  // blocks, times those of a chunk
}

size_t fast_workspace_bytes(const ScanArgs<bf16>& args, bool backward) {
  FastScan f;
  return plan(f, args, backward);
}

void fast_forward(const ScanArgs<bf16>& args) {
  FastScan f;
  plan(f, args, false);
  start(f);
  launch_walk<Walk::output>(f);
}

FastScan fast_states(const ScanArgs<bf16>& args) {
  FastScan f;
  plan(f, args, true);
  start(f);
  launch_walk<Walk::states>(f);
  return f;
}

}  // namespace prism::cuda
