#include "autograd/tape.h"

#include "kernels/elementwise.h"

namespace prism {

Var Tape::constant(Tensor value) {
  Node& node = nodes_.emplace_back();
  node.value = value;
  node.constant = true;
  return &node;
}

Var Tape::parameter(Tensor value, Tensor grad) {
  Node& node = nodes_.emplace_back();
  node.value = value;
  node.grad = grad;
  node.constant = !grad;
  return &node;
}

Var Tape::make(DType dtype, const Shape& shape) {
  Node& node = nodes_.emplace_back();
  node.value = arena_.low(dtype, shape);
  return &node;
}

Var Tape::temporary(const Shape& shape, std::function<void(Tensor)> compute) {
  Node& node = nodes_.emplace_back();
  node.value = arena_.high(dtype_, shape);
  compute(node.value);
  if (recording_) node.remake = std::move(compute);
  return &node;
}

Tensor Tape::value(Var x) {
  if (!x->value.data) {
    x->value = arena_.high(x->value.dtype, x->value.shape);
    x->remake(x->value);
  }
  return x->value;
}

void Tape::with_value(Var x, std::function<void()> use) {
  if (x->rewrites && !x->value.data) return x->waiting.push_back(std::move(use));
  value(x);
  use();
}

Tensor Tape::rewrite_target(Var x) {
  if (!x->waiting.empty() && !x->value.data) x->value = arena_.high(x->value.dtype, x->value.shape);
  return x->waiting.empty() ? Tensor{} : x->value;
}

void Tape::rewritten(Var x) {
  for (const auto& use : x->waiting) use();
  x->waiting.clear();
}

void Tape::make_grad(Var x, bool zero) {
  x->grad = arena_.high(x->value.dtype, x->value.shape);
  if (zero && !arena_.measures()) fill_bytes(device(), x->grad.data, 0, x->grad.bytes());
}

Tensor Tape::grad(Var x) {
  // Columns that no op takes, and outputs that no op reads, have gradient 0.
  if (!x->grad) make_grad(x, x->columns_used != x->value.shape[-1]);
  return x->grad;
}

Tensor Tape::grad_target(Var x) {
  if (!x || x->constant) return {};
  if (x->grad) return arena_.high(x->value.dtype, x->value.shape);
  make_grad(x, false);
  return x->grad;
}

Tensor Tape::grad_target(const Columns& x) {
  if (!x || x.of->constant) return {};
  return x.whole() ? grad_target(x.of) : grad(x.of);
}

void Tape::settle(const Columns& x, Tensor target) {
  if (target && x.whole()) settle(x.of, target);
}

void Tape::settle(Var x, Tensor target) {
  if (!target || target.data == x->grad.data || arena_.measures()) return;
  dispatch(target.dtype, [&]<class T>(Tag<T>) {
    const int64_t columns = target.shape[-1];
    add_rows<T>(device(), {x->grad.ptr<T>(), columns}, {target.ptr<T>(), columns}, target.rows(), columns);
  });
}

void Tape::backward() {
  PRISM_CHECK(recording_, "backward: the tape did not record");
  while (!reverses_.empty()) {
    const std::function<void()> reverse = std::move(reverses_.back());
    reverses_.pop_back();
    reverse();
  }
}

Tape::Scope::Scope(Tape& tape)
    : tape_(tape),
      low_(tape.arena_.low_mark()),
      high_(tape.arena_.high_mark()),
      first_node_(tape.nodes_.size()) {
  // Runs last of the scope's reverse functions: what they left at the high end goes.
  tape.on_reverse([&tape, first = first_node_] { tape.close_reverse_scope(first, tape.nodes_.size()); });
}

Tape::Scope::~Scope() {
  tape_.arena_.release_high(high_);
  for (size_t i = first_node_; i < tape_.nodes_.size(); ++i)
    if (tape_.nodes_[i].remake) tape_.nodes_[i].value.data = nullptr;
  if (!tape_.recording_) tape_.arena_.release_low(low_);
  tape_.on_reverse([&tape = tape_] { tape.open_reverse_scope(); });
}

void Tape::open_reverse_scope() { scope_marks_.push_back(arena_.high_mark()); }

void Tape::close_reverse_scope(size_t first_node, size_t end_node) {
  arena_.release_high(scope_marks_.back());
  scope_marks_.pop_back();
  for (size_t i = first_node; i < end_node; ++i)
    if (nodes_[i].remake) nodes_[i].value.data = nullptr;
}

}  // namespace prism
