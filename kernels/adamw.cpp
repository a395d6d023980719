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
  // Tiles whose numbers stay in the cache from one line to the next.
  parallel_tiles(x.n, 8192, [&](int64_t begin, int64_t end) {
    const auto part = [=](auto* data) { return array(data + begin, end - begin); };
    auto m = part(x.m), v = part(x.v), theta = part(x.theta);
    const auto g = part(x.grad) * s.clip_scale;
    m = x.beta1 * m + (T(1) - x.beta1) * g;
    v = x.beta2 * v + (T(1) - x.beta2) * g.square();
    theta -= s.lr * (x.weight_decay * theta + (m / s.correction1) / ((v / s.correction2).sqrt() + x.eps));
  });
}

PRISM_ON_CPU(grad_norm);
PRISM_ON_CPU(adamw);

}  // namespace prism::cpu
