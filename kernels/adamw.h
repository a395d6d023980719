// AdamW with decoupled decay, global-norm clipping and the non-finite check (SPEC section 9), all on the
// device: T is the masters' type.
#pragma once

#include "kernels/rows.h"

namespace prism {

// What one step shares, on the device: the host writes lr, bias corrections and clears nothing else; the
// kernels do the rest.
template <class T>
struct StepScalars {
  T lr;           // learning rate of this step
  T correction1;  // 1 - beta1^t
  T correction2;  // 1 - beta2^t, t counted from 1 over the steps taken
  T loss;         // sum over scored positions / their number; set before grad_norm
  T norm;         // global norm of the gradients, before clipping
  T clip_scale;   // min(1, clip / (norm + 1e-6)); 0 when the loss or the norm is not finite: the update is
                  // skipped
};

// Sets norm and clip_scale from the gradient [n] and loss; clip <= 0 turns clipping off. partial:
// [grad_norm_partials(n)] scratch.
inline int64_t grad_norm_partials(int64_t n) { return (n + 65535) / 65536; }
PRISM_KERNEL(grad_norm, (StepScalars<T> * scalars, T* partial, const T* grad, int64_t n, T clip),
             (scalars, partial, grad, n, clip))

template <class T>
struct AdamWArgs {
  T* theta = nullptr;       // [n] masters
  T* m = nullptr;           // [n] first moment
  T* v = nullptr;           // [n] second moment
  bf16* copy = nullptr;     // [n] compute copy, written again after the update; or null
  const T* grad = nullptr;  // [n], before clipping
  const StepScalars<T>* scalars = nullptr;
  int64_t n = 0;
  T beta1 = 0, beta2 = 0, eps = 0, weight_decay = 0;
};
// m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g^2;  theta -= lr (wd theta + (m / c1) / (sqrt(v / c2) + eps));
// nothing when clip_scale is 0.
PRISM_KERNEL(adamw, (const AdamWArgs<T>& args), (args))

}  // namespace prism
