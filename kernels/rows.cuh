// What the kernels that go row by row share: vectors of N numbers, teams of lanes that hold a row in
// registers, the two steps of a column sum.
#pragma once

#include <algorithm>
#include <type_traits>

#include "kernels/cuda.cuh"
#include "kernels/rows.h"

namespace prism::cuda {

// N consecutive numbers of storage T as they lie in memory: half the registers of N floats when T is bf16.
// Moved by 16-byte accesses, or 8-byte ones when that is all there is (the caller sees to the alignment); N =
// 1: plainly.
template <int N, class T>
struct Packed {
  static constexpr int kWords = N == 1 ? 1 : N * static_cast<int>(sizeof(T)) / 4;
  uint32_t words[kWords];

  __device__ void load(const T* x) {
    if constexpr (N == 1) {
      words[0] = __float_as_uint(cuda::load(x));
    } else if constexpr (kWords == 2) {
      const uint2 raw = *reinterpret_cast<const uint2*>(x);
      words[0] = raw.x, words[1] = raw.y;
    } else {
#pragma unroll
      for (int i = 0; i < kWords; i += 4) {
        const uint4 raw = reinterpret_cast<const uint4*>(x)[i / 4];
        words[i] = raw.x, words[i + 1] = raw.y, words[i + 2] = raw.z, words[i + 3] = raw.w;
      }
    }
  }
  __device__ void store(T* x) const {
    if constexpr (N == 1) {
      cuda::store(x, __uint_as_float(words[0]));
    } else if constexpr (kWords == 2) {
      *reinterpret_cast<uint2*>(x) = make_uint2(words[0], words[1]);
    } else {
#pragma unroll
      for (int i = 0; i < kWords; i += 4)
        reinterpret_cast<uint4*>(x)[i / 4] = make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]);
    }
  }
  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = 0;
  }
  // Number i, a constant. The empty instruction keeps the compiler from holding floats it has met before.
  __device__ __forceinline__ float operator[](int i) const {
    uint32_t word = words[i * kWords / N];
    asm volatile("" : "+r"(word));
    if (N == 1 || sizeof(T) == 4) return __uint_as_float(word);
    return __uint_as_float(i % 2 == 0 ? word << 16 : word & 0xffff0000u);
  }
  // To be called in order of i.
  __device__ __forceinline__ void set(int i, float x) {
    uint32_t& word = words[i * kWords / N];
    if (N == 1 || sizeof(T) == 4 || i % 2 == 0)
      word = __float_as_uint(x);
    else
      word = pack_bf16(__uint_as_float(word), x);
  }
  __device__ void unpack(float (&values)[N]) const {
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = (*this)[i];
  }
  __device__ void pack(const float (&values)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) set(i, values[i]);
  }
};

template <int N, class T>
__device__ void load_n(const T* x, float (&values)[N]) {
  Packed<N, T> raw;
  raw.load(x);
  raw.unpack(values);
}
template <int N, class T>
__device__ void store_n(T* x, const float (&values)[N]) {
  Packed<N, T> raw;
  raw.pack(values);
  raw.store(x);
}

// x as it will be read back from storage T.
template <class T>
__device__ float rounded(float x) {
  if constexpr (sizeof(T) == 4) return x;
  return __uint_as_float(pack_bf16(0.f, x));
}

// exp and sigmoid in a few instructions: relative error below 2^-20, subnormal results become 0.
__device__ inline float fast_exp(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.44269504f));
  return y;
}
__device__ inline float sigmoid(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(1.f + fast_exp(-x)));
  return y;
}

// True when every row may be read by 16-byte accesses; an absent one does not object.
inline bool aligned(const void* x) { return reinterpret_cast<uintptr_t>(x) % 16 == 0; }
template <class T>
bool aligned(const Rows<T>& x) {
  return aligned(x.data) && (!x || x.stride * sizeof(T) % 16 == 0);
}
template <class X, class Y, class... More>
bool aligned(const X& x, const Y& y, const More&... more) {
  return aligned(x) && aligned(y, more...);
}

template <int N>
using Int = std::integral_constant<int, N>;

// Calls fn(Int<N>) with N = kVec<T> when rows of `width` can go by whole vectors, else with 1.
template <class T, class Fn>
void with_vectors(bool rows_aligned, int64_t width, Fn&& fn) {
  if (rows_aligned && width % kVec<T> == 0) return fn(Int<kVec<T>>{});
  fn(Int<1>{});
}

// f(s, i) for the S vectors of N that a lane holds.
template <int S, int N, class F>
__device__ __forceinline__ void each(F&& f) {
#pragma unroll
  for (int s = 0; s < S; ++s)
#pragma unroll
    for (int i = 0; i < N; ++i) f(s, i);
}

template <int N, class F>
__device__ __forceinline__ void each(F&& f) {
#pragma unroll
  for (int i = 0; i < N; ++i) f(i);
}

// --- Teams: a row over a power of two of lanes, at most a warp ---

// Lane i of the team takes the vectors i, i + lanes, ...: S of them a pass. A row that fits in one pass stays
// in registers; a longer one is read again. A team without a row has width 0 and still joins the shuffles.
template <int N, int S>
struct Team {
  int lanes, lane;
  int64_t width;

