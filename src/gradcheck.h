// `prism gradcheck`: every op, mixer, solver choice and ablation against something that cannot be wrong in
// the same way. One row of the table is one of them, each of its tensors held to ||x - ref|| / ||ref||
// (absolute where ref is 0).
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "tensor/dtype.h"

namespace prism {

struct GradcheckOptions {
  Device device = Device::cpu;
  // f64: reverse passes against finite differences, the chunked scan against the recurrence. Any other type:
  // this device and type against the CPU in double, on the same rounded inputs.
  DType dtype = DType::f64;
  // Multiplies each tensor by 1 + this, one after the other (a tensor of zeros: adds it). A row fails if that
  // is caught for every tensor.
  double inject_error = 0;
  std::string filter = {};  // only rows whose name contains it
};

struct Tally {
  int passed = 0, failed = 0;
};
// Prints the table, row by row. Throws when no row's name contains the filter.
Tally gradcheck(const GradcheckOptions& options);

// --- what the parts of the table share

// One line of the table: shows the tensor furthest from passing, or with an injected error the one whose
// error shows least.
class Row {
 public:
  explicit Row(double inject_error) : inject_(inject_error) {}
  void compare(const std::string& tensor, std::vector<double> x, const std::vector<double>& reference,
               double tolerance);
  // An error that stands for several tensors and takes no injection, such as a median.
  void summarise(const std::string& what, double error, double tolerance);
  bool passes() const { return shown_.error <= shown_.tolerance; }
  void print(const std::string& name, const std::string& reference) const;

 private:
  struct Finding {
    std::string tensor;
    double error = 0, tolerance = 1;
  };
  void add(const Finding& finding);
  double inject_;
  int tensors_ = 0;
  Finding shown_;
};

class Table {
 public:
  explicit Table(const GradcheckOptions& options) : options(options) {}
  // Adds a row, unless the filter leaves it out.
  void row(const std::string& name, const std::string& reference, std::function<void(Row&)> fill);
  // Fills the rows, on the CPU several at a time, and prints them in order.
  Tally run() const;

  const GradcheckOptions options;

 private:
  struct Entry {
    std::string name, reference;
    std::function<void(Row&)> fill;
  };
  std::vector<Entry> entries_;
};

// One gradient of f, the sum of f's scalars (one an output), as the reverse pass has it.
struct Differentiated {
  std::string name;
  std::span<double> x;  // where f reads it
  std::vector<double> gradient;
};
// Compares gradients with central differences of fourth order, each output's share of them included: in every
// element of an x of up to `each` numbers, else along a few random directions.
void compare_with_differences(Row& row, std::vector<Differentiated> inputs,
                              const std::vector<std::string>& outputs,
                              const std::function<std::vector<double>()>& f, size_t each);

void check_ops(Table& table);     // src/gradcheck_ops.cpp
void check_scan(Table& table);    // src/gradcheck_scan.cpp
void check_models(Table& table);  // src/gradcheck_models.cpp

}  // namespace prism
