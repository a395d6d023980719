// What a token's write changes in a memory: of a linear state one direction, of a two-layer memory many.
#include <doctest/doctest.h>

#include <Eigen/SVD>
#include <vector>

#include "kernels/scan.h"
#include "kernels/ttt.h"
#include "tensor/rng.h"

using namespace prism;

namespace {

constexpr int64_t kK = 16, kM = 4 * kK;
using Square = Eigen::Matrix<double, kK, kK>;
using Read = std::vector<double> (*)(double beta, const std::vector<double>& q);

std::vector<double> normal(int64_t n, double scale, uint64_t stream) {
  std::vector<double> x(static_cast<size_t>(n));
  for (size_t i = 0; i < x.size(); ++i) x[i] = scale * random_normal(9, stream, i);
  return x;
}

// Rows for two tokens: one that is written with strength beta, and a query that writes nothing.
std::vector<double> two(const std::vector<double>& first, const std::vector<double>& second) {
  std::vector<double> rows = first;
  rows.insert(rows.end(), second.begin(), second.end());
  return rows;
}
std::vector<double> second_row(const std::vector<double>& o) { return {o.begin() + kK, o.end()}; }

const std::vector<double> key = normal(kK, 1 / std::sqrt(double(kK)), 1), value = normal(kK, 1, 2);
const std::vector<double> none(kK);

// S - beta (S k - v) k^T: gradient descent on 1/2 |S k - v|^2.
std::vector<double> linear_state(double beta, const std::vector<double>& q) {
  std::vector<double> w = value;
  for (double& x : w) x *= beta;
  const std::vector<double> queries = two(none, q), keys = two(key, none), writes = two(w, none),
                            betas = {beta, 0}, state = normal(kK * kK, 0.3, 3);
  std::vector<double> o(2 * kK);
  ScanArgs<double> a;
  a.o = o.data(), a.q = queries.data(), a.k = keys.data(), a.w = writes.data(), a.beta = betas.data();
  a.initial_state = state.data(), a.B = 1, a.T_len = 2, a.H = 1, a.K = a.V = kK;
  cpu::scan_recurrence_forward(a);
  return second_row(o);
}

std::vector<double> two_layers(double beta, const std::vector<double>& q) {
  const std::vector<double> queries = two(none, q), keys = two(key, key), values = two(value, value),
                            betas = {beta, 0}, W1 = normal(kM * kK, 1, 4), b1(kM),
                            W2 = normal(kK * kM, 1 / std::sqrt(double(kM)), 5), b2(kK), weight(kK, 1),
                            bias(kK);
  std::vector<double> o(2 * kK);
  TttArgs<double> a;
  a.o = o.data(), a.q = queries.data(), a.k = keys.data(), a.v = values.data(), a.beta = betas.data();
  a.W1 = W1.data(), a.b1 = b1.data(), a.W2 = W2.data(), a.b2 = b2.data();
  a.norm_weight = weight.data(), a.norm_bias = bias.data();
  a.B = 1, a.T_len = 2, a.H = 1, a.K = kK, a.M = kM, a.rate = 0.1 / kK, a.eps = 1e-6;
  cpu::ttt_forward(a);
  return second_row(o);
}

// Singular values, over the largest, of the change that one token's write makes to d read / d q.
Eigen::VectorXd write_spectrum(Read read) {
  constexpr double h = 1e-4;
  const std::vector<double> at = normal(kK, 1 / std::sqrt(double(kK)), 6);
  Square change;
  for (int64_t j = 0; j < kK; ++j) {
    std::vector<double> up = at, down = at;
    up[static_cast<size_t>(j)] += h, down[static_cast<size_t>(j)] -= h;
    for (const double beta : {0.5, 0.0}) {
      const auto high = read(beta, up), low = read(beta, down);
      for (int64_t i = 0; i < kK; ++i) {
        const auto r = static_cast<size_t>(i);
        const double slope = (high[r] - low[r]) / (2 * h);
        change(i, j) = beta > 0 ? slope : change(i, j) - slope;
      }
    }
  }
  const Eigen::VectorXd values = Eigen::JacobiSVD<Square>(change).singularValues();
  return values / values[0];
}

}  // namespace

TEST_CASE("a gradient step on a linear state writes rank 1, one on a two-layer memory does not") {
  const Eigen::VectorXd linear = write_spectrum(linear_state), memory = write_spectrum(two_layers);
  CAPTURE(memory.transpose());
  CHECK(linear[1] < 1e-9);  // what rounding leaves of differences
  CHECK(memory[1] > 0.1);
  CHECK((memory.array() > 0.01).count() == kK - 1);  // all but the mean, which the layer norm takes away
}
