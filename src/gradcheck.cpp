#include "src/gradcheck.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <mutex>
#include <numeric>
#include <optional>

#include "src/compare.h"
#include "tensor/parallel.h"
#include "tensor/rng.h"

namespace prism {

void Row::compare(const std::string& tensor, std::vector<double> x, const std::vector<double>& reference,
                  double tolerance) {
  if (inject_ != 0) {
    const bool zeros = std::all_of(x.begin(), x.end(), [](double v) { return v == 0; });
    for (double& v : x) v = zeros ? inject_ : v * (1 + inject_);
  }
  add({tensor, relative_error(std::span<const double>(x), std::span<const double>(reference)), tolerance});
}

void Row::summarise(const std::string& what, double error, double tolerance) {
  if (inject_ == 0) add({what, error, tolerance});
}

void Row::add(const Finding& finding) {
  const double here = finding.error / finding.tolerance, there = shown_.error / shown_.tolerance;
  if (tensors_++ == 0 || (inject_ == 0 ? here > there : here < there)) shown_ = finding;
}

void Row::print(const std::string& name, const std::string& reference) const {
  std::printf("%-36s %-34s %6d   %8.1e %-34s %7.0e  %s\n", name.c_str(), reference.c_str(), tensors_,
              shown_.error, shown_.tensor.c_str(), shown_.tolerance, passes() ? "PASS" : "FAIL");
  std::fflush(stdout);
}

void Table::row(const std::string& name, const std::string& reference, std::function<void(Row&)> fill) {
  if (name.find(options.filter) != std::string::npos) entries_.push_back({name, reference, std::move(fill)});
}

Tally Table::run() const {
  PRISM_CHECK(!entries_.empty(), "--filter: no row's name contains ", options.filter);
  Tally tally;
  std::vector<std::optional<Row>> rows(entries_.size());
  size_t printed = 0;
  std::mutex mutex;
  std::exception_ptr error;
  const auto fill = [&](int64_t i) {
    Row row(options.inject_error);
    std::exception_ptr thrown;
    try {
      entries_[static_cast<size_t>(i)].fill(row);
    } catch (...) {
      thrown = std::current_exception();  // must not leave a parallel loop
    }
    const std::lock_guard lock(mutex);
    if (thrown) error = thrown;
    rows[static_cast<size_t>(i)] = row;
    for (; printed < rows.size() && rows[printed] && !error; ++printed) {
      rows[printed]->print(entries_[printed].name, entries_[printed].reference);
      ++(rows[printed]->passes() ? tally.passed : tally.failed);
    }
  };
  const auto count = static_cast<int64_t>(entries_.size());
  if (options.device == Device::cpu)
    parallel_for(count, fill);
  else
    for (int64_t i = 0; i < count && !error; ++i) fill(i);
  if (error) std::rethrow_exception(error);
  return tally;
}

namespace {

double dot(std::span<const double> x, std::span<const double> y) {
  return std::inner_product(x.begin(), x.end(), y.begin(), 0.0);
}

// The i-th direction in which x is moved: along one element, or at random with length 1.
std::vector<double> direction(size_t size, size_t i, bool each) {
  std::vector<double> d(size, 0);
  if (each) {
    d[i] = 1;
    return d;
  }
  for (size_t j = 0; j < size; ++j) d[j] = random_normal(7, i, j);
  const double norm = std::sqrt(dot(d, d));
  for (double& v : d) v /= norm;
  return d;
}

// The slope of each of f's scalars along d: (8 (f(h) - f(-h)) - (f(2h) - f(-2h))) / 12 h. With h = 5e-4 the
// error, h^4 / 30 times the fifth derivative, is about the rounding of f, which is 1e-12 of it.
std::vector<double> slopes(std::span<double> x, const std::vector<double>& d,
                           const std::function<std::vector<double>()>& f) {
  constexpr double h = 5e-4;
  const std::vector<double> x0(x.begin(), x.end());
  const auto at = [&](double step) {
    for (size_t i = 0; i < x.size(); ++i) x[i] = x0[i] + step * d[i];
    return f();
  };
  const std::vector<double> far_up = at(2 * h), up = at(h), down = at(-h), far_down = at(-2 * h);
  std::copy(x0.begin(), x0.end(), x.begin());
  std::vector<double> slope(up.size());
  for (size_t i = 0; i < slope.size(); ++i)
    slope[i] = (8 * (up[i] - down[i]) - (far_up[i] - far_down[i])) / (12 * h);
  return slope;
}

}  // namespace

void compare_with_differences(Row& row, std::vector<Differentiated> inputs,
                              const std::vector<std::string>& outputs,
                              const std::function<std::vector<double>()>& f, size_t each) {
  constexpr double tolerance = 1e-7;
  constexpr size_t directions = 3;
  std::vector<double> expected;                            // slopes by the reverse pass, all inputs'
  std::vector<std::vector<double>> parts(outputs.size());  // what each output has in them, by differences
  for (const Differentiated& input : inputs) {
    const bool single = input.x.size() <= each;
    std::vector<double> reverse, differences;
    for (size_t i = 0; i < (single ? input.x.size() : directions); ++i) {
      const std::vector<double> d = direction(input.x.size(), i, single), slope = slopes(input.x, d, f);
      reverse.push_back(dot(input.gradient, d));
      differences.push_back(std::accumulate(slope.begin(), slope.end(), 0.0));
      for (size_t o = 0; o < outputs.size(); ++o) parts[o].push_back(slope[o]);
    }
    row.compare("d" + input.name, reverse, differences, tolerance);
    expected.insert(expected.end(), reverse.begin(), reverse.end());
  }
  for (size_t o = 0; o < outputs.size(); ++o) {
    const auto zero = [](double slope) { return slope == 0; };
    if (std::all_of(parts[o].begin(), parts[o].end(), zero)) continue;  // depends on no input: a fixed decay
    std::vector<double> rest = expected;
    for (size_t other = 0; other < outputs.size(); ++other)
      for (size_t i = 0; i < rest.size() && other != o; ++i) rest[i] -= parts[other][i];
    row.compare(outputs[o], parts[o], rest, tolerance);
  }
}

Tally gradcheck(const GradcheckOptions& options) {
  std::printf("%-36s %-34s %6s   %8s %-34s %7s\n", "row", "compared with", "tensors",
              options.inject_error == 0 ? "worst" : "least", "tensor", "limit");
  Table table(options);
  check_ops(table);
  check_scan(table);
  check_models(table);
  const Tally tally = table.run();
  std::printf("%d PASS, %d FAIL\n", tally.passed, tally.failed);
  return tally;
}

}  // namespace prism
