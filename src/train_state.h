// What a training run is and where it stands: its settings, and the files that continue it exactly.
#pragma once

#include <limits>
#include <set>

#include "data/loader.h"
#include "src/model_files.h"

namespace prism {

// What a run is. All but the last ones decide its weights, and must be the same when it is resumed.
struct TrainSettings {
  std::vector<std::string> data, val;  // as open_sources() takes them
  Recipe recipe;
  std::vector<std::string> train_only;  // parts of weights' names; none: all are trained
  uint64_t seed = 0;
  bool no_document_reset = false, raw_u16 = false;
  std::string device = "cpu", dtype = "f32";
  // These may change on resume: they decide what is reported and kept. Every 0 steps: every tenth of `steps`.
  int64_t log_every = 10, eval_every = 0, save_every = 0;
  int64_t eval_tokens = 1 << 19;  // validation looks at so many at most, the same ones each time
  int64_t keep = 2;               // checkpoints; 0: all
};

// visit(name, field, help) for each setting but device and dtype; its flag is --name.
template <class S, class Visit>
void for_each_setting(S& s, const Visit& visit) {
  visit("data", s.data,
        "text files, directories, .bin token shards, data sets of tokenize; each may be PATH:WEIGHT");
  visit("val", s.val, "the same for validation; else the last tenth of each file");
  visit("steps", s.recipe.steps, "optimizer steps");
  visit("batch", s.recipe.batch, "rows of a micro-batch");
  visit("seq", s.recipe.seq, "positions of a row");
  visit("accumulate", s.recipe.accumulate, "micro-batches of a step");
  visit("lr", s.recipe.lr, "highest learning rate");
  visit("min-lr", s.recipe.min_lr, "learning rate of the last step; a tenth of --lr when that is given");
  visit("warmup", s.recipe.warmup,
        "steps in which the learning rate rises; at most a tenth of --steps when that is given");
  visit("schedule", s.recipe.schedule, "cosine, constant, linear or wsd (warm-up, stable, decay)");
  visit("weight-decay", s.recipe.weight_decay, "of matrices and embeddings");
  visit("beta1", s.recipe.beta1, "AdamW's decay of the first moment");
  visit("beta2", s.recipe.beta2, "AdamW's decay of the second moment");
  visit("clip", s.recipe.clip, "largest global norm of the gradients; 0: no clipping");
  visit("train-only", s.train_only,
        "train only weights whose names contain one of these (model.layers.11.), and freeze the others");
  visit("seed", s.seed, "of the weights and of the order of the data");
  visit("no-document-reset", s.no_document_reset,
        "let state and convolutions cross from document to document");
  visit("raw-u16", s.raw_u16, ".bin files are uint16 ids without a header");
  visit("log-every", s.log_every, "steps between lines of the log");
  visit("eval-every", s.eval_every, "steps between validations; 0: a tenth of --steps");
  visit("eval-tokens", s.eval_tokens, "validation tokens looked at, at most");
  visit("save-every", s.save_every, "steps between checkpoints; 0: a tenth of --steps");
  visit("keep", s.keep, "checkpoints to keep; 0: all");
}

// Throws a UsageError that names the flag, what was expected and what came.
void check_settings(const TrainSettings& settings);

struct TrainState {
  TrainSettings settings;
  int64_t step = 0;  // steps done
  LoaderState loader;
  std::string fingerprint;                             // of the training data
  int32_t taken = 0, skipped = 0, skipped_in_row = 0;  // updates
  double loss = std::numeric_limits<double>::quiet_NaN(), val_loss = loss;
};

// optimizer.safetensors (m.NAME and v.NAME of each weight) and trainer_state.json. Model and state must
// outlive what is returned.
std::vector<CheckpointFile> state_files(const Model& model, const TrainState& state);
// Both throw one line, naming the file, when it is not what state_files() writes.
TrainState read_state(const std::string& checkpoint);
void read_moments(const std::string& checkpoint, Model& model);
// Throws, with the saved value and the given one, for a setting that differs and is not among `allowed`.
void check_unchanged(const TrainSettings& saved, const TrainSettings& given,
                     const std::set<std::string>& allowed);

}  // namespace prism
