// What the parts of bench share.
#pragma once

#include <functional>
#include <memory>

#include "src/bench.h"
#include "src/engine.h"

namespace prism {

// A model at random weights and one batch of random ids, to time training steps with. Throws when the memory
// they need is not free.
struct TrainingSteps {
  TrainingSteps(const Config& config, Device device, DType dtype, int64_t B, int64_t T);
  void step() { engine->train_step(optimizer); }
  size_t bytes() const { return engine->arena_bytes() + engine->input_bytes() + model.parameters().bytes(); }

  Model model;
  Optimizer optimizer;
  Batch batch;
  std::unique_ptr<Engine> engine;
};

// NAME:KEY=VALUE:...
Config preset_config(const std::string& text);
double milliseconds_of(Device device, const std::function<void()>& work);
double median_of(std::vector<double> times);

void bench_lengths(const BenchOptions& options);

}  // namespace prism
