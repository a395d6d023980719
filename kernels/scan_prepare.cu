// The scan's products without state, for all chunks at once (see scan_fast.cuh).
//
// Plan. A block of 4 warps has one chunk of one (row, head) pair; warp w computes rows 16 w.. of every
// square, of which only the blocks on and below the diagonal exist. Shared memory, K = 128: q, k and kappa
// tiles of 16 KiB, Gamma and M_0 in float, 17 KiB each: three blocks a multiprocessor. T = (I + M_0)^{-1}
// goes by blocks of 16: the diagonal ones by forward substitution, a column a lane, in float; below them T_ij
// = -T_ii sum_k M_ik T_kj, warp j on column j, in tf32 (2^-11, against the 2^-9 that T is then stored with).
// Rank 1, K 128: 32 KiB in, 24 KiB out, about 3 MFLOP a chunk: bound by memory.
#include "kernels/scan_fast.cuh"

namespace prism::cuda {

namespace {

constexpr int kThreads = 128;
constexpr int kRow = kChunk + 4;  // floats; 4 more spread the rows over the banks

using Square = float[kChunk][kRow];

struct Floats {
  Square gamma;  // then T
  Square m0;     // M_0
  float g[kChunk], beta[kChunk];
  int start[kChunk];
};

// Gamma, and a, b, beta into `vector`. Sums of log decays run from their own start, so -1e4 and -inf are
// exact.
__device__ void decays(Floats& s, const FastScan& f, int64_t pair, int64_t chunk, int n) {
  const ScanArgs<bf16>& args = f.args;
  const int64_t c0 = chunk * kChunk;
  const int j = static_cast<int>(threadIdx.x);
  if (j < kChunk) {
    const int64_t at = f.at(pair, c0 + j);
    s.g[j] = args.g && j < n ? args.g[at] : 0.f;
    s.beta[j] = args.beta && j < n ? args.beta[at] : 0.f;
    s.start[j] =
        args.start && j < n ? static_cast<int>(max(args.start[f.token(pair, c0 + j)] - c0, int64_t{-1})) : -1;
  }
  __syncthreads();
  float* vector = f.vector(pair, chunk);
  if (j < kChunk) {
    float sum = 0.f, gamma = 0.f;
    for (int i = 0; i < kChunk; ++i) {
      if (i > j) sum += s.g[i];
      gamma = i >= j && j >= s.start[i] && i < n ? __expf(sum) : 0.f;
      s.gamma[i][j] = gamma;
      if (i == n - 1) vector[kChunk + j] = gamma;
    }
    vector[2 * kChunk + j] = s.beta[j];
  } else if (j == kChunk) {
    float sum = 0.f;
    for (int i = 0; i < kChunk; ++i) {
      sum += s.g[i];
      // running before the chunk: start < max(c0, 1)
      const bool running = s.start[i] < 0 || (c0 == 0 && s.start[i] == 0);
      vector[i] = running && i < n ? __expf(sum) : 0.f;
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

// x . Gamma, strictly below the diagonal if `strict`, to a square of bf16; and diag(beta) times it to `m0`.
__device__ void store_square(bf16* to, const float (&x)[8][4], Floats& s, int w, bool strict, bool keep) {
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
        const float2 gamma = *reinterpret_cast<const float2*>(&s.gamma[i][j]);
        const float x0 = strict && j >= i ? 0.f : gamma.x * x[nt][2 * half];
        const float x1 = strict && j + 1 >= i ? 0.f : gamma.y * x[nt][2 * half + 1];
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
    for (int j = 0; j < i; ++j) x[i] -= M[d + i][d + j] * x[j];
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

template <int KP>
__global__ void __launch_bounds__(kThreads) prepare_kernel(FastScan f, bool backward) {
  extern __shared__ __align__(128) char memory[];
  Floats& s = *reinterpret_cast<Floats*>(memory + (f.extra ? 3 : 2) * kChunk * KP * 2);
  const uint32_t tiles = shared_address(memory);
  const Tile k{tiles, KP / 8}, q{tiles + kChunk * KP * 2, KP / 8}, kappa{tiles + 2 * kChunk * KP * 2, KP / 8};
  const int64_t chunk = blockIdx.x % f.chunks, pair = blockIdx.x / f.chunks, c0 = chunk * kChunk;
  const int n = f.tokens(chunk), w = static_cast<int>(threadIdx.x) / kWarp, K = static_cast<int>(f.args.K);
  load_tile(k, f.key(0, pair, c0), f.key_stride(0), n, K);
  load_tile(q, f.args.q + f.at(pair, c0) * K, f.key_stride(0), n, K);
  commit_copies();
  decays(s, f, pair, chunk, n);
  float x[8][4];
  for (int m = f.extra; m >= 0; --m) {
    if (m > 0) load_tile(kappa, f.key(m, pair, c0), f.key_stride(m), n, K);
    commit_copies();
    wait_copies<0>();
    __syncthreads();
    const Tile& key = m > 0 ? kappa : k;
    key_product<KP>(x, k, key, w);
    store_square(m > 0 || backward ? f.square(pair, chunk, square_x(m)) : nullptr, x, s, w, true, m == 0);
    key_product<KP>(x, q, key, w);
    store_square(f.square(pair, chunk, square_p(m)), x, s, w, false, false);
    __syncthreads();
  }
  invert(s.gamma, s.m0, w);
  bf16* T = f.square(pair, chunk, square_T);
  for (int e = static_cast<int>(threadIdx.x); e < kSquare / 8; e += kThreads) {
    const int i = e / 8, j = e % 8 * 8;
    const bool below = j / 16 <= i / 16;
    uint32_t words[4];
#pragma unroll
    for (int c = 0; c < 4; ++c)
      words[c] = below ? pack_bf16(s.gamma[i][j + 2 * c], s.gamma[i][j + 2 * c + 1]) : 0;
    store_words(T + i * kChunk + j, words);
  }
}

}  // namespace

void launch_prepare(const FastScan& f, bool backward) {
  const auto launch = [&](auto kernel, int KP) {
    const size_t bytes = static_cast<size_t>(f.extra ? 3 : 2) * kChunk * KP * 2 + sizeof(Floats);
    CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
    kernel<<<static_cast<unsigned>(f.pairs * f.chunks), kThreads, bytes, stream()>>>(f, backward);
    CUDA_CHECK_LAUNCH();
  };
  if (f.args.K <= 64)
    launch(prepare_kernel<64>, 64);
  else if (f.args.K <= 128)
    launch(prepare_kernel<128>, 128);
  else
    launch(prepare_kernel<256>, 256);
}

}  // namespace prism::cuda
