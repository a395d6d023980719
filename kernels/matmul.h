// Dense products, row-major: C[m,n] = op(A)[m,k] op(B)[k,n], or C += with accumulate. op is the transpose
// where asked. The engine's three uses, for a weight W [out,in] and rows x [n,in], y [n,out]:
//   y = x W^T        {x, W, .b_transposed}
//   dx = dy W        {dy, W}
//   dW += dy^T x     {dy, x, .a_transposed, .accumulate}, into the accumulation type
#pragma once

#include "kernels/rows.h"

namespace prism {

template <class T>
struct MatmulArgs {
  Rows<const T> a;  // [m,k], or [k,m] when a_transposed
  Rows<const T> b;  // [k,n], or [n,k] when b_transposed
  int64_t m = 0, n = 0, k = 0;
  bool a_transposed = false, b_transposed = false;
  bool accumulate = false;
};

// C in the storage type.
PRISM_KERNEL(matmul, (Rows<T> c, const MatmulArgs<T>& args), (c, args))
// C in the accumulation type (parameter gradients).
PRISM_KERNEL(matmul_acc, (Rows<acc_t<T>> c, const MatmulArgs<T>& args), (c, args))

// From now on float products on cuda may round their operands to TF32 (10 bits of mantissa). Off at start.
namespace cuda {
void use_tf32(bool on);
}

}  // namespace prism
