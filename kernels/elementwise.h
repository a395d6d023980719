// Elementwise work that belongs to no other op.
#pragma once

#include "kernels/rows.h"

namespace prism {

// y = SiLU(gate) up, with gate | up the two halves of a row of x: the feed-forward's inner product (Shazeer
// 2020).
PRISM_KERNEL(swiglu_forward, (T * y /*[n,F]*/, const T* x /*[n,2 F]*/, int64_t n, int64_t F), (y, x, n, F))
// y, null when it is not wanted, is the forward's output once more.
PRISM_KERNEL(swiglu_backward, (T * dx, T* y, const T* dy, const T* x, int64_t n, int64_t F),
             (dx, y, dy, x, n, F))

// y[i,:] += x[i,:], and y[i,:] = x[i,:].
PRISM_KERNEL(add_rows, (Rows<T> y, Rows<const T> x, int64_t n, int64_t columns), (y, x, n, columns))
PRISM_KERNEL(copy_rows, (Rows<T> y, Rows<const T> x, int64_t n, int64_t columns), (y, x, n, columns))

// y = x rounded to the storage type: the compute copy of a parameter.
PRISM_KERNEL(cast, (T * y, const acc_t<T>* x, int64_t n), (y, x, n))

}  // namespace prism
