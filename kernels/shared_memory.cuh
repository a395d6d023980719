// Leave for a kernel to use more shared memory than the 48 KiB that all may have.
#pragma once

#include "tensor/cuda.h"

namespace prism::cuda {

// The leave is the kernel's, not the launch's: a smaller one for this launch could reach another thread's
// kernel before its launch, so every launch asks for all there is.
template <class Kernel>
void allow_shared_memory(Kernel kernel) {
  cudaFuncAttributes own;
  CUDA_CHECK(cudaFuncGetAttributes(&own, kernel));
  CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(context().shared_memory - own.sharedSizeBytes)));
}

}  // namespace prism::cuda
