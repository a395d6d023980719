// How a block holds the weights of one head's memory: both matrices as [M,K] (W2 transposed), a tile a
// thread, in registers. Smaller heads fill a part of the tiles: the rest is 0 and stays 0.
#pragma once

#include "kernels/cuda.cuh"
#include "kernels/ttt.h"

namespace prism::cuda::ttt {

constexpr int kWide = 64, kHidden = 256;  // the largest K and M
constexpr int kThreads = 512, kWarps = kThreads / kWarp, kRows = 4, kColumns = 8;
static_assert(kThreads * kRows * kColumns == kWide * kHidden);
constexpr unsigned kAll = 0xffffffffu;

using Tile = float[kRows][kColumns];
using Vectors = float[kWarps][kWide];  // what each warp's rows add to K columns

__device__ inline float2 operator+(float2 a, float2 b) { return {a.x + b.x, a.y + b.y}; }
__device__ inline float2 operator-(float2 a, float2 b) { return {a.x - b.x, a.y - b.y}; }
__device__ inline float2 operator*(float2 a, float2 b) { return {a.x * b.x, a.y * b.y}; }
__device__ inline float2 operator*(float a, float2 b) { return {a * b.x, a * b.y}; }
__device__ inline float2& pair_of(float* x) { return reinterpret_cast<float2*>(x)[threadIdx.x % kWarp]; }

// A warp has 16 rows of the tiles. 8 lanes share 4 rows, 8 columns each; a number a row (z1, f, ...) is held
// by two of the 8. Of a vector of K numbers a warp's lane has the pair (2 lane, 2 lane + 1).
struct Place {
  int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, group = lane / 8, across = lane % 8;
  __device__ int row(int i) const { return warp * 16 + group * 4 + i; }
  __device__ int own_row() const { return row(across % 4); }
  __device__ bool first_copy() const { return across < 4; }
  __device__ int column(int j) const { return j / 4 * 32 + across * 4 + j % 4; }
  __device__ float4 columns(const float* x, int half) const {
    return reinterpret_cast<const float4*>(x)[half * 8 + across];
  }
  __device__ void columns(const float* x, float (&c)[kColumns]) const {
    for (int half = 0; half < 2; ++half) {
      const float4 v = columns(x, half);
      c[half * 4] = v.x, c[half * 4 + 1] = v.y, c[half * 4 + 2] = v.z, c[half * 4 + 3] = v.w;
    }
  }
  __device__ void rows(float own, float (&r)[kRows]) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) r[i] = __shfl_sync(kAll, own, (lane & 24) | i);
  }
  // The sum over the 8 lanes of row `across % 4`.
  __device__ float own_sum(const float (&s)[kRows]) const {
    const bool odd = across & 1, high = across & 2;
    const float low2 = (odd ? s[1] : s[0]) + __shfl_xor_sync(kAll, odd ? s[0] : s[1], 1);
    const float high2 = (odd ? s[3] : s[2]) + __shfl_xor_sync(kAll, odd ? s[2] : s[3], 1);
    const float sum = (high ? high2 : low2) + __shfl_xor_sync(kAll, high ? low2 : high2, 2);
    return sum + __shfl_xor_sync(kAll, sum, 4);
  }
  // to[column] = the sum of y over the warp's rows.
  __device__ void sum_columns(float* to, const float (&y)[kColumns]) const {
    const bool odd = group & 1, high = group & 2;
    float half[4];
#pragma unroll
    for (int j = 0; j < 4; ++j)
      half[j] = (odd ? y[4 + j] : y[j]) + __shfl_xor_sync(kAll, odd ? y[j] : y[4 + j], 8);
    const float x = (high ? half[2] : half[0]) + __shfl_xor_sync(kAll, high ? half[0] : half[2], 16);
    const float z = (high ? half[3] : half[1]) + __shfl_xor_sync(kAll, high ? half[1] : half[3], 16);
    *reinterpret_cast<float2*>(to + column(odd ? 4 : 0) + (high ? 2 : 0)) = {x, z};
  }
};

