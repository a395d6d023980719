// The scan: the token recurrence against finite differences, the chunked form against the recurrence.
#include <doctest/doctest.h>

#include <cstring>

#include "src/compare.h"
#include "src/scan_case.h"

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

}  // namespace

TEST_CASE("scan: the recurrence's reverse pass is the gradient of its forward pass") {
  // Central differences with step 1e-5 in double are good to about 1e-9; the loss is O(10).
  for (ScanCase c : scan_settings()) {
    if (c.decay == ScanDecay::mixed) continue;  // a difference cannot step around g = -inf
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
  for (ScanCase c : scan_settings())
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
          c.T = T, c.C = C, c.L = L, c.documents = documents, c.decay = ScanDecay::mixed;
          c.K = 17, c.V = 33, c.seed = static_cast<uint64_t>(100 * T + C);
          check_chunked<double>(c, 1e-11);
          check_chunked<float>(c, 1e-5);
        }
}

TEST_CASE("scan: tokens that all erase the same key keep the substitution accurate") {
  for (int64_t C : {16, 64}) {
    ScanCase c;
    c.T = 131, c.C = C, c.L = 2, c.decay = ScanDecay::none;
    ScanData<float> chunked(c);
    for (size_t i = 0; i < chunked.k.size(); ++i) chunked.k[i] = i % c.K == 0;
    for (float& beta : chunked.beta) beta = 1;
    ScanData<double> exact(chunked);
    run_chunked(chunked), run_recurrence(exact);
    chunked.compare(exact, [&](const char* name, auto& x, auto& ref) { check_close(c, name, x, ref, 1e-5); });
  }
}

TEST_CASE("scan: a reset by g = -inf is a fresh start, and nothing flows back through it") {
  for (int64_t at : {1, 5, 16, 40}) {
    ScanCase c;
    c.B = 1, c.T = 67, c.L = 2;
    ScanData<double> reset(c);
    for (int64_t h = 0; h < c.H; ++h) reset.g[at * c.H + h] = -kInf;
    const auto tail = [&](auto& x) {  // the rows from token `at` on
      return std::decay_t<decltype(x)>(x.begin() + x.size() / c.T * at, x.end());
    };
    ScanCase rest = c;
    rest.T = c.T - at;
    ScanData<double> fresh(rest);
    fresh.q = tail(reset.q), fresh.k = tail(reset.k), fresh.kappa = tail(reset.kappa),
    fresh.w = tail(reset.w);
    fresh.beta = tail(reset.beta), fresh.g = tail(reset.g), fresh.d_o = tail(reset.d_o);
    fresh.initial_state.clear(), fresh.dfinal_state = reset.dfinal_state;
    run_chunked(reset), run_chunked(fresh);
    const auto check = [&](const char* name, const std::vector<double>& x, const std::vector<double>& ref) {
      check_close(c, name, x, ref, 1e-13);  // the chunks fall elsewhere
    };
    check("o", tail(reset.o), fresh.o), check("final_state", reset.final_state, fresh.final_state);
    check("dq", tail(reset.dq), fresh.dq), check("dk", tail(reset.dk), fresh.dk);
    check("dkappa", tail(reset.dkappa), fresh.dkappa), check("dw", tail(reset.dw), fresh.dw);
    check("dbeta", tail(reset.dbeta), fresh.dbeta), check("dg", tail(reset.dg), fresh.dg);

    // The other side: tokens before the reset get no gradient from those after it.
    const std::vector<double> dinitial_state = reset.dinitial_state;
    for (size_t i = reset.d_o.size() / c.T * at; i < reset.d_o.size(); ++i) reset.d_o[i] = 0;
    reset.dfinal_state.assign(reset.dfinal_state.size(), 0);
    run_chunked(reset);
    CHECK(same_bits(reset.dinitial_state, dinitial_state));
  }
}

