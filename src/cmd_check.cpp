#include <memory>

#include "src/bench.h"
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

void add_bench(CLI::App& app) {
  struct Options {
    DeviceOptions device;
    BenchOptions bench;
  };
  const auto o = std::make_shared<Options>();
  CLI::App* command =
      app.add_subcommand("bench", "Measure training, the scan, attention and generation on this machine");
  add_device_options(*command, o->device);
  command->add_option(
      "--preset", o->bench.presets,
      "train these, NAME or NAME:KEY=VALUE:... with keys of config.json at other values; nothing "
      "named: a choice of everything");
  command->add_option("--scan", o->bench.scans, "time the scan alone in these sizes, B:T:H:K:V:rank");
  command->add_option("--attention", o->bench.attentions, "time attention alone in these sizes, B:T:H:width");
  command->add_flag("--profile", o->bench.profile, "each kernel of a step");
  CLI::Option* json =
      command->add_option("--json", o->bench.json_file, "an object a row; of --lengths one in FILE")
          ->type_name("[FILE]")
          ->expected(0, 1);
  const auto count = [&](const char* name, int64_t& value, const char* what) {
    command->add_option(name, value, what)->check(CLI::PositiveNumber);
  };
  count("--generate", o->bench.generate, "let the presets generate so many tokens in place of training");
  count("--batch", o->bench.batch, "rows of a training step (cpu: 4, cuda: 32)");
  count("--seq", o->bench.seq, "tokens a row (cpu: 512, cuda: 2048)");
  count("--steps", o->bench.steps, "steps, of which the median counts (cpu: 5, cuda: 8)");
  command
      ->add_option("--lengths", o->bench.lengths,
                   "train in rows of these lengths (cpu: 64 to 1024, cuda: 2048 to 65536)")
      ->delimiter(',')
      ->expected(0, 64)
      ->check(CLI::NonNegativeNumber);
  count("--tokens", o->bench.tokens, "--lengths: of a step (cpu: 1024, cuda: 65536)");
  command->add_option("--max-seconds", o->bench.max_seconds, "--lengths: for a point")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command->add_option("--svg", o->bench.svg_file, "--lengths: tokens/s against length, as a picture");
  command->footer(
      "A share of GEMM is model FLOPs over this machine's best rate of square products; a token's model "
      "FLOPs\n"
      "are 6 times the matrix parameters (head once) plus 6 K V (3 + rank) H a layer, or 6 T D of "
      "attention.\n"
      "Example: prism bench --preset tiny --profile\n"
      "         prism bench --scan 1:2048:4:64:128:3 --json\n"
      "         prism bench --lengths 64,128 --preset tiny:rank=1 tiny:rank=3 --json t.json --svg t.svg");
  command->callback([o, json] {
    BenchOptions& b = o->bench;
    o->device.resolve(b.device, b.dtype);
    b.json = json->count() > 0 && b.json_file.empty();
    if (b.lengths.empty() && !(b.json_file + b.svg_file).empty())
      throw UsageError("--json FILE, --svg: expected --lengths, whose result they take");
    bench(b);
  });
}

}  // namespace prism
