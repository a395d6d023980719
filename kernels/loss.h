// Softmax cross entropy of a slice of rows, turned into its gradient in place (SPEC section 3).
#pragma once

#include "kernels/rows.h"

namespace prism {

// For each row i < n with target t >= 0:  row_loss[i] = -log softmax(logits[i])[t],
//                                          logits[i] <- (softmax(logits[i]) - e_t) * *scale
// and for target -1: row_loss 0, gradient 0. scale: one number on the device, 1 / scored positions of the
// step; null: the logits are left as they are.
PRISM_KERNEL(cross_entropy,
             (T * logits /*[n,vocab]*/, acc_t<T>* row_loss /*[n]*/, const int32_t* targets /*[n]*/,
              const acc_t<T>* scale, int64_t n, int64_t vocab),
             (logits, row_loss, targets, scale, n, vocab))

// *total += *scale * sum x_i, in one fixed order; scale null: 1.
PRISM_KERNEL(sum_into, (T * total, const T* x, const T* scale, int64_t n), (total, x, scale, n))

}  // namespace prism
