#include "kernels/gates.h"

#include "kernels/eigen.h"

namespace prism::cpu {

namespace {

template <class T>
T softplus(T x) {
  return x > T(20) ? x : std::log1p(std::exp(x));  // beyond 20 the difference is below double's rounding of g
}

}  // namespace

template <class T>
void gates_forward(const GatesArgs<T>& x) {
  parallel_tiles(x.n, 256, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      for (int64_t h = 0; h < x.H; ++h) {
        x.beta[i * x.H + h] = sigmoid(x.b[i][h]);
        if (!x.g) continue;
        x.g[i * x.H + h] = x.a ? -std::exp(x.A_log[h]) * softplus(x.a[i][h] + x.dt_bias[h])
                               : std::log1p(-std::exp2(T(-5 - h)));
      }
  });
}

template <class T>
void gates_backward(const GatesArgs<T>& x, const GatesGrads<T>& g) {
  const int64_t H = x.H;
  parallel_tiles(x.n, kSumTile, [&](int64_t begin, int64_t end) {
    auto sums = array(g.partial + begin / kSumTile * 2 * H, 2 * H);
    sums.setZero();
    for (int64_t i = begin; i < end; ++i)
      for (int64_t h = 0; h < H; ++h) {
        const T beta = sigmoid(x.b[i][h]);
        g.db[i][h] = g.dbeta[i * H + h] * beta * (T(1) - beta);
        if (!x.a) continue;
        const T dg = g.dg[i * H + h], rate = -std::exp(x.A_log[h]), z = x.a[i][h] + x.dt_bias[h];
        const T da = dg * rate * sigmoid(z);
        g.da[i][h] = da;
        sums[h] += dg * rate * softplus(z);  // dg/dA_log = g
        sums[H + h] += da;
      }
  });
  if (!x.a) return;
  for (int64_t tile = 0; tile < sum_tiles(x.n); ++tile) {
    array(g.dA_log, H) += array(g.partial + tile * 2 * H, H);
    array(g.ddt_bias, H) += array(g.partial + tile * 2 * H + H, H);
  }
}

PRISM_ON_CPU(gates_forward);
PRISM_ON_CPU(gates_backward);

}  // namespace prism::cpu
