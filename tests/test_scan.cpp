// The scan: the token recurrence against finite differences, the chunked form against the recurrence.
#include <doctest/doctest.h>

#include <cstring>
#include <functional>

#include "tests/compare.h"
#include "tests/scan_case.h"

#ifdef _OPENMP
#include <omp.h>
#endif

using namespace prism;

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

template <class T>
void run_recurrence(ScanData<T>& data) {
  cpu::scan_recurrence_forward(data.args());
  cpu::scan_recurrence_backward(data.args(), data.grads());
}
template <class T>
void run_chunked(ScanData<T>& data) {
  cpu::scan_forward(data.args());
  cpu::scan_backward(data.args(), data.grads());
}

template <class X, class Y>
void check_close(const ScanCase& c, const std::string& name, const X& x, const Y& ref, double tolerance) {
  using E = typename X::value_type;
  using F = typename Y::value_type;
  const double error = relative_error(std::span<const E>(x), std::span<const F>(ref));
  INFO(name, " of ", cat(c), ": error ", error);
  CHECK(error <= tolerance);
}

// Chunked T against the recurrence in double, on the inputs as T holds them.
template <class T>
void check_chunked(const ScanCase& c, double tolerance) {
  ScanData<T> chunked(c);
  ScanData<double> exact(chunked);
  run_chunked(chunked), run_recurrence(exact);
  chunked.compare(exact,
                  [&](const char* name, auto& x, auto& ref) { check_close(c, name, x, ref, tolerance); });
}

template <class X>
bool same_bits(const std::vector<X>& x, const std::vector<X>& y) {
  return x.size() == y.size() && std::memcmp(x.data(), y.data(), x.size() * sizeof(X)) == 0;
}

// Sum of o dO and S_T dS_T, the loss whose gradient the reverse pass gives.
double loss(ScanData<double>& data) {
  cpu::scan_recurrence_forward(data.args());
  double sum = 0;
  for (size_t i = 0; i < data.o.size(); ++i) sum += data.o[i] * data.d_o[i];
  for (size_t i = 0; i < data.dfinal_state.size(); ++i) sum += data.final_state[i] * data.dfinal_state[i];
  return sum;
}

std::vector<double> central_differences(ScanData<double>& data, std::vector<double>& input) {
  std::vector<double> gradient;
  for (double& x : input) {
    const double x0 = x, step = 1e-5;
    x = x0 + step;
    const double above = loss(data);
    x = x0 - step;
    gradient.push_back((above - loss(data)) / (2 * step));
    x = x0;
  }
  return gradient;
}

std::vector<ScanCase> settings() {  // every setting of the operator, small
  std::vector<ScanCase> cases;
  for (int64_t L : {1, 2, 3, 4})
    for (int own : {0, 1})
      for (bool erase : {true, false})
        for (Decay decay : {Decay::none, Decay::mild, Decay::mixed})
          for (bool documents : {false, true}) {
            ScanCase c;
            c.L = L, c.own_first_key = own, c.erase = erase, c.decay = decay, c.documents = documents;
            c.states = cases.size() % 3 != 2, c.seed = cases.size() + 1;
            cases.push_back(c);
          }
  return cases;
}

}  // namespace

TEST_CASE("scan: the recurrence's reverse pass is the gradient of its forward pass") {
  // Central differences with step 1e-5 in double are good to about 1e-9; the loss is O(10).
  for (ScanCase c : settings()) {
    if (c.decay == Decay::mixed) continue;  // a difference cannot step around g = -inf
    c.B = 1, c.T = 7, c.K = 3, c.V = 5;
    ScanData<double> data(c);
    run_recurrence(data);
    const auto check = [&](const char* name, const std::vector<double>& gradient,
                           std::vector<double>& input) {
      if (!input.empty()) check_close(c, name, gradient, central_differences(data, input), 1e-7);
    };
    check("dq", data.dq, data.q), check("dk", data.dk, data.k), check("dkappa", data.dkappa, data.kappa);
    check("dw", data.dw, data.w), check("dbeta", data.dbeta, data.beta), check("dg", data.dg, data.g);
    check("dinitial_state", data.dinitial_state, data.initial_state);
  }
}

TEST_CASE("scan: the chunked form is the recurrence, for every setting") {
  for (ScanCase c : settings())
    for (int64_t C : {1, 16, 64}) {
      c.C = C, c.T = 67, c.K = 5, c.V = 7;
      check_chunked<double>(c, 1e-11);  // reassociation alone: a few hundred roundings of 1e-16
      check_chunked<float>(c, 1e-5);    // the same of 6e-8
    }
}

TEST_CASE("scan: the chunked form is the recurrence, for every length and width") {
  for (int64_t T : {1, 2, 15, 16, 17, 63, 64, 65, 131})
    for (int64_t C : {1, 16, 64})
      for (int64_t L : {1, 3})
        for (bool documents : {false, true}) {
          ScanCase c;
          c.T = T, c.C = C, c.L = L, c.documents = documents, c.decay = Decay::mixed;
          c.K = 17, c.V = 33, c.seed = static_cast<uint64_t>(100 * T + C);
          check_chunked<double>(c, 1e-11);
          check_chunked<float>(c, 1e-5);
        }
}
