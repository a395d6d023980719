// The training loop: steps, reports, validation, checkpoints, and how a run ends.
#pragma once

#include "optim/optimizer.h"
#include "src/engine.h"
#include "src/progress.h"
#include "src/run_log.h"
#include "src/sources.h"
#include "src/train_state.h"

namespace prism {

class Trainer {
 public:
  // The model has its initial or saved weights. A state of step 0 begins a run; a later one continues it,
  // with the moments of the newest checkpoint in `out`. Throws when memory does not suffice, or the
  // data does not fit the model or is not that of the state; with `other_data` it may be, and its first epoch
  // begins.
  Trainer(Model& model, const TrainState& state, const Sources& data, const std::string& out,
          CheckpointWriter& writer, bool other_data = false);

  // Trains to the last step, to `stop_after`, or until SIGINT or SIGTERM; then saves. Returns the exit
  // status: 0, or 128 + the signal. A second signal ends the process at once. Throws after ten steps in a row
  // whose loss or gradient is not finite.
  int run(int64_t stop_after = 0);
  const TrainState& state() const { return state_; }
  Engine& engine() { return *engine_; }
  // The validation batches; none when there is too little validation data.
  void for_each_validation_batch(const std::function<void(const Batch&)>& fn);

 private:
  LoaderOptions loader_options(int64_t B, uint64_t seed, const Sources& data) const;
  void place_loader(const Sources& data, bool other_data);
  void make_engine();
  void announce();
  void train_step();
  void check_finite(const StepScalars<double>& scalars) const;
  void validate();
  void report(const StepScalars<double>& scalars, double seconds, bool logged, bool evaluated);
  void save(const StepScalars<double>& scalars);

  using Clock = std::chrono::steady_clock;
  Model& model_;
  TrainState state_;
  std::string out_;
  CheckpointWriter& writer_;
  std::optional<Tokenizer> tokenizer_;
  std::unique_ptr<Loader> loader_, val_loader_;
  LoaderState val_begin_;
  std::unique_ptr<Engine> engine_;
  Optimizer optimizer_;
  std::optional<RunLog> log_;
  Progress progress_;
  int64_t first_step_;      // of this process
  std::string last_saved_;  // checkpoint directory
  // Speed is measured from here: set again after validation and saving.
  Clock::time_point clock_ = Clock::now();
  int64_t clock_step_;
};

}  // namespace prism
