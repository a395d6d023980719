// `prism bench`: what this machine reaches, as rates and as shares of its own dense products.
#pragma once

#include <string>
#include <vector>

#include "tensor/dtype.h"

namespace prism {

struct BenchOptions {
  Device device = Device::cpu;
  DType dtype = DType::f32;
  std::vector<std::string> presets;       // empty: those that fit the device
  int64_t batch = 0, seq = 0, steps = 0;  // of a training step; 0: what fits the device
  std::string json;                       // file to write the same numbers to; empty: none
};
void bench(const BenchOptions& options);

}  // namespace prism
