// The scan on the card against the token recurrence in double on the processor, on the same rounded inputs.
#include <doctest/doctest.h>

#include <map>

#include "src/compare.h"
#include "src/scan_case.h"
#include "tests/gpu/memory.h"

using namespace prism;

namespace {

// The worst error of each output over the cases of one test, printed at its end.
class Worst {
 public:
  explicit Worst(std::string title) : title_(std::move(title)) {}
  ~Worst() {
    std::string line = title_ + ":";
    for (const auto& [name, error] : errors_) line += cat(" ", name, " ", error);
    MESSAGE(line);
  }
  void add(const std::string& name, double error) { errors_[name] = std::max(errors_[name], error); }

 private:
  std::string title_;
  std::map<std::string, double> errors_;
};

template <class T>
void run_on_card(ScanData<T>& data) {
  DeviceScan<T>(Device::cuda, data).run();
}

template <class T>
void check_on_card(const ScanCase& c, double tolerance, Worst& worst) {
  ScanData<T> data(c);
  ScanData<double> exact(data);
  run_on_card(data);
  cpu::scan_recurrence_forward(exact.args());
  cpu::scan_recurrence_backward(exact.args(), exact.grads());
  data.compare(exact, [&](const char* name, auto& x, auto& ref) {
    const std::vector<double> values = converted<double>(x);
    const double error = relative_error(std::span<const double>(values), std::span<const double>(ref));
    worst.add(name, error);
    INFO(name, " of ", cat(c), ": error ", error);
    CHECK(error <= tolerance);
  });
}

std::vector<ScanCase> settings() {
  const std::vector<ScanCase> all = scan_settings();
  std::vector<ScanCase> cases;
  for (size_t i = 0; i < all.size(); i += kSmall ? 9 : 1) cases.push_back(all[i]);
  for (ScanCase& c : cases) c.B = 1, c.T = kSmall ? 70 : 150, c.K = 32, c.V = 40, c.C = 64;
  return cases;
}

std::vector<ScanCase> shapes(KernelChoice choice) {  // every length class and width
  std::vector<ScanCase> cases;
  const auto add = [&](int64_t T, int64_t K, int64_t V, int64_t L) {
    ScanCase c;
    c.B = 2, c.T = T, c.K = K, c.V = V, c.L = L, c.C = 64;
    c.documents = cases.size() % 2, c.decay = cases.size() % 3 ? ScanDecay::mixed : ScanDecay::mild;
    c.seed = cases.size() + 1000;
    cases.push_back(c);
  };
  if (kSmall && choice == KernelChoice::simple) {  // the same kernels at every width
    for (int64_t L : {1, 3}) add(66, 128, 40, L), add(66, 16, 136, L);
    return cases;
  }
  if (kSmall) {
    for (int64_t L : {1, 2, 3, 4}) add(131, 128, 256, L), add(70, L > 2 ? 256 : 64, 40, L);
    return cases;
  }
  for (int64_t T : {1, 2, 15, 63, 64, 65, 131, 300}) add(T, 64, 64, 1), add(T, 128, 256, 3);
  for (int64_t K : {16, 24, 40, 64, 72, 96, 128, 136, 200, 256})
    for (int64_t V : {16, 40, 128, 256}) add(100, K, V, 1 + static_cast<int64_t>(cases.size() % 3));
  return cases;
}

template <class T>
void sweep(const char* title, KernelChoice choice, const std::vector<ScanCase>& cases, double tolerance) {
  const KernelChoice before = std::exchange(kernel_choice, choice);
  Worst worst(title);
  for (const ScanCase& c : cases) check_on_card<T>(c, tolerance, worst);
  kernel_choice = before;
}

}  // namespace

// float32: sums of at most a few hundred terms of either sign, each rounded at 6e-8; dg, a difference of
// sums, shows 2e-6.
TEST_CASE("cuda scan: float32 is the recurrence for every setting, length and width") {
  sweep<float>("float32 settings", KernelChoice::simple, settings(), 9e-6);
  sweep<float>("float32 shapes", KernelChoice::simple, shapes(KernelChoice::simple), 9e-6);
}

// bf16 storage: outputs are rounded at 1.7e-3.
TEST_CASE("cuda scan: the simple kernels in bf16 are the recurrence on the rounded inputs") {
  sweep<bf16>("bf16 simple settings", KernelChoice::simple, settings(), 8e-3);
  sweep<bf16>("bf16 simple shapes", KernelChoice::simple, shapes(KernelChoice::simple), 8e-3);
}

// Tensor cores: operands, S among them, are rounded to bf16 before each product, of which a few follow; dbeta
// shows 5e-3.
TEST_CASE("cuda scan: the fast kernels in bf16 are the recurrence on the rounded inputs") {
  sweep<bf16>("bf16 fast settings", KernelChoice::fast, settings(), 2e-2);
  sweep<bf16>("bf16 fast shapes", KernelChoice::fast, shapes(KernelChoice::fast), 2e-2);
}

TEST_CASE("cuda scan: a long row cut into segments is the recurrence") {
  std::vector<ScanCase> cases;
  for (int64_t L : {1, 3})
    for (ScanDecay decay : {ScanDecay::mild, ScanDecay::mixed}) {
      ScanCase c;
      c.B = 1, c.T = kSmall ? 1000 : 4000, c.H = 1, c.K = 128, c.V = 64, c.L = L, c.C = 64, c.decay = decay;
      c.documents = decay == ScanDecay::mixed, c.seed = cases.size() + 2000;
      cases.push_back(c);
    }
  sweep<bf16>("bf16 long", KernelChoice::fast, cases, 2e-2);
}

TEST_CASE("cuda scan: two runs give the same bits") {
  for (const KernelChoice choice : {KernelChoice::simple, KernelChoice::fast}) {
    const KernelChoice before = std::exchange(kernel_choice, choice);
    ScanCase c;
    c.T = kSmall ? 70 : 500, c.K = 128, c.V = 256, c.L = 3, c.C = 64, c.documents = true;
    ScanData<bf16> first(c), second(c);
    run_on_card(first), run_on_card(second);
    first.compare(second, [&](const char* name, auto& x, auto& y) {
      INFO(name);
      CHECK(converted<double>(x) == converted<double>(y));
    });
    kernel_choice = before;
  }
}
