// Reverse-mode differentiation by a tape. An op computes its output and records a function that turns the
// gradient of the output into gradients of the inputs; backward() calls these in reverse order. That is all
// of autograd.
//
// Memory is an arena with two ends (tensor/arena.h). What the reverse pass reads is saved at the low end.
// What is cheap to compute again is a `temporary`: it lives until its scope ends and is remade when the
// reverse pass asks for it. Gradients and remade values lie at the high end, until the reverse pass leaves
// the scope.
#pragma once

#include <deque>
#include <functional>
#include <vector>

#include "tensor/arena.h"

namespace prism {

// A value on the tape.
struct Node {
  Tensor value;  // data is null while a temporary is not there
  Tensor grad;   // of a parameter: its place in the flat buffer, accumulated; else made by the reverse pass
  std::function<void(Tensor)> remake;  // temporaries: computes the value into the tensor
  int64_t columns_used = 0;            // columns that ops with a gradient have taken from it (see Columns)
  bool constant = false;               // no gradient is wanted
  bool rewrites = false;  // a temporary that its producer's reverse op can write again in passing
  std::vector<std::function<void()>> waiting;  // reverse work for the moment it has
};
using Var = Node*;  // null: absent

// Columns [begin, begin + width) of a matrix [n, P]: all of them, or a part that no other op takes. The
// gradient of columns that no op took is 0.
struct Columns {
  Var of = nullptr;
  int64_t begin = 0, width = 0;

  Columns() = default;
  Columns(Var x) : of(x), width(x ? x->value.shape[-1] : 0) {}
  Columns(Var x, int64_t from, int64_t count) : of(x), begin(from), width(count) {}
  explicit operator bool() const { return of != nullptr; }
  bool whole() const { return width == of->value.shape[-1]; }
};

class Tape {
 public:
  // Computes in storage type `dtype` on the arena's device. Without `recording` nothing is saved for a
  // reverse pass.
  Tape(Arena& arena, DType dtype, bool recording) : arena_(arena), dtype_(dtype), recording_(recording) {}

  DType dtype() const { return dtype_; }
  DType acc() const { return acc_of(dtype_); }
  Device device() const { return arena_.device(); }
  bool recording() const { return recording_; }
  Arena& arena() { return arena_; }

  // --- forward
  Var constant(Tensor value);
  Var parameter(Tensor value, Tensor grad);
  // An output the reverse pass reads.
  Var make(DType dtype, const Shape& shape);
  Var make(const Shape& shape) { return make(dtype_, shape); }
  // Computed now, and again in the reverse pass once its scope has ended.
  Var temporary(const Shape& shape, std::function<void(Tensor)> compute);
  // Memory until the innermost Scratch ends.
  Tensor scratch(DType dtype, const Shape& shape) { return arena_.high(dtype, shape); }

  // Launches fn(Tag<T>) for the tape's storage type; skipped while the arena only measures.
  template <class Fn>
  void run(Fn&& fn) const {
    if (!arena_.measures()) dispatch(dtype_, fn);
  }
  void on_reverse(std::function<void()> reverse) {
    if (recording_) reverses_.push_back(std::move(reverse));
  }

  // --- reverse
  void backward();
  // The value, remade if it is a temporary whose scope has ended. Ask before opening a Scratch.
  Tensor value(Var x);
  // Calls use(), which reads x and adds to no gradient but a parameter's: now, or when the reverse op of x's
  // producer has written it again, which saves a pass over memory.
  void with_value(Var x, std::function<void()> use);
  // That op's side: where to write the value, null when nobody waits; and that it has been written.
  Tensor rewrite_target(Var x);
  void rewritten(Var x);
  // The gradient of an output: made by its consumers, 0 if there were none.
  Tensor grad(Var x);
  // Where to write (=) the gradient of an input: its own tensor, or scratch when another consumer wrote
  // first; settle() then adds it. Absent (null data) for constants.
  Tensor grad_target(Var x);
  void settle(Var x, Tensor target);
  // The same for columns: part of a matrix lies in the matrix's own gradient.
  Tensor grad_target(const Columns& x);
  void settle(const Columns& x, Tensor target);

  // Releases, when it ends, the scratch taken since it began.
  class Scratch {
   public:
    explicit Scratch(Tape& tape) : arena_(tape.arena_), mark_(arena_.high_mark()) {}
    ~Scratch() { arena_.release_high(mark_); }

   private:
    Arena& arena_;
    size_t mark_;
  };

  // A part of the model whose temporaries nobody outside reads: a layer's mixer, a feed-forward. Without
  // recording everything made inside is released.
  class Scope {
   public:
    explicit Scope(Tape& tape);
    ~Scope();

   private:
    Tape& tape_;
    size_t low_, high_, first_node_;
  };

 private:
  void open_reverse_scope();
  void close_reverse_scope(size_t first_node, size_t end_node);
  void make_grad(Var x, bool zero);

  Arena& arena_;
  DType dtype_;
  bool recording_;
  std::deque<Node> nodes_;
  std::vector<std::function<void()>> reverses_;
  std::vector<size_t> scope_marks_;  // high ends of the scopes the reverse pass is in
};

}  // namespace prism
