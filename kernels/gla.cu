#include "kernels/gla.h"

#include "kernels/rows.cuh"

namespace prism::cuda {

namespace {

constexpr int kWarps = 4, kRows = 4;  // a block's; a warp's rows of X, whose columns lie over the lanes

template <class T>
__global__ void alpha_kernel(GlaArgs<T> x, int64_t count) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const float y = load(x.y + i);  // log sigmoid(y), kept from overflow
  x.alpha[i] = expf((fminf(y, 0.f) - log1pf(expf(-fabsf(y)))) / kDecayRoot);
}

// A warp walks kRows rows of one head's X through all tokens; a lane holds columns lane, lane + 32, ...
template <int N, class T, class R>
__global__ void __launch_bounds__(kWarps* kWarp) walk_kernel(GlaArgs<T> x, GlaWalk<T> p, R* r, bool keeps) {
  const int lane = threadIdx.x % kWarp;
  const int64_t i = blockIdx.x, b = i / x.H, h = i % x.H;
  const int64_t first = (blockIdx.y * int64_t{kWarps} + threadIdx.x / kWarp) * kRows;
  float X[kRows][N];
  // A state lies as [V,K]: row, then column, or the other way round.
  const auto state = [&](int j, int c) {
    const int64_t row = first + j, column = lane + c * kWarp;
    return i * p.rows * p.columns + (p.decay_rows ? column * p.rows + row : row * p.columns + column);
  };
  const auto inside = [&](int j, int c) { return first + j < p.rows && lane + c * kWarp < p.columns; };
  each<kRows, N>([&](int j, int c) {
    X[j][c] = x.initial_state && !p.reverse && inside(j, c) ? x.initial_state[state(j, c)] : 0.f;
  });
  for (int64_t s = 0; s < x.T_len; ++s) {
    const int64_t t = p.reverse ? x.T_len - 1 - s : s, at = (b * x.T_len + t) * x.H + h;
    // Between a token and the one before it lies the decay of the later one.
    const int64_t later = p.reverse ? t + 1 : t;
    const bool empty = later == x.T_len || x.opens(b, later);
    const float* const alpha = x.alpha + (at + (later - t) * x.H) * x.K;
    float a[kRows], rows[kRows], sum[kRows] = {};
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      const bool within = first + j < p.rows;
      a[j] = within ? load(p.a + at * p.rows + first + j) : 0.f;
      rows[j] = !within || empty ? 0.f : p.decay_rows ? alpha[first + j] : 1.f;
    }
#pragma unroll
    for (int c = 0; c < N; ++c) {
      const int64_t column = lane + c * kWarp;
      if (column >= p.columns) continue;
      const float b_t = load(p.b + at * p.columns + column), z_t = load(p.z + at * p.columns + column);
      const float decay = p.decay_rows || empty ? 1.f : alpha[column];
#pragma unroll
      for (int j = 0; j < kRows; ++j) {
        X[j][c] = (empty ? 0.f : X[j][c] * (rows[j] * decay)) + a[j] * b_t;
        sum[j] += X[j][c] * z_t;
      }
    }
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      sum[j] = warp_sum(sum[j]);
      if (lane == 0 && first + j < p.rows) store(r + at * p.rows + first + j, sum[j]);
    }
  }
  if (keeps)
    each<kRows, N>([&](int j, int c) {
      if (inside(j, c)) x.final_state[state(j, c)] = X[j][c];
    });
}

template <class T, class R>
void walk(const GlaArgs<T>& x, const GlaWalk<T>& p, R* r, bool keeps = false) {
  PRISM_CHECK(p.columns <= 16 * kWarp, "gla: expected heads of width ", 16 * kWarp, " at most, got ",
              p.columns);
  const dim3 grid(grid_for(x.B * x.H, 1), grid_for(p.rows, kWarps * kRows));
  const auto launch = [&](auto n) { walk_kernel<n><<<grid, kWarps * kWarp, 0, stream()>>>(x, p, r, keeps); };
  p.columns <= 2 * kWarp   ? launch(Int<2>{})
  : p.columns <= 4 * kWarp ? launch(Int<4>{})
  : p.columns <= 8 * kWarp ? launch(Int<8>{})
                           : launch(Int<16>{});
  CUDA_CHECK_LAUNCH();
}

template <class T>
void fill_alpha(const GlaArgs<T>& x) {
  const int64_t count = x.n() * x.H * x.K;
  alpha_kernel<<<grid_for(count, 256), 256, 0, stream()>>>(x, count);
  CUDA_CHECK_LAUNCH();
}

// A channel of a row a thread, from the last token to the first.
template <class T>
__global__ void finish_kernel(GlaArgs<T> x, GlaGrads<T> g) {
  const int64_t HK = x.H * x.K, b = blockIdx.y;
  const int64_t channel = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (channel >= HK) return;
  float dlog = 0;
  for (int64_t t = x.T_len - 1; t >= 0; --t) {
    const int64_t at = (b * x.T_len + t) * HK + channel;
    const float dq = g.dq_sum[at], dk = g.dk_sum[at];
    dlog = x.opens(b, t) ? 0.f : dlog + (load(x.q + at) * dq - load(x.k + at) * dk);
    store(g.dq + at, dq), store(g.dk + at, dk);
    store(g.dy + at, dlog * sigmoid(-load(x.y + at)) / kDecayRoot);
  }
}

}  // namespace

template <class T>
void gla_forward(const GlaArgs<T>& x) {
  if (x.n() == 0) return;
  fill_alpha(x);
  walk(x, GlaWalk<T>{x.w, x.k, x.q, x.V, x.K, false, false}, x.o, x.final_state != nullptr);
}

template <class T>
void gla_backward(const GlaArgs<T>& x, const GlaGrads<T>& g) {
  if (x.n() == 0) return;
  fill_alpha(x);
  gla_reverse_walks(x, g, [&](const GlaWalk<T>& p, auto* r) { walk(x, p, r); });
  finish_kernel<<<dim3(grid_for(x.H * x.K, 128), grid_for(x.B, 1)), 128, 0, stream()>>>(x, g);
  CUDA_CHECK_LAUNCH();
}

PRISM_ON_CUDA(gla_forward);
PRISM_ON_CUDA(gla_backward);

}  // namespace prism::cuda
