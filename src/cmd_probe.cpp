// probe: what the recurrences can and cannot do, on tasks made on the fly.
#include <memory>

#include "src/commands.h"
#include "src/device_options.h"
#include "src/probe.h"

namespace prism {

void add_probe(CLI::App& app) {
  struct Options {
    DeviceOptions device;
    ProbeOptions probe;
    std::string block = "full";
    bool quick = false;
  };
  const auto o = std::make_shared<Options>();
  ProbeOptions& p = o->probe;
  CLI::App* command =
      app.add_subcommand("probe", "Train small models on made-up tasks: recall, logic, state");
  command->add_option("--task", p.tasks, "names, or all, recall, needle, error-growth (src/probe_tasks.h)")
      ->required();
  command
      ->add_option("--mixer", p.mixers,
                   "mixers, all when none is named; prism+attention is a hybrid, in turn by layer")
      ->delimiter(',')
      ->type_name(cat("{", CLI::detail::join(mixer_names(), ","), "}"));
  const auto count = [&](const char* name, auto& value, const char* what) {
    return command->add_option(name, value, what)->check(CLI::PositiveNumber);
  };
  count("--rank", p.ranks, "ranks of prism and prism-loop")->delimiter(',')->capture_default_str();
  command
      ->add_option("--set", p.grid, "keys of config.json; of values with commas between, every combination")
      ->type_name("KEY=VALUE");
  command->add_option("--block", o->block, "full, or bare: without the output gate")
      ->check(CLI::IsMember({"full", "bare"}))
      ->capture_default_str();
  count("--seeds", p.seeds, "runs of each model")->capture_default_str();
  count("--steps", p.steps, "of a run (D = 16: 2000, D = 128: 1500, recall: 5000)");
  count("--batch", p.batch, "rows a step")->capture_default_str();
  count("--width", p.width, "D (the task's: 16, 64 or 128)");
  count("--layers", p.layers, "of each model")->capture_default_str();
  count("--heads", p.heads, "of each model; K = V = D / heads")->capture_default_str();
  count("--lr", p.lr, "peak learning rate (4e-3 at D = 16, 1 / sqrt(D) of that above)");
  command->add_option("--json", p.json, "write a line for each model and task");
  command->add_flag("--quick", o->quick,
                    "one seed, of linear, gdn and prism 2 unless --mixer says otherwise");
  add_device_options(*command, o->device);
  command->footer(
      "A run stops once it gets 99.9 % right of rows it is neither trained on nor tested with.\n"
      "Example: prism probe --task all --quick\n"
      "         prism probe --task recall:32:512 --mixer prism --rank 2,4 --set solver_gain=sigmoid,gelu");
  command->callback([o] {
    ProbeOptions& p = o->probe;
    o->device.resolve(p.device, p.dtype);
    p.bare = o->block == "bare";
    if (std::erase(p.tasks, "error-growth") > 0) {
      if (!p.tasks.empty()) throw UsageError("--task: expected error-growth alone, got others with it");
      return probe_error_growth(p.json);
    }
    if (o->quick) {
      p.seeds = 1;
      if (p.mixers.empty()) p.mixers = {"linear", "gdn", "prism"}, p.ranks = {2};
    }
    probe(p);
  });
}

}  // namespace prism
