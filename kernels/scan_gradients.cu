// The last part of the fast scan's reverse pass (see scan_fast.cuh): from S, dS, U, Y and dO of every chunk,
// all chunks at once, dQ, dK, dkappa_m, dbeta and dg. Sums over V go in slabs, two in shared memory, cp.async
// ahead.
//
// Plan. squares_kernel, a block of 4 warps for one write m of one chunk: dP_m = dO W_m^T and dM_m = -Y W_m^T,
// then Gamma . dP_m and Z_m = diag(beta) Gamma^- . dM_m as bf16 in the place of Gamma . P_m and Gamma^- .
// X_m, and their share of dg and dbeta. 74 KiB: three blocks a multiprocessor. Rank 1: 4 MFLOP; 120 KiB in,
// 16 out. keys_kernel, for 64 columns of K: two warps for each of dO S, Y S, U dS and W_m dS, 64 accumulators
// a lane; the squares then multiply the keys into the same accumulators. 112 KiB and 6 warps at rank 1: two
// blocks a multiprocessor, so that one computes while the other waits. 21 MFLOP a chunk at K 128; 290 KiB in,
// 32 out. gates_kernel, a warp a chunk, adds up dbeta and dg.
#include "kernels/scan_fast.cuh"

namespace prism::cuda {

namespace {

constexpr int kSquareThreads = 128, kGateThreads = 128;
constexpr int kColumns = 64;  // of K, a block of keys_kernel

using Sum = float[2][8][4];  // 32 rows, 64 columns

// The chunk a block works on.
struct Place {
  Line line;
  int chunk, n;
  int64_t c0;
};

__device__ Place place(const FastScan& f, uint32_t index) {
  const auto chunks = static_cast<uint32_t>(f.chunks);
  const int chunk = static_cast<int>(index % chunks);
  return {f.line(index / chunks), chunk, f.tokens(chunk), int64_t{chunk} * kChunk};
}

// Write m's value, from token c0 on: U or W_m.
__device__ void load_value(const Tile& tile, const FastScan& f, const Place& p, int m, int v0) {
  const int64_t V = f.args.V;
  const int width = static_cast<int>(V) - v0;
  if (m == 0)
    load_tile(tile, f.u + f.at(p.line, p.c0) * V + v0, f.args.H * V, p.n, width);
  else
    load_tile(tile, f.args.w + f.value(m, p.line, p.c0) + v0, f.value_stride(), p.n, width);
}

__device__ void load_d_o_and_y(const Tile& d_o, const Tile& y, const FastScan& f,
                               const ScanGrads<bf16>& grads, const Place& p, int v0) {
  const int64_t V = f.args.V;
  const int width = static_cast<int>(V) - v0;
  load_tile(d_o, grads.d_o + f.at(p.line, p.c0) * V + v0, f.args.H * V, p.n, width);
  load_tile(y, f.y_at(grads, p.line, p.c0) + v0, f.y_stride(), p.n, width);
}

// x += A B, 32 rows of A, 64 columns of B (or of B^T), 16 DEPTH deep, of which p0 <= p < p1 count.
template <int DEPTH, bool a_transposed, bool b_transposed>
__device__ void multiply(Sum& x, const Tile& A, const Tile& B, int row, int p0 = 0, int p1 = DEPTH) {
#pragma unroll
  for (int p = 0; p < DEPTH; ++p) {
    if (p < p0 || p >= p1) continue;
    FragmentA a[2];
#pragma unroll
    for (int mt = 0; mt < 2; ++mt)
      if constexpr (a_transposed)
        A.a_transposed(a[mt], row + 16 * mt, 16 * p);
      else
        A.a(a[mt], row + 16 * mt, 16 * p);
#pragma unroll
    for (int np = 0; np < 4; ++np) {
      uint32_t b[4];
      if constexpr (b_transposed)
        B.b_transposed(b, 16 * p, 16 * np);
      else
        B.b(b, 16 * p, 16 * np);
#pragma unroll
      for (int mt = 0; mt < 2; ++mt)
        mma(x[mt][2 * np], a[mt], b[0], b[1]), mma(x[mt][2 * np + 1], a[mt], b[2], b[3]);
    }
  }
}

// The two bf16 at (row, column) and (row, column + 1) of a tile, column even.
__device__ uint32_t* pair_at(char* memory, const Tile& tile, int row, int column) {
  return reinterpret_cast<uint32_t*>(memory + (tile.piece(row, column / 8) - shared_address(memory)) +
                                     column % 8 * 2);
}

// dP_m (below = false) or dM_m, rows `row`.. : its sums with Gamma . P_m or Gamma^- . X_m, which lies in
// `square` and gives way to Gamma . dP_m or Z_m. Row sums, and column sums over these rows, times beta for
// dM_m.
__device__ void square_epilogue(const Sum& x, char* memory, const Tile& square, const Tile& gamma,
                                const float* beta, float* row_sums, float* column_sums, int row, bool below) {
  const int lane = lane_here(), g = lane / 4, t = lane % 4;
  float columns[8][2] = {};
#pragma unroll
  for (int mt = 0; mt < 2; ++mt)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = row + 16 * mt + 8 * half + g;
      const float scale = below ? beta[i] : 1.f;
      float sum = 0.f;
#pragma unroll
      for (int nt = 0; nt < 8; ++nt) {
        const int j = 8 * nt + 2 * t;
        uint32_t* word = pair_at(memory, square, i, j);
        const uint32_t old = *word, decay = *pair_at(memory, gamma, i, j);
        const float x0 = below ? (i > j ? -x[mt][nt][2 * half] : 0.f) : x[mt][nt][2 * half];
        const float x1 = below ? (i > j + 1 ? -x[mt][nt][2 * half + 1] : 0.f) : x[mt][nt][2 * half + 1];
        const float e0 = x0 * low_bf16(old), e1 = x1 * high_bf16(old);
        sum += e0 + e1;
        columns[nt][0] += scale * e0, columns[nt][1] += scale * e1;
        *word = pack_bf16(scale * low_bf16(decay) * x0, scale * high_bf16(decay) * x1);
      }
      sum = warp_sum<4>(sum);
      if (t == 0) row_sums[i] = sum;
    }
#pragma unroll
  for (int nt = 0; nt < 8; ++nt)
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float sum = columns[nt][c];
#pragma unroll
      for (int d = 4; d < kWarp; d *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
      if (g == 0) column_sums[8 * nt + 2 * t + c] = sum;
    }
}

constexpr int kSquareStage = 3 * kSquare * 2;  // bytes: a slab of 64 of dO, Y and a value
constexpr int kSquareBytes =
    2 * kSquareStage + 3 * kSquare * 2 + 7 * kChunk * static_cast<int>(sizeof(float));

__global__ void __launch_bounds__(kSquareThreads) squares_kernel(FastScan f, ScanGrads<bf16> grads) {
  extern __shared__ __align__(128) char memory[];
  const uint32_t writes = 1 + static_cast<uint32_t>(f.extra), at = shared_address(memory);
  const int m = static_cast<int>(blockIdx.x % writes), thread = static_cast<int>(threadIdx.x),
            sub = thread / kWarp;
  const Place p = place(f, blockIdx.x / writes);
  // Two slabs of dO, Y and the value; Gamma . P_m, Gamma^- . X_m, which become the results; Gamma.
  const auto tile = [&](int i) { return Tile{at + i * kSquare * 2, kChunk / 8}; };
  const auto stored = [&](int which) { return f.square(p.line, p.chunk, which ? square_x(m) : square_p(m)); };
  float* beta = reinterpret_cast<float*>(memory + 9 * kSquare * 2);
  float *rows = beta + kChunk, *columns = rows + 2 * kChunk;  // [2][C] by dP, dM; [4][C] by warp

  for (int i = 0; i < 2; ++i) load_tile(tile(6 + i), stored(i), kChunk, kChunk, kChunk);
  load_tile(tile(8), f.square(p.line, p.chunk, f.squares_per_chunk() - 1), kChunk, kChunk, kChunk);
  if (thread < kChunk) beta[thread] = f.vector(p.line, p.chunk)[2 * kChunk + thread];
  const auto load = [&](int slab) {
    const int first = slab % 2 * 3;
    load_d_o_and_y(tile(first), tile(first + 1), f, grads, p, 64 * slab);
    load_value(tile(first + 2), f, p, m, 64 * slab);
    commit_copies();
  };
  const int slabs = static_cast<int>(ceil_div(f.args.V, 64)), row = 32 * (sub % 2);
  const bool below = sub >= 2;
  Sum x = {};
  load(0);
  for (int slab = 0; slab < slabs; ++slab) {
    wait_copies<0>();
    __syncthreads();  // this slab is here, and nobody still reads the one before
    if (slab + 1 < slabs) load(slab + 1);
    multiply<4, false, true>(x, tile(slab % 2 * 3 + below), tile(slab % 2 * 3 + 2), row);
  }
  square_epilogue(x, memory, tile(6 + below), tile(8), beta, rows + below * kChunk, columns + sub * kChunk,
                  row, below);
  __syncthreads();
  for (int i = thread; i < 2 * kSquare / 8; i += kSquareThreads) {
    const int which = i / (kSquare / 8), r = i / 8 % kChunk, u = i % 8;
    const uint4* words = reinterpret_cast<const uint4*>(memory + (tile(6 + which).piece(r, u) - at));
    *reinterpret_cast<uint4*>(stored(which) + r * kChunk + u * 8) = *words;
  }
  if (thread < kChunk) {
    float* sums = f.gate_sums(p.line, p.chunk, m);
    const int i = thread;
    float column = 0.f;
    for (int warp = 0; warp < 4; ++warp) column += columns[warp * kChunk + i];
    sums[i] = rows[i] + beta[i] * rows[kChunk + i] - column;  // to dG_i
    sums[kChunk + i] = rows[kChunk + i];                      // to dbeta_i
  }
}

// to[i] = <x_i, key_i> over 64 columns.
__device__ void row_dots(float* to, const Sum& x, char* memory, const Tile& key, int row) {
  const int lane = lane_here(), g = lane / 4, t = lane % 4;
#pragma unroll
  for (int mt = 0; mt < 2; ++mt)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = row + 16 * mt + 8 * half + g;
      float sum = 0.f;
#pragma unroll
      for (int nt = 0; nt < 8; ++nt) {
        const uint32_t k = *pair_at(memory, key, i, 8 * nt + 2 * t);
        sum += x[mt][nt][2 * half] * low_bf16(k) + x[mt][nt][2 * half + 1] * high_bf16(k);
      }
      sum = warp_sum<4>(sum);
      if (t == 0) to[i] = sum;
    }
}

