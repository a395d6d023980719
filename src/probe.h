// `prism probe`: small models trained on tasks made on the fly (src/probe_tasks.h), and how much of unseen
// rows they get right.
#pragma once

#include "src/config.h"
#include "src/probe_tasks.h"
#include "tensor/dtype.h"

namespace prism {

struct ProbeOptions {
  std::vector<std::string> tasks;
  std::vector<std::string> mixers;  // none: all; a hybrid, "prism+attention", has them in turn by layer
  std::vector<int64_t> ranks = {1, 2, 4};
  // Keys of config.json with values separated by commas: every combination is a model.
  std::vector<std::string> grid;
  int64_t seeds = 3;
  // Of a run. 0: the task's own steps and width, one head.
  int64_t steps = 0, batch = 16, width = 0, layers = 2, heads = 1;
  double lr = 0;  // 0: 4e-3 / sqrt(width / 16)
  bool bare = false;
  Device device = Device::cpu;
  DType dtype = DType::f32;
  std::string json;  // file of a line for each model and task; none when empty
};

struct ProbeModel {
  std::string name;
  Config config;
};
// Two-layer models whose states have the same size, for a task: each mixer, with each rank where it has one,
// with each combination of the grid that changes it.
std::vector<ProbeModel> probe_models(const ProbeTask& task, const ProbeOptions& options);

// One model on one task, over the seeds 0, 1, ..
struct ProbeResult {
  std::vector<double>
      accuracy;  // share of the scored positions of 1,024 test rows where the likeliest id is right
  std::vector<int64_t> steps;  // fewer than asked for where a run stopped early
  double mean() const;
};
// Trains and tests every model on every task, as many runs at once as there are threads, and prints a table.
// A run stops early once it gets at least 99.9 % right of 128 rows that are neither trained on nor tested.
std::vector<std::vector<ProbeResult>> probe(const ProbeOptions& options);

// Appendix D in numbers: the relative error of a scan's state after T tokens, over the relative noise in each
// token's alpha, or in each token's write. An error in a decay is carried by all that the state holds, one in
// a write by that write alone: with random writes and no erasure they are sqrt(sum_i i alpha^2i / sum_i
// alpha^2i) over i < T, and 1.
struct ErrorGrowth {
  double alpha;
  bool erases;
  int64_t T;
  double decay, writes;
};
std::vector<ErrorGrowth> error_growth();
// The same as a table, and as lines of JSON.
void probe_error_growth(const std::string& json);

}  // namespace prism
