// The last part of the fast scan's reverse pass (see scan_fast.cuh): from S, dS, U, Y and dO of every chunk,
// all chunks at once, dQ, dK, dkappa_m, dbeta and dg.
//
// Plan. A block of 16 warps has one chunk of one (row, head) pair and up to 128 columns of K. V is summed in
// slabs of 64; a quad of warps keeps one product, [64][128] or two [64][64], in 64 accumulators a lane:
//   base pass:            dO S | Y S | U dS | dP_0 = dO U^T and dM_0 = -Y U^T
//   for two more writes:  W_m dS | dP_m, dM_m | W_m' dS | dP_m', dM_m'          (these passes come first)
// Then the squares Gamma . dP_m and Z_m = diag(beta) Gamma^- . dM_m go to shared memory as bf16, in the place
// of Gamma . P_m and Gamma^- . X_m, and multiply the keys into the same accumulators. Shared memory, K 128:
// q, k (16 KiB each, as each further key), three squares (8 each, and two for each further key), a slab of
// dO, Y, U (8 each), S and dS (16 each), twice: 170 KiB. Rank 1: 25 MFLOP; 290 KiB in, 32 KiB out: bound by
// memory.
#include <utility>

#include "kernels/scan_fast.cuh"

namespace prism::cuda {

namespace {

constexpr int kThreads = 512;

struct Sums {
  float a[kChunk], b[kChunk], beta[kChunk];
  float dots[4][2][kChunk];        // <dO_i, S q_i>, <Y_i, S k_i>, db and db; by half of the columns
  float rows[2][2][kChunk];        // row sums of dP . Gamma . P and dM . Gamma^- . X, by quad
  float columns[2][4][kChunk];     // column sums of both, the latter times beta, by quad and warp
  float states[kThreads / kWarp];  // <dS, S>
  float dg[kChunk];
};

// Where things stand in shared memory. KC: columns of K; VS: rows of a slab of V.
template <int KC, int VS>
struct Memory {
  uint32_t at;
  int extra;
  static constexpr int kKeyBytes = kChunk * KC * 2, kSquareBytes = kSquare * 2;
  static constexpr int kTokenBytes = kChunk * VS * 2, kStateBytes = VS * KC * 2;
  static constexpr int kStageBytes = 3 * kTokenBytes + 2 * kStateBytes;
  static __host__ __device__ constexpr int bytes(int extra) {
    return (2 + extra) * kKeyBytes + (3 + 2 * extra) * kSquareBytes + 2 * kStageBytes +
           static_cast<int>(sizeof(Sums));
  }
  __device__ Tile key(int m) const { return {at + m * kKeyBytes, KC / 8}; }
  __device__ Tile q() const { return key(1 + extra); }
  __device__ Tile gamma() const { return {key(2 + extra).at, kChunk / 8}; }
  __device__ Tile p(int m) const {
    return {gamma().at + (1 + 2 * m) * kSquareBytes, kChunk / 8};
  }  // Gamma . dP_m
  __device__ Tile x(int m) const { return {gamma().at + (2 + 2 * m) * kSquareBytes, kChunk / 8}; }  // Z_m
  // A slab: dO, Y and a value; S, or in passes without it a second value; dS. Two of them.
  __device__ uint32_t stage(int i) const { return p(1 + extra).at + i * kStageBytes; }
  __device__ Tile tokens(int i, int which) const { return {stage(i) + which * kTokenBytes, VS / 8}; }
  __device__ Tile S(int i) const { return {stage(i) + 3 * kTokenBytes, KC / 8}; }
  __device__ Tile dS(int i) const { return {S(i).at + kStateBytes, KC / 8}; }
};

using Sum = float[2][8][4];  // 32 rows, 64 columns

// What a block works on.
struct Place {
  Line line;
  int chunk, n, k0, width;  // columns k0.. of K, `width` of them
  int64_t c0;
};

// Starts the slab of V at v0: dO, Y, one or two values, dS and, in the base pass, S.
template <int KC, int VS>
__device__ void load_slab(const Memory<KC, VS>& mem, int stage, const FastScan& f,
                          const ScanGrads<bf16>& grads, const Place& p, int pass, int v0) {
  const int64_t V = f.args.V, stride = f.args.H * V;
  const int thread = thread_here(), height = static_cast<int>(V) - v0;
  const int row = thread / (VS / 8), unit = thread % (VS / 8);
  const auto copy_tokens = [&](int i, const bf16* from, int64_t from_stride) {
    copy_async(mem.tokens(stage, i).piece(row, unit), from + v0 + row * from_stride + unit * 8,
               row < p.n && unit * 8 < height);
  };
  if (row < kChunk) {
    const int m = 2 * pass - 1;
    copy_tokens(0, grads.d_o + f.at(p.line, p.c0) * V, stride);
    copy_tokens(1, f.y_at(grads, p.line, p.c0), f.y_stride());
    if (pass == 0)
      copy_tokens(2, f.u + f.at(p.line, p.c0) * V, stride);
    else
      copy_tokens(2, f.args.w + f.value(m, p.line, p.c0), f.value_stride());
    if (pass && m < f.extra) copy_tokens(3, f.args.w + f.value(m + 1, p.line, p.c0), f.value_stride());
  }
  constexpr int kStep = kThreads / (KC / 8);  // rows of the state that the block copies at once
  const int64_t K = f.args.K, state = ((p.line.pair * f.chunks + p.chunk) * V + v0) * K + p.k0;
  const int k = thread % (KC / 8);
#pragma unroll
  for (int r = 0; r < VS; r += kStep) {
    const int v = thread / (KC / 8) + r;
    const bool valid = v < height && k * 8 < p.width;
    copy_async(mem.dS(stage).piece(v, k), f.dstates() + state + v * K + k * 8, valid);
    if (pass == 0) copy_async(mem.S(stage).piece(v, k), f.states() + state + v * K + k * 8, valid);
  }
  commit_copies();
}

// x += A B, 32 rows of A, 16 NP columns of B (or of B^T), 16 DEPTH deep, of which p0 <= p < p1 count.
template <int DEPTH, int NP, bool a_transposed, bool b_transposed>
__device__ void multiply(Sum& x, const Tile& A, const Tile& B, int row, int column, int p0 = 0,
                         int p1 = DEPTH) {
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
    for (int np = 0; np < NP; ++np) {
      uint32_t b[4];
      if constexpr (b_transposed)
        B.b_transposed(b, 16 * p, column + 16 * np);
      else
        B.b(b, 16 * p, column + 16 * np);
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

// to[i] += <x_i, key_i> over this warp's columns.
template <int NT>
__device__ void add_row_dots(float* to, const Sum& x, char* memory, const Tile& key, int row, int column) {
  const int lane = lane_here(), g = lane / 4, t = lane % 4;
#pragma unroll
  for (int mt = 0; mt < 2; ++mt)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = row + 16 * mt + 8 * half + g;
      float sum = 0.f;
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
        const uint32_t k = *pair_at(memory, key, i, column + 8 * nt + 2 * t);
        sum += x[mt][nt][2 * half] * low_bf16(k) + x[mt][nt][2 * half + 1] * high_bf16(k);
      }
      sum = warp_sum<4>(sum);
      if (t == 0) to[i] += sum;
    }
}

template <int NT>
__device__ void scale_rows(Sum& x, const float* scale, const float* scale2, float sign, int row) {
  const int g = lane_here() / 4;
#pragma unroll
  for (int mt = 0; mt < 2; ++mt)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = row + 16 * mt + 8 * half + g;
      const float s = sign * scale[i] * (scale2 ? scale2[i] : 1.f);
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) x[mt][nt][2 * half] *= s, x[mt][nt][2 * half + 1] *= s;
    }
}

