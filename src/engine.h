// One model at work on fixed memory: training steps, gradients, evaluation. Everything a step needs is
// allocated before the first one; the arena's size is found by running the step once without computing.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "data/loader.h"
#include "optim/optimizer.h"
#include "src/model.h"

namespace prism {

// What `prism grad` shows beside the gradients.
struct Activations {
  std::vector<double> logits;               // [B,T,vocab]
  std::vector<std::vector<double>> layers;  // each layer's output [B,T,D]
};

class Engine {
 public:
  // Steps of `accumulate` micro-batches of B rows of T positions.
  Engine(Model& model, int64_t B, int64_t T, int64_t accumulate = 1);

  // Copies a step's micro-batches to the device. Their scored targets together are the divisor of the loss.
  void load(std::span<const Batch> batches);
  // Loss and gradients of the loaded step: the gradients are in the model's flat buffer, the mean loss is
  // added to *loss (one number of the accumulation type on the device; cleared here).
  void gradients(Tensor loss, Activations* activations = nullptr);
  // Gradients, then the optimizer's update. On cuda the second step is recorded as one graph, which it and
  // all later ones replay; the first runs eagerly, as all do without use_graph, with the same weights bit for
  // bit.
  void train_step(Optimizer& optimizer);
  bool use_graph = true;
  // Losses of each position of the batch, 0 where it is not scored, without a reverse pass. With `state` the
  // rows go on from it. `likeliest`, where given, receives for each position whether its target is the
  // likeliest id.
  std::vector<double> evaluate(const Batch& batch, DecodeState* state = nullptr,
                               std::vector<bool>* likeliest = nullptr);

  size_t arena_bytes() const { return arena_->capacity(); }
  // Bytes that are not the arena's: inputs and row losses.
  size_t input_bytes() const { return inputs_.bytes(); }
  // What a step's arena would take, without reserving it.
  static size_t measure(const Model& model, int64_t B, int64_t T, bool training);

 private:
  Inputs inputs(int64_t micro) const;
  Tensor ints(int64_t kind, int64_t micro) const;
  void copy_batch(const Batch& batch, int64_t micro, bool sorted);
  static void micro_step(Tape& tape, const Model& model, const Inputs& in, Tensor targets, Tensor scale,
                         Tensor row_loss, Activations* activations);
  static Var score(Tape& tape, const Model& model, const Inputs& in, DecodeState* state, Tensor rows,
                   Tensor targets, Tensor row_loss);

  Model& model_;
  int64_t B_, T_, accumulate_;
  Buffer inputs_;  // tokens | targets | order | start, each [accumulate, B T] i32; then scale [1], row_loss
                   // [B T]
  Tensor scale_, row_loss_;
  std::unique_ptr<Arena> arena_;
  Graph graph_;
  int64_t steps_run_ = 0;
};

}  // namespace prism
