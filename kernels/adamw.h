// AdamW with decoupled decay, global-norm clipping and the non-finite check (SPEC section 9), all on the
// device: T is the masters' type. The host writes lr and clears loss before a step; everything else is the
// kernels'.
#pragma once

#include "kernels/rows.h"

namespace prism {

// What one optimizer step shares, on the device.
template <class T>
struct StepScalars {
  T lr;                    // learning rate of this step
  T loss;                  // mean over the scored positions of the step
  T norm;                  // global norm of the gradients, before clipping
  T clip_scale;            // min(1, clip / (norm + 1e-6)); 0: not finite, the update is skipped
  T correction1;           // 1 - beta1^taken
  T correction2;           // 1 - beta2^taken
  int32_t taken;           // updates made so far
  int32_t skipped;         // updates skipped so far
  int32_t skipped_in_row;  // and since the last one made
};

// Sets norm and clip_scale from the gradient [n] and the loss, counts the step as taken or skipped, sets the
// corrections. clip <= 0: no clipping. partial: [grad_norm_partials(n)] scratch, summed in order.
inline int64_t grad_norm_partials(int64_t n) { return (n + 65535) / 65536; }
PRISM_KERNEL(grad_norm,
             (StepScalars<T> * scalars, T* partial, const T* grad, int64_t n, T clip, T beta1, T beta2),
             (scalars, partial, grad, n, clip, beta1, beta2))

// m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g^2;  theta -= lr (wd theta + (m / c1) / (sqrt(v / c2) + eps)),
// with g the clipped gradient and c1, c2 the corrections; nothing when the step is skipped.
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
PRISM_KERNEL(adamw, (const AdamWArgs<T>& args), (args))

}  // namespace prism
