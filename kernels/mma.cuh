// Warp-wide matrix products on the tensor cores (bf16 operands, float32 sums; sm_80 and later), and tiles of
// bf16 in shared memory that feed them.
//
// Fragments, with g = lane / 4 and t = lane % 4 (PTX ISA, mma.m16n8k16):
//   accumulator [16][8]:  c0,c1 = (g, 2t..2t+1)   c2,c3 = (g + 8, 2t..2t+1)
//   A [16][16], 4 words:  (g, 2t) (g + 8, 2t) (g, 2t + 8) (g + 8, 2t + 8), two neighbours of a row each
//   B [16][8], 2 words:   (2t, g) (2t + 8, g), two neighbours of a column each
// So two accumulators side by side, rounded to bf16, are the A fragment of a next product: a chain of
// products keeps its left operand in registers.
#pragma once

#include "kernels/cuda.cuh"

namespace prism::cuda {

// The lane, read anew at each call (volatile): what follows from it is then computed where it is needed, and
// not kept, and spilled, around a loop with its registers full.
__device__ inline int lane_here() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

__device__ inline int thread_here() {  // the same for threadIdx.x
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

using Accumulator = float[4];
using FragmentA = uint32_t[4];

__device__ inline void mma(Accumulator& c, const FragmentA& a, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The A fragment of two neighbouring accumulators.
__device__ inline void to_a(FragmentA& a, const Accumulator& left, const Accumulator& right) {
  a[0] = pack_bf16(left[0], left[1]), a[1] = pack_bf16(left[2], left[3]);
  a[2] = pack_bf16(right[0], right[1]), a[3] = pack_bf16(right[2], right[3]);
}

__device__ inline float low_bf16(uint32_t word) { return __uint_as_float(word << 16); }
__device__ inline float high_bf16(uint32_t word) { return __uint_as_float(word & 0xffff0000u); }

// Multiplies column k of an A fragment by sign x[k]: x points at the fragment's first column.
__device__ inline void scale_columns(FragmentA& a, const float* x, float sign = 1.f) {
  const int t = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float2 s = *reinterpret_cast<const float2*>(x + 8 * half + 2 * t);
#pragma unroll
    for (int r = 2 * half; r < 2 * half + 2; ++r)
      a[r] = pack_bf16(sign * s.x * low_bf16(a[r]), sign * s.y * high_bf16(a[r]));
  }
}

// A matrix of bf16 in shared memory: rows of `units` pieces of 16 bytes (4, 8, 16 or 32), from a multiple of
// 128. Piece u of row r stands at u ^ (r % 8), or u ^ (r / 2 % 4) of 4: eight rows of one column of pieces
// lie in different banks.
struct Tile {
  uint32_t at;  // shared memory address
  int units;

  __device__ int swizzle(int row) const { return units == 4 ? row >> 1 & 3 : row & 7; }
  __device__ uint32_t piece(int row, int unit) const {
    return at + ((row * units + (unit ^ swizzle(row))) << 4);
  }

  // Four 8 x 8 matrices for the fragments below; `row` is a multiple of 8, `column` of 16.
  template <bool transposed, bool rows_first>
  __device__ void load(uint32_t (&x)[4], int row, int column) const {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int r = rows_first ? lane & 15 : (lane & 7) + ((lane >> 4) << 3);
    const int u = rows_first ? lane >> 4 : (lane >> 3) & 1;
    // piece(row + r, column / 8 + u), with one lane's part for all rows and columns of a tile
    const uint32_t lane_at = at + ((r * units + (u ^ swizzle(r))) << 4);
    const uint32_t address = (lane_at ^ (column / 8 % 8 << 4)) + ((row * units + column / 64 * 8) << 4);
    if constexpr (transposed)
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                   : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                   : "r"(address)
                   : "memory");
    else
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                   : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                   : "r"(address)
                   : "memory");
  }
  // The A fragment of rows m.., columns k.. of this tile, or of its transpose.
  __device__ void a(FragmentA& x, int m, int k) const { load<false, true>(x, m, k); }
  __device__ void a_transposed(FragmentA& x, int m, int k) const { load<true, false>(x, k, m); }
  // Two B fragments, columns n.. and n + 8.. of this tile (x[0], x[1] and x[2], x[3]), or of its transpose.
  __device__ void b(uint32_t (&x)[4], int k, int n) const { load<true, true>(x, k, n); }
  __device__ void b_transposed(uint32_t (&x)[4], int k, int n) const { load<false, false>(x, n, k); }
};

__device__ inline uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// 16 bytes from global to shared memory, in the background; zeros when not `valid`.
__device__ inline void copy_async(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0));
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `pending` of this thread's groups are on their way.
template <int pending>
__device__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// Fills the first HEIGHT rows of a tile with `rows` rows of `width` numbers, `stride` apart, and zeros
// beyond; by the block.
template <int HEIGHT>
__device__ void load_rows(const Tile& tile, const bf16* from, int64_t stride, int rows, int width) {
  const int shift = __ffs(tile.units) - 1;
  const int thread = thread_here(), unit = thread & (tile.units - 1),
            step = static_cast<int>(blockDim.x) >> shift;
  int row = thread >> shift;
  if (unit * 8 >= width) rows = 0;
  from += row * stride + unit * 8;
#pragma unroll 4
  for (; row < HEIGHT; row += step, from += step * stride)
    copy_async(tile.piece(row, unit), from, row < rows);
}
__device__ inline void load_tile(const Tile& tile, const bf16* from, int64_t stride, int rows, int width) {
  load_rows<64>(tile, from, stride, rows, width);
}

// Brings the rows that load_tile would read into the second-level cache.
__device__ inline void prefetch_tile(const bf16* from, int64_t stride, int rows, int width) {
  const int lines = (width + 63) / 64;  // of 128 bytes
  for (int i = static_cast<int>(threadIdx.x); i < rows * lines; i += static_cast<int>(blockDim.x))
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from + i / lines * stride + i % lines * 64));
}

// Exchanges words among the four lanes of a quad: lane t's word s goes to lane s's word t.
__device__ inline void transpose_quad(uint32_t (&x)[4]) {
  const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t y = __shfl_xor_sync(0xffffffffu, odd ? x[i] : x[i + 1], 1);
    x[i] = odd ? y : x[i], x[i + 1] = odd ? x[i + 1] : y;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t y = __shfl_xor_sync(0xffffffffu, high ? x[i] : x[i + 2], 2);
    x[i] = high ? y : x[i], x[i + 2] = high ? x[i + 2] : y;
  }
}

// The 8 x 8 matrix spread over the warp (lane: row g, columns 2t..2t+1) transposed.
__device__ inline uint32_t transpose_matrix(uint32_t x) {
  uint32_t y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

__device__ inline void store_words(bf16* to, const uint32_t (&x)[4]) {
  *reinterpret_cast<uint4*>(to) = make_uint4(x[0], x[1], x[2], x[3]);
}

}  // namespace prism::cuda