// Row i of x times sign scale[i] scale2[i].
__device__ void scale_rows(Sum& x, const float* scale, const float* scale2, float sign, int row) {
  const int g = lane_here() / 4;
#pragma unroll
  for (int mt = 0; mt < 2; ++mt)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = row + 16 * mt + 8 * half + g;
      const float s = sign * scale[i] * (scale2 ? scale2[i] : 1.f);
#pragma unroll
      for (int nt = 0; nt < 8; ++nt) x[mt][nt][2 * half] *= s, x[mt][nt][2 * half + 1] *= s;
    }
}

__device__ void store_rows(bf16* to, int64_t stride, const Sum& x, int row, int n, int width) {
  const int lane = lane_here(), g = lane / 4, t = lane % 4;
#pragma unroll
  for (int mt = 0; mt < 2; ++mt)
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int q = 0; q < 2; ++q) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          words[i] = pack_bf16(x[mt][4 * q + i][2 * half], x[mt][4 * q + i][2 * half + 1]);
        transpose_quad(words);
        const int i = row + 16 * mt + 8 * half + g, k = 32 * q + 8 * t;
        if (i < n && k < width) store_words(to + i * stride + k, words);
      }
}

// Shared memory of keys_kernel: tiles of 64 columns of K; slabs of VS rows of V.
template <int VS>
struct Memory {
  uint32_t at;
  int extra;
  static constexpr int kTile = kSquare * 2, kTokenBytes = kChunk * VS * 2, kStateBytes = VS * kColumns * 2;
  static __host__ __device__ constexpr int stage_bytes(int extra) {
    return (3 + extra) * kTokenBytes + 2 * kStateBytes;
  }
  static __host__ __device__ constexpr int bytes(int extra) {
    return (2 + extra + 2 * (1 + extra)) * kTile + 2 * stage_bytes(extra);
  }
  __device__ Tile tile(int i) const { return {at + i * kTile, kChunk / 8}; }
  __device__ Tile q() const { return tile(0); }
  __device__ Tile key(int m) const { return tile(1 + m); }
  __device__ Tile p(int m) const { return tile(2 + extra + 2 * m); }  // Gamma . dP_m
  __device__ Tile z(int m) const { return tile(3 + extra + 2 * m); }
  __device__ uint32_t stage(int i) const { return tile(4 + 3 * extra).at + i * stage_bytes(extra); }
  __device__ Tile tokens(int i, int which) const {
    return {stage(i) + which * kTokenBytes, VS / 8};
  }  // dO, Y, values
  __device__ Tile S(int i) const { return {tokens(i, 3 + extra).at, kColumns / 8}; }
  __device__ Tile dS(int i) const { return {S(i).at + kStateBytes, kColumns / 8}; }
};

