#include "src/device_options.h"

#include "kernels/matmul.h"
#include "tensor/parallel.h"

namespace prism {

void add_device_options(CLI::App& command, DeviceOptions& options) {
  command.add_option("--device", options.device_name, "auto, cpu or cuda")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}))
      ->capture_default_str();
  command
      .add_option("--dtype", options.dtype_name, "auto (cpu: f32, cuda: bf16), f32, f64 (cpu) or bf16 (cuda)")
      ->check(CLI::IsMember({"auto", "f32", "f64", "bf16"}))
      ->capture_default_str();
  command.add_option("--kernels", options.kernels, "cuda: fast, or simple, the readable reference")
      ->check(CLI::IsMember({"simple", "fast"}))
      ->capture_default_str();
  command.add_flag("--tf32", options.tf32,
                   "cuda, f32: products may round their operands to 10 bits of mantissa");
  command
      .add_option("--threads", options.threads,
                  "threads on the cpu; 0: all cores. Results do not depend on it")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
}

void add_set_option(CLI::App& command, std::vector<std::string>& settings) {
  command
      .add_option("--set", settings, "keys of config.json at other values, such as rank=2 solver_gain=gelu")
      ->type_name("KEY=VALUE");
}

void DeviceOptions::resolve(Device& device, DType& dtype) const {
  const bool cuda = device_name == "cuda" || (device_name == "auto" && dtype_name != "f64" && cuda_usable());
  device = cuda ? Device::cuda : Device::cpu;
  if (cuda) describe(Device::cuda);  // says what is wrong with the card, if anything is
  dtype = dtype_name == "auto"  ? (cuda ? DType::bf16 : DType::f32)
          : dtype_name == "f64" ? DType::f64
          : dtype_name == "f32" ? DType::f32
                                : DType::bf16;
  if ((cuda && dtype == DType::f64) || (!cuda && dtype == DType::bf16))
    throw UsageError(
        cat("--dtype: the cpu computes in f32 and f64, cuda in f32 and bf16; got ", dtype, " on ", device));
  kernel_choice = kernels == "simple" ? KernelChoice::simple : KernelChoice::fast;
  if constexpr (kWithCuda)
    if (cuda) cuda::use_tf32(tf32);
  if (threads > 0) set_threads(threads);
}

}  // namespace prism
