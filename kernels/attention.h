// Causal softmax attention within documents (SPEC section 6), per batch row and head, W the head's width:
//   s_tj = W^-1/2 <q_t, k_j>   for j <= t in t's document
//   p_tj = exp(s_tj - lse_t),  lse_t = log sum_j exp(s_tj)      o_t = sum_j p_tj v_j
// Reverse, with D_t = <do_t, o_t> and ds_tj = W^-1/2 p_tj (<do_t, v_j> - D_t):
//   dq_t = sum_j ds_tj k_j      dk_j = sum_t ds_tj q_t      dv_j = sum_t p_tj do_t
// No kernel stores s or p: the reverse pass makes them again from lse.
#pragma once

#include <cmath>

#include "kernels/rows.h"

namespace prism {

// Decoding: the running document's (rotated) keys and values from before this pass, oldest first, and after
// it.
template <class T>
struct KeyValueCache {
  T *keys = nullptr, *values = nullptr;  // [B,capacity,H,W]; null: none
  const int32_t* past = nullptr;         // [B] how many the row's running document has, before the pass
  int64_t capacity = 0;                  // at least past + T_len
};

template <class T>
struct AttentionArgs {
  using A = acc_t<T>;
  // outputs
  T* o = nullptr;    // [B,T,H,W]
  A* lse = nullptr;  // [B,H,T]
  // inputs
  Rows<const T> q, k, v;           // [B T, H W], q and k rotated
  const int32_t* start = nullptr;  // [B,T] (kernels/documents.h); null: one document a row
  KeyValueCache<T> cache;          // forward only
  // sizes
  int64_t B = 0, T_len = 0, H = 0, W = 0;
  double scale() const { return 1 / std::sqrt(static_cast<double>(W)); }
};

template <class T>
struct AttentionGrads {
  Rows<T> dq, dk, dv;         // [B T, H W]
  acc_t<T>* delta = nullptr;  // [B,H,T] scratch: D
  const T* d_o = nullptr;     // [B,T,H,W]
};

// The rotary embedding, in place: each head's pairs (x_i, x_{i + W/2}) turn by the angle p base^(-2i/W), or
// back by it (inverse), base 10000. Only differences of positions enter attention, so p counts from the
// document's start: a document's numbers do not depend on where in a row it lies.
inline constexpr double kRotaryBase = 10000;
template <class T>
struct RotaryArgs {
  Rows<T> x;                       // [B T, heads W]
  const int32_t* start = nullptr;  // [B,T]; null: one document a row
  const int32_t* past = nullptr;   // [B] positions of the row's first document before the row; null: 0
  int64_t B = 0, T_len = 0, heads = 0, W = 0;
  bool inverse = false;
};

PRISM_KERNEL(rotary, (const RotaryArgs<T>& args), (args))
// With a cache, also puts the keys and values of the row's last document there.
PRISM_KERNEL(attention_forward, (const AttentionArgs<T>& args), (args))
PRISM_KERNEL(attention_backward, (const AttentionArgs<T>& args, const AttentionGrads<T>& grads),
             (args, grads))

}  // namespace prism
