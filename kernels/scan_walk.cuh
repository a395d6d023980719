// What the forward and the reverse walk of the fast scan share: a warp's products, all with the left operand
// in registers. A warp owns 16 MT rows of the state, [v][k] as accumulators; products over tokens are
// [v][token].
#pragma once

#include "kernels/scan_fast.cuh"

namespace prism::cuda {

inline constexpr int kWalkThreads = 256;

template <int MT, int KP>
using StateRegisters = float[MT][KP / 8][4];
template <int MT>
using HalfSums = float[MT][4][4];  // [v][32 tokens], float: half h of a chunk
template <int MT>
using TokenOperand = uint32_t[MT][4][4];  // [v][64 tokens], A fragments

template <int MT>
__device__ void clear(HalfSums<MT>& x) {
#pragma unroll
  for (int mt = 0; mt < MT; ++mt)
#pragma unroll
    for (int nt = 0; nt < 4; ++nt)
#pragma unroll
      for (int c = 0; c < 4; ++c) x[mt][nt][c] = 0.f;
}

// x[v][i] *= scale[i]
template <int MT>
__device__ void scale_tokens(HalfSums<MT>& x, const float* scale, int h) {
#pragma unroll
  for (int nt = 0; nt < 4; ++nt) {
    const float2 s = *reinterpret_cast<const float2*>(scale + 32 * h + 8 * nt + 2 * (threadIdx.x % 4));
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
      x[mt][nt][0] *= s.x, x[mt][nt][1] *= s.y, x[mt][nt][2] *= s.x, x[mt][nt][3] *= s.y;
  }
}

template <int MT>
__device__ void to_operand(TokenOperand<MT>& a, const HalfSums<MT>& x, int h) {
#pragma unroll
  for (int mt = 0; mt < MT; ++mt)
#pragma unroll
    for (int p = 0; p < 2; ++p) to_a(a[mt][2 * h + p], x[mt][2 * p], x[mt][2 * p + 1]);
}

// Left operands [v][token] of the products below, 16 tokens from 16 p at a time: from registers, or from
// columns v.. of a tile [token][v] (which keeps fewer registers busy), each token multiplied by scale[token]
// if given.
template <int MT>
struct FromRegisters {
  const TokenOperand<MT>& x;
  __device__ void operator()(FragmentA (&a)[MT], int p) const {
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
      for (int i = 0; i < 4; ++i) a[mt][i] = x[mt][p][i];
  }
};
template <int MT>
struct FromTile {
  Tile tile;
  int v;
  const float* scale = nullptr;
  __device__ void operator()(FragmentA (&a)[MT], int p) const {
#pragma unroll
    for (int mt = 0; mt < MT; ++mt) {
      tile.a_transposed(a[mt], v + 16 * mt, 16 * p);
      if (scale) scale_columns(a[mt], scale + 16 * p);
    }
  }
};

template <int MT>
__device__ void scale_operand(TokenOperand<MT>& a, const float* scale, float sign = 1.f) {
#pragma unroll
  for (int mt = 0; mt < MT; ++mt)
#pragma unroll
    for (int p = 0; p < 4; ++p) scale_columns(a[mt][p], scale + 16 * p, sign);
}

template <int MT, int KP>
__device__ void scale_state(StateRegisters<MT, KP>& S, float scale) {
#pragma unroll
  for (int mt = 0; mt < MT; ++mt)
#pragma unroll
    for (int kt = 0; kt < KP / 8; ++kt)
#pragma unroll
      for (int c = 0; c < 4; ++c) S[mt][kt][c] *= scale;
}

// x[v][i] += sum_k S[v][k] key[i][k]
template <int MT, int KP>
__device__ void add_state_key(HalfSums<MT>& x, const StateRegisters<MT, KP>& S, const Tile& key, int h) {
#pragma unroll
  for (int k = 0; k < KP / 16; ++k) {
    FragmentA a[MT];
#pragma unroll
    for (int mt = 0; mt < MT; ++mt) to_a(a[mt], S[mt][2 * k], S[mt][2 * k + 1]);
#pragma unroll
    for (int np = 0; np < 2; ++np) {
      uint32_t b[4];
      key.b_transposed(b, 16 * k, 32 * h + 16 * np);
#pragma unroll
      for (int mt = 0; mt < MT; ++mt)
        mma(x[mt][2 * np], a[mt], b[0], b[1]), mma(x[mt][2 * np + 1], a[mt], b[2], b[3]);
    }
  }
}

// S[v][k] += sum_j a[v][j] key[j][k]
template <int MT, int KP, class Left>
__device__ void add_outer(StateRegisters<MT, KP>& S, const Left& left, const Tile& key) {
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    FragmentA a[MT];
    left(a, p);
#pragma unroll
    for (int k = 0; k < KP / 16; ++k) {
      uint32_t b[4];
      key.b(b, 16 * p, 16 * k);
#pragma unroll
      for (int mt = 0; mt < MT; ++mt)
        mma(S[mt][2 * k], a[mt], b[0], b[1]), mma(S[mt][2 * k + 1], a[mt], b[2], b[3]);
    }
  }
}

