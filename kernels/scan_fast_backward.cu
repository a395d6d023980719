// The fast scan's reverse walk (see scan_fast.cuh): dS from the last chunk to the first, and all that mixes
// no rows of it, Y and dW_m. kernels/scan_gradients.cu then has dS and S of every chunk and does the rest,
// all chunks at once.
//
// Plan, K 128, V 256: as the forward walk, with dS for S: 8 warps of 32 rows of dS; a stage holds q, k (16
// KiB each), dO (32), T and Gamma . P (8 each), twice. 128 + 128 + 128 + 80 mma a warp and chunk; 80 KiB in,
// 32 KiB of Y and 64 KiB of dS in bf16 out. Segments as forward, with the transposed transitions.
#include "kernels/scan_walk.cuh"

namespace prism::cuda {

namespace {

// One chunk's shared memory: tiles of 64 rows.
template <int KP>
struct Stage {
  uint32_t at;
  int extra, value_units;

  static __host__ __device__ int bytes(int extra, int value_units) {
    return kChunk * ((2 + extra) * KP * 2 + value_units * 16) + (2 + 2 * extra) * kSquare * 2 +
           3 * kChunk * static_cast<int>(sizeof(float));
  }
  __device__ Tile key(int m) const { return {at + m * kChunk * KP * 2, KP / 8}; }
  __device__ Tile q() const { return key(1 + extra); }
  __device__ Tile d_o() const { return {key(2 + extra).at, value_units}; }
  // T or, of m >= 1, Gamma^- . X_m; Gamma . P_m
  __device__ Tile x(int m) const {
    return {d_o().at + kChunk * value_units * 16 + m * kSquare * 2, kChunk / 8};
  }
  __device__ Tile p(int m) const { return x(1 + extra + m); }
  __device__ uint32_t vectors() const { return x(2 + 2 * extra).at; }
};

// Or, with `prefetch`, only brings it nearer.
template <int KP, bool transition, bool prefetch = false>
__device__ void load_stage(const Stage<KP>& stage, const FastScan& f, const bf16* d_o, const Line& line,
                           int64_t chunk, int64_t v0) {
  const int64_t c0 = chunk * kChunk, V = f.args.V;
  const int n = f.tokens(chunk), K = static_cast<int>(f.args.K);
  const auto fetch = [](const Tile& tile, const bf16* from, int64_t stride, int rows, int columns) {
    prefetch ? prefetch_tile(from, stride, rows, min(columns, tile.units * 8))
             : load_tile(tile, from, stride, rows, columns);
  };
  for (int m = 0; m <= (transition ? 0 : f.extra); ++m) {
    fetch(stage.key(m), f.key(m, line, c0), f.key_stride(m), n, K);
    fetch(stage.x(m), f.square(line, chunk, m ? square_x(m) : square_T), kChunk, kChunk, kChunk);
    fetch(stage.p(m), f.square(line, chunk, square_p(m)), kChunk, kChunk, kChunk);
  }
  fetch(stage.q(), f.args.q + f.at(line, c0) * K, f.key_stride(0), n, K);
  fetch(stage.d_o(), d_o + f.at(line, c0) * V + v0, f.args.H * V, n, static_cast<int>(V - v0));
  if constexpr (prefetch) return;
  const int i = static_cast<int>(threadIdx.x);
  if (i < 3 * kChunk / 4) copy_async(stage.vectors() + i * 16, f.vector(line, chunk) + i * 4, true);
  commit_copies();
}

// A warp's share of one chunk: Y, dW_m and the gradient of the state before it, in the terms of
// forward_chunk; `c0` is the chunk's first token and v the first of this warp's rows.
template <int KP, int MT, bool transition>
__device__ void reverse_chunk(StateRegisters<MT, KP>& dS, const Stage<KP>& stage, const FastScan& f,
                              const ScanGrads<bf16>& grads, const Line& line, const float* a, int64_t c0,
                              int n, int warp_v, int64_t v, int height) {
  const float *b = a + kChunk, *beta = b + kChunk;
  // dW_0 = diag(b) K dS^T + (Gamma . P_0)^T dO;   Y = T^T dW_0
  const FromTile<MT> d_o{stage.d_o(), warp_v};
  HalfSums<MT> x;
  TokenOperand<MT> y, dw;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    clear<MT>(x);
    add_state_key<MT, KP>(x, dS, stage.key(0), h);
    scale_tokens<MT>(x, b, h);
    add_lower<MT, true>(x, d_o, stage.p(0), h);
    to_operand<MT>(y, x, h);
  }
  multiply_lower<MT, true>(y, stage.x(0));
  if constexpr (!transition) store_tokens<MT>(f.y_at(grads, line, c0) + v, f.y_stride(), y, n, height, 0, 4);
  scale_operand<MT>(y, beta, -1.f);  // y = -diag(beta) Y
  // dW_m = diag(b) kappa_m dS^T + (Gamma . P_m)^T dO - (Gamma^- . X_m)^T diag(beta) Y
  if constexpr (!transition)
    for (int m = 1; m <= f.extra; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        clear<MT>(x);
        add_state_key<MT, KP>(x, dS, stage.key(m), h);
        scale_tokens<MT>(x, b, h);
        add_lower<MT, true>(x, d_o, stage.p(m), h);
        add_lower<MT, true>(x, FromRegisters<MT>{y}, stage.x(m), h);
        to_operand<MT>(dw, x, h);
        store_tokens<MT>(grads.dw + f.value(m, line, c0) + v, f.value_stride(), dw, n, height, 2 * h,
                         2 * h + 2);
      }
  // dS_in = a_n dS + dO^T diag(a) Q - Y^T diag(beta a) K
  scale_state<MT, KP>(dS, a[n - 1]);
  add_outer<MT, KP>(dS, FromTile<MT>{stage.d_o(), warp_v, a}, stage.q());
  scale_operand<MT>(y, a);
  add_outer<MT, KP>(dS, FromRegisters<MT>{y}, stage.key(0));
}

// With `transition` runs each segment from 0 and keeps its result alone.
template <int KP, int MT, bool transition>
__global__ void __launch_bounds__(kWalkThreads, 1)
    reverse_walk(FastScan f, ScanGrads<bf16> grads, int value_units, int stages) {
  extern __shared__ __align__(128) char memory[];
  const int stage_bytes = Stage<KP>::bytes(f.extra, value_units);
  const Line line = f.line(blockIdx.x);
  const int64_t segment = blockIdx.y, V = f.args.V, v0 = blockIdx.z * value_units * 8;
  const int K = static_cast<int>(f.args.K), warp_v = static_cast<int>(threadIdx.x) / kWarp * 16 * MT;
  const int height = static_cast<int>(max(V - v0 - warp_v, int64_t{0}));
  const int64_t first = segment * f.segment_chunks, last = min(first + f.segment_chunks, f.chunks);
  const auto stage_at = [&](int64_t chunk) {
    const int which = stages == 2 ? static_cast<int>(chunk & 1) : 0;
    return Stage<KP>{shared_address(memory) + which * stage_bytes, f.extra, value_units};
  };

  StateRegisters<MT, KP> dS = {};
  const int64_t row = (v0 + warp_v) * K;  // where this warp's part of a state begins
  const float* from = transition           ? nullptr
                      : last < f.chunks    ? f.segment(line, segment)
                      : grads.dfinal_state ? grads.dfinal_state + line.pair * V * K
                                           : nullptr;
  if (from)
    each_state<MT, KP>(dS, K, height, [&](int v, int k, float& x0, float& x1) {
      x0 = from[row + v * K + k], x1 = from[row + v * K + k + 1];
    });

  if (stages == 2) load_stage<KP, transition>(stage_at(last - 1), f, grads.d_o, line, last - 1, v0);
  for (int64_t chunk = last - 1; chunk >= first; --chunk) {
    const Stage<KP> stage = stage_at(chunk);
    const int n = f.tokens(chunk);
    if (stages == 1) load_stage<KP, transition>(stage, f, grads.d_o, line, chunk, v0);
    wait_copies<0>();
    __syncthreads();  // this chunk is here, and nobody still reads the one before
    if (stages == 2 && chunk > first)
      load_stage<KP, transition>(stage_at(chunk - 1), f, grads.d_o, line, chunk - 1, v0);
    if (stages == 1 && chunk > first)
      load_stage<KP, transition, true>(stage, f, grads.d_o, line, chunk - 1, v0);
    const float* a = reinterpret_cast<const float*>(memory + (stage.vectors() - shared_address(memory)));
    if constexpr (!transition)
      store_state<MT, KP>(f.dstates() + (line.pair * f.chunks + chunk) * V * K + row, K, dS, height);

    reverse_chunk<KP, MT, transition>(dS, stage, f, grads, line, a, chunk * kChunk, n, warp_v, v0 + warp_v,
                                      height);
    if (stages == 1) __syncthreads();
  }

  float* to = transition                           ? f.segment(line, segment)
              : first == 0 && grads.dinitial_state ? grads.dinitial_state + line.pair * V * K
                                                   : nullptr;
  if (to)
    each_state<MT, KP>(dS, K, height, [&](int v, int k, float& x0, float& x1) {
      *reinterpret_cast<float2*>(to + row + v * K + k) = {x0, x1};
    });
}

template <int KP, int MT, bool transition>
void launch_walk(const FastScan& f, const ScanGrads<bf16>& grads) {
  const auto kernel = reverse_walk<KP, MT, transition>;
  const int bytes = Stage<KP>::bytes(f.extra, f.walk_units);
  const int stages = 2 * bytes <= static_cast<int>(context().shared_memory) ? 2 : 1;
  allow_shared_memory(kernel);
  const dim3 grid(static_cast<unsigned>(f.pairs), static_cast<unsigned>(f.segment_count),
                  static_cast<unsigned>(ceil_div(f.args.V, 8 * f.walk_units)));
  kernel<<<grid, f.walk_units * 8 / (16 * MT) * kWarp, stages * bytes, stream()>>>(f, grads, f.walk_units,
                                                                                   stages);
  CUDA_CHECK_LAUNCH();
}

template <bool transition>
void launch_walk(const FastScan& f, const ScanGrads<bf16>& grads) {
  if (f.args.K <= 64)
    launch_walk<64, 2, transition>(f, grads);
  else if (f.args.K <= 128)
    launch_walk<128, 2, transition>(f, grads);
  else
    launch_walk<256, 1, transition>(f, grads);
}

}  // namespace

void fast_backward(const ScanArgs<bf16>& args, const ScanGrads<bf16>& grads) {
  const FastScan f = fast_states(args);
  if (f.segment_count > 1) {
    launch_walk<true>(f, grads);
    chain_segments(f, grads.dfinal_state, true);
  }
  launch_walk<false>(f, grads);
  launch_gradients(f, grads);
}

}  // namespace prism::cuda
