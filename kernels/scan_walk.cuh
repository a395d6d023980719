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
using TokenSums = float[MT][8][4];  // [v][token], float
template <int MT>
using TokenOperand = uint32_t[MT][4][4];  // [v][token], A fragments

template <int MT>
__device__ void clear(TokenSums<MT>& x) {
#pragma unroll
  for (int mt = 0; mt < MT; ++mt)
#pragma unroll
    for (int nt = 0; nt < 8; ++nt)
#pragma unroll
      for (int c = 0; c < 4; ++c) x[mt][nt][c] = 0.f;
}

// x[v][i] *= scale[i]
template <int MT>
__device__ void scale_tokens(TokenSums<MT>& x, const float* scale) {
#pragma unroll
  for (int nt = 0; nt < 8; ++nt) {
    const float2 s = *reinterpret_cast<const float2*>(scale + 8 * nt + 2 * (threadIdx.x % 4));
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
      x[mt][nt][0] *= s.x, x[mt][nt][1] *= s.y, x[mt][nt][2] *= s.x, x[mt][nt][3] *= s.y;
  }
}

template <int MT>
__device__ void to_operand(TokenOperand<MT>& a, const TokenSums<MT>& x) {
#pragma unroll
  for (int mt = 0; mt < MT; ++mt)
#pragma unroll
    for (int p = 0; p < 4; ++p) to_a(a[mt][p], x[mt][2 * p], x[mt][2 * p + 1]);
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
__device__ void scale_operand(TokenOperand<MT>& a, const float* scale) {
#pragma unroll
  for (int mt = 0; mt < MT; ++mt)
#pragma unroll
    for (int p = 0; p < 4; ++p) scale_columns(a[mt][p], scale + 16 * p);
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
__device__ void add_state_key(TokenSums<MT>& x, const StateRegisters<MT, KP>& S, const Tile& key) {
#pragma unroll
  for (int k = 0; k < KP / 16; ++k) {
    FragmentA a[MT];
#pragma unroll
    for (int mt = 0; mt < MT; ++mt) to_a(a[mt], S[mt][2 * k], S[mt][2 * k + 1]);
#pragma unroll
    for (int np = 0; np < 4; ++np) {
      uint32_t b[4];
      key.b_transposed(b, 16 * k, 16 * np);
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

// x[v][i] += sum_{j <= i} a[v][j] L[i][j] for a lower triangular square
template <int MT, class Left>
__device__ void add_lower(TokenSums<MT>& x, const Left& left, const Tile& L) {
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    FragmentA a[MT];
    left(a, p);
#pragma unroll
    for (int np = p; np < 4; ++np) {
      uint32_t b[4];
      L.b_transposed(b, 16 * p, 16 * np);
#pragma unroll
      for (int mt = 0; mt < MT; ++mt)
        mma(x[mt][2 * np], a[mt], b[0], b[1]), mma(x[mt][2 * np + 1], a[mt], b[2], b[3]);
    }
  }
}

// x[v][j] += sum_{i >= j} a[v][i] L[i][j] for a lower triangular square
template <int MT, class Left>
__device__ void add_lower_transposed(TokenSums<MT>& x, const Left& left, const Tile& L) {
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    FragmentA a[MT];
    left(a, p);
#pragma unroll
    for (int np = 0; np <= p; ++np) {
      uint32_t b[4];
      L.b(b, 16 * p, 16 * np);
#pragma unroll
      for (int mt = 0; mt < MT; ++mt)
        mma(x[mt][2 * np], a[mt], b[0], b[1]), mma(x[mt][2 * np + 1], a[mt], b[2], b[3]);
    }
  }
}

// Rows i < n of [token][V] from x[v][i]; `to` is token 0's column v of this warp's first row, `width` what is
// left of V from there.
template <int MT>
__device__ void store_tokens(bf16* to, int64_t stride, const TokenSums<MT>& x, int n, int width) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, g = lane / 4, t = lane % 4;
  constexpr int kBlocks = 2 * MT, kTogether = 4 / kBlocks;  // 8-row blocks of v, and token blocks for 4 words
#pragma unroll
  for (int nt = 0; nt < 8; nt += kTogether) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Accumulator& c = x[i % kBlocks / 2][nt + i / kBlocks];
      words[i] = transpose_matrix(pack_bf16(c[i % 2 * 2], c[i % 2 * 2 + 1]));
    }
    transpose_quad(words);
    const int token = 8 * (nt + t / kBlocks) + g, v = t % kBlocks * 8;
    if (token < n && v < width) store_words(to + token * stride + v, words);
  }
}

// The state as bf16 [v][k], rows below `height`.
template <int MT, int KP>
__device__ void store_state(bf16* to, int K, const StateRegisters<MT, KP>& S, int height) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, g = lane / 4, t = lane % 4;
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
  const int lane = static_cast<int>(threadIdx.x) % kWarp, g = lane / 4, t = lane % 4;
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