TEST_CASE("scan: no bit of a document depends on another document") {
  ScanCase c;
  c.B = 1, c.T = 67, c.K = 9, c.V = 13, c.L = 3, c.documents = true, c.decay = ScanDecay::mixed;
  ScanData<float> plain(c);
  run_chunked(plain);
  for (int32_t first = 0; first < c.T; ++first) {
    if (plain.start[first] != first) continue;  // one document for each first token
    ScanData<float> changed(c);
    const auto mine = [&](size_t i, size_t size) { return changed.start[i / (size / c.T)] == first; };
    const auto perturb = [&](std::vector<float>& x, float factor) {
      for (size_t i = 0; i < x.size(); ++i)
        if (mine(i, x.size())) x[i] = factor * x[i] + 0.01f;
    };
    perturb(changed.q, 1000), perturb(changed.k, 2), perturb(changed.kappa, 3), perturb(changed.w, -1000);
    perturb(changed.beta, 0.7f), perturb(changed.g, 0.5f), perturb(changed.d_o, 1000);
    run_chunked(changed);
    size_t differing = 0;
    const auto rows = [&](const std::vector<float>& x, const std::vector<float>& y) {
      for (size_t i = 0; i < x.size(); ++i) {
        const bool same = std::memcmp(&x[i], &y[i], sizeof(float)) == 0;
        if (mine(i, x.size()))
          differing += !same;
        else
          REQUIRE(same);
      }
    };
    rows(plain.o, changed.o), rows(plain.dq, changed.dq), rows(plain.dk, changed.dk);
    rows(plain.dkappa, changed.dkappa), rows(plain.dw, changed.dw);
    rows(plain.dbeta, changed.dbeta), rows(plain.dg, changed.dg);
    CHECK(differing > 0);
    CHECK(same_bits(plain.final_state, changed.final_state) == (first != plain.start.back()));
    CHECK(same_bits(plain.dinitial_state, changed.dinitial_state) == (first != 0));
  }
}

TEST_CASE("scan: prefill then single steps, the state in place, is the whole sequence at every split") {
  ScanCase c;
  c.B = 1, c.T = 37, c.H = 1, c.L = 2, c.decay = ScanDecay::mixed;
  ScanData<double> whole(c);
  cpu::scan_forward(whole.args());
  for (int64_t split = 1; split < c.T; ++split) {
    ScanData<double> parts(c);
    parts.final_state = parts.initial_state;
    for (int64_t t = 0; t < c.T; t = t == 0 ? split : t + 1) {
      ScanArgs<double> step = parts.args();
      step.T_len = t == 0 ? split : 1;
      step.o += t * c.V, step.q += t * c.K, step.k += t * c.K, step.kappa += t * c.K, step.w += 2 * t * c.V;
      step.beta += t, step.g += t, step.initial_state = step.final_state, step.states = nullptr;
      cpu::scan_forward(step);
    }
    check_close(c, "o", parts.o, whole.o, 1e-13);
    check_close(c, "final_state", parts.final_state, whole.final_state, 1e-13);
  }
}

TEST_CASE("scan: the forward pass leaves the chunk states the reverse pass recomputes") {
  ScanCase c;
  c.T = 67, c.L = 2, c.documents = true;
  ScanData<double> forward(c), reverse(c);
  cpu::scan_forward(forward.args());
  cpu::scan_backward(reverse.args(), reverse.grads());
  check_close(c, "states", forward.states, reverse.states, 1e-14);
  ScanArgs<double> without = reverse.args();
  without.states = nullptr;
  CHECK_THROWS_WITH_AS(cpu::scan_backward(without, reverse.grads()), doctest::Contains("args.states is null"),
                       Error);
}

#ifdef _OPENMP
TEST_CASE("scan: the number of threads changes no bit") {
  ScanCase c;
  c.T = 67, c.H = 3, c.L = 2, c.documents = true, c.decay = ScanDecay::mixed;
  const int threads = omp_get_max_threads();
  omp_set_num_threads(1);
  ScanData<float> one(c);
  run_chunked(one);
  for (int n : {2, 5}) {
    omp_set_num_threads(n);
    ScanData<float> many(c);
    run_chunked(many);
    many.compare(one, [](const char* name, auto& x, auto& y) {
      INFO(std::string(name));
      CHECK(same_bits(x, y));
    });
  }
  omp_set_num_threads(threads);
}
#endif
