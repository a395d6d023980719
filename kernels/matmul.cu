// Dense products by cuBLAS. It is column-major: a row-major matrix is its transpose there, so C = A B is
// asked for as C^T = B^T A^T, with the operands swapped and untouched.
#include "kernels/matmul.h"

#include "tensor/cuda.h"

namespace prism::cuda {

namespace {

cublasComputeType_t float_compute = CUBLAS_COMPUTE_32F;

template <class T>
inline constexpr cudaDataType_t kDataType = sizeof(T) == 2 ? CUDA_R_16BF : CUDA_R_32F;

template <class C, class T>
void product(Rows<C> c, const MatmulArgs<T>& args) {
  if (args.m == 0 || args.n == 0) return;
  const float one = 1, keep = args.accumulate ? 1 : 0;
  const auto op = [](bool transposed) { return transposed ? CUBLAS_OP_T : CUBLAS_OP_N; };
  CUBLAS_CHECK(cublasGemmEx_64(context().blas, op(args.b_transposed), op(args.a_transposed), args.n, args.m,
                               args.k, &one, args.b.data, kDataType<T>, args.b.stride, args.a.data,
                               kDataType<T>, args.a.stride, &keep, c.data, kDataType<C>, c.stride,
                               sizeof(T) == 4 ? float_compute : CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
}

}  // namespace

void use_tf32(bool on) { float_compute = on ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F; }

template <class T>
void matmul(Rows<T> c, const MatmulArgs<T>& args) {
  product(c, args);
}

template <class T>
void matmul_acc(Rows<acc_t<T>> c, const MatmulArgs<T>& args) {
  product(c, args);
}

PRISM_ON_CUDA(matmul);
PRISM_ON_CUDA(matmul_acc);

}  // namespace prism::cuda
