// All weights of a model in one flat buffer per kind (masters, gradients, moments, compute copies), with
// named views. Matrices, which decay, come first; vectors (norms, convolutions, biases, A_log, dt_bias) after
// them. Weights that read the same input are adjacent rows of one matrix, so that one product serves them.
#pragma once

#include <string>
#include <vector>

#include "kernels/adamw.h"
#include "tensor/tensor.h"

namespace prism {

// How a weight is drawn before training (SPEC section 3).
struct Init {
  enum Kind {
    normal,      // N(0, scale^2)
    uniform,     // uniform +-scale
    constant,    // scale
    decay_rate,  // A_log: log of uniform (0,16]
    time_step,   // dt_bias: inverse softplus of exp(uniform(log 0.001, log 0.1)), at least 1e-4
  };
  Kind kind = constant;
  double scale = 0;
};

// One named weight, as a checkpoint knows it.
struct Parameter {
  std::string name;
  Shape shape;
  Init init;
  bool decays = false;
  bool frozen = false;  // takes no update: see Parameters::train_only
  int64_t offset = 0;   // in elements, from the start of the flat buffers
};

// What one product or kernel takes: one parameter, or adjacent ones as one matrix.
struct Slot {
  int64_t index = -1;  // into the table of slots; -1: absent
  explicit operator bool() const { return index >= 0; }
};

class Parameters {
 public:
  // --- building: declare everything, then allocate
  // One matrix, or several as adjacent rows of one [sum of their rows, columns]. `padded`: the sum is rounded
  // up to a multiple of 8, so that rows of the product stay aligned; padding stays 0.
  Slot add_matrix(std::vector<Parameter> pieces, bool padded = false);
  // A tensor of any shape that does not decay.
  Slot add_vector(Parameter vector);
  // dtype: what the model computes in. Masters are float, or double for f64. Gradients and moments exist when
  // training.
  void allocate(Device device, DType dtype, bool training);
  void initialise(uint64_t seed);

  // From now on only weights whose names contain one of `words` are trained. Throws when there are none.
  void train_only(const std::vector<std::string>& words);

  // --- use
  const std::vector<Parameter>& list() const { return list_; }  // in order of declaration
  std::vector<Parameter>& list() { return list_; }
  const Parameter* find(const std::string& name) const;
  // A slot as the model computes with it: matrices in the compute type, vectors in the accumulation type.
  Tensor value(Slot slot) const;
  // Its gradient, in the accumulation type; absent without training, and for a matrix that is frozen whole.
  // Other frozen weights have one, as their kernels expect, that the optimizer clears.
  Tensor grad(Slot slot) const;
  // The flat buffers' stretches that are trained, or frozen, as one kind of decay each.
  struct Range {
    int64_t begin, end;
    bool decays;
  };
  std::vector<Range> ranges(bool frozen) const;
  // One weight's view of a flat buffer.
  Tensor master(const Parameter& p) const { return view(masters_, p); }
  Tensor grad(const Parameter& p) const { return view(grads_, p); }
  Tensor moment1(const Parameter& p) const { return view(moments1_, p); }
  Tensor moment2(const Parameter& p) const { return view(moments2_, p); }
  // Writes the compute copies again, after masters changed from outside.
  void refresh_copies();

  int64_t size() const { return size_; }        // elements of a flat buffer, padding included
  int64_t decayed() const { return decayed_; }  // the first so many decay
  int64_t count() const;                        // weights, without padding
  DType dtype() const { return dtype_; }
  Device device() const { return device_; }
  bool training() const { return training_; }
  Tensor masters() const { return flat(masters_, acc_of(dtype_)); }
  Tensor grads() const { return flat(grads_, acc_of(dtype_)); }
  Tensor moments1() const { return flat(moments1_, acc_of(dtype_)); }
  Tensor moments2() const { return flat(moments2_, acc_of(dtype_)); }
  Tensor copies() const { return dtype_ == DType::bf16 ? flat(copies_, DType::bf16) : Tensor{}; }
  size_t bytes() const;

 private:
  struct Piece {
    int64_t first, count;  // parameters list_[first, first + count)
    int64_t offset;        // elements
    Shape shape;
    bool matrix;
  };
  Tensor flat(const Buffer& buffer, DType dtype) const { return {buffer.data(), {size_}, dtype, device_}; }
  Tensor view(const Buffer& buffer, const Parameter& p) const;

  std::vector<Parameter> list_;
  std::vector<Piece> slots_;
  int64_t size_ = 0, decayed_ = 0;
  Device device_ = Device::cpu;
  DType dtype_ = DType::f32;
  bool training_ = false;
  Buffer masters_, grads_, moments1_, moments2_, copies_;
};

}  // namespace prism
