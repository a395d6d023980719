// Gated linear attention against the scan, and where its decays and rows are extreme.
#include <doctest/doctest.h>

#include <cmath>
#include <vector>

#include "kernels/gla.h"
#include "kernels/scan.h"
#include "src/compare.h"
#include "tensor/rng.h"

using namespace prism;

namespace {

template <class T>
struct Case {
  int64_t B, Tlen, H, K, V;
  std::vector<T> q, k, y, w, d_o, S0, o, S, alpha, dq, dk, dy, dw, dq_sum, dk_sum;

  Case(int64_t b, int64_t t, int64_t h, int64_t kk, int64_t v, double center, double spread)
      : B(b), Tlen(t), H(h), K(kk), V(v) {
    const int64_t keys = B * Tlen * H * K, values = B * Tlen * H * V;
    uint64_t stream = 0;
    const auto draw = [&](std::vector<T>& x, int64_t n, double scale, double offset = 0) {
      x.resize(static_cast<size_t>(n));
      ++stream;
      for (size_t i = 0; i < x.size(); ++i)
        x[i] = static_cast<T>(static_cast<float>(offset + scale * random_normal(3, stream, i)));
    };
    const double unit = 1 / std::sqrt(static_cast<double>(K));
    draw(q, keys, unit), draw(k, keys, unit), draw(y, keys, spread, center), draw(w, values, 1);
    draw(d_o, values, 1), draw(S0, B * H * V * K, 1);
    for (auto* x : {&alpha, &dq, &dk, &dy, &dq_sum, &dk_sum}) x->resize(static_cast<size_t>(keys));
    for (auto* x : {&o, &dw}) x->resize(static_cast<size_t>(values));
    S.resize(S0.size());
  }
  void run() {
    GlaArgs<T> a;
    a.o = o.data(), a.final_state = S.data(), a.q = q.data(), a.k = k.data(), a.y = y.data();
    a.w = w.data(), a.initial_state = S0.data(), a.alpha = alpha.data();
    a.B = B, a.T_len = Tlen, a.H = H, a.K = K, a.V = V;
    cpu::gla_forward(a);
    cpu::gla_backward(a,
                      {dq.data(), dk.data(), dy.data(), dw.data(), dq_sum.data(), dk_sum.data(), d_o.data()});
  }
};

template <class X, class Y>
double error(const std::vector<X>& x, const std::vector<Y>& ref) {
  return relative_error(std::span<const X>(x), std::span<const Y>(ref));
}

}  // namespace

TEST_CASE("gla: with one decay for all channels of a head it is the scan with that decay, within 1e-13") {
  Case<double> c(2, 70, 2, 5, 7, 0, 2);
  std::vector<double> g(static_cast<size_t>(c.B * c.Tlen * c.H)), o(c.o.size()), S(c.S.size());
  for (size_t i = 0; i < c.y.size(); ++i) {
    c.y[i] = c.y[i / 5 * 5];
    g[i / 5] = -std::log1p(std::exp(-c.y[i])) / 16;
  }
  c.run();
  ScanArgs<double> a;
  a.o = o.data(), a.final_state = S.data(), a.q = c.q.data(), a.k = c.k.data(), a.w = c.w.data();
  a.g = g.data(), a.initial_state = c.S0.data();
  a.B = c.B, a.T_len = c.Tlen, a.H = c.H, a.K = c.K, a.V = c.V;
  cpu::scan_recurrence_forward(a);
  CHECK(error(c.o, o) < 1e-13);
  CHECK(error(c.S, S) < 1e-13);
}

TEST_CASE("gla: decays from 0 to 1 in one row give finite values, and 0 forgets all") {
  Case<float> c(1, 9, 1, 4, 3, 0, 1), fresh = c;
  for (size_t i = 0; i < c.y.size(); ++i) c.y[i] = i % 3 == 0 ? -80.f : i % 3 == 1 ? -3e4f : 3e4f;
  for (size_t i = 0; i < 4; ++i) c.y[16 + i] = -3e4f;  // token 4
  fresh.y = c.y, fresh.S0.assign(fresh.S0.size(), 0);
  for (size_t i = 0; i < 16; ++i) fresh.k[i] = 0;  // nothing is written before token 4
  c.run(), fresh.run();
  CHECK(c.alpha[16] == 0);
  CHECK(c.alpha[0] == doctest::Approx(std::exp(-5.0)).epsilon(1e-6));  // where sigmoid itself is below float
  for (const auto* x : {&c.o, &c.S, &c.dq, &c.dk, &c.dy, &c.dw})
    for (float value : *x) CHECK(std::isfinite(value));
  CHECK(std::equal(c.o.begin() + 12, c.o.end(), fresh.o.begin() + 12));
  CHECK(c.S == fresh.S);
}

// dy is a sum over all later tokens of terms of either sign; what it loses grows with how far they cancel.
TEST_CASE("gla: float agrees with double over 4,096 tokens of long memory") {
  Case<float> c(1, 4096, 1, 16, 16, 5, 2);
  Case<double> exact(1, 4096, 1, 16, 16, 5, 2);
  c.run(), exact.run();
  CHECK(error(c.o, exact.o) < 3e-6);
  CHECK(error(c.dq, exact.dq) < 3e-6);
  CHECK(error(c.dk, exact.dk) < 3e-6);
  CHECK(error(c.dw, exact.dw) < 3e-6);
  CHECK(error(c.dy, exact.dy) < 1.5e-5);  // seen: 3e-6
}
