#include "kernels/loss.h"

#include <cfloat>

#include "kernels/rows.cuh"

namespace prism::cuda {

namespace {

constexpr int kHeld = 8;  // vectors of a row that a thread keeps in registers

// The total over the block of sum exp(highest), as log: the online softmax's merge.
__device__ float block_log_sum_exp(float highest, float sum) {
  __shared__ float parts[kWarp];
  const int warps = static_cast<int>(blockDim.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const float in_warp = warp_max(highest);
  if (lane == 0) parts[threadIdx.x / kWarp] = in_warp;
  __syncthreads();
  const float in_block = warp_max(lane < warps ? parts[lane] : -FLT_MAX);
  return in_block + logf(block_sum(sum * fast_exp(highest - in_block)));
}

// One row a block, held in registers between the sum and the gradient: the logits are read and written once.
// A row too long for that is read again.
template <int kThreads, int N, class T>
__global__ void __launch_bounds__(kThreads, 1024 / kThreads)
    cross_entropy_kernel(T* logits, float* row_loss, const int32_t* targets, const float* scale,
                         int64_t vocab) {
  const int64_t row = blockIdx.x;
  constexpr int step = kThreads * N, pass = kHeld * step;
  const int first = static_cast<int>(threadIdx.x) * N;
  const int32_t target = targets[row];
  T* x = logits + row * vocab + first;
  const int width = static_cast<int>(vocab) - first;  // from this thread's first logit on
  Packed<N, T> held[kHeld];
  float values[N];
  const auto load = [&](int at) {
#pragma unroll
    for (int s = 0; s < kHeld; ++s)
      if (at + s * step < width) held[s].load(x + at + s * step);
  };
  if (target < 0) {
    if (threadIdx.x == 0) row_loss[row] = 0.f;
    each<N>([&](int i) { values[i] = 0.f; });
    for (int at = 0; scale && at < width; at += step) store_n<N>(x + at, values);
    return;
  }
  const float chosen = cuda::load(logits + row * vocab + target);
  float highest = -FLT_MAX, sum = 0;
  for (int at = 0; at < width; at += pass) {
    load(at);
    const float before = highest;
#pragma unroll
    for (int s = 0; s < kHeld; ++s)
      if (at + s * step < width) {
        held[s].unpack(values);
        each<N>([&](int i) { highest = fmaxf(highest, values[i]); });
      }
    sum *= fast_exp(before - highest);
#pragma unroll
    for (int s = 0; s < kHeld; ++s)
      if (at + s * step < width) {
        held[s].unpack(values);
        each<N>([&](int i) { sum += fast_exp(values[i] - highest); });
      }
  }
  const float log_sum = block_log_sum_exp(highest, sum);
  if (threadIdx.x == 0) row_loss[row] = log_sum - chosen;
  if (!scale) return;
  const float factor = *scale;
  for (int at = 0; at < width; at += pass) {
    if (pass < vocab) load(at);
#pragma unroll
    for (int s = 0; s < kHeld; ++s)
      if (at + s * step < width) {
        held[s].unpack(values);
        const int to_target = target - first - at - s * step;
        each<N>([&](int i) {
          values[i] = factor * (fast_exp(values[i] - log_sum) - (i == to_target ? 1.f : 0.f));
        });
        store_n<N>(x + at + s * step, values);
      }
  }
}

// One block.
template <int kThreads>
__global__ void sum_into_kernel(float* total, const float* x, const float* scale, int64_t n) {
  float sum = 0;
#pragma unroll 8
  for (int64_t i = threadIdx.x; i < n; i += kThreads) sum += x[i];
  sum = block_sum(sum);
  if (threadIdx.x == 0) *total += scale ? *scale * sum : sum;
}

}  // namespace

template <class T>
void cross_entropy(T* logits, acc_t<T>* row_loss, const int32_t* targets, const acc_t<T>* scale, int64_t n,
                   int64_t vocab) {
  if (n == 0) return;
  with_vectors<T>(aligned(logits), vocab, [&](auto N) {
    const auto launch = [&](auto threads) {
      cross_entropy_kernel<threads, N>
          <<<grid_for(n, 1), threads.value, 0, stream()>>>(logits, row_loss, targets, scale, vocab);
    };
    vocab <= 64 * kHeld* N ? launch(Int<64>{}) : launch(Int<512>{});
  });
  CUDA_CHECK_LAUNCH();
}

template <class T>
void sum_into(T* total, const T* x, const T* scale, int64_t n) {
  sum_into_kernel<1024><<<1, 1024, 0, stream()>>>(total, x, scale, n);
  CUDA_CHECK_LAUNCH();
}

PRISM_ON_CUDA(cross_entropy);
template void sum_into(float*, const float*, const float*, int64_t);

}  // namespace prism::cuda