template <int NT>
__device__ void store_rows(bf16* to, int64_t stride, const Sum& x, int row, int column, int n, int width) {
  const int lane = lane_here(), g = lane / 4, t = lane % 4;
#pragma unroll
  for (int mt = 0; mt < 2; ++mt)
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int q = 0; q < NT / 4; ++q) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          words[i] = pack_bf16(x[mt][4 * q + i][2 * half], x[mt][4 * q + i][2 * half + 1]);
        transpose_quad(words);
        const int i = row + 16 * mt + 8 * half + g, k = column + 32 * q + 8 * t;
        if (i < n && k < width) store_words(to + i * stride + k, words);
      }
}

// dP_m (below = false) or dM_m, rows `row`.. : its sums with Gamma . P_m or Gamma^- . X_m, which lies in
// `square` and gives way to Gamma . dP_m or Z_m.
__device__ void square_epilogue(const Sum& x, char* memory, const Tile& square, const Tile& gamma, Sums& s,
                                int quad, int sub, bool below) {
  const int lane = lane_here(), g = lane / 4, t = lane % 4, row = 32 * (sub % 2);
  float columns[8][2] = {};
#pragma unroll
  for (int mt = 0; mt < 2; ++mt)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = row + 16 * mt + 8 * half + g;
      const float beta = below ? s.beta[i] : 1.f;
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
        columns[nt][0] += beta * e0, columns[nt][1] += beta * e1;
        *word = pack_bf16(beta * low_bf16(decay) * x0, beta * high_bf16(decay) * x1);
      }
      sum = warp_sum<4>(sum);
      if (t == 0) s.rows[quad / 2][below][i] += sum;
    }
