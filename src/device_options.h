// Where and in which precision a command computes: --device, --dtype, --kernels, --threads.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "tensor/tensor.h"

namespace prism {

struct DeviceOptions {
  std::string device_name = "auto", dtype_name = "auto", kernels = "fast";
  bool tf32 = false;
  int threads = 0;  // 0: OpenMP's choice

  // What the names mean here: auto is cuda when a card can be used, with bf16, else the cpu with f32. Sets
  // the kernels and the number of threads. Throws when the device cannot compute in the dtype.
  void resolve(Device& device, DType& dtype) const;
};

void add_device_options(CLI::App& command, DeviceOptions& options);
// --set KEY=VALUE: keys of config.json at other values (with_settings in src/config.h).
void add_set_option(CLI::App& command, std::vector<std::string>& settings);

}  // namespace prism
