#include "src/gradcheck_ops.h"

#include <cstring>
#include <numeric>

#include "kernels/documents.h"
#include "src/gradcheck.h"
#include "src/host.h"
#include "tensor/rng.h"

namespace prism {

namespace {

constexpr uint64_t kSeed = 11;

Trial::Result result(const std::string& name, Tensor x) { return {name, to_host(x)}; }

}  // namespace

Tensor Trial::fill(const std::string& name, Tensor to, bool differentiable, const Draw& draw) {
  if (tape.arena().measures()) return to;
  const uint64_t stream = next_++;
  if (draws_) {
    Drawn drawn{name, std::vector<double>(static_cast<size_t>(to.numel())), differentiable};
    for (size_t i = 0; i < drawn.values.size(); ++i) drawn.values[i] = draw(stream, i);
    from_host(to, drawn.values);
    drawn.values = to_host(to);
    drawn_.push_back(std::move(drawn));
  } else {
    from_host(to, drawn_.at(stream).values);
  }
  return to;
}

Var Trial::input(const std::string& name, Var x, const Draw& draw) {
  fill(name, x->value, true, draw);
  inputs_.emplace_back(name, x);
  return x;
}

Var Trial::activation(const std::string& name, const Shape& shape, double scale) {
  return input(name, tape.make(shape),
               [=](uint64_t stream, uint64_t i) { return scale * random_normal(kSeed, stream, i); });
}

Var Trial::scalars(const std::string& name, const Shape& shape, double low, double high) {
  return input(name, tape.make(tape.acc(), shape), [=](uint64_t stream, uint64_t i) {
    return low + (high - low) * random_uniform(kSeed, stream, i);
  });
}

Var Trial::parameter(const std::string& name, DType dtype, const Shape& shape, double scale, double offset) {
  const Tensor value = tape.make(dtype, shape)->value;
  const Tensor grad = tape.recording() ? tape.make(tape.acc(), shape)->value : Tensor{};
  if (grad && !tape.arena().measures()) fill_bytes(tape.device(), grad.data, 0, grad.bytes());
  return input(name, tape.parameter(value, grad),
               [=](uint64_t stream, uint64_t i) { return offset + scale * random_normal(kSeed, stream, i); });
}

Var Trial::matrix(const std::string& name, const Shape& shape, double scale) {
  return parameter(name, tape.dtype(), shape, scale, 0);
}

Var Trial::vector(const std::string& name, const Shape& shape, double scale, double offset) {
  return parameter(name, tape.acc(), shape, scale, offset);
}

Tensor Trial::constant(DType dtype, const Shape& shape) {
  return fill("constant", tape.make(dtype, shape)->value, false,
              [](uint64_t stream, uint64_t i) { return random_normal(kSeed, stream, i); });
}

Tensor Trial::ints(const std::vector<int32_t>& values) {
  const Tensor x = tape.make(DType::i32, {static_cast<int64_t>(values.size())})->value;
  if (!tape.arena().measures()) copy_in(tape.device(), x.data, values.data(), x.bytes());
  return x;
}

Sequences Trial::sequences(const Sizes& s) {
  std::vector<int32_t> segment(static_cast<size_t>(s.n())), start(segment.size());
  for (size_t i = 1; i < segment.size(); ++i)
    segment[i] = segment[i - 1] ^ (random_below(5, kSeed, 1000, i) == 0 ? 1 : 0);
  document_starts(start.data(), segment.data(), s.B, s.T);
  return {s.B, s.T, ints(start)};
}

void Trial::output(const std::string& name, Var y) {
  const Tensor gradient = tape.make(y->value.dtype, y->value.shape)->value;
  // Around 0.5, so that sums over tokens are not small by chance.
  fill(name, gradient, false,
       [](uint64_t stream, uint64_t i) { return 0.5 + random_normal(kSeed, stream, i); });
  y->grad = gradient;
  output(name, y->value, gradient);
}

void Trial::output(const std::string& name, Tensor y, Tensor gradient) {
  outputs_.push_back({name, y, gradient});
}

std::vector<Trial::Result> Trial::outputs() const {
  std::vector<Result> results;
  for (const Output& o : outputs_) results.push_back(result(o.name, o.y));
  return results;
}

std::vector<Trial::Result> Trial::gradients() const {
  std::vector<Result> results;
  for (const auto& [name, x] : inputs_) {
    results.push_back({"d" + name, std::vector<double>(static_cast<size_t>(x->value.numel()))});
    if (x->grad) results.back().values = to_host(x->grad);  // else no op read it
  }
  return results;
}

std::vector<double> Trial::projections() const {
  std::vector<double> sums;
  for (const Output& o : outputs_) {
    const std::vector<double> y = to_host(o.y), gradient = to_host(o.gradient);
    sums.push_back(std::inner_product(y.begin(), y.end(), gradient.begin(), 0.0));
  }
  return sums;
}

namespace {

// Fresh memory for trials of one op, all NaN before each.
class Bench {
 public:
  Bench(const OpCase& op, const Sizes& sizes, Device device, DType dtype, bool reverse,
        std::vector<Drawn>& drawn)
      : op_(op),
        sizes_(sizes),
        dtype_(dtype),
        reverse_(reverse),
        drawn_(drawn),
        arena_(Arena::measuring(device)) {
    run([](const Trial&) {});
    arena_ = Arena(device, arena_.peak());
  }

