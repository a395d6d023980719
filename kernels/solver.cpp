#include "kernels/solver.h"

#include <numbers>
#include <vector>

#include "kernels/eigen.h"

namespace prism::cpu {

namespace {

template <class T>
T normal_cdf(T x) {
  return T(0.5) * std::erfc(-x * T(std::numbers::sqrt2 / 2));
}
template <class T>
T normal_density(T x) {
  return std::exp(T(-0.5) * x * x) * T(std::numbers::inv_sqrtpi / std::numbers::sqrt2);
}

// delta = f(y, r) of one step, number by number; without y the gain p is 1/2. r2 is the residual before
// the first step.
template <class T>
void step_forward(RowArray<T>& delta, const RowArray<T>& r, const RowArray<T>& r2, const T* y,
                  GainKind kind) {
  const int64_t n = r.size();
  if (kind == GainKind::loop) {
    for (int64_t i = 0; i < n; ++i) {
      const T z = (y ? y[i] : T(0.5)) * r[i];
      delta[i] = z * normal_cdf(z);
    }
  } else if (!y) {
    delta = T(0.5) * r;
  } else if (kind == GainKind::sigmoid) {
    delta = sigmoid(array(y, n)) * r;
  } else if (kind == GainKind::gelu) {
    for (int64_t i = 0; i < n; ++i) delta[i] = y[i] * normal_cdf(y[i] * r2[i]) * r[i];
  } else {
    delta = array(y, n) * r;
  }
}

// From ddelta: dr = (ddelta/dr)^T ddelta, dr2 += the part through r2, and dy when y is given.
template <class T>
void step_backward(RowArray<T>& dr, RowArray<T>& dr2, T* dy, const RowArray<T>& ddelta, const RowArray<T>& r,
                   const RowArray<T>& r2, const T* y, GainKind kind) {
  const int64_t n = r.size();
  if (kind == GainKind::loop) {
    for (int64_t i = 0; i < n; ++i) {
      const T p = y ? y[i] : T(0.5), z = p * r[i];
      const T dz = ddelta[i] * (normal_cdf(z) + z * normal_density(z));
      dr[i] = dz * p;
      if (dy) dy[i] = dz * r[i];
    }
  } else if (!y) {
    dr = T(0.5) * ddelta;
  } else if (kind == GainKind::sigmoid) {
    dr = sigmoid(array(y, n));
    array(dy, n) = ddelta * r * dr * (T(1) - dr);
    dr *= ddelta;
  } else if (kind == GainKind::gelu) {
    for (int64_t i = 0; i < n; ++i) {
      const T z = y[i] * r2[i], phi = normal_cdf(z), slope = y[i] * normal_density(z);
      const T dp = ddelta[i] * r[i];
      dr[i] = ddelta[i] * y[i] * phi;
      dr2[i] += dp * slope * y[i];
      dy[i] = dp * (phi + slope * r2[i]);
    }
  } else {
    dr = array(y, n) * ddelta;
    array(dy, n) = ddelta * r;
  }
}

// What both passes share for token i, all heads at once: the residuals r[s] and corrections delta[s] of every
// step, each [H V].
template <class T>
struct Steps {
  const SolverArgs<T>& x;
  const int64_t HV;
  std::vector<RowArray<T>> r, delta;

