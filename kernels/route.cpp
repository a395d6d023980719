#include "kernels/route.h"

#include "kernels/eigen.h"

namespace prism::cpu {

namespace {

template <class T>
void clear_others(const RouteArgs<T>& x, T* beta, T* g, int64_t i) {
  for (int64_t m = 0; m < x.M; ++m) {
    if (chosen(x.x[i], x.M, x.active, m)) continue;
    const int64_t at = (i * (x.M + 1) + m + 1) * x.H;
    array(beta + at, x.H).setZero(), array(g + at, x.H).setZero();
  }
}

}  // namespace

template <class T>
void route_forward(const RouteArgs<T>& x) {
  parallel_tiles(x.n, 256, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      T* const weight = x.weight + i * (x.M + 1);
      weight[0] = 1;
      for (int64_t m = 0; m < x.M; ++m) weight[m + 1] = routing_weight(x.x[i], x.M, x.active, m);
      clear_others(x, x.beta, x.g, i);
    }
  });
}

template <class T>
void route_backward(const RouteArgs<T>& x, const RouteGrads<T>& grads) {
  parallel_tiles(x.n, 256, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const auto weight = array<const T>(x.weight + i * (x.M + 1) + 1, x.M);
      const auto dweight = array(grads.dweight + i * (x.M + 1) + 1, x.M);
      // Of a softmax; where nothing was chosen the weight is 0.
      array(grads.dx[i], x.M) = weight * (dweight - (weight * dweight).sum());
      clear_others(x, grads.dbeta, grads.dg, i);
    }
  });
}

template <class T>
void mix_forward(const MixArgs<T>& x) {
  parallel_tiles(x.n, 64, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      auto y = array(x.y + i * x.columns, x.columns);
      y.setZero();
      for (int64_t m = i * x.N; m < (i + 1) * x.N; ++m)
        y += x.weight[m] * array(x.o + m * x.columns, x.columns);
    }
  });
}

template <class T>
void mix_backward(const MixArgs<T>& x, const MixGrads<T>& grads) {
  parallel_tiles(x.n, 64, [&](int64_t begin, int64_t end) {
    for (int64_t m = begin * x.N; m < end * x.N; ++m) {
      const auto dy = array(grads.dy + m / x.N * x.columns, x.columns);
      array(grads.d_o + m * x.columns, x.columns) = x.weight[m] * dy;
      grads.dweight[m] = (dy * array(x.o + m * x.columns, x.columns)).sum();
    }
  });
}

PRISM_ON_CPU(route_forward);
PRISM_ON_CPU(route_backward);
PRISM_ON_CPU(mix_forward);
PRISM_ON_CPU(mix_backward);

}  // namespace prism::cpu