  template <class Fn>
  void run(const Fn& read) {
    arena_.reset();
    if (!arena_.measures()) {
      const Tensor all = arena_.low(DType::i32, {static_cast<int64_t>(arena_.capacity() / 4)});
      fill_bytes(arena_.device(), all.data, 0xff, all.bytes());
      arena_.reset();
    }
    Tape tape(arena_, dtype_, reverse_);
    Trial trial(tape, drawn_);
    op_.run(trial, sizes_);
    if (reverse_) tape.backward();
    read(trial);
  }
  // Every output and gradient.
  std::vector<Trial::Result> results() {
    std::vector<Trial::Result> all;
    run([&](const Trial& trial) {
      all = trial.outputs();
      for (Trial::Result& gradient : trial.gradients()) all.push_back(std::move(gradient));
    });
    return all;
  }

 private:
  const OpCase& op_;
  Sizes sizes_;
  DType dtype_;
  bool reverse_;
  std::vector<Drawn>& drawn_;
  Arena arena_;
};

void check_by_differences(Row& row, const OpCase& op, const Sizes& sizes) {
  std::vector<Drawn> drawn;
  std::vector<Trial::Result> gradients;
  std::vector<std::string> outputs;
  Bench(op, sizes, Device::cpu, DType::f64, true, drawn).run([&](const Trial& trial) {
    gradients = trial.gradients();
    for (const Trial::Result& y : trial.outputs()) outputs.push_back(y.name);
  });
  std::vector<Differentiated> inputs;
  for (Drawn& x : drawn)
    if (x.differentiable) inputs.push_back({x.name, x.values, gradients[inputs.size()].values});
  Bench forward(op, sizes, Device::cpu, DType::f64, false, drawn);
  compare_with_differences(
      row, std::move(inputs), outputs,
      [&] {
        std::vector<double> sums;
        forward.run([&](const Trial& trial) { sums = trial.projections(); });
        return sums;
      },
      64);
}

void check_on_device(Row& row, const OpCase& op, const Sizes& sizes, Device device, DType dtype) {
  std::vector<Drawn> drawn;
  const std::vector<Trial::Result> results = Bench(op, sizes, device, dtype, true, drawn).results();
  const std::vector<Trial::Result> exact = Bench(op, sizes, Device::cpu, DType::f64, true, drawn).results();
  // Less than five times the worst error seen on the CPU and on a card: 8.7e-3 and 6.2e-7.
  const double tolerance = dtype == DType::bf16 ? 1.4e-2 : 3e-6;
  for (size_t i = 0; i < results.size(); ++i)
    row.compare(results[i].name, results[i].values, exact[i].values, tolerance);
}

}  // namespace

void check_ops(Table& table) {
  const Device device = table.options.device;
  const DType dtype = table.options.dtype;
  for (const OpCase& op : op_cases()) {
    if (dtype == DType::f64)
      table.row(op.name, "finite differences", [=](Row& row) {
        // The second has more rows than a tile of a column sum (kernels/rows.h).
        for (const Sizes& sizes : {Sizes{2, 5, 2, 3, 5, 3}, Sizes{1, 131, 1, 9, 3, 2}})
          check_by_differences(row, op, sizes);
      });
    else
      table.row(op.name, "cpu f64, same inputs", [=](Row& row) {
        for (const Sizes& sizes :
             {Sizes{2, 1, 4, 16, 16, 2}, Sizes{2, 17, 4, 24, 40, 4}, Sizes{1, 131, 3, 64, 128, 3},
              Sizes{2, 65, 4, 128, 256, 3}, Sizes{1, 64, 4, 256, 16, 2}})
          check_on_device(row, op, sizes, device, dtype);
      });
  }
}

}  // namespace prism
