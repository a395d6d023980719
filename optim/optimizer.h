// AdamW over a model's flat buffers, and the learning rate's schedules (SPEC section 9).
#pragma once

#include <string>

#include "optim/parameters.h"

namespace prism {

struct AdamWSettings {
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8;
  double weight_decay = 0.1;  // of matrices and embeddings only
  double clip = 1;            // largest global norm of the gradients; <= 0: no clipping
};

class Optimizer {
 public:
  Optimizer(Parameters& parameters, const AdamWSettings& settings);

  // Enqueues one update from the gradients in the flat buffer: norm, clipping, the non-finite check, AdamW.
  // lr and the loss are read on the device, from scalars().
  void step();

  // Where the step's mean loss goes on the device, before step().
  Tensor loss() const;
  void set_lr(double lr);
  // One step's outcome on the host; waits for the device.
  StepScalars<double> read() const;
  void restore(int32_t taken, int32_t skipped, int32_t skipped_in_row);

 private:
  Parameters& parameters_;
  AdamWSettings settings_;
  Buffer scalars_, partial_;
};

// Step s from 0 of `steps`. Warm-up: lr (s+1) / warmup, in every schedule. Then `cosine` and `linear` fall to
// min_lr at the last step, `constant` stays, `wsd` (warm-up, stable, decay) stays until the last tenth and
// falls linearly.
double learning_rate(const std::string& schedule, int64_t s, int64_t steps, double lr, double min_lr,
                     int64_t warmup);
// Throws a UsageError that names the schedules there are.
void check_schedule(const std::string& schedule);

}  // namespace prism
