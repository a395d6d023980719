// `prism bench`: what this machine reaches, as rates and as shares of its own dense products.
#pragma once

#include <string>
#include <vector>

#include "tensor/dtype.h"

namespace prism {

struct BenchOptions {
  Device device = Device::cpu;
  DType dtype = DType::f32;
  // What to measure: training steps of presets (NAME:KEY=VALUE:... for keys of config.json at other values),
  // or one stream of `generate` tokens by each of them, or scans (B:T:H:K:V:rank), or attention (B:T:H:W).
  // Nothing named: all four, in sizes that fit the device, and each kernel of the steps.
  std::vector<std::string> presets, scans, attentions;
  int64_t generate = 0;
  bool profile = false;
  int64_t batch = 0, seq = 0, steps = 0;  // of a training step, and how many; 0: what fits the device
  bool json = false;                      // an object a row in place of tables
  // Training steps of the presets in rows of each of these lengths, `tokens` a step (0: what fits the
  // device). A point ends after max_seconds; a model that took as long for one step gets no longer rows.
  std::vector<int64_t> lengths;
  int64_t tokens = 0;
  double max_seconds = 60;
  std::string json_file, svg_file;  // "": none
};
// Times are medians after a first run that does not count.
void bench(const BenchOptions& options);

}  // namespace prism
