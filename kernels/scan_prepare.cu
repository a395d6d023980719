// The scan's products without state, for all chunks at once (see scan_fast.cuh).
//
// Plan. A block of 4 warps has one chunk of one (row, head) pair; warp w computes rows 16 w.. of every
// square, of which only the blocks on and below the diagonal exist. Shared memory, K = 128: q, k and kappa
// tiles of 16 KiB, Gamma and M_0 in float, 17 KiB each: three blocks a multiprocessor. T = (I + M_0)^{-1}
// goes by blocks of 16: the diagonal ones by forward substitution, a column a lane, in float; below them T_ij
// = -T_ii sum_k M_ik T_kj, warp j on column j, in tf32 (2^-11, against the 2^-9 that T is then stored with).
// Rank 1, K 128: 32 KiB in, 24 KiB out, about 3 MFLOP a chunk: bound by memory.
#include <algorithm>

#include "kernels/scan_fast.cuh"

namespace prism::cuda {

namespace {

constexpr int kThreads = 128;
constexpr int kRow = kChunk + 4;  // floats; 4 more spread the rows over the banks

using Square = float[kChunk][kRow];

struct Floats {
  Square m0;  // M_0
  float g[kChunk], beta[kChunk];
  float since[kChunk], until[kChunk];  // decay since the start of a token's block of 16, and until its end
  float block[4];                      // log decay over each block
  float diagonal[4][16][17];           // Gamma's diagonal blocks
  int start[kChunk];                   // of the document, from the chunk's first token; -1: before it
};
using Gamma = float[8][4];  // this lane's part, as the accumulators of rows 16 w..

// Gamma, and a, b, beta into `vector`. A decay over tokens of several blocks is the product of the decays
// until the end of the first, over those between and since the start of the last: each the exponential of a
// sum of its own, never of a difference, so -1e4 and -inf are exact.
__device__ void decays(Gamma& gamma, Floats& s, const FastScan& f, const Line& line, int chunk, int n,
                       int w) {
  const ScanArgs<bf16>& args = f.args;
  const int64_t c0 = int64_t{chunk} * kChunk;
  const int j = static_cast<int>(threadIdx.x), lane = j % kWarp, g = lane / 4, t = lane % 4;
  if (j < kChunk) {
    const int64_t at = f.at(line, c0 + j);
    const float log_decay = args.g && j < n ? args.g[at] : 0.f;
    float since = log_decay, until = __shfl_down_sync(0xffffffffu, log_decay, 1, 16);
    if (j % 16 == 15) until = 0.f;
#pragma unroll
    for (int d = 1; d < 16; d *= 2) {
      const float x = __shfl_up_sync(0xffffffffu, since, d, 16),
                  y = __shfl_down_sync(0xffffffffu, until, d, 16);
      if (j % 16 >= d) since += x;
      if (j % 16 < 16 - d) until += y;
    }
    s.g[j] = log_decay, s.since[j] = __expf(since), s.until[j] = __expf(until);
    if (j % 16 == 15) s.block[j / 16] = since;
    s.beta[j] = args.beta && j < n ? args.beta[at] : 0.f;
    s.start[j] =
        args.start && j < n ? static_cast<int>(max(args.start[f.token(line, c0 + j)] - c0, int64_t{-1})) : -1;
  }
  __syncthreads();
  if (j < kChunk) {
    float before = 1.f, after = 1.f;
    for (int q = 0; q < 4; ++q) (q < j / 16 ? before : after) *= q == j / 16 ? 1.f : __expf(s.block[q]);
    float* vector = f.vector(line, chunk);
    const bool running = s.start[j] < 0 || (c0 == 0 && s.start[j] == 0);  // start < max(c0, 1)
    vector[j] = running && j < n ? before * s.since[j] : 0.f;
    vector[kChunk + j] = j >= s.start[n - 1] && j < n ? s.until[j] * after : 0.f;
    vector[2 * kChunk + j] = s.beta[j];
  }
  if (lane < 16) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if (i > lane) sum += s.g[16 * w + i];
      s.diagonal[w][i][lane] = i >= lane ? __expf(sum) : 0.f;
    }
  }
  __syncwarp();
  float between = 1.f;
#pragma unroll
  for (int block = 3; block >= 0; --block) {
    if (block < w - 1) between *= __expf(s.block[block + 1]);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const int row = g + 8 * (e / 2 % 2), column = 8 * (e / 4) + 2 * t + e % 2, i = 16 * w + row;
      const float decay =
          block == w ? s.diagonal[w][row][column] : s.since[i] * between * s.until[16 * block + column];
      const bool within = block <= w && 16 * block + column >= s.start[i] && i < n;
      gamma[2 * block + e / 4][e % 4] = within ? decay : 0.f;
    }
  }
}

