#include "kernels/route.h"

#include "kernels/rows.cuh"

namespace prism::cuda {

namespace {

constexpr int kThreads = 128;

template <class T>
__device__ void clear_unless_chosen(const RouteArgs<T>& x, float* beta, float* g, int64_t i, int64_t m) {
  if (chosen(x.x[i], x.M, x.active, m)) return;
  const int64_t at = (i * (x.M + 1) + m + 1) * x.H;
  for (int64_t h = at; h < at + x.H; ++h) beta[h] = g[h] = 0;
}

// One token and memory a thread.
template <class T>
__global__ void route_forward_kernel(RouteArgs<T> x) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t i = at / (x.M + 1), m = at % (x.M + 1) - 1;
  if (i >= x.n) return;
  x.weight[at] = m < 0 ? 1.f : routing_weight(x.x[i], x.M, x.active, m);
  if (m >= 0) clear_unless_chosen(x, x.beta, x.g, i, m);
}

template <class T>
__global__ void route_backward_kernel(RouteArgs<T> x, RouteGrads<T> grads) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t i = at / (x.M + 1), m = at % (x.M + 1) - 1;
  if (i >= x.n || m < 0) return;
  float mean = 0;
  for (int64_t j = at - m; j < at - m + x.M; ++j) mean += x.weight[j] * grads.dweight[j];
  store(grads.dx[i] + m, x.weight[at] * (grads.dweight[at] - mean));
  clear_unless_chosen(x, grads.dbeta, grads.dg, i, m);
}

// One number of y a thread.
template <class T>
__global__ void mix_forward_kernel(MixArgs<T> x) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x, i = at / x.columns;
  if (i >= x.n) return;
  const T* const o = x.o + i * x.N * x.columns + at % x.columns;
  float y = 0;
  for (int64_t m = 0; m < x.N; ++m) y += x.weight[i * x.N + m] * load(o + m * x.columns);
  store(x.y + at, y);
}

// One token and memory a block.
template <class T>
__global__ void mix_backward_kernel(MixArgs<T> x, MixGrads<T> grads) {
  const int64_t m = blockIdx.x, o = m * x.columns, y = m / x.N * x.columns;
  float dot = 0;
  for (int64_t c = threadIdx.x; c < x.columns; c += kThreads) {
    const float dy = load(grads.dy + y + c);
    store(grads.d_o + o + c, x.weight[m] * dy);
    dot += dy * load(x.o + o + c);
  }
  dot = block_sum(dot);
  if (threadIdx.x == 0) grads.dweight[m] = dot;
}

}  // namespace

template <class T>
void route_forward(const RouteArgs<T>& x) {
  if (x.n == 0) return;
  route_forward_kernel<<<grid_for(x.n * (x.M + 1), kThreads), kThreads, 0, stream()>>>(x);
  CUDA_CHECK_LAUNCH();
}

template <class T>
void route_backward(const RouteArgs<T>& x, const RouteGrads<T>& grads) {
  if (x.n == 0) return;
  route_backward_kernel<<<grid_for(x.n * (x.M + 1), kThreads), kThreads, 0, stream()>>>(x, grads);
  CUDA_CHECK_LAUNCH();
}

template <class T>
void mix_forward(const MixArgs<T>& x) {
  if (x.n == 0) return;
  mix_forward_kernel<<<grid_for(x.n * x.columns, kThreads), kThreads, 0, stream()>>>(x);
  CUDA_CHECK_LAUNCH();
}

template <class T>
void mix_backward(const MixArgs<T>& x, const MixGrads<T>& grads) {
  if (x.n == 0) return;
  mix_backward_kernel<<<grid_for(x.n * x.N, 1), kThreads, 0, stream()>>>(x, grads);
  CUDA_CHECK_LAUNCH();
}

PRISM_ON_CUDA(route_forward);
PRISM_ON_CUDA(route_backward);
PRISM_ON_CUDA(mix_forward);
PRISM_ON_CUDA(mix_backward);

}  // namespace prism::cuda
