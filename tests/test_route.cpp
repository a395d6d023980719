// Mixture of memories: which ones a token uses, and that it leaves the others alone.
#include <doctest/doctest.h>

#include <cmath>
#include <vector>

#include "kernels/route.h"
#include "src/engine.h"
#include "src/host.h"

using namespace prism;

TEST_CASE("route: the largest are chosen, of equal ones the lower index, and share by a softmax") {
  struct Case {
    std::vector<double> x;
    int64_t active;
    std::vector<double> share;  // exp(x) of the chosen
  };
  const double e = std::exp(1);
  for (const Case& c : std::vector<Case>{{{0, 1, 0, 0}, 2, {1, e, 0, 0}},
                                         {{5, 5, 5, 5}, 1, {1, 0, 0, 0}},
                                         {{0, 1, 1, 1}, 2, {0, 1, 1, 0}},
                                         {{-1000, 0, 1000, 0}, 4, {0, 0, 1, 0}},
                                         {{0, 1, 0, 1}, 4, {1, e, 1, e}}}) {
    std::vector<double> weight(5), beta(10, 0.5), g(10, -0.5);
    RouteArgs<double> a;
    a.weight = weight.data(), a.beta = beta.data(), a.g = g.data(), a.x = {c.x.data(), 4};
    a.n = 1, a.M = 4, a.H = 2, a.active = c.active;
    cpu::route_forward(a);
    double sum = 0;
    for (double share : c.share) sum += share;
    CHECK(weight[0] == 1);
    int64_t kept = 0;
    for (size_t m = 0; m < 4; ++m) {
      CHECK(weight[m + 1] == doctest::Approx(c.share[m] / sum).epsilon(1e-14));
      for (size_t h = 2 * (m + 1); h < 2 * (m + 2); ++h) {
        const bool keeps = beta[h] == 0.5 && g[h] == -0.5, cleared = beta[h] == 0 && g[h] == 0;
        CHECK((weight[m + 1] > 0 ? keeps : keeps || cleared));
        kept += keeps;
      }
    }
    CHECK(kept == 2 * c.active);  // also where a share is too small for a number
  }
}

TEST_CASE("mom: a token changes the memories it chooses and leaves the others as they were, bit for bit") {
  Config c;
  c.vocab_size = 29, c.hidden_size = 24, c.num_hidden_layers = 2, c.num_heads = 2, c.head_dim = 6;
  c.intermediate_size = 20, c.mixers = {"mom"}, c.memories = 5, c.memories_active = 2;
  Model model(c, Device::cpu, DType::f64, false);
  model.parameters().initialise(5);
  DecodeState state(model, 1);
  Engine engine(model, 1, 1);
  std::vector<std::vector<double>> beta(2);
  model.watch = [&](int64_t layer, const MixerValues& values) {
    beta[static_cast<size_t>(layer)] = to_host(values.scan.beta->value);
  };
  const auto head_of = [&](const std::vector<double>& S, size_t h) {
    const auto size = static_cast<int64_t>(S.size() / 12);
    return std::vector<double>(S.begin() + static_cast<int64_t>(h) * size,
                               S.begin() + static_cast<int64_t>(h + 1) * size);
  };
  for (int32_t token = 1; token < 12; ++token) {
    std::vector<std::vector<double>> before;
    for (int64_t i = 0; i < 2; ++i) before.push_back(to_host(state.layer(i).S));
    engine.evaluate({1, 1, {token}, {-1}, {0}, 0}, &state);
    for (size_t i = 0; i < 2; ++i) {
      const std::vector<double> after = to_host(state.layer(static_cast<int64_t>(i)).S);
      int changed = 0;
      for (size_t h = 0; h < 12; ++h) {
        const bool chose = beta[i][h] > 0;
        CHECK((head_of(before[i], h) == head_of(after, h)) == !chose);
        changed += chose;
      }
      CHECK(changed == 2 * 3);  // heads of the shared memory and of two more
    }
  }
}
