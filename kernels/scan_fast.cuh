// The scan on the tensor cores, bf16 only: what kernels/scan_fast.cu (forward) and
// kernels/scan_fast_backward.cu share. The names are SPEC section 2's; as in kernels/scan.cu write 0 stands
// for W_0 + W_1 when they share k.
//
// Plan. What needs no state is done for all chunks at once (scan_prepare.cu), n x n products and the inverse
// T = (I + M_0)^{-1}. What needs it is a walk along the chunks that never mixes rows of S: a warp owns 16 or
// 32 rows of S for the whole walk, transposed to [v][token] everywhere, so that S, R, U and O are
// accumulators and left operands in its registers; the warps of a block share only the tiles of k, q, w and
// the squares. Few (row, head) pairs: V is split over blocks, then time into segments (see scan_fast.cu).
#pragma once

#include "kernels/mma.cuh"
#include "kernels/scan.h"

namespace prism::cuda {

inline constexpr int kChunk = 64;  // C, tokens
inline constexpr int kSquare = kChunk * kChunk;

// One batch row and head.
struct Line {
  int64_t pair, row, head;
};

// The problem and where its scratch stands. Per (pair of row and head, chunk): `squares` of bf16,
//   T, then Gamma^- . X_m and Gamma . P_m for m = 0..M, and, for the reverse pass, Gamma
// and vectors a, b, beta [3][C] in float.
struct FastScan {
  ScanArgs<bf16> args;
  bf16* squares = nullptr;
  float* vectors = nullptr;
  bf16* u = nullptr;  // [B,T,H,V] U, for the reverse pass
  float* segments =
      nullptr;  // [pairs][count][V + 2 K][K]: a segment's own final state, its transition Phi, Phi^T
  int64_t pairs = 0, chunks = 0;
  int64_t segment_chunks = 0;  // chunks a segment has
  int segment_count = 1;
  int walk_units = 0;  // rows of S that a block of a walk has, over 8
  int extra = 0;       // M
  bool backward = false;
  bf16* y = nullptr;                       // [B,T,H,V] Y, where dw_1 is another thing
  float *sums = nullptr, *dots = nullptr;  // what kernels/scan_gradients.cu adds up to dg and dbeta

  __host__ __device__ int squares_per_chunk() const { return 1 + 2 * (1 + extra) + backward; }
  // args.states holds, in bf16, S before each chunk and then dS after it: two [pairs][chunks][V][K].
  __device__ bf16* states() const { return reinterpret_cast<bf16*>(args.states); }
  __device__ bf16* dstates() const { return states() + pairs * chunks * args.V * args.K; }
  __device__ Line line(uint32_t pair) const {
    const auto H = static_cast<uint32_t>(args.H);
    return {pair, pair / H, pair % H};
  }
  __device__ bf16* square(const Line& l, int64_t chunk, int i) const {
    return squares + ((l.pair * chunks + chunk) * squares_per_chunk() + i) * kSquare;
  }
  __device__ float* vector(const Line& l, int64_t chunk) const {
    return vectors + (l.pair * chunks + chunk) * 3 * kChunk;
  }
  static constexpr int kSums = 2 * kChunk, kDots = 4 * kChunk;
  __device__ float* gate_sums(const Line& l, int64_t chunk, int m) const {
    return sums + ((l.pair * chunks + chunk) * (1 + extra) + m) * kSums;
  }
  __host__ __device__ int key_parts() const { return static_cast<int>((args.K + 63) / 64); }
  __device__ float* gate_dots(const Line& l, int64_t chunk, int part) const {
    return dots + ((l.pair * chunks + chunk) * key_parts() + part) * kDots;
  }
  __device__ float* segment(const Line& l, int64_t s) const {
    return segments + (l.pair * segment_count + s) * (args.V + 2 * args.K) * args.K;
  }
  // The first element of token t's vectors: gates, then keys and values of a write.
  __device__ int64_t token(const Line& l, int64_t t) const { return l.row * args.T_len + t; }
  __device__ int64_t at(const Line& l, int64_t t) const { return token(l, t) * args.H + l.head; }
  __device__ int64_t kappa(int m, const Line& l, int64_t t) const {
    return ((token(l, t) * extra + m - 1) * args.H + l.head) * args.K;
  }
  __device__ const bf16* key(int m, const Line& l, int64_t t) const {
    return m == 0 ? args.k + at(l, t) * args.K : args.kappa + kappa(m, l, t);
  }
  __device__ int64_t key_stride(int m) const { return (m == 0 ? 1 : extra) * args.H * args.K; }
  __device__ int64_t value(int m, const Line& l, int64_t t) const {
    return ((token(l, t) * args.L + m - args.own_first_key) * args.H + l.head) * args.V;
  }
  __device__ int64_t value_stride() const { return args.L * args.H * args.V; }
  // Y is dw_1 where write 1 shares k.
  __device__ bf16* y_at(const ScanGrads<bf16>& grads, const Line& l, int64_t t) const {
    return has_value(0) ? grads.dw + value(0, l, t) : y + at(l, t) * args.V;
  }
  __device__ int64_t y_stride() const { return has_value(0) ? value_stride() : args.H * args.V; }
  __device__ bool has_value(int m) const { return m > 0 || !args.own_first_key; }
  __device__ int tokens(int64_t chunk) const {
    return static_cast<int>(min(args.T_len - chunk * kChunk, int64_t{kChunk}));
  }
};

inline constexpr int square_T = 0;
__host__ __device__ constexpr int square_x(int m) { return 1 + 2 * m; }
__host__ __device__ constexpr int square_p(int m) { return 2 + 2 * m; }

// True when the fast kernels cover this problem's shape on this card.
void launch_prepare(const FastScan& f);
// Plans the reverse pass and fills, from the inputs, the first half of args.states, and u.
FastScan fast_states(const ScanArgs<bf16>& args);
// From each segment's own result to its incoming state: forward from `boundary` [B,H,V,K] before the first
// (null: 0), in reverse, with the transposed transitions, from `boundary` after the last.
void chain_segments(const FastScan& f, const float* boundary, bool reverse);
void launch_gradients(const FastScan& f, const ScanGrads<bf16>& grads);
bool gradients_cover(const ScanArgs<bf16>& args);

// True when the fast kernels cover this problem's shape on this card.
bool fast_covers(const ScanArgs<bf16>& args, bool backward);
size_t fast_workspace_bytes(const ScanArgs<bf16>& args, bool backward);
void fast_forward(const ScanArgs<bf16>& args);
void fast_backward(const ScanArgs<bf16>& args, const ScanGrads<bf16>& grads);

}  // namespace prism::cuda