#pragma unroll
  for (int nt = 0; nt < 8; ++nt)
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float sum = columns[nt][c];
#pragma unroll
      for (int d = 4; d < kWarp; d *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
      if (g == 0) s.columns[quad / 2][sub][8 * nt + 2 * t + c] += sum;
    }
}

// <dS, S> over a slab, this thread's part.
template <int KC, int VS>
__device__ float states_dot(const char* memory, const Memory<KC, VS>& mem, int stage) {
  const uint4* S = reinterpret_cast<const uint4*>(memory + (mem.S(stage).at - mem.at));
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < VS * KC / 8; i += kThreads) {
    float x[8], y[8];
    load_vec(reinterpret_cast<const bf16*>(S + i + threadIdx.x), x);
    load_vec(reinterpret_cast<const bf16*>(S + VS * KC / 8 + i + threadIdx.x), y);
#pragma unroll
    for (int c = 0; c < 8; ++c) sum += x[c] * y[c];
  }
  return sum;
}

// dbeta and dg of the chunk, by one warp. Blocks with the later columns of K add no square's sums.
__device__ void finish_gates(Sums& s, const FastScan& f, const Place& p, float* dg, float* dbeta,
                             bool squares) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  float all_db = 0.f;
  for (int i = lane; i < kChunk; i += kWarp) {
    const float rows_p = s.rows[0][0][i] + s.rows[1][0][i], rows_x = s.rows[0][1][i] + s.rows[1][1][i];
    const float y_dot = s.dots[1][0][i] + s.dots[1][1][i];
    const float da = s.dots[0][0][i] + s.dots[0][1][i] - s.beta[i] * y_dot;
    const float db = s.b[i] * (s.dots[2][0][i] + s.dots[2][1][i] + s.dots[3][0][i] + s.dots[3][1][i]);
    float columns = 0.f;
    for (int c = 0; c < 8; ++c) columns += s.columns[c / 4][c % 4][i];
    s.dg[i] = (squares ? rows_p + s.beta[i] * rows_x - columns : 0.f) + da * s.a[i] - db;
    all_db += db;
    if (dbeta && i < p.n) dbeta[f.at(p.line, p.c0 + i)] = (squares ? rows_x : 0.f) - s.a[i] * y_dot;
  }
  if (!dg) return;
  all_db = warp_sum(all_db);
  __syncwarp();
  if (lane == 0) {
    float states = 0.f, sum = 0.f;
    for (int w = 0; w < kThreads / kWarp; ++w) states += s.states[w];
    s.dg[p.n - 1] += all_db + s.a[p.n - 1] * states;
    const int32_t* start = f.args.start ? f.args.start + f.token(p.line, p.c0) : nullptr;
    for (int i = p.n - 1; i >= 0; --i) {
      sum += s.dg[i];
      s.dg[i] = sum;
      if (start && start[i] == p.c0 + i) sum = 0.f;  // i opens a document: what follows ends the one before
    }
  }
  __syncwarp();
  for (int i = lane; i < p.n; i += kWarp) dg[f.at(p.line, p.c0 + i)] = s.dg[i];
}