  __device__ Team(int lanes, int64_t width)
      : lanes(lanes), lane(static_cast<int>(threadIdx.x) & (lanes - 1)), width(width) {}
  __device__ int64_t step() const { return static_cast<int64_t>(S) * N * lanes; }
  __device__ bool one_pass() const { return width <= step(); }
  __device__ int64_t column(int64_t pass, int s) const { return pass + (s * lanes + lane) * N; }

  // f(s, column) for the vectors of a pass within the row.
  template <class F>
  __device__ __forceinline__ void vectors(int64_t pass, F&& f) const {
#pragma unroll
    for (int s = 0; s < S; ++s)
      if (column(pass, s) < width) f(s, column(pass, s));
  }
  template <class T>
  __device__ void load(const T* row, int64_t pass, float (&x)[S][N]) const {
#pragma unroll
    for (int s = 0; s < S; ++s) {
      if (column(pass, s) < width)
        load_n<N>(row + column(pass, s), x[s]);
      else
        each<N>([&](int i) { x[s][i] = 0.f; });
    }
  }
  template <class T>
  __device__ void load(const T* row, int64_t pass, Packed<N, T> (&x)[S]) const {
#pragma unroll
    for (int s = 0; s < S; ++s) {
      if (column(pass, s) < width)
        x[s].load(row + column(pass, s));
      else
        x[s].clear();
    }
  }
  template <class T>
  __device__ void store(T* row, int64_t pass, const float (&x)[S][N]) const {
#pragma unroll
    for (int s = 0; s < S; ++s)
      if (column(pass, s) < width) store_n<N>(row + column(pass, s), x[s]);
  }
};

// Every lane gets the sum over its team. Unrolled: the tests are the same for the whole launch.
__device__ inline float team_sum(float x, int lanes) {
#pragma unroll
  for (int i = kWarp / 2; i > 0; i /= 2)
    if (i < lanes) x += __shfl_xor_sync(0xffffffffu, x, i);
  return x;
}

// Lanes for rows of `width`: as few as hold one in a pass, so that each has several loads in flight.
inline int team_lanes(int64_t width, int n, int s) {
  int lanes = 1;
  while (lanes < kWarp && static_cast<int64_t>(lanes) * n * s < width) lanes *= 2;
  return lanes;
}

// Calls fn(Int<N>, Int<S>, lanes), with twice the S when a warp would not hold a row.
template <class T, int S, class Fn>
void with_team(bool rows_aligned, int64_t width, Fn&& fn) {
  const auto call = [&](auto n, auto s) { fn(n, s, team_lanes(width, n, s)); };
  with_vectors<T>(rows_aligned, width, [&](auto n) {
    if (width <= kWarp * S * n)
      call(n, Int<S>{});
    else
      call(n, Int<2 * S>{});
  });
}

// --- Elementwise work on rows of vectors ---

// A thread takes one vector of kDeep rows, reads them all, then finishes each. Op gives kInputs,
// load(row, column, in) and finish(row, column, in).
inline constexpr int kDeep = 4;
template <int N, class Op>
__global__ void by_rows_kernel(Op op, int64_t n, int64_t columns) {
  const int64_t column = (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * N;
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y) * kDeep;
  if (column >= columns) return;
  float in[kDeep][Op::kInputs][N];
#pragma unroll
  for (int r = 0; r < kDeep; ++r)
    if (first + r < n) op.load(first + r, column, in[r]);
#pragma unroll
  for (int r = 0; r < kDeep; ++r)
    if (first + r < n) op.finish(first + r, column, in[r]);
}
template <int N, class Op>
void by_rows(Int<N>, const Op& op, int64_t n, int64_t columns) {
  if (n == 0 || columns == 0) return;
  const int64_t vectors = ceil_div(columns, N);
  unsigned x = 1;
  while (x < 256 && x < vectors) x *= 2;
  const dim3 block(x, 256 / x), grid(grid_for(ceil_div(n, kDeep), block.y), grid_for(vectors, x));
  by_rows_kernel<N><<<grid, block, 0, stream()>>>(op, n, columns);
  CUDA_CHECK_LAUNCH();
}

// --- Column sums: the second step (rows.h) ---

// Rows a block sums in the first step: n shared evenly among the blocks that run at once, at least kSumTile
// each, so that no block is left for a second wave.
template <class Kernel>
int64_t rows_a_block(Kernel kernel, int threads, size_t shared, int64_t n, int64_t blocks_a_share = 1) {
  int resident = 0;
  CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, threads, shared));
  const int64_t shares = std::max<int64_t>(1, resident * context().multiprocessors / blocks_a_share);
  return std::max(kSumTile, ceil_div(n, shares));
}

// The second step. partial is [tiles, parts, columns], parts 1 or 2: first[c] += sum over tiles of
// partial[tile,0,c], second[c] that of partial[tile,1,c]. Either may be null.
void add_tiles(const float* partial, int64_t tiles, int parts, int64_t columns, float* first,
               float* second = nullptr);

}  // namespace prism::cuda
