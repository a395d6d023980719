// RMSNorm with the residual sum before it, and the gated output norm of the mixers (SPEC section 3).
#pragma once

#include "kernels/rows.h"

namespace prism {

// sum = x + y;   xn = sum rstd weight,   rstd = 1 / sqrt(mean(sum^2) + eps), over rows of D
template <class T>
struct AddNormArgs {
  using A = acc_t<T>;
  // outputs
  T* sum = nullptr;   // [n,D]; null when y is null (sum = x, not copied). May be x or y itself
  T* xn = nullptr;    // [n,D]
  A* rstd = nullptr;  // [n]
  // inputs
  const T* x = nullptr;       // [n,D]
  const T* y = nullptr;       // [n,D] or null
  const A* weight = nullptr;  // [D]
  A eps = 0;
  int64_t n = 0, D = 0;
};
PRISM_KERNEL(add_norm_forward, (const AddNormArgs<T>& args), (args))

// dsum_out = dsum_in + d(norm)/d(sum)^T dxn: the gradient of x, and of y as well.
template <class T>
struct AddNormGrads {
  using A = acc_t<T>;
  T* dsum = nullptr;           // [n,D] out; may be dsum_in itself
  T* xn = nullptr;             // [n,D] out, the forward's once more; null when it is not wanted
  A* dweight = nullptr;        // [D], accumulated (+=)
  A* partial = nullptr;        // [sum_tiles(n),D] scratch
  const T* dsum_in = nullptr;  // [n,D] gradient of sum by its other uses; null: 0
  const T* dxn = nullptr;      // [n,D]
  const T* sum = nullptr;      // [n,D]
  const A* rstd = nullptr;     // [n]
  const A* weight = nullptr;
  int64_t n = 0, D = 0;
};
PRISM_KERNEL(add_norm_backward, (const AddNormGrads<T>& grads), (grads))

// y = RMSNorm_V(o) weight * SiLU(gate), per head: rows of V; the weight is shared by the heads
template <class T>
struct GatedNormArgs {
  using A = acc_t<T>;
  T* y = nullptr;             // [n,H,V]; the reverse pass writes it once more, unless it is null
  const T* o = nullptr;       // [n,H,V]
  Rows<const T> gate;         // [n,H V]
  const A* weight = nullptr;  // [V]
  A eps = 0;
  int64_t n = 0, H = 0, V = 0;
};
template <class T>
struct GatedNormGrads {
  using A = acc_t<T>;
  T* d_o = nullptr;       // [n,H,V]
  Rows<T> dgate;          // [n,H V]
  A* dweight = nullptr;   // [V], accumulated (+=)
  A* partial = nullptr;   // [sum_tiles(n),V] scratch
  const T* dy = nullptr;  // [n,H,V]
};
PRISM_KERNEL(gated_norm_forward, (const GatedNormArgs<T>& args), (args))
PRISM_KERNEL(gated_norm_backward, (const GatedNormArgs<T>& args, const GatedNormGrads<T>& grads),
             (args, grads))

}  // namespace prism