// W x, for the lane's own row.
__device__ inline float times(const Place& at, const Tile& W, const float* x) {
  float c[kColumns], s[kRows] = {};
  at.columns(x, c);
#pragma unroll
  for (int i = 0; i < kRows; ++i)
#pragma unroll
    for (int j = 0; j < kColumns; ++j) s[i] += W[i][j] * c[j];
  return at.own_sum(s);
}
// y += W^T x over the lane's rows.
__device__ inline void add_transposed(const Place& at, float (&y)[kColumns], const Tile& W, float x) {
  float r[kRows];
  at.rows(x, r);
#pragma unroll
  for (int i = 0; i < kRows; ++i)
#pragma unroll
    for (int j = 0; j < kColumns; ++j) y[j] += W[i][j] * r[i];
}
// to[column] = W^T x over the warp's rows.
__device__ inline void sum_transposed(const Place& at, float* to, const Tile& W, float x) {
  float y[kColumns] = {};
  add_transposed(at, y, W, x);
  at.sum_columns(to, y);
}
// W += x c^T
__device__ inline void add_outer(const Place& at, Tile& W, float x, const float (&c)[kColumns]) {
  float r[kRows];
  at.rows(x, r);
#pragma unroll
  for (int i = 0; i < kRows; ++i)
#pragma unroll
    for (int j = 0; j < kColumns; ++j) W[i][j] += r[i] * c[j];
}
__device__ inline void add_outer(const Place& at, Tile& W, float x, const float* y) {
  float c[kColumns];
  at.columns(y, c);
  add_outer(at, W, x, c);
}
// The warps' parts of the lane's pair.
__device__ inline float2 total(Vectors& parts) {
  float2 sum = {};
#pragma unroll
  for (int w = 0; w < kWarps; ++w) sum = sum + pair_of(parts[w]);
  return sum;
}

// LayerNorm over a warp's pairs.
struct Norm {
  int K;
  float2 live;  // 1 where the pair's columns are below K, else 0
  __device__ explicit Norm(int64_t k) : K(static_cast<int>(k)) {
    const int c = threadIdx.x % kWarp * 2;
    live = {c < K ? 1.f : 0.f, c + 1 < K ? 1.f : 0.f};
  }
  template <class T>
  __device__ float2 load(const T* row) const {
    const int c = threadIdx.x % kWarp * 2;
    return {c < K ? cuda::load(row + c) : 0.f, c + 1 < K ? cuda::load(row + c + 1) : 0.f};
  }
  template <class T>
  __device__ void store(T* row, float2 x) const {
    const int c = threadIdx.x % kWarp * 2;
    if (c < K) cuda::store(row + c, x.x);
    if (c + 1 < K) cuda::store(row + c + 1, x.y);
  }
  __device__ float mean(float2 x) const { return warp_sum(x.x + x.y) / static_cast<float>(K); }
  __device__ float2 normalise(float2 z, float eps, float& r) const {
    const float2 centred = z - mean(z) * live;
    r = rsqrtf(mean(centred * centred) + eps);
    return r * centred;
  }
  // The derivative of zhat by z, symmetric, applied to x.
  __device__ float2 through(float2 x, float2 zhat, float r) const {
    const float m = mean(x), along = mean(x * zhat);
    return r * (x - m * live - along * zhat);
  }
};

// One head of one batch row.
template <class T>
struct Head {
  const TttArgs<T>& a;
  int64_t i = blockIdx.x, b = i / a.H, h = i % a.H;
  __device__ explicit Head(const TttArgs<T>& args) : a(args) {}
  __device__ int64_t token(int64_t t) const { return (b * a.T_len + t) * a.H + h; }
  __device__ float* record(int64_t t) const { return a.record + (i * a.T_len + t) * a.R(); }
  // Entries of W1 | b1 | W2 | b2.
  __device__ int64_t at_W1(int row, int column) const { return row * a.K + column; }
  __device__ int64_t at_W2(int row, int column) const { return a.M * a.K + a.M + column * a.M + row; }
  // fn(bias, its entry, whether it exists, whether this thread answers for it).
  template <class Fn>
  __device__ void biases(const Place& at, float& b1, float2& b2, const Fn& fn) const {
    const int row = at.own_row(), c = at.lane * 2;
    fn(b1, a.M * a.K + row, row < a.M, at.first_copy());
    fn(b2.x, at_W2(0, 0) + a.M * a.K + c, c < a.K, at.warp == 0);
    fn(b2.y, at_W2(0, 0) + a.M * a.K + c + 1, c + 1 < a.K, at.warp == 0);
  }
  // W - W_0 as the document that begins at token `first` finds it.
  __device__ const float* state_at(int64_t first) const { return first == 0 ? a.initial_state : nullptr; }
  __device__ float weight(int64_t j, const float* state) const {
    return a.initial_weight(h, j) + (state ? state[i * a.P() + j] : 0.f);
  }
  // fn(weight, its entry) for the tiles' entries that exist.
  template <class Fn>
  __device__ void tiles(const Place& at, Tile& W1, Tile& W2, const Fn& fn) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const int row = at.row(r), column = at.column(c);
        const bool inside = row < a.M && column < a.K;
        fn(W1[r][c], at_W1(row, column), inside), fn(W2[r][c], at_W2(row, column), inside);
      }
  }
  __device__ void initial(const Place& at, Tile& W1, Tile& W2, const float* state) const {
    tiles(at, W1, W2, [&](float& w, int64_t j, bool inside) { w = inside ? weight(j, state) : 0.f; });
  }
};

}  // namespace prism::cuda::ttt
