#include "kernels/adamw.h"

#include "kernels/rows.cuh"

namespace prism::cuda {

namespace {

constexpr int kThreads = 512;
constexpr int64_t kPart = 65536;  // numbers a partial sum covers (grad_norm_partials)

// A block takes one part.
template <int N>
__global__ void square_sum_kernel(float* partial, const float* grad, int64_t n) {
  const int64_t begin = blockIdx.x * kPart, end = min(begin + kPart, n);
  float sum = 0, g[N];
#pragma unroll 8
  for (int64_t i = begin + threadIdx.x * N; i < end; i += kThreads * N) {
    load_n<N>(grad + i, g);
    each<N>([&](int k) { sum += g[k] * g[k]; });
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// One block: the parts, then what the step shares.
__global__ void step_scalars_kernel(StepScalars<float>* scalars, const float* partial, int64_t parts,
                                    float clip, float beta1, float beta2) {
  float sum = 0;
  for (int64_t i = threadIdx.x; i < parts; i += blockDim.x) sum += partial[i];
  sum = block_sum(sum);
  if (threadIdx.x > 0) return;
  StepScalars<float> s = *scalars;
  s.norm = sqrtf(sum);
  const bool finite = isfinite(s.norm) && isfinite(s.loss);
  s.clip_scale = !finite ? 0.f : clip > 0 ? fminf(1.f, clip / (s.norm + 1e-6f)) : 1.f;
  s.taken += finite;
  s.skipped += !finite;
  s.skipped_in_row = finite ? 0 : s.skipped_in_row + 1;
  s.correction1 = 1.f - powf(beta1, static_cast<float>(s.taken));
  s.correction2 = 1.f - powf(beta2, static_cast<float>(s.taken));
  *scalars = s;
}

// One vector of N parameters a thread: everything is read once and written once.
template <int N>
__global__ void adamw_kernel(AdamWArgs<float> a) {
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * N;
  if (i >= a.n) return;
  float theta[N], m[N], v[N], g[N];
  load_n<N>(a.grad + i, g), load_n<N>(a.m + i, m), load_n<N>(a.v + i, v), load_n<N>(a.theta + i, theta);
  const StepScalars<float> s = *a.scalars;
  if (s.clip_scale == 0.f) return;
  each<N>([&](int k) {
    const float grad = g[k] * s.clip_scale;
    m[k] = a.beta1 * m[k] + (1.f - a.beta1) * grad;
    v[k] = a.beta2 * v[k] + (1.f - a.beta2) * grad * grad;
    const float step = (m[k] / s.correction1) / (sqrtf(v[k] / s.correction2) + a.eps);
    theta[k] -= s.lr * (a.weight_decay * theta[k] + step);
  });
  store_n<N>(a.m + i, m), store_n<N>(a.v + i, v), store_n<N>(a.theta + i, theta);
  if (a.copy) store_n<N>(a.copy + i, theta);
}

}  // namespace

template <>
void grad_norm(StepScalars<float>* scalars, float* partial, const float* grad, int64_t n, float clip,
               float beta1, float beta2) {
  const int64_t parts = grad_norm_partials(n);
  if (parts > 0)
    with_vectors<float>(aligned(grad), n, [&](auto N) {
      square_sum_kernel<N><<<grid_for(parts, 1), kThreads, 0, stream()>>>(partial, grad, n);
    });
  CUDA_CHECK_LAUNCH();
  step_scalars_kernel<<<1, 1024, 0, stream()>>>(scalars, partial, parts, clip, beta1, beta2);
  CUDA_CHECK_LAUNCH();
}

template <>
void adamw(const AdamWArgs<float>& a) {
  if (a.n == 0) return;
  // 8 at a time, for the copy's 16 bytes.
  const bool whole = aligned(a.theta, a.m, a.v, a.copy, a.grad) && a.n % kVec<bf16> == 0;
  const auto launch = [&](auto N) {
    adamw_kernel<N><<<grid_for(ceil_div(a.n, N), 256), 256, 0, stream()>>>(a);
  };
  whole ? launch(Int<kVec<bf16>>{}) : launch(Int<1>{});
  CUDA_CHECK_LAUNCH();
}

}  // namespace prism::cuda