// Brings a block's inputs into the second-level cache, for one that runs about when this one is done.
__device__ void prefetch(const FastScan& f, const ScanGrads<bf16>& grads, const Place& p) {
  const int V = static_cast<int>(f.args.V);
  const int64_t at = f.at(p.line, p.c0), state = (p.line.pair * f.chunks + p.chunk) * V * f.args.K + p.k0;
  prefetch_tile(f.states() + state, f.args.K, V, p.width);
  prefetch_tile(f.dstates() + state, f.args.K, V, p.width);
  prefetch_tile(grads.d_o + at * V, f.args.H * V, p.n, V);
  prefetch_tile(f.y_at(grads, p.line, p.c0), f.y_stride(), p.n, V);
  prefetch_tile(f.u + at * V, f.args.H * V, p.n, V);
  for (int m = 0; m <= f.extra; ++m)
    prefetch_tile(f.key(m, p.line, p.c0) + p.k0, f.key_stride(m), p.n, p.width);
}

template <int KC, int VS>
__global__ void __launch_bounds__(kThreads, 1)
    gradients_kernel(FastScan f, ScanGrads<bf16> grads, uint32_t wave) {
  extern __shared__ __align__(128) char memory[];
  constexpr int NP = KC / 32, kDepth = VS / 16;  // a warp's columns and a slab's rows, in sixteens
  const Memory<KC, VS> mem{shared_address(memory), f.extra};
  Sums& s = *reinterpret_cast<Sums*>(memory + Memory<KC, VS>::bytes(f.extra) - sizeof(Sums));
  const auto place = [&](uint32_t block) {
    const auto chunks = static_cast<uint32_t>(f.chunks);
    const auto chunk = static_cast<int>(block % chunks), k0 = static_cast<int>(blockIdx.y) * KC;
    return Place{f.line(block / chunks), chunk, f.tokens(chunk), k0, min(static_cast<int>(f.args.K) - k0, KC),
                 int64_t{chunk} * kChunk};
  };
  const Place p = place(blockIdx.x);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp, quad = warp / 4, sub = warp % 4;
  // This warp's part of a product with K columns, or of dP (sub 0, 1) and dM (2, 3).
  const int row = 32 * (sub / 2), column = KC / 2 * (sub % 2), square_row = 32 * (sub % 2);

  load_tile(mem.q(), f.args.q + f.at(p.line, p.c0) * f.args.K + p.k0, f.key_stride(0), p.n, p.width);
  load_tile(mem.gamma(), f.square(p.line, p.chunk, f.squares_per_chunk() - 1), kChunk, kChunk, kChunk);
  for (int m = 0; m <= f.extra; ++m) {
    load_tile(mem.key(m), f.key(m, p.line, p.c0) + p.k0, f.key_stride(m), p.n, p.width);
    load_tile(mem.p(m), f.square(p.line, p.chunk, square_p(m)), kChunk, kChunk, kChunk);
    load_tile(mem.x(m), f.square(p.line, p.chunk, square_x(m)), kChunk, kChunk, kChunk);
  }
  float* floats = reinterpret_cast<float*>(&s);  // a, b, beta, then sums from 0
  for (int i = thread; i < static_cast<int>(sizeof(Sums) / sizeof(float)); i += kThreads)
    floats[i] = i < 3 * kChunk ? f.vector(p.line, p.chunk)[i] : 0.f;

  // Passes count down to the base pass, 0; a step is a slab of one.
  const int V = static_cast<int>(f.args.V), slabs = (V + VS - 1) / VS, passes = 1 + (f.extra + 1) / 2;
  int next_pass = passes - 1, next_v0 = 0;
  const auto load_next = [&](int stage) {
    load_slab(mem, stage, f, grads, p, next_pass, next_v0);
    next_v0 += VS;
    if (next_v0 >= V) --next_pass, next_v0 = 0;
  };
  Sum x = {};
  float states = 0.f;
  load_next(0);
  if (blockIdx.x + wave < gridDim.x) prefetch(f, grads, place(blockIdx.x + wave));
  for (int step = 0, pass = passes - 1, slab = 0; pass >= 0; ++step) {
    const int at = step & 1;
    wait_copies<0>();
    __syncthreads();  // this slab is here, and nobody still reads the one before
    if (pass || slab + 1 < slabs) load_next(at ^ 1);

    // The write of this quad, and whether its product is dP and dM.
    const bool square = pass ? quad % 2 == 1 : quad == 3;
    const int m = pass ? 2 * pass - 1 + quad / 2 : 0;
    const Tile value = mem.tokens(at, pass && quad / 2 ? 3 : 2);
    if (m <= f.extra) {
      if (square)
        multiply<kDepth, 4, false, true>(x, mem.tokens(at, sub / 2), value, square_row, 0);
      else
        multiply<kDepth, NP, false, false>(x, pass || quad == 2 ? value : mem.tokens(at, quad),
                                           pass || quad == 2 ? mem.dS(at) : mem.S(at), row, column);
    }
    if (pass == 0) states += states_dot(memory, mem, at);
    if (++slab < slabs) continue;

    // The sums over V are complete.
    if (pass == 0) {
      states = warp_sum(states);
      if (threadIdx.x % kWarp == 0) s.states[warp] = states;
    }
    if (m <= f.extra) {
      const int dots = pass && quad == 0 ? 3 : quad;
      if (square)
        square_epilogue(x, memory, sub < 2 ? mem.p(m) : mem.x(m), mem.gamma(), s, quad, sub, sub >= 2);
      else
        add_row_dots<2 * NP>(s.dots[dots][sub % 2], x, memory, pass == 0 && quad == 0 ? mem.q() : mem.key(m),
                             row, column);
    }
    __syncthreads();
    const bool dkappa = pass ? !square && m <= f.extra : quad == 2;
    if (dkappa) {  // dkappa_m = diag(b) W_m dS + (Gamma . dP_m)^T Q + Z_m^T K
      scale_rows<2 * NP>(x, s.b, nullptr, 1.f, row);
      multiply<4, NP, true, false>(x, mem.p(m), mem.q(), row, column, row / 16, 4);
      multiply<4, NP, true, false>(x, mem.x(m), mem.key(0), row, column, row / 16, 4);
      if (pass)
        store_rows<2 * NP>(grads.dkappa + f.kappa(m, p.line, p.c0) + p.k0, f.key_stride(m), x, row, column,
                           p.n, p.width);
    }
    if (pass) {
#pragma unroll
      for (int mt = 0; mt < 2; ++mt)
#pragma unroll
        for (int nt = 0; nt < 8; ++nt)
#pragma unroll
          for (int c = 0; c < 4; ++c) x[mt][nt][c] = 0.f;
    }
    slab = 0, --pass;
  }

  // x: dO S, Y S and dkappa_0 in quads 0, 1, 2.
  float* exchange =
      reinterpret_cast<float*>(memory + (mem.stage(0) - mem.at)) + sub * 16 * NP * kWarp + lane_here();
  const auto exchanged = [&](int i) -> float& {  // this lane's i-th number of this sub's part
    return exchange[i * kWarp];
  };
  const int64_t out = f.at(p.line, p.c0) * f.args.K + p.k0;
  if (quad == 0) {  // dQ = diag(a) dO S + sum_m (Gamma . dP_m) kappa_m
    scale_rows<2 * NP>(x, s.a, nullptr, 1.f, row);
    for (int m = 0; m <= f.extra; ++m)
      multiply<4, NP, false, false>(x, mem.p(m), mem.key(m), row, column, 0, row / 16 + 2);
    store_rows<2 * NP>(grads.dq + out, f.key_stride(0), x, row, column, p.n, p.width);
  } else if (quad == 1) {  // dK_row = -diag(beta a) Y S + sum_m Z_m kappa_m
    scale_rows<2 * NP>(x, s.a, s.beta, -1.f, row);
    for (int m = 0; m <= f.extra; ++m)
      multiply<4, NP, false, false>(x, mem.x(m), mem.key(m), row, column, 0, row / 16 + 2);
#pragma unroll
    for (int i = 0; i < 16 * NP; ++i) exchanged(i) = x[i % 2][i / 2 % (2 * NP)][i / (4 * NP)];
  } else if (warp == 12) {
    const bool first = blockIdx.y == 0;
    finish_gates(s, f, p, grads.dg ? (first ? grads.dg : f.second_dg) : nullptr,
                 grads.dbeta ? (first ? grads.dbeta : f.second_dbeta) : nullptr, first);
  }
  __syncthreads();
  if (quad == 2) {  // dk = dkappa_0 + dK_row
#pragma unroll
    for (int i = 0; i < 16 * NP; ++i) x[i % 2][i / 2 % (2 * NP)][i / (4 * NP)] += exchanged(i);
    store_rows<2 * NP>(grads.dk + out, f.key_stride(0), x, row, column, p.n, p.width);
  }
}

