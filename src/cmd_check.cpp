#include <memory>

#include "src/commands.h"
#include "src/device_options.h"
#include "src/gradcheck.h"

namespace prism {

void add_gradcheck(CLI::App& app) {
  struct Options {
    DeviceOptions device;
    GradcheckOptions check;
  };
  const auto o = std::make_shared<Options>();
  o->device.device_name = "cpu";
  CLI::App* command = app.add_subcommand(
      "gradcheck", "Check every op, mixer, solver choice and ablation, forward and reverse");
  add_device_options(*command, o->device);
  command->add_option("--inject-error", o->check.inject_error,
                      "multiply each computed tensor in turn by 1 + this: every row must then fail");
  command->add_option("--filter", o->check.filter, "only rows whose name contains this");
  command->footer(
      "f64, the cpu's default: against finite differences. f32 (cuda's default) and bf16: against the cpu "
      "in\n"
      "double. Exits with 1 when a row fails.\n"
      "Example: prism gradcheck --filter solver\n"
      "         prism gradcheck --inject-error 0.01");
  command->callback([o] {
    if (o->device.dtype_name == "auto") o->device.dtype_name = o->device.device_name == "cpu" ? "f64" : "f32";
    o->device.resolve(o->check.device, o->check.dtype);
    if (gradcheck(o->check).failed > 0) throw Exit{1};
  });
}

}  // namespace prism
