#include "kernels/norm.h"

#include "kernels/eigen.h"

namespace prism::cpu {

template <class T>
void add_norm_forward(const AddNormArgs<T>& x) {
  parallel_tiles(x.n, 64, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const T* sum = x.x + i * x.D;
      if (x.y) {
        array(x.sum + i * x.D, x.D) = array(sum, x.D) + array(x.y + i * x.D, x.D);
        sum = x.sum + i * x.D;
      }
      const T rstd = T(1) / std::sqrt(array(sum, x.D).square().sum() / T(x.D) + x.eps);
      x.rstd[i] = rstd;
      array(x.xn + i * x.D, x.D) = array(sum, x.D) * rstd * array(x.weight, x.D);
    }
  });
}

template <class T>
void add_norm_backward(const AddNormGrads<T>& x) {
  parallel_tiles(x.n, kSumTile, [&](int64_t begin, int64_t end) {
    auto dweight = array(x.partial + begin / kSumTile * x.D, x.D);
    dweight.setZero();
    for (int64_t i = begin; i < end; ++i) {
      const auto sum = array(x.sum + i * x.D, x.D), dxn = array(x.dxn + i * x.D, x.D);
      const auto weight = array(x.weight, x.D);
      const T rstd = x.rstd[i];
      const T dot =
          (dxn * weight * sum).sum() * rstd * rstd / T(x.D);  // <dxn weight, sum> / |sum|^2, but for eps
      dweight += dxn * sum * rstd;
      if (x.xn) array(x.xn + i * x.D, x.D) = sum * rstd * weight;
      auto dsum = array(x.dsum + i * x.D, x.D);
      if (x.dsum_in)
        dsum = array(x.dsum_in + i * x.D, x.D) + rstd * (dxn * weight - sum * dot);
      else
        dsum = rstd * (dxn * weight - sum * dot);
    }
  });
  add_partials(x.dweight, x.partial, sum_tiles(x.n), x.D);
}

template <class T>
void gated_norm_forward(const GatedNormArgs<T>& x) {
  parallel_tiles(x.n, 64, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      for (int64_t h = 0; h < x.H; ++h) {
        const auto o = array(x.o + (i * x.H + h) * x.V, x.V), gate = array(x.gate[i] + h * x.V, x.V);
        const T rstd = T(1) / std::sqrt(o.square().sum() / T(x.V) + x.eps);
        array(x.y + (i * x.H + h) * x.V, x.V) = o * rstd * array(x.weight, x.V) * gate * sigmoid(gate);
      }
  });
}

template <class T>
void gated_norm_backward(const GatedNormArgs<T>& x, const GatedNormGrads<T>& g) {
  parallel_tiles(x.n, kSumTile, [&](int64_t begin, int64_t end) {
    auto dweight = array(g.partial + begin / kSumTile * x.V, x.V);
    dweight.setZero();
    const auto weight = array(x.weight, x.V);
    RowArray<T> sigma(x.V), dnormed(x.V);
    for (int64_t i = begin; i < end; ++i)
      for (int64_t h = 0; h < x.H; ++h) {
        const int64_t at = (i * x.H + h) * x.V;
        const auto o = array(x.o + at, x.V), gate = array(x.gate[i] + h * x.V, x.V),
                   dy = array(g.dy + at, x.V);
        const T rstd = T(1) / std::sqrt(o.square().sum() / T(x.V) + x.eps);
        sigma = sigmoid(gate);
        array(g.dgate[i] + h * x.V, x.V) = dy * o * rstd * weight * silu_slope(gate, sigma);
        if (x.y) array(x.y + at, x.V) = o * rstd * weight * gate * sigma;
        dnormed = dy * gate * sigma;  // gradient of o rstd weight
        dweight += dnormed * o * rstd;
        const T dot = (dnormed * weight * o).sum() * rstd * rstd / T(x.V);
        array(g.d_o + at, x.V) = rstd * (dnormed * weight - o * dot);
      }
  });
  add_partials(g.dweight, g.partial, sum_tiles(x.n), x.V);
}

PRISM_ON_CPU(add_norm_forward);
PRISM_ON_CPU(add_norm_backward);
PRISM_ON_CPU(gated_norm_forward);
PRISM_ON_CPU(gated_norm_backward);

}  // namespace prism::cpu