// rows 16 w.. of left right^T, K columns each, on and below the diagonal.
template <int KP>
__device__ void key_product(float (&x)[8][4], const Tile& left, const Tile& right, int w) {
#pragma unroll
  for (int nt = 0; nt < 8; ++nt)
#pragma unroll
    for (int c = 0; c < 4; ++c) x[nt][c] = 0.f;
#pragma unroll 4
  for (int k = 0; k < KP; k += 16) {
    FragmentA a;
    left.a(a, 16 * w, k);
#pragma unroll
    for (int np = 0; np < 4; ++np)
      if (np <= w) {
        uint32_t b[4];
        right.b_transposed(b, k, 16 * np);
        mma(x[2 * np], a, b[0], b[1]), mma(x[2 * np + 1], a, b[2], b[3]);
      }
  }
}

// x . Gamma, without the diagonal if `strict`, to a square of bf16; and diag(beta) times it to M_0 if `keep`.
__device__ void store_square(bf16* to, const float (&x)[8][4], const Gamma& gamma, Floats& s, int w,
                             bool strict, bool keep) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = 16 * w + 8 * half + g;
#pragma unroll
    for (int quarter = 0; quarter < 2; ++quarter) {
      uint32_t words[4];
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const int nt = 4 * quarter + q, j = 8 * nt + 2 * t;
        const float x0 = strict && j == i ? 0.f : gamma[nt][2 * half] * x[nt][2 * half];
        const float x1 = strict && j + 1 == i ? 0.f : gamma[nt][2 * half + 1] * x[nt][2 * half + 1];
        if (keep) *reinterpret_cast<float2*>(&s.m0[i][j]) = {s.beta[i] * x0, s.beta[i] * x1};
        words[q] = pack_bf16(x0, x1);
      }
      transpose_quad(words);
      if (to) store_words(to + i * kChunk + 32 * quarter + 8 * t, words);
    }
  }
}

__device__ uint32_t tf32(float x) {
  uint32_t y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return y;
}

// c += left right for 16 x 16 blocks at (i, k) and (k, j) of squares of float, in tf32.
__device__ void multiply_block(float (&c)[2][4], const Square& left, const Square& right, int i, int k,
                               int j) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int k0 = k; k0 < k + 16; k0 += 8) {
    const uint32_t a[4] = {tf32(left[i + g][k0 + t]), tf32(left[i + g + 8][k0 + t]),
                           tf32(left[i + g][k0 + t + 4]), tf32(left[i + g + 8][k0 + t + 4])};
#pragma unroll
    for (int nt = 0; nt < 2; ++nt) {
      const uint32_t b0 = tf32(right[k0 + t][j + 8 * nt + g]), b1 = tf32(right[k0 + t + 4][j + 8 * nt + g]);
      asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
          "{%0,%1,%2,%3};"
          : "+f"(c[nt][0]), "+f"(c[nt][1]), "+f"(c[nt][2]), "+f"(c[nt][3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
  }
}

__device__ void put_block(Square& to, const float (&c)[2][4], int i, int j, float sign) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int nt = 0; nt < 2; ++nt)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      *reinterpret_cast<float2*>(&to[i + 8 * half + g][j + 8 * nt + 2 * t]) = {sign * c[nt][2 * half],
                                                                               sign * c[nt][2 * half + 1]};
}

// T = (I + M_0)^{-1}; the blocks above the diagonal are not written.
__device__ void invert(Square& T, const Square& M, int w) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, d = 16 * w, column = lane % 16;
  float x[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    x[i] = i == column ? 1.f : 0.f;
#pragma unroll
    for (int j = 0; j < i; j += 4) {
      const float4 m = *reinterpret_cast<const float4*>(&M[d + i][d + j]);  // zero on and above the diagonal
      x[i] -= m.x * x[j];
      if (j + 1 < i) x[i] -= m.y * x[j + 1];
      if (j + 2 < i) x[i] -= m.z * x[j + 2];
      if (j + 3 < i) x[i] -= m.w * x[j + 3];
    }
  }
  if (lane < 16)