// <dS, S> over a slab, this thread's part.
template <int VS>
__device__ float states_dot(const char* memory, const Memory<VS>& mem, int stage) {
  const uint4* S = reinterpret_cast<const uint4*>(memory + (mem.S(stage).at - mem.at));
  float sum = 0.f;
  for (int i = static_cast<int>(threadIdx.x); i < VS * kColumns / 8; i += static_cast<int>(blockDim.x)) {
    float x[8], y[8];
    load_vec(reinterpret_cast<const bf16*>(S + i), x);
    load_vec(reinterpret_cast<const bf16*>(S + VS * kColumns / 8 + i), y);
#pragma unroll
    for (int c = 0; c < 8; ++c) sum += x[c] * y[c];
  }
  return sum;
}

// Two warps a product: 0: dO S, for dQ; 1: Y S, for dK_row; 2 + m: W_m dS, for dkappa_m.
template <int VS>
__global__ void __launch_bounds__(384, 1) keys_kernel(FastScan f, ScanGrads<bf16> grads) {
  extern __shared__ __align__(128) char memory[];
  const Memory<VS> mem{shared_address(memory), f.extra};
  const auto parts = static_cast<uint32_t>(f.key_parts());
  const Place p = place(f, blockIdx.x / parts);
  const int part = static_cast<int>(blockIdx.x % parts), k0 = part * kColumns;
  const int width = static_cast<int>(f.args.K) - k0, V = static_cast<int>(f.args.V);
  const int warp = static_cast<int>(threadIdx.x) / kWarp, job = warp / 2, row = warp % 2 * 32,
            m = max(job - 2, 0);
  const int64_t state = (p.line.pair * f.chunks + p.chunk) * V * f.args.K + k0;

  load_tile(mem.q(), f.args.q + f.at(p.line, p.c0) * f.args.K + k0, f.key_stride(0), p.n, width);
  for (int i = 0; i <= f.extra; ++i) {
    load_tile(mem.key(i), f.key(i, p.line, p.c0) + k0, f.key_stride(i), p.n, width);
    load_tile(mem.p(i), f.square(p.line, p.chunk, square_p(i)), kChunk, kChunk, kChunk);
    load_tile(mem.z(i), f.square(p.line, p.chunk, square_x(i)), kChunk, kChunk, kChunk);
  }
  const auto load = [&](int stage, int v0) {
    load_d_o_and_y(mem.tokens(stage, 0), mem.tokens(stage, 1), f, grads, p, v0);
    for (int i = 0; i <= f.extra; ++i) load_value(mem.tokens(stage, 2 + i), f, p, i, v0);
    load_rows<VS>(mem.S(stage), f.states() + state + v0 * f.args.K, f.args.K, V - v0, width);
    load_rows<VS>(mem.dS(stage), f.dstates() + state + v0 * f.args.K, f.args.K, V - v0, width);
    commit_copies();
  };
  Sum x = {};
  float states = 0.f;
  load(0, 0);
  for (int v0 = 0, stage = 0; v0 < V; v0 += VS, stage ^= 1) {
    wait_copies<0>();
    __syncthreads();  // this slab is here, and nobody still reads the one before
    if (v0 + VS < V) load(stage ^ 1, v0 + VS);
    multiply<VS / 16, false, false>(x, mem.tokens(stage, job), job < 2 ? mem.S(stage) : mem.dS(stage), row);
    states += states_dot(memory, mem, stage);
  }
  __syncthreads();  // the slabs' memory is free for the sums, and for dK_row on its way to dkappa_0's warps
  float* sums =
      reinterpret_cast<float*>(memory + (mem.stage(1) - mem.at));  // [3 + M][C], then <dS, S> by warp
  float* exchange = reinterpret_cast<float*>(memory + (mem.stage(0) - mem.at)) + row * kColumns + lane_here();
  row_dots(sums + job * kChunk, x, memory, job == 0 ? mem.q() : mem.key(m), row);
  states = warp_sum(states);
  float* states_sums = sums + (3 + f.extra) * kChunk;
  if (threadIdx.x % kWarp == 0) states_sums[warp] = states;

  const float *a = f.vector(p.line, p.chunk), *b = a + kChunk, *beta = b + kChunk;
  const int64_t out = f.at(p.line, p.c0) * f.args.K + k0;
  if (job < 2) {  // dQ = diag(a) dO S + sum_m (Gamma . dP_m) kappa_m;   dK_row = -diag(beta a) Y S + sum_m
                  // Z_m kappa_m
    scale_rows(x, a, job ? beta : nullptr, job ? -1.f : 1.f, row);
    for (int i = 0; i <= f.extra; ++i)
      multiply<4, false, false>(x, job ? mem.z(i) : mem.p(i), mem.key(i), row, 0, row / 16 + 2);
    if (job == 0) {
      store_rows(grads.dq + out, f.key_stride(0), x, row, p.n, width);
    } else {
#pragma unroll
      for (int i = 0; i < 64; ++i) exchange[i * kWarp] = x[i % 2][i / 2 % 8][i / 16];
    }
  } else {  // dkappa_m = diag(b) W_m dS + (Gamma . dP_m)^T Q + Z_m^T K
    scale_rows(x, b, nullptr, 1.f, row);
    multiply<4, true, false>(x, mem.p(m), mem.q(), row, row / 16, 4);
    multiply<4, true, false>(x, mem.z(m), mem.key(0), row, row / 16, 4);
    if (m) store_rows(grads.dkappa + f.kappa(m, p.line, p.c0) + k0, f.key_stride(m), x, row, p.n, width);
  }
  __syncthreads();
  if (job == 2) {  // dk = dkappa_0 + dK_row
#pragma unroll
    for (int i = 0; i < 64; ++i) x[i % 2][i / 2 % 8][i / 16] += exchange[i * kWarp];
    store_rows(grads.dk + out, f.key_stride(0), x, row, p.n, width);
  }
  float* dots = f.gate_dots(p.line, p.chunk, part);  // <dO_i, S q_i>, <Y_i, S k_i>, db_i, <dS, S>
  for (int i = static_cast<int>(threadIdx.x); i < kChunk; i += static_cast<int>(blockDim.x)) {
    float db = 0.f, all_states = 0.f;
    for (int j = 0; j <= f.extra; ++j) db += sums[(2 + j) * kChunk + i];
    for (int w = 0; w < static_cast<int>(blockDim.x) / kWarp; ++w) all_states += states_sums[w];
    dots[i] = sums[i], dots[kChunk + i] = sums[kChunk + i], dots[2 * kChunk + i] = db,
    dots[3 * kChunk + i] = all_states;
  }
}

