#include "kernels/gates.h"

#include "kernels/scalars.cuh"

namespace prism::cuda {

namespace {

// One token and head a thread.
template <class T>
__global__ void gates_forward_kernel(GatesArgs<T> x) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t i = at / x.H, h = at % x.H;
  if (i >= x.n) return;
  x.beta[at] = sigmoid(load(x.b[i] + h));
  if (!x.g) return;
  if (x.a)
    x.g[at] = learned_log_decay(x.A_log[h], load(x.a[i] + h) + x.dt_bias[h]);
  else
    x.g[at] = fixed_log_decay(h);
}

// A block takes a tile of tokens, one a thread, and one head.
template <class T>
__global__ void gates_backward_kernel(GatesArgs<T> x, GatesGrads<T> g) {
  const int64_t i = blockIdx.x * kSumTile + threadIdx.x, h = blockIdx.y, at = i * x.H + h;
  float dA_log = 0, da = 0;
  if (i < x.n) {
    const float beta = sigmoid(load(x.b[i] + h));
    store(g.db[i] + h, g.dbeta[at] * beta * (1.f - beta));
    if (x.a) {
      const float rate = -expf(x.A_log[h]), z = load(x.a[i] + h) + x.dt_bias[h];
      da = g.dg[at] * rate * sigmoid(z);
      dA_log = g.dg[at] * rate * softplus(z);  // dg/dA_log = g
      store(g.da[i] + h, da);
    }
  }
  if (!x.a) return;
  dA_log = block_sum(dA_log);
  da = block_sum(da);
  if (threadIdx.x > 0) return;
  g.partial[2 * blockIdx.x * x.H + h] = dA_log;
  g.partial[(2 * blockIdx.x + 1) * x.H + h] = da;
}

}  // namespace

template <class T>
void gates_forward(const GatesArgs<T>& x) {
  if (x.n == 0) return;
  gates_forward_kernel<<<grid_for(x.n * x.H, 256), 256, 0, stream()>>>(x);
  CUDA_CHECK_LAUNCH();
}

template <class T>
void gates_backward(const GatesArgs<T>& x, const GatesGrads<T>& g) {
  const int64_t tiles = sum_tiles(x.n);
  if (tiles == 0) return;
  gates_backward_kernel<<<dim3(grid_for(tiles, 1), grid_for(x.H, 1)), kSumTile, 0, stream()>>>(x, g);
  CUDA_CHECK_LAUNCH();
  if (x.a) add_tiles(g.partial, tiles, 2, x.H, g.dA_log, g.ddt_bias);
}

PRISM_ON_CUDA(gates_forward);
PRISM_ON_CUDA(gates_backward);

}  // namespace prism::cuda
