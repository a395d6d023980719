#include "kernels/adamw.h"

#include "kernels/eigen.h"

namespace prism::cpu {

template <class T>
void grad_norm(StepScalars<T>* s, T* partial, const T* grad, int64_t n, T clip, T beta1, T beta2) {
  parallel_tiles(n, 65536, [&](int64_t begin, int64_t end) {
    partial[begin / 65536] = array(grad + begin, end - begin).square().sum();
  });
  T total = 0;
  for (int64_t i = 0; i < grad_norm_partials(n); ++i) total += partial[i];
  s->norm = std::sqrt(total);
  const bool finite = std::isfinite(s->norm) && std::isfinite(s->loss);
  s->clip_scale = !finite ? T(0) : clip > 0 ? std::min(T(1), clip / (s->norm + T(1e-6))) : T(1);
  s->taken += finite;
  s->skipped += !finite;
  s->skipped_in_row = finite ? 0 : s->skipped_in_row + 1;
  s->correction1 = T(1) - std::pow(beta1, T(s->taken));
  s->correction2 = T(1) - std::pow(beta2, T(s->taken));
}

template <class T>
void adamw(const AdamWArgs<T>& x) {
  const StepScalars<T> s = *x.scalars;
  if (s.clip_scale == T(0)) return;
  parallel_tiles(x.n, 65536, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const T g = x.grad[i] * s.clip_scale;
      const T m = x.m[i] = x.beta1 * x.m[i] + (T(1) - x.beta1) * g;
      const T v = x.v[i] = x.beta2 * x.v[i] + (T(1) - x.beta2) * g * g;
      const T step = (m / s.correction1) / (std::sqrt(v / s.correction2) + x.eps);
      x.theta[i] -= s.lr * (x.weight_decay * x.theta[i] + step);
    }
  });
}

template void grad_norm(StepScalars<float>*, float*, const float*, int64_t, float, float, float);
template void grad_norm(StepScalars<double>*, double*, const double*, int64_t, double, double, double);
template void adamw(const AdamWArgs<float>&);
template void adamw(const AdamWArgs<double>&);

}  // namespace prism::cpu
