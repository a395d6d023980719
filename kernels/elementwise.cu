#include "kernels/elementwise.h"

#include "kernels/rows.cuh"

namespace prism::cuda {

namespace {

template <class T>
struct SwigluForward {
  static constexpr int kInputs = 2;
  T* y;
  const T* x;
  int64_t F;
  template <int N>
  __device__ void load(int64_t row, int64_t column, float (&in)[2][N]) const {
    load_n<N>(x + row * 2 * F + column, in[0]);
    load_n<N>(x + row * 2 * F + F + column, in[1]);
  }
  template <int N>
  __device__ void finish(int64_t row, int64_t column, float (&in)[2][N]) const {
    each<N>([&](int i) { in[0][i] *= sigmoid(in[0][i]) * in[1][i]; });
    store_n<N>(y + row * F + column, in[0]);
  }
};

template <class T>
struct SwigluBackward {
  static constexpr int kInputs = 3;
  T *dx, *y;
  const T *dy, *x;
  int64_t F;
  template <int N>
  __device__ void load(int64_t row, int64_t column, float (&in)[3][N]) const {
    load_n<N>(x + row * 2 * F + column, in[0]);
    load_n<N>(x + row * 2 * F + F + column, in[1]);
    load_n<N>(dy + row * F + column, in[2]);
  }
  template <int N>
  __device__ void finish(int64_t row, int64_t column, float (&in)[3][N]) const {
    float dgate[N], dup[N], out[N];
    each<N>([&](int i) {
      const float gate = in[0][i], s = sigmoid(gate);
      out[i] = gate * (s * in[1][i]);
      dgate[i] = in[2][i] * in[1][i] * s * (1.f + gate * (1.f - s));
      dup[i] = in[2][i] * gate * s;
    });
    store_n<N>(dx + row * 2 * F + column, dgate);
    store_n<N>(dx + row * 2 * F + F + column, dup);
    if (y) store_n<N>(y + row * F + column, out);
  }
};

// y = x, or y += x.
template <class T, bool add>
struct TakeRows {
  static constexpr int kInputs = add ? 2 : 1;
  Rows<T> y;
  Rows<const T> x;
  template <int N>
  __device__ void load(int64_t row, int64_t column, float (&in)[kInputs][N]) const {
    load_n<N>(x[row] + column, in[0]);
    if constexpr (add) load_n<N>(y[row] + column, in[1]);
  }
  template <int N>
  __device__ void finish(int64_t row, int64_t column, float (&in)[kInputs][N]) const {
    if constexpr (add) each<N>([&](int i) { in[0][i] += in[1][i]; });
    store_n<N>(y[row] + column, in[0]);
  }
};

// One vector of N a thread.
template <int N, class T>
__global__ void cast_kernel(T* y, const float* x, int64_t n) {
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * N;
  if (i >= n) return;
  float values[N];
  load_n<N>(x + i, values);
  store_n<N>(y + i, values);
}

// A block sums 32 columns: warp w the tiles w, w + 32, ..., then the warps in order.
__global__ void add_tiles_kernel(const float* partial, int64_t tiles, int64_t width, int64_t columns,
                                 float* first, float* second) {
  __shared__ float sums[kWarp][kWarp];
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kWarp + threadIdx.x;
  float sum = 0;
  if (column < width)
#pragma unroll 8
    for (int64_t tile = threadIdx.y; tile < tiles; tile += kWarp) sum += partial[tile * width + column];
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  float* const y = column < columns ? first : second;
  if (threadIdx.y > 0 || column >= width || !y) return;
  for (int w = 1; w < kWarp; ++w) sum += sums[w][threadIdx.x];
  y[column % columns] += sum;
}

}  // namespace

template <class T>
void swiglu_forward(T* y, const T* x, int64_t n, int64_t F) {
  with_vectors<T>(aligned(y, x), F, [&](auto N) { by_rows(N, SwigluForward<T>{y, x, F}, n, F); });
}

template <class T>
void swiglu_backward(T* dx, T* y, const T* dy, const T* x, int64_t n, int64_t F) {
  with_vectors<T>(aligned(dx, y, dy, x), F, [&](auto N) {
    by_rows(N, SwigluBackward<T>{dx, y, dy, x, F}, n, F);
  });
}

template <class T>
void add_rows(Rows<T> y, Rows<const T> x, int64_t n, int64_t columns) {
  with_vectors<T>(aligned(y, x), columns, [&](auto N) { by_rows(N, TakeRows<T, true>{y, x}, n, columns); });
}

template <class T>
void copy_rows(Rows<T> y, Rows<const T> x, int64_t n, int64_t columns) {
  with_vectors<T>(aligned(y, x), columns, [&](auto N) { by_rows(N, TakeRows<T, false>{y, x}, n, columns); });
}

template <class T>
void cast(T* y, const acc_t<T>* x, int64_t n) {
  if (n == 0) return;
  with_vectors<T>(aligned(y, x), n, [&](auto N) {
    cast_kernel<N><<<grid_for(ceil_div(n, N), 256), 256, 0, stream()>>>(y, x, n);
  });
  CUDA_CHECK_LAUNCH();
}

void add_tiles(const float* partial, int64_t tiles, int parts, int64_t columns, float* first, float* second) {
  if (tiles * columns == 0 || (!first && !second)) return;
  const int64_t width = parts * columns;
  add_tiles_kernel<<<grid_for(width, kWarp), dim3(kWarp, kWarp), 0, stream()>>>(partial, tiles, width,
                                                                                columns, first, second);
  CUDA_CHECK_LAUNCH();
}

PRISM_ON_CUDA(swiglu_forward);
PRISM_ON_CUDA(swiglu_backward);
PRISM_ON_CUDA(add_rows);
PRISM_ON_CUDA(copy_rows);
PRISM_ON_CUDA(cast);

}  // namespace prism::cuda
