// An op under test is one function that asks a Trial for its inputs, calls the op, and hands over its
// outputs. gradcheck_cases.cpp has one for each op; gradcheck_ops.cpp runs them.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "autograd/ops.h"

namespace prism {

struct Sizes {
  int64_t B, T, H, K, V, L;
  int64_t n() const { return B * T; }
};

// A tensor the first trial drew: an input, or the gradient of an output.
struct Drawn {
  std::string name;
  std::vector<double> values;
  bool differentiable = false;
};

// One run of an op. The first one draws its numbers, rounds them to its types and leaves them in `drawn`;
// later ones (in double, or with one number moved) read them there.
class Trial {
 public:
  Trial(Tape& tape, std::vector<Drawn>& drawn) : tape(tape), drawn_(drawn), draws_(drawn.empty()) {}

  // Inputs with a gradient: activations in the storage or the accumulation type, then parameters likewise.
  Var activation(const std::string& name, const Shape& shape, double scale = 1);
  Var scalars(const std::string& name, const Shape& shape, double low, double high);  // uniform
  Var matrix(const std::string& name, const Shape& shape, double scale = 1);
  Var vector(const std::string& name, const Shape& shape, double scale = 1, double offset = 0);
  // Without one.
  Tensor constant(DType dtype, const Shape& shape);
  Tensor ints(const std::vector<int32_t>& values);
  // Documents of random length in B rows of T.
  Sequences sequences(const Sizes& sizes);

  void output(const std::string& name, Var y);
  // An op that takes its own gradients: for the loss <y, gradient>.
  void output(const std::string& name, Tensor y, Tensor gradient);

  struct Result {
    std::string name;
    std::vector<double> values;
  };
  // Outputs, then (after the reverse pass) the gradient of each input in the order of `drawn`.
  std::vector<Result> outputs() const;
  std::vector<Result> gradients() const;
  // <y, its gradient> of each output.
  std::vector<double> projections() const;

  Tape& tape;

 private:
  using Draw = std::function<double(uint64_t stream, uint64_t i)>;
  Tensor fill(const std::string& name, Tensor to, bool differentiable, const Draw& draw);
  Var input(const std::string& name, Var x, const Draw& draw);
  Var parameter(const std::string& name, DType dtype, const Shape& shape, double scale, double offset);
  struct Output {
    std::string name;
    Tensor y, gradient;
  };

  std::vector<Drawn>& drawn_;
  const bool draws_;
  size_t next_ = 0;
  std::vector<std::pair<std::string, Var>> inputs_;
  std::vector<Output> outputs_;
};

struct OpCase {
  std::string name;
  std::function<void(Trial&, const Sizes&)> run;
};
std::vector<OpCase> op_cases();

}  // namespace prism
