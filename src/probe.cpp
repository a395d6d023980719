#include "src/probe.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <mutex>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>

#include "src/engine.h"
#include "src/files.h"
#include "src/progress.h"
#include "tensor/parallel.h"

namespace prism {

namespace {

constexpr int64_t kTestRows = 1024, kStopRows = 128, kChecks = 20;  // looks a run takes at its stopping rows
constexpr double kSolved = 0.999;
constexpr int32_t kMostSkipped = 10;  // steps in a row without an update that end a run (SPEC section 9)

// Share of the scored positions of `rows` rows where the likeliest id is the target.
double accuracy(Engine& engine, const ProbeTask& task, uint64_t seed, ProbeSplit split, int64_t rows,
                int64_t B) {
  int64_t right = 0, scored = 0;
  for (int64_t first = 0; first < rows; first += B) {
    const Batch batch = draw_probe(task, seed, split, first, B);
    std::vector<bool> hits;
    engine.evaluate(batch, nullptr, &hits);
    right += std::count(hits.begin(), hits.end(), true);
    scored += batch.scored;
  }
  return static_cast<double>(right) / static_cast<double>(scored);
}

struct Run {
  double accuracy = 0;
  int64_t steps = 0;
};

Run train_and_test(const ProbeTask& task, const Config& config, uint64_t seed, const ProbeOptions& o) {
  const int64_t steps = o.steps ? o.steps : task.steps, B = o.batch;
  const double lr = o.lr > 0 ? o.lr : 4e-3 / std::sqrt(static_cast<double>(config.hidden_size) / 16);
  Model model(config, o.device, o.dtype, true);
  model.parameters().initialise(seed);
  AdamWSettings settings;
  settings.weight_decay = 0.01;
  Optimizer optimizer(model.parameters(), settings);
  Engine engine(model, B, task.T);
  Run run;
  while (run.steps < steps) {
    const Batch batch = draw_probe(task, seed, ProbeSplit::train, run.steps * B, B);
    optimizer.set_lr(learning_rate("cosine", run.steps, steps, lr, lr / 100, steps / 20));
    engine.load({&batch, 1});
    engine.train_step(optimizer);
    if (++run.steps % std::max<int64_t>(steps / kChecks, 1) != 0) continue;
    PRISM_CHECK(optimizer.read().skipped_in_row < kMostSkipped, task.name, ", step ", run.steps,
                ": expected a finite loss and gradient, got ", kMostSkipped, " steps in a row without");
    if (accuracy(engine, task, seed, ProbeSplit::stop, kStopRows, B) >= kSolved) break;
  }
  run.accuracy = accuracy(engine, task, seed, ProbeSplit::test, kTestRows, B);
  return run;
}

std::vector<std::string> split(const std::string& text, char at) {
  std::vector<std::string> parts;
  for (size_t begin = 0, end; begin <= text.size(); begin = end + 1) {
    end = std::min(text.find(at, begin), text.size());
    parts.push_back(text.substr(begin, end - begin));
  }
  return parts;
}

// Every combination of one value of each "KEY=VALUE,VALUE..".
std::vector<std::vector<std::string>> combinations(const std::vector<std::string>& grid) {
  std::vector<std::vector<std::string>> all = {{}};
  for (const std::string& entry : grid) {
    const size_t values = std::min(entry.find('='), entry.size() - 1) + 1;
    std::vector<std::vector<std::string>> longer;
    for (const auto& one : all)
      for (const std::string& value : split(entry.substr(values), ',')) {
        longer.push_back(one);
        longer.back().push_back(entry.substr(0, values) + value);
      }
    all = std::move(longer);
  }
  return all;
}

// A model on a task, all seeds of it.
struct Group {
  ProbeTask task;
  ProbeModel model;
  ProbeResult result;
  size_t column;  // in the table
  int64_t left;   // runs
};

std::string line_of(const Group& g) {
  const auto [least, most] = std::minmax_element(g.result.accuracy.begin(), g.result.accuracy.end());
  const int64_t steps = std::accumulate(g.result.steps.begin(), g.result.steps.end(), int64_t{0});
  char line[200];
  std::snprintf(line, sizeof line, "%-18s %-28s %.3f  (%.3f .. %.3f)  %lld steps", g.task.name.c_str(),
                g.model.name.c_str(), g.result.mean(), *least, *most,
                static_cast<long long>(steps / static_cast<int64_t>(g.result.steps.size())));
  return line;
}

std::string json_of(const Group& g, const ProbeOptions& o) {
  const nlohmann::ordered_json object = {{"task", g.task.name},
                                         {"model", g.model.name},
                                         {"block", o.bare ? "bare" : "full"},
                                         {"accuracy", g.result.mean()},
                                         {"seeds", g.result.accuracy},
                                         {"steps", g.result.steps},
                                         {"batch", o.batch},
                                         {"dtype", name_of(o.dtype)},
                                         {"config", nlohmann::json::parse(to_json(g.model.config))}};
  return object.dump() + "\n";
}

void print_table(const std::vector<Group>& groups, const std::vector<std::string>& columns) {
  std::printf("\n%-18s", "mean accuracy");
  for (const std::string& name : columns) std::printf("  %s", name.c_str());
  std::string row;
  for (const Group& g : groups) {
    if (g.task.name != row) std::printf("\n%-18s", (row = g.task.name).c_str());
    std::printf("  %*.2f", static_cast<int>(columns[g.column].size()), g.result.mean());
  }
  std::printf("\n");
}

}  // namespace

double ProbeResult::mean() const {
  return std::accumulate(accuracy.begin(), accuracy.end(), 0.0) / static_cast<double>(accuracy.size());
}

std::vector<ProbeModel> probe_models(const ProbeTask& task, const ProbeOptions& o) {
  std::vector<ProbeModel> models;
  Config base;
  const int64_t D = o.width ? o.width : task.width;
  PRISM_CHECK(D % o.heads == 0, "--heads: expected a divisor of the width ", D, ", got ", o.heads);
  base.vocab_size = task.ids.size(), base.hidden_size = D, base.num_hidden_layers = o.layers;
  base.num_heads = o.heads, base.head_dim = D / o.heads, base.expand_v = 1;
  base.intermediate_size = (8 * D / 3 + 7) / 8 * 8, base.solver_dim = std::max<int64_t>(8, D / 4);
  base.initializer_range = 1 / std::sqrt(3 * static_cast<double>(D));  // as PyTorch's linear layers begin
  base.use_gate = !o.bare;
  const auto& mixers = o.mixers.empty() ? mixer_names() : o.mixers;
  for (const std::string& mixer : mixers) {
    const std::vector<std::string> parts = split(mixer, '+');
    const auto layers = static_cast<size_t>(o.layers);
    PRISM_CHECK(parts.size() <= layers, "--mixer ", mixer, ": expected ", parts.size(),
                " layers or more, a mixer each, got --layers ", o.layers);
    base.mixers.clear();
    for (size_t layer = 0; layer < layers; ++layer) base.mixers.push_back(parts[layer % parts.size()]);
    if (parts.size() == 1) base.mixers.resize(1);
    const auto has = [&](const char* name) { return std::count(parts.begin(), parts.end(), name) > 0; };
    const bool ranked = has("prism") || has("prism-loop");
    for (int64_t rank : ranked ? o.ranks : std::vector<int64_t>{1}) {
      // prism of rank 1 is gdn bit for bit.
      if (mixer == "prism" && rank == 1 && std::count(mixers.begin(), mixers.end(), "gdn")) continue;
      for (const std::vector<std::string>& settings : combinations(o.grid)) {
        ProbeModel m{ranked ? cat(mixer, " ", rank) : mixer, base};
        m.config.rank = rank;
        // Four memories, the shared one included, of heads half as wide have a state of the same size.
        if (has("mom") && base.head_dim % 2 == 0) m.config.head_dim /= 2, m.config.memories = 3;
        // A solver's key says nothing to a model without one, nor does a memory's.
        for (const std::string& setting : settings)
          if (setting.starts_with("solver_")    ? has("prism") && rank > 1
              : setting.starts_with("memories") ? has("mom")
                                                : true) {
            m.config = with_settings(m.config, {setting});
            m.name += " " + setting.substr(setting.find('=') + 1);
          }
        validate(m.config);
        const auto same = [&](const ProbeModel& other) { return other.config == m.config; };
        if (std::none_of(models.begin(), models.end(), same)) models.push_back(m);
      }
    }
  }
  return models;
}

std::vector<std::vector<ProbeResult>> probe(const ProbeOptions& o) {
  std::vector<Group> groups;
  std::vector<std::string> columns;
  for (const std::string& name : o.tasks)
    for (const ProbeTask& task : find_probe_tasks(name)) {
      columns.clear();
      for (const ProbeModel& model : probe_models(task, o)) {
        const auto seeds = static_cast<size_t>(o.seeds);
        groups.push_back({task,
                          model,
                          {std::vector<double>(seeds), std::vector<int64_t>(seeds)},
                          columns.size(),
                          o.seeds});
        columns.push_back(model.name);
      }
    }
  std::optional<OutputFile> file;
  if (!o.json.empty()) file.emplace(o.json);
  const auto runs = static_cast<int64_t>(groups.size()) * o.seeds;
  const auto begin = std::chrono::steady_clock::now();
  Progress progress;
  progress.keep(cat(groups.size(), " models and tasks, ", runs, " runs on ", o.device, " in ", o.dtype));
  std::mutex mutex;
  std::exception_ptr error;
  std::atomic<bool> failed = false;
  int64_t done = 0;
  // One thread a run: models this small gain nothing from several. On cuda each has its stream.
  parallel_for(runs, [&](int64_t i) {
    if (failed) return;
    try {
      Group& g = groups[static_cast<size_t>(i / o.seeds)];
      const auto seed = static_cast<size_t>(i % o.seeds);
      const Run run = train_and_test(g.task, g.model.config, seed, o);
      const std::lock_guard lock(mutex);
      g.result.accuracy[seed] = run.accuracy, g.result.steps[seed] = run.steps;
      if (--g.left == 0) {
        progress.keep(line_of(g));
        if (file) file->write(json_of(g, o));
      }
      ++done;
      const double spent = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
      const double left = spent * static_cast<double>(runs - done) / static_cast<double>(done);
      progress.show(cat(done, "/", runs, " runs, ", duration(left), " left"));
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (!failed.exchange(true)) error = std::current_exception();  // must not leave a parallel loop
    }
  });
  if (error) std::rethrow_exception(error);
  print_table(groups, columns);
  std::vector<std::vector<ProbeResult>> results;
  for (const Group& g : groups) {
    if (g.column == 0) results.emplace_back();
    results.back().push_back(g.result);
  }
  return results;
}

}  // namespace prism