__global__ void add_kernel(float* to, const float* more, int64_t n) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < n) to[i] += more[i];
}

template <int KC, int VS>
void launch(const FastScan& f, const ScanGrads<bf16>& grads) {
  const int bytes = Memory<KC, VS>::bytes(f.extra);
  const auto kernel = gradients_kernel<KC, VS>;
  CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  const dim3 grid(static_cast<unsigned>(f.pairs * f.chunks), static_cast<unsigned>(ceil_div(f.args.K, KC)));
  kernel<<<grid, kThreads, bytes, stream()>>>(f, grads, static_cast<uint32_t>(context().multiprocessors));
  CUDA_CHECK_LAUNCH();
  const int64_t n = f.args.B * f.args.T_len * f.args.H;
  if (grid.y > 1)
    for (const auto& [to, more] : {std::pair{grads.dg, f.second_dg}, std::pair{grads.dbeta, f.second_dbeta}})
      if (to) add_kernel<<<grid_for(n, 256), 256, 0, stream()>>>(to, more, n);
  CUDA_CHECK_LAUNCH();
}

}  // namespace

void launch_gradients(const FastScan& f, const ScanGrads<bf16>& grads) {
  const int available = static_cast<int>(context().shared_memory);
  if (f.args.K <= 64)
    launch<64, 64>(f, grads);
  else
    Memory<128, 64>::bytes(f.extra) <= available ? launch<128, 64>(f, grads) : launch<128, 32>(f, grads);
}

int gradients_bytes(const ScanArgs<bf16>& args) {
  const int extra = static_cast<int>(args.extra_keys());
  return args.K <= 64 ? Memory<64, 64>::bytes(extra) : Memory<128, 32>::bytes(extra);
}

}  // namespace prism::cuda
