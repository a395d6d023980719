// Small device helpers shared by the kernels: numbers in and out of storage, 16-byte accesses, reductions.
#pragma once

#include "tensor/cuda.h"
#include "tensor/dtype.h"

namespace prism::cuda {

inline constexpr int kWarp = 32;

__host__ __device__ constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A grid of `block` threads each that covers n elements.
inline unsigned grid_for(int64_t n, int block) { return static_cast<unsigned>(ceil_div(n, block)); }

template <class T>
__device__ float load(const T* x) {
  return static_cast<float>(*x);
}
template <class T>
__device__ void store(T* x, float value) {
  *x = static_cast<T>(value);
}

// Two bf16 in one word, `low` at the lower address.
__device__ inline uint32_t pack_bf16(float low, float high) {
  uint32_t word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

// 16 bytes of storage: 4 floats or 8 bf16. Addresses must be multiples of 16.
template <class T>
inline constexpr int kVec = 16 / static_cast<int>(sizeof(T));

template <class T>
__device__ void load_vec(const T* x, float (&values)[kVec<T>]) {
  const uint4 raw = *reinterpret_cast<const uint4*>(x);
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      values[i] = __uint_as_float(words[i]);
    } else {
      values[2 * i] = __uint_as_float(words[i] << 16);
      values[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
  }
}

template <class T>
__device__ void store_vec(T* x, const float (&values)[kVec<T>]) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4)
      words[i] = __float_as_uint(values[i]);
    else
      words[i] = pack_bf16(values[2 * i], values[2 * i + 1]);
  }
  *reinterpret_cast<uint4*>(x) = make_uint4(words[0], words[1], words[2], words[3]);
}

// Every lane gets the result over its group of `width` lanes (a power of two).
template <int width = kWarp>
__device__ float warp_sum(float x) {
#pragma unroll
  for (int i = width / 2; i > 0; i /= 2) x += __shfl_xor_sync(0xffffffffu, x, i);
  return x;
}
template <int width = kWarp>
__device__ float warp_max(float x) {
#pragma unroll
  for (int i = width / 2; i > 0; i /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, i));
  return x;
}

// Every thread gets the sum over its block of at most 1024 threads, a multiple of 32 (blockDim.x alone).
__device__ inline float block_sum(float x) {
  __shared__ float parts[kWarp];
  x = warp_sum(x);
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  __syncthreads();  // the parts of an earlier call have been read
  if (lane == 0) parts[warp] = x;
  __syncthreads();
  return warp_sum(lane < static_cast<int>(blockDim.x) / kWarp ? parts[lane] : 0.f);
}

// Lets a kernel use more shared memory than the 48 KiB that all may have. The leave is the kernel's, not the
// launch's: a smaller one for this launch could reach another thread's kernel before its launch, so every
// launch asks for all there is.
template <class Kernel>
void allow_shared_memory(Kernel kernel) {
  cudaFuncAttributes own;
  CUDA_CHECK(cudaFuncGetAttributes(&own, kernel));
  CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(context().shared_memory - own.sharedSizeBytes)));
}

}  // namespace prism::cuda
