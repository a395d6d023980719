// The short convolution of the mixers, with what follows it (SPEC section 3): causal, depthwise, width W,
// within one document; then SiLU; then, for queries and keys, the l2 norm of each head and a scale.
//   s_t = sum_{j<W} weight[c, W-1-j] x_{t-j}     over t-j in t's document (before the row: from the cache)
//   y_t = SiLU(s_t),   or  scale * SiLU(s_t) / sqrt(sum_head SiLU(s_t)^2 + 1e-6)
#pragma once

#include "kernels/rows.h"

namespace prism {

template <class T>
struct ConvArgs {
  using A = acc_t<T>;
  // outputs
  T* y = nullptr;          // [B,T,channels]; null in the reverse pass
  T* cache_out = nullptr;  // [B,W-1,channels] the row's last W-1 inputs, zero where the last document is
                           // shorter; or null
  // inputs
  Rows<const T> x;            // [B T,channels]
  const A* weight = nullptr;  // [channels,W]; null: no convolution, s = x
  const T* cache_in =
      nullptr;  // [B,W-1,channels] inputs before the row (oldest first); null: 0. May be cache_out
  const int32_t* start = nullptr;  // [B,T] (kernels/documents.h); null: one document a row
  // sizes
  int64_t B = 0, T_len = 0, channels = 0, W = 1;
  int64_t head = 0;  // channels a head for the l2 norm; 0: no norm
  A scale = 1;       // used with the norm only
};

template <class T>
struct ConvGrads {
  using A = acc_t<T>;
  Rows<T> dx;             // [B T,channels]
  A* dweight = nullptr;   // [channels,W], accumulated (+=); null when weight is
  A* partial = nullptr;   // [conv_partials(B, T_len),channels,W] scratch
  T* ds = nullptr;        // [B,T,channels] scratch: gradient of s
  const T* dy = nullptr;  // [B,T,channels]
};

// Tiles the sum over tokens of dweight goes by: kSumTile tokens of one row of the batch.
inline int64_t conv_partials(int64_t B, int64_t T_len) { return B * sum_tiles(T_len); }

PRISM_KERNEL(conv_forward, (const ConvArgs<T>& args), (args))
PRISM_KERNEL(conv_backward, (const ConvArgs<T>& args, const ConvGrads<T>& grads), (args, grads))

}  // namespace prism