#pragma unroll
    for (int i = 0; i < 16; ++i) T[d + i][d + column] = x[i];
  __syncthreads();
  for (int i = d + 16; i < kChunk; i += 16) {
    float sum[2][4] = {}, block[2][4] = {};
    for (int k = d; k < i; k += 16) multiply_block(sum, M, T, i, k, d);
    put_block(T, sum, i, d, 1.f);
    __syncwarp();
    multiply_block(block, T, T, i, i, d);  // T_ii times the sum just put at (i, d)
    __syncwarp();
    put_block(T, block, i, d, -1.f);
    __syncwarp();
  }
  __syncthreads();
}

// The tiles of q and k, which T takes over, and of kappa.
template <int KP>
constexpr int tile_bytes(int extra) {
  return std::max((extra ? 3 : 2) * kChunk * KP * 2, static_cast<int>(sizeof(Square)));
}

template <int KP>
__global__ void __launch_bounds__(kThreads, 4) prepare_kernel(FastScan f) {
  extern __shared__ __align__(128) char memory[];
  Floats& s = *reinterpret_cast<Floats*>(memory + tile_bytes<KP>(f.extra));
  Square& T = *reinterpret_cast<Square*>(memory);
  const uint32_t tiles = shared_address(memory);
  const Tile k{tiles, KP / 8}, q{tiles + kChunk * KP * 2, KP / 8}, kappa{tiles + 2 * kChunk * KP * 2, KP / 8};
  const auto chunks = static_cast<uint32_t>(f.chunks);
  const int chunk = static_cast<int>(blockIdx.x % chunks), n = f.tokens(chunk),
            K = static_cast<int>(f.args.K);
  const int64_t c0 = int64_t{chunk} * kChunk;
  const Line line = f.line(blockIdx.x / chunks);
  const int w = static_cast<int>(threadIdx.x) / kWarp;
  load_tile(k, f.key(0, line, c0), f.key_stride(0), n, K);
  load_tile(q, f.args.q + f.at(line, c0) * K, f.key_stride(0), n, K);
  commit_copies();
  Gamma gamma;
  decays(gamma, s, f, line, chunk, n, w);
  float x[8][4];
  if (f.backward) {
    for (auto& tile : x)
      for (float& one : tile) one = 1.f;
    store_square(f.square(line, chunk, f.squares_per_chunk() - 1), x, gamma, s, w, false, false);
  }
  if (f.extra) load_tile(kappa, f.key(f.extra, line, c0), f.key_stride(f.extra), n, K);
  commit_copies();
  for (int m = f.extra; m >= 0; --m) {
    wait_copies<0>();
    __syncthreads();
    const Tile key = m > 0 ? kappa : k;
    float y[8][4];
    key_product<KP>(x, k, key, w);
    key_product<KP>(y, q, key, w);
    __syncthreads();
    if (m > 1) load_tile(kappa, f.key(m - 1, line, c0), f.key_stride(m - 1), n, K);
    commit_copies();
    store_square(m > 0 || f.backward ? f.square(line, chunk, square_x(m)) : nullptr, x, gamma, s, w, true,
                 m == 0);
    store_square(f.square(line, chunk, square_p(m)), y, gamma, s, w, false, false);
  }
  __syncthreads();
  invert(T, s.m0, w);
  bf16* to = f.square(line, chunk, square_T);
  for (int e = static_cast<int>(threadIdx.x); e < kSquare / 8; e += kThreads) {
    const int i = e / 8, j = e % 8 * 8;
    const bool below = j / 16 <= i / 16;
    uint32_t words[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) words[c] = below ? pack_bf16(T[i][j + 2 * c], T[i][j + 2 * c + 1]) : 0;
    store_words(to + i * kChunk + j, words);
  }
}

}  // namespace

void launch_prepare(const FastScan& f) {
  const auto launch = [&](auto kernel, int tiles) {
    const size_t bytes = static_cast<size_t>(tiles) + sizeof(Floats);
    allow_shared_memory(kernel);
    kernel<<<static_cast<unsigned>(f.pairs * f.chunks), kThreads, bytes, stream()>>>(f);
    CUDA_CHECK_LAUNCH();
  };
  if (f.args.K <= 64)
    launch(prepare_kernel<64>, tile_bytes<64>(f.extra));
  else if (f.args.K <= 128)
    launch(prepare_kernel<128>, tile_bytes<128>(f.extra));
  else
    launch(prepare_kernel<256>, tile_bytes<256>(f.extra));
}

}  // namespace prism::cuda
