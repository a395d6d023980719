// What a training run is and where it stands: its settings, and the files that continue it exactly.
#pragma once

#include <limits>

#include "data/loader.h"
#include "src/model_files.h"

namespace prism {

// All that decides a run's weights. A run that is resumed must keep them.
struct TrainSettings {
  std::vector<std::string> data, val;  // as open_sources() takes them
  Recipe recipe;
  uint64_t seed = 0;
  bool no_document_reset = false, raw_u16 = false;
  std::string device = "cpu", dtype = "f32";
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
  visit("seed", s.seed, "of the weights and of the order of the data");
  visit("no-document-reset", s.no_document_reset,
        "let state and convolutions cross from document to document");
  visit("raw-u16", s.raw_u16, ".bin files are uint16 ids without a header");
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
                     const std::vector<std::string>& allowed);

}  // namespace prism