// dbeta and dg, a warp a chunk:
//   dbeta_i = sum_j sum_m (dM_m . Gamma^- . X_m)_ij - a_i <Y_i, (K S^T)_i>
//   dG_i = what the squares give + a_i da_i - b_i db_i, and at i = n the sum of b_j db_j and a_n <dS, S>
__global__ void __launch_bounds__(kGateThreads) gates_kernel(FastScan f, float* dg, float* dbeta) {
  __shared__ float dG[kGateThreads / kWarp][kChunk];
  const uint32_t index = blockIdx.x * (kGateThreads / kWarp) + threadIdx.x / kWarp;
  if (index >= f.pairs * f.chunks) return;
  const Place p = place(f, index);
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  float* s = dG[threadIdx.x / kWarp];
  const float *a = f.vector(p.line, p.chunk), *b = a + kChunk, *beta = b + kChunk;
  float all_db = 0.f, states = 0.f;
  for (int i = lane; i < kChunk; i += kWarp) {
    float dq = 0.f, y = 0.f, db = 0.f, squares = 0.f, squares_beta = 0.f;
    states = 0.f;
    for (int part = 0; part < f.key_parts(); ++part) {
      const float* dots = f.gate_dots(p.line, p.chunk, part);
      dq += dots[i], y += dots[kChunk + i], db += dots[2 * kChunk + i], states += dots[3 * kChunk + i];
    }
    for (int m = 0; m <= f.extra; ++m) {
      const float* sums = f.gate_sums(p.line, p.chunk, m);
      squares += sums[i], squares_beta += sums[kChunk + i];
    }
    s[i] = squares + (dq - beta[i] * y) * a[i] - b[i] * db;
    all_db += b[i] * db;
    if (dbeta && i < p.n) dbeta[f.at(p.line, p.c0 + i)] = squares_beta - a[i] * y;
  }
  if (!dg) return;
  all_db = warp_sum(all_db);
  __syncwarp();
  if (lane == 0) {
    float sum = all_db + a[p.n - 1] * states;
    const int32_t* start = f.args.start ? f.args.start + f.token(p.line, p.c0) : nullptr;
    for (int i = p.n - 1; i >= 0; --i) {
      s[i] = sum += s[i];
      if (start && start[i] == p.c0 + i) sum = 0.f;  // i opens a document: what follows ends the one before
    }
  }
  __syncwarp();
  for (int i = lane; i < p.n; i += kWarp) dg[f.at(p.line, p.c0 + i)] = s[i];
}

