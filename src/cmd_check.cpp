#include <map>
#include <memory>

#include "src/commands.h"
#include "src/gradcheck.h"

namespace prism {

void add_gradcheck(CLI::App& app) {
  struct Options {
    GradcheckOptions check;
    std::string device = "cpu", dtype;
  };
  const auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand(
      "gradcheck", "Check every op, mixer, solver choice and ablation, forward and reverse");
  command->add_option("--device", options->device, "what computes")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str();
  command
      ->add_option("--dtype", options->dtype,
                   "f64 (cpu): against finite differences; f32, bf16: against the cpu in double")
      ->check(CLI::IsMember({"f64", "f32", "bf16"}))
      ->default_str("f64 on cpu, f32 on cuda");
  command->add_option("--inject-error", options->check.inject_error,
                      "multiply each computed tensor in turn by 1 + E: every row must then fail");
  command->add_option("--filter", options->check.filter, "only rows whose name contains this");
  command->footer(
      "Exits with 1 when a row fails.\n"
      "Example: prism gradcheck --filter solver\n"
      "         prism gradcheck --inject-error 0.01");
  command->callback([options] {
    GradcheckOptions& check = options->check;
    check.device = options->device == "cuda" ? Device::cuda : Device::cpu;
    if (options->dtype.empty()) options->dtype = check.device == Device::cuda ? "f32" : "f64";
    check.dtype = options->dtype == "f64" ? DType::f64 : options->dtype == "f32" ? DType::f32 : DType::bf16;
    if (gradcheck(check).failed > 0) throw Exit{1};
  });
}

}  // namespace prism
