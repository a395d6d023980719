// The scalars of a token and head that steer the scan (SPEC section 3):
//   beta = sigmoid(b)        g = -exp(A_log) softplus(a + dt_bias),  or RetNet's fixed log(1 - 2^{-5-h})
#pragma once

#include "kernels/rows.h"

namespace prism {

template <class T>
struct GatesArgs {
  using A = acc_t<T>;
  // outputs
  A* beta = nullptr;  // [n,H]
  A* g = nullptr;     // [n,H]; null: no decay
  // inputs
  Rows<const T> b;             // [n,H]
  Rows<const T> a;             // [n,H]; absent with g given: the fixed decay
  const A* A_log = nullptr;    // [H]
  const A* dt_bias = nullptr;  // [H]
  int64_t n = 0, H = 0;
};

template <class T>
struct GatesGrads {
  using A = acc_t<T>;
  Rows<T> db, da;            // [n,H]; da absent where a is
  A* dA_log = nullptr;       // [H], accumulated (+=)
  A* ddt_bias = nullptr;     // [H], accumulated (+=)
  A* partial = nullptr;      // [sum_tiles(n),2,H] scratch
  const A* dbeta = nullptr;  // [n,H]
  const A* dg = nullptr;     // [n,H] or null
};

PRISM_KERNEL(gates_forward, (const GatesArgs<T>& args), (args))
PRISM_KERNEL(gates_backward, (const GatesArgs<T>& args, const GatesGrads<T>& grads), (args, grads))

}  // namespace prism
