// Gated linear attention (SPEC section 12): every key channel has a decay of its own. Per row and head,
//
//   S_t = S_{t-1} diag(alpha_t) + w_t k_t^T        o_t = S_t q_t        alpha_t = sigmoid(y_t)^(1/16)
//
// Forward and reverse are four walks over the tokens, all of one form, where none needs another's state:
//
//   X_t = X_{t-1} decayed + a_t b_t^T     r_t = X_t z_t
//
//   r = o: X = S, z = q                          r = dq: X = S^T, z = do
//   r = dw: X = dS, from the end, z = k          r = dk: X = dS^T, from the end, z = w
//
// with dS_t = dS_{t+1} diag(alpha_{t+1}) + do_t q_t^T. The decay's gradient needs no state at all: the column
// sums of dS_t . S_t are k dk + dlog alpha_t by the first line, q dq + dlog alpha_{t+1} by the last, so
//   dlog alpha_t = dlog alpha_{t+1} + q_t dq_t - k_t dk_t, and 0 where a document begins.
#pragma once

#include "kernels/rows.h"

namespace prism {

inline constexpr int kDecayRoot = 16;

template <class T>
struct GlaArgs {
  using A = acc_t<T>;
  // outputs
  T* o = nullptr;            // [B,T,H,V]
  A* final_state = nullptr;  // [B,H,V,K], or null
  // inputs
  const T *q = nullptr, *k = nullptr, *y = nullptr;  // [B,T,H,K]
  const T* w = nullptr;                              // [B,T,H,V]
  const A* initial_state = nullptr;                  // [B,H,V,K], or null: 0
  const int32_t* start = nullptr;                    // [B,T] kernels/documents.h, or null
  A* alpha = nullptr;                                // [B,T,H,K] scratch
  int64_t B = 0, T_len = 0, H = 0, K = 0, V = 0;

  int64_t n() const { return B * T_len; }
  // Token t's document, or the row without a state, begins with it.
  PRISM_HD bool opens(int64_t b, int64_t t) const {
    return t == 0 ? !initial_state : start && start[b * T_len + t] == t;
  }
};

template <class T>
struct GlaGrads {
  using A = acc_t<T>;
  T *dq = nullptr, *dk = nullptr, *dy = nullptr, *dw = nullptr;  // as the inputs, overwritten (=)
  A *dq_sum = nullptr, *dk_sum = nullptr;                        // [B,T,H,K] scratch: before rounding
  const T* d_o = nullptr;                                        // [B,T,H,V]
};

// One walk: a and r are rows of `rows` numbers a token and head, b and z of `columns`.
template <class T>
struct GlaWalk {
  const T *a = nullptr, *b = nullptr, *z = nullptr;
  int64_t rows = 0, columns = 0;
  bool reverse = false, decay_rows = false;  // alpha belongs to X's rows, else to its columns
};

// walk(GlaWalk, r) for each of the reverse pass's three.
template <class T, class Walk>
void gla_reverse_walks(const GlaArgs<T>& x, const GlaGrads<T>& g, const Walk& walk) {
  walk(GlaWalk<T>{x.k, x.w, g.d_o, x.K, x.V, false, true}, g.dq_sum);
  walk(GlaWalk<T>{x.q, g.d_o, x.w, x.K, x.V, true, true}, g.dk_sum);
  walk(GlaWalk<T>{g.d_o, x.q, x.k, x.V, x.K, true, false}, g.dw);
}

PRISM_KERNEL(gla_forward, (const GlaArgs<T>& args), (args))
PRISM_KERNEL(gla_backward, (const GlaArgs<T>& args, const GlaGrads<T>& grads), (args, grads))

}  // namespace prism
