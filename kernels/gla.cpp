#include "kernels/gla.h"

#include "kernels/eigen.h"

namespace prism::cpu {

namespace {

template <class T>
void fill_alpha(const GlaArgs<T>& x) {
  const int64_t HK = x.H * x.K;
  parallel_tiles(x.n(), 64, [&](int64_t begin, int64_t end) {
    const auto y = array(x.y + begin * HK, (end - begin) * HK);
    // log sigmoid(y), kept from overflow
    array(x.alpha + begin * HK, y.size()) = ((y.min(T(0)) - (-y.abs()).exp().log1p()) / T(kDecayRoot)).exp();
  });
}

template <class T>
void walk(const GlaArgs<T>& x, const GlaWalk<T>& p, T* r) {
  using Vector = Eigen::Matrix<T, Eigen::Dynamic, 1>;
  parallel_for(x.B * x.H, [&](int64_t i) {
    const int64_t b = i / x.H, size = p.rows * p.columns;
    Matrix<T> X = Matrix<T>::Zero(p.rows, p.columns);
    // A state lies as [V,K].
    if (x.initial_state && !p.reverse) {
      const Rows<const T> state{x.initial_state + i * size, x.K};
      X = p.decay_rows ? Matrix<T>(matrix(state, x.V, x.K).transpose()) : Matrix<T>(matrix(state, x.V, x.K));
    }
    for (int64_t s = 0; s < x.T_len; ++s) {
      const int64_t t = p.reverse ? x.T_len - 1 - s : s, at = (b * x.T_len + t) * x.H + i % x.H;
      // Between a token and the one before it lies the decay of the later one.
      const int64_t later = p.reverse ? t + 1 : t, alpha_at = at + (later - t) * x.H;
      if (later < x.T_len && x.opens(b, later)) X.setZero();
      if (later < x.T_len) {
        const Eigen::Map<const Vector> alpha(x.alpha + alpha_at * x.K, x.K);
        if (p.decay_rows)
          X.array().colwise() *= alpha.array();
        else
          X.array().rowwise() *= alpha.transpose().array();
      }
      const Eigen::Map<const Vector> a_t(p.a + at * p.rows, p.rows), b_t(p.b + at * p.columns, p.columns),
          z_t(p.z + at * p.columns, p.columns);
      X.noalias() += a_t * b_t.transpose();
      Eigen::Map<Vector>(r + at * p.rows, p.rows).noalias() = X * z_t;
    }
    if (x.final_state && r == x.o) matrix(Rows<T>{x.final_state + i * size, x.K}, x.V, x.K) = X;
  });
}

}  // namespace

template <class T>
void gla_forward(const GlaArgs<T>& x) {
  fill_alpha(x);
  walk(x, {x.w, x.k, x.q, x.V, x.K, false, false}, x.o);
}

template <class T>
void gla_backward(const GlaArgs<T>& x, const GlaGrads<T>& g) {
  fill_alpha(x);
  gla_reverse_walks(x, g, [&](const GlaWalk<T>& p, T* r) { walk(x, p, r); });
  const int64_t HK = x.H * x.K;
  parallel_for(x.B, [&](int64_t b) {
    RowArray<T> dlog = RowArray<T>::Zero(HK);
    for (int64_t t = x.T_len - 1; t >= 0; --t) {
      const int64_t at = (b * x.T_len + t) * HK;
      const auto dq = array<const T>(g.dq_sum + at, HK), dk = array<const T>(g.dk_sum + at, HK);
      dlog += array(x.q + at, HK) * dq - array(x.k + at, HK) * dk;
      if (x.opens(b, t)) dlog.setZero();
      array(g.dq + at, HK) = dq, array(g.dk + at, HK) = dk;
      array(g.dy + at, HK) = dlog * sigmoid(-array(x.y + at, HK)) / T(kDecayRoot);
    }
  });
}

PRISM_ON_CPU(gla_forward);
PRISM_ON_CPU(gla_backward);

}  // namespace prism::cpu