  explicit Steps(const SolverArgs<T>& args) : x(args), HV(args.H * args.V) {
    r.assign(static_cast<size_t>(x.steps() + 1), RowArray<T>(HV));
    delta.assign(static_cast<size_t>(x.steps()), RowArray<T>(HV));
  }
  const T* y(int64_t i, int64_t step) const { return x.y ? x.y[i] + step * HV : nullptr; }
  void run(int64_t i) {
    r[0] = array(x.v[i], HV);
    if (x.anchor) r[0] -= array(x.anchor[i], HV);
    for (int64_t s = 0; s < x.steps(); ++s) {
      const size_t at = static_cast<size_t>(s);
      step_forward(delta[at], r[at], r[0], y(i, s), x.gain);
      if (x.retain)
        r[at + 1] = r[at] - delta[at];
      else
        r[at + 1] = r[0];
    }
  }
  // The confidence of write l (0-based), and what multiplies it in a bypass added to a trained base.
  T beta(int64_t i, int64_t l, int64_t h) const {
    if (l == 0) return x.beta[i * x.H + h];
    const int64_t c = (l - 1) * x.H + h;
    return sigmoid(x.gate[i][c] + (x.gate_bias ? x.gate_bias[c] : T(0)));
  }
  T scale(int64_t l, int64_t h) const { return l == 0 || !x.scale ? T(1) : x.scale[(l - 1) * x.H + h]; }
  // The step that makes write l, or -1: the write is v itself.
  int64_t step_of(int64_t l) const { return x.first_is_step ? l : l - 1; }
  // delta_l of token i, head h: what the confidence multiplies.
  auto correction(int64_t i, int64_t l, int64_t h) const {
    const int64_t s = step_of(l);
    return array((s < 0 ? x.v[i] : delta[static_cast<size_t>(s)].data()) + h * x.V, x.V);
  }
};

}  // namespace

template <class T>
void solver_forward(const SolverArgs<T>& x) {
  parallel_tiles(x.n, 64, [&](int64_t begin, int64_t end) {
    Steps<T> steps(x);
    for (int64_t i = begin; i < end; ++i) {
      steps.run(i);
      for (int64_t l = 0; l < x.L; ++l)
        for (int64_t h = 0; h < x.H; ++h)
          array(x.w + ((i * x.L + l) * x.H + h) * x.V, x.V) =
              steps.beta(i, l, h) * steps.scale(l, h) * steps.correction(i, l, h);
    }
  });
}

template <class T>
void solver_backward(const SolverArgs<T>& x, const SolverGrads<T>& g) {
  const int64_t gates = (x.L - 1) * x.H, HV = x.H * x.V;
  parallel_tiles(x.n, kSumTile, [&](int64_t begin, int64_t end) {
    Steps<T> steps(x);
    RowArray<T> ddelta(HV), dr(HV), dr2(HV), step_dr(HV);
    auto sums = array(g.partial + begin / kSumTile * 2 * gates, 2 * gates);
    sums.setZero();
    for (int64_t i = begin; i < end; ++i) {
      steps.run(i);
      auto dv = array(g.dv[i], HV);
      dr.setZero(), dr2.setZero(), dv.setZero();
      for (int64_t l = x.L - 1; l >= 0; --l) {
        const int64_t s = steps.step_of(l);
        for (int64_t h = 0; h < x.H; ++h) {
          const int64_t c = (l - 1) * x.H + h;
          const auto dw = array(g.dw + ((i * x.L + l) * x.H + h) * x.V, x.V);
          const T beta = steps.beta(i, l, h), scale = steps.scale(l, h);
          const T along = (dw * steps.correction(i, l, h)).sum();
          if (l == 0) {
            g.dbeta[i * x.H + h] = along;
          } else {
            const T dgate = along * scale * beta * (T(1) - beta);
            g.dgate[i][c] = dgate;
            sums[c] += dgate;
            sums[gates + c] += along * beta;
          }
          array((s < 0 ? dv.data() : ddelta.data()) + h * x.V, x.V) = beta * scale * dw;
        }
        if (s < 0) continue;
        const size_t at = static_cast<size_t>(s);
        if (x.retain) ddelta -= dr;  // r_{l+1} = r_l - delta_l
        T* dy = g.dy ? g.dy[i] + s * HV : nullptr;
        step_backward(step_dr, dr2, dy, ddelta, steps.r[at], steps.r[0], steps.y(i, s), x.gain);
        (x.retain ? dr : dr2) += step_dr;
      }
      dr += dr2;
      dv += dr;
      if (x.anchor) array(g.danchor[i], HV) = -dr;
    }
  });
  for (int64_t tile = 0; tile < sum_tiles(x.n); ++tile) {
    if (g.dgate_bias) array(g.dgate_bias, gates) += array(g.partial + tile * 2 * gates, gates);
    if (g.dscale) array(g.dscale, gates) += array(g.partial + tile * 2 * gates + gates, gates);
  }
}

template <class T>
void l2norm_forward(Rows<T> y, Rows<const T> x, acc_t<T> scale, int64_t n, int64_t heads, int64_t width) {
  parallel_tiles(n, 64, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      for (int64_t at = 0; at < heads * width; at += width) {
        const auto head = array(x[i] + at, width);
        array(y[i] + at, width) = head * (scale / std::sqrt(head.square().sum() + T(kL2NormEps)));
      }
  });
}

template <class T>
void l2norm_backward(Rows<T> dx, Rows<const T> dy, Rows<const T> x, acc_t<T> scale, int64_t n, int64_t heads,
                     int64_t width) {
  parallel_tiles(n, 64, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      for (int64_t at = 0; at < heads * width; at += width) {
        const auto head = array(x[i] + at, width), d = array(dy[i] + at, width);
        const T inverse = T(1) / std::sqrt(head.square().sum() + T(kL2NormEps));
        array(dx[i] + at, width) = scale * inverse * (d - head * ((head * d).sum() * inverse * inverse));
      }
  });
}

PRISM_ON_CPU(solver_forward);
PRISM_ON_CPU(solver_backward);
PRISM_ON_CPU(l2norm_forward);
PRISM_ON_CPU(l2norm_backward);

}  // namespace prism::cpu
