// What every .cu file shares: the thread's stream, the cuBLAS handle, checked calls. Included by .cu files
// only.
#pragma once

#include <cublas_v2.h>
#include <cuda_runtime.h>

#include "tensor/device.h"

namespace prism::cuda {

struct Context {
  cudaStream_t stream;   // all work of this thread, in order; can be captured into a graph
  cublasHandle_t blas;   // on that stream, with a workspace of its own; float products without TF32
  int multiprocessors;   // of this card
  size_t shared_memory;  // bytes that one block may ask for
};

// Made at a thread's first call; throws what describe() throws when there is no usable card.
const Context& context();
inline cudaStream_t stream() { return context().stream; }

}  // namespace prism::cuda

#define CUDA_CHECK(call)                                                                      \
  do {                                                                                        \
    const cudaError_t status_ = (call);                                                       \
    if (status_ != cudaSuccess)                                                               \
      PRISM_FAIL(__FILE__, ":", __LINE__, ": ", cudaGetErrorString(status_), " (" #call ")"); \
  } while (0)

#define CUBLAS_CHECK(call)                                                                       \
  do {                                                                                           \
    const cublasStatus_t status_ = (call);                                                       \
    if (status_ != CUBLAS_STATUS_SUCCESS)                                                        \
      PRISM_FAIL(__FILE__, ":", __LINE__, ": ", cublasGetStatusString(status_), " (" #call ")"); \
  } while (0)

// After a kernel launch: reports what the launch itself got wrong (grid, shared memory, machine code).
#define CUDA_CHECK_LAUNCH() CUDA_CHECK(cudaGetLastError())