template <int VS>
void launch_keys(const FastScan& f, const ScanGrads<bf16>& grads) {
  const int bytes = Memory<VS>::bytes(f.extra);
  allow_shared_memory(keys_kernel<VS>);
  const auto blocks = static_cast<unsigned>(f.pairs * f.chunks * f.key_parts());
  keys_kernel<VS><<<blocks, (3 + f.extra) * 2 * kWarp, bytes, stream()>>>(f, grads);
  CUDA_CHECK_LAUNCH();
}

}  // namespace

void launch_gradients(const FastScan& f, const ScanGrads<bf16>& grads) {
  allow_shared_memory(squares_kernel);
  const int64_t places = f.pairs * f.chunks;
  const auto blocks = static_cast<unsigned>(places * (1 + f.extra));
  squares_kernel<<<blocks, kSquareThreads, kSquareBytes, stream()>>>(f, grads);
  CUDA_CHECK_LAUNCH();
  const bool wide = Memory<64>::bytes(f.extra) <= static_cast<int>(context().shared_memory);
  wide ? launch_keys<64>(f, grads) : launch_keys<32>(f, grads);
  gates_kernel<<<grid_for(places * kWarp, kGateThreads), kGateThreads, 0, stream()>>>(f, grads.dg,
                                                                                      grads.dbeta);
  CUDA_CHECK_LAUNCH();
}

bool gradients_cover(const ScanArgs<bf16>& args) {
  const int extra = static_cast<int>(args.extra_keys());
  return extra <= 3 && Memory<32>::bytes(extra) <= static_cast<int>(context().shared_memory);
}

}  // namespace prism::cuda
