// Mixture of memories (SPEC section 11): which memories a token uses, and what it reads from them. A head of
// the scan is one head of one memory; memory 0 is shared by all tokens, 1..M are routed.
//
//   weight_0 = 1     weight_m = exp(x_m) / sum of exp(x_j) over the chosen j, 0 where m is not chosen
//   y = sum_m weight_m o_m
//
// The `active` largest of the router's M values x are chosen, of equal ones the lower index. A memory that is
// not chosen gets beta = 0 and g = 0: the scan erases nothing, writes beta v = 0 and forgets nothing.
#pragma once

#include <cmath>

#include "kernels/rows.h"

namespace prism {

template <class T>
struct RouteArgs {
  using A = acc_t<T>;
  A* weight = nullptr;  // [n,M+1]
  A* beta = nullptr;    // [n,M+1,H], in place: 0 where a memory is not chosen
  A* g = nullptr;       // [n,M+1,H], likewise
  Rows<const T> x;      // [n,M]
  int64_t n = 0, M = 0, H = 0, active = 1;
};

template <class T>
struct RouteGrads {
  using A = acc_t<T>;
  Rows<T> dx;                  // [n,M]
  A* dbeta = nullptr;          // [n,M+1,H], in place as beta
  A* dg = nullptr;             // [n,M+1,H]
  const A* dweight = nullptr;  // [n,M+1]
};

template <class T>
struct MixArgs {
  using A = acc_t<T>;
  T* y = nullptr;             // [n,columns]
  const T* o = nullptr;       // [n,N,columns]
  const A* weight = nullptr;  // [n,N]
  int64_t n = 0, N = 0, columns = 0;
};

template <class T>
struct MixGrads {
  using A = acc_t<T>;
  T* d_o = nullptr;       // [n,N,columns]
  A* dweight = nullptr;   // [n,N]
  const T* dy = nullptr;  // [n,columns]
};

PRISM_KERNEL(route_forward, (const RouteArgs<T>& args), (args))
// The choice counts as constant. Reads the forward pass's weight, not its beta and g.
PRISM_KERNEL(route_backward, (const RouteArgs<T>& args, const RouteGrads<T>& grads), (args, grads))
PRISM_KERNEL(mix_forward, (const MixArgs<T>& args), (args))
PRISM_KERNEL(mix_backward, (const MixArgs<T>& args, const MixGrads<T>& grads), (args, grads))

// Whether a token with the router's values x chooses its m-th, counted from 0.
template <class T>
PRISM_HD bool chosen(const T* x, int64_t M, int64_t active, int64_t m) {
  using A = acc_t<T>;
  const A mine = static_cast<A>(x[m]);
  int64_t before = 0;
  for (int64_t j = 0; j < M; ++j) {
    const A other = static_cast<A>(x[j]);
    before += other > mine || (other == mine && j < m);
  }
  return before < active;
}

// weight_{m+1}: 1 / sum of exp(x_j - x_m), whose overflow gives the 0 it should.
template <class T>
PRISM_HD acc_t<T> routing_weight(const T* x, int64_t M, int64_t active, int64_t m) {
  using A = acc_t<T>;
  if (!chosen(x, M, active, m)) return 0;
  A sum = 0;
  for (int64_t j = 0; j < M; ++j)
    if (chosen(x, M, active, j)) sum += std::exp(static_cast<A>(x[j]) - static_cast<A>(x[m]));
  return 1 / sum;
}

}  // namespace prism