// x[v][i] += sum_{j <= i} a[v][j] L[i][j] for a lower triangular square L, or with its transpose, sum_{j >=
// i} .. L[j][i]
template <int MT, bool transposed, class Left>
__device__ void add_lower(HalfSums<MT>& x, const Left& left, const Tile& L, int h) {
#pragma unroll
  for (int p = transposed ? 2 * h : 0; p < (transposed ? 4 : 2 * h + 2); ++p) {
    FragmentA a[MT];
    left(a, p);
#pragma unroll
    for (int np = 0; np < 2; ++np) {
      if (transposed ? p < 2 * h + np : p > 2 * h + np) continue;
      uint32_t b[4];
      if constexpr (transposed)
        L.b(b, 16 * p, 32 * h + 16 * np);
      else
        L.b_transposed(b, 16 * p, 32 * h + 16 * np);
#pragma unroll
      for (int mt = 0; mt < MT; ++mt)
        mma(x[mt][2 * np], a[mt], b[0], b[1]), mma(x[mt][2 * np + 1], a[mt], b[2], b[3]);
    }
  }
}

// The same product in place, a block of 16 tokens at a time in the order in which none is read after it is
// written.
template <int MT, bool transposed>
__device__ void multiply_lower(TokenOperand<MT>& a, const Tile& L) {
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    const int i = transposed ? step : 3 - step;
    float x[MT][2][4] = {};
#pragma unroll
    for (int p = transposed ? i : 0; p < (transposed ? 4 : i + 1); ++p) {
      uint32_t b[4];
      if constexpr (transposed)
        L.b(b, 16 * p, 16 * i);
      else
        L.b_transposed(b, 16 * p, 16 * i);
#pragma unroll
      for (int mt = 0; mt < MT; ++mt)
        mma(x[mt][0], a[mt][p], b[0], b[1]), mma(x[mt][1], a[mt][p], b[2], b[3]);
    }
#pragma unroll
    for (int mt = 0; mt < MT; ++mt) to_a(a[mt][i], x[mt][0], x[mt][1]);
  }
}

// Rows 16 p0 <= i < 16 p1 of [token][V], those below n, from x[v][i]; `to` is token 0's column v of this
// warp's first row, `width` what is left of V from there.
template <int MT>
__device__ void store_tokens(bf16* to, int64_t stride, const TokenOperand<MT>& x, int n, int width, int p0,
                             int p1) {
  const int lane = lane_here(), g = lane / 4, t = lane % 4;
  constexpr int kBlocks = 2 * MT,
                kTogether = 4 / kBlocks;  // 8-row blocks of v, and token blocks, for 4 words
#pragma unroll
  for (int p = p0; p < p1; ++p)
#pragma unroll
    for (int e = 0; e < 2; e += kTogether) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        words[i] = transpose_matrix(x[i % kBlocks / 2][p][2 * (e + i / kBlocks) + i % 2]);
      transpose_quad(words);
      const int token = 16 * p + 8 * (e + t / kBlocks) + g, v = t % kBlocks * 8;
      if (token < n && v < width) store_words(to + token * stride + v, words);
    }
}

// The state as bf16 [v][k], rows below `height`.
template <int MT, int KP>
__device__ void store_state(bf16* to, int K, const StateRegisters<MT, KP>& S, int height) {
  const int lane = lane_here(), g = lane / 4, t = lane % 4;
#pragma unroll
  for (int mt = 0; mt < MT; ++mt)
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int q = 0; q < KP / 32; ++q) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          words[i] = pack_bf16(S[mt][4 * q + i][2 * half], S[mt][4 * q + i][2 * half + 1]);
        transpose_quad(words);
        const int v = 16 * mt + 8 * half + g, k = 32 * q + 8 * t;
        if (v < height && k < K) store_words(to + v * K + k, words);
      }
}

// fn(v, k, x0, x1) for this lane's numbers of the state, at (v, k) and (v, k + 1), inside height x K.
template <int MT, int KP, class Fn>
__device__ void each_state(StateRegisters<MT, KP>& S, int K, int height, Fn fn) {
  const int lane = lane_here(), g = lane / 4, t = lane % 4;
#pragma unroll
  for (int mt = 0; mt < MT; ++mt)
#pragma unroll
    for (int kt = 0; kt < KP / 8; ++kt)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int v = 16 * mt + 8 * half + g, k = 8 * kt + 2 * t;
        if (v < height && k < K) fn(v, k, S[mt][kt][2 * half], S[mt][kt][2 * half + 1]);
      }
}

}  // namespace prism::cuda
