// The serial solver: test-time training with a two-layer memory (Sun et al. 2024, TTT-MLP, mini-batches of
// one token). Per batch row and head, with the memory's weights W1 [M,K], b1 [M], W2 [K,M], b2 [K],
//
//   f(x; W) = x + LayerNorm(W2 GELU(W1 x + b1) + b2)              exact GELU; norm_weight, norm_bias a head
//   W_t = W_{t-1} - eta_t d/dW 1/2 |f(k_t; W_{t-1}) - v_t|^2      eta_t = rate beta_t
//   o_t = f(q_t; W_t)
//
// Every token's write waits for what the memory answers, so nothing runs in parallel over time. A document
// starts from W_0, the initial weights. kernels/README.md derives the reverse pass.
#pragma once

#include <cmath>

#include "tensor/dispatch.h"

namespace prism {

template <class T>
struct TttArgs {
  using A = acc_t<T>;
  // outputs
  T* o = nullptr;            // [B,T,H,K]; null: the record alone
  A* final_state = nullptr;  // [B,H,P] W_T - W_0 (W1 | b1 | W2 | b2), or null; may be initial_state
  A* record = nullptr;  // [B,H,T,R] of each token z1 | h | a1 [M], zhat | ahat | e [K], r_z, r_a; or null
  // inputs
  const T* q = nullptr;                                                // [B,T,H,K]
  const T* k = nullptr;                                                // [B,T,H,K]
  const T* v = nullptr;                                                // [B,T,H,K]
  const A* beta = nullptr;                                             // [B,T,H]
  const A *W1 = nullptr, *b1 = nullptr, *W2 = nullptr, *b2 = nullptr;  // [H,M,K], [H,M], [H,K,M], [H,K]
  const A *norm_weight = nullptr, *norm_bias = nullptr;                // [H,K]
  const A* initial_state = nullptr;  // [B,H,P] W - W_0 before the first token; null: 0
  const int32_t* start = nullptr;    // [B,T] (kernels/documents.h); null: one document a row
  // sizes; cuda: K at most 64, M at most 256, so that a head's memory stays on chip
  int64_t B = 0, T_len = 0, H = 0, K = 0, M = 0;
  A rate = 0, eps = 0;

  PRISM_HD constexpr int64_t P() const { return 2 * M * K + M + K; }
  PRISM_HD constexpr int64_t R() const { return 3 * M + 3 * K + 2; }
  PRISM_HD bool opens_document(int64_t b, int64_t t) const {
    return t == 0 || (start && start[b * T_len + t] == t);
  }
  // Entry j of a head's W1 | b1 | W2 | b2.
  PRISM_HD A initial_weight(int64_t h, int64_t j) const {
    const int64_t MK = M * K;
    if (j < MK) return W1[h * MK + j];
    if ((j -= MK) < M) return b1[h * M + j];
    if ((j -= M) < MK) return W2[h * MK + j];
    return b2[h * K + j - MK];
  }
};

template <class T>
struct TttGrads {
  using A = acc_t<T>;
  // outputs
  T *dq = nullptr, *dk = nullptr, *dv = nullptr;                     // [B,T,H,K]
  A* dbeta = nullptr;                                                // [B,T,H]
  A *dW1 = nullptr, *db1 = nullptr, *dW2 = nullptr, *db2 = nullptr;  // accumulated (+=),
  A *dnorm_weight = nullptr, *dnorm_bias = nullptr;                  // or null: not wanted
  A* partial = nullptr;                                              // [B,H,P+2K] scratch
  A* last_state = nullptr;                                           // [B,H,P] scratch: W_T - W_0
  // inputs
  const T* d_o = nullptr;  // [B,T,H,K]

  // Where entry j of a head's dW1 | db1 | dW2 | db2 | dnorm_weight | dnorm_bias is added; null: nowhere.
  PRISM_HD A* target(int64_t h, int64_t j, int64_t K, int64_t M) const {
    A* const out[] = {dW1, db1, dW2, db2, dnorm_weight, dnorm_bias};
    const int64_t size[] = {M * K, M, M * K, K, K, K};
    int i = 0;
    for (; j >= size[i]; ++i) j -= size[i];
    return out[i] ? out[i] + h * size[i] + j : nullptr;
  }
};

// GELU(z) = z Phi(z) and its first two derivatives.
template <class A>
struct Gelu {
  A value, slope, bend;
  PRISM_HD explicit Gelu(A z) {
    const A cdf = A(0.5) * (1 + std::erf(z * A(0.70710678118654752440)));
    const A density = A(0.39894228040143267794) * std::exp(A(-0.5) * z * z);
    value = z * cdf, slope = cdf + z * density, bend = density * (2 - z * z);
  }
};

PRISM_KERNEL(ttt_forward, (const TttArgs<T>& args), (args))
// Fills args.record (required) by a forward pass, then walks the tokens backwards.
PRISM_KERNEL(ttt_backward, (const TttArgs<T>& args, const TttGrads<T>& grads), (args, grads))

}  // namespace prism
