// Training throughput against sequence length, at as many tokens a step.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "src/bench_steps.h"
#include "src/files.h"
#include "src/plot.h"
#include "src/progress.h"

namespace prism {

namespace {

using Json = nlohmann::ordered_json;

struct Contender {
  std::string name;
  Config config;
  double slowest = 0;  // seconds of a step, at the lengths so far
  int64_t slowest_at = 0;
  Json points = Json::array();
};

// One point: {seq, rows, ...} with its times, or with what was in the way as "skipped".
Json measured(Contender& model, const BenchOptions& o, int64_t T) {
  Json point = {{"seq", T}, {"rows", o.tokens / T}};
  if (model.slowest > o.max_seconds) {
    point["skipped"] = cat("too slow: ", duration(model.slowest), " a step at ", model.slowest_at);
    return point;
  }
  try {
    TrainingSteps training(model.config, o.device, o.dtype, o.tokens / T, T);
    // The first step warms up, the second is recorded as a graph: they count only where time ends with them.
    std::vector<double> times;
    double spent = 0;
    while (times.size() < 2 + static_cast<size_t>(o.steps) && spent < o.max_seconds) {
      times.push_back(milliseconds_of(o.device, [&] { training.step(); }));
      spent += times.back() / 1e3;
    }
    times.erase(times.begin(), times.begin() + std::min<int64_t>(2, static_cast<int64_t>(times.size()) - 1));
    const double ms = median_of(times);
    model.slowest = std::max(model.slowest, ms / 1e3), model.slowest_at = T;
    point["params"] = training.model.parameters().count();
    point["steps"] = times.size(), point["ms"] = ms;
    point["tokens_per_s"] = std::round(static_cast<double>(o.tokens) / ms * 1e3);
    point["GiB"] = static_cast<double>(training.bytes()) / (1 << 30);
  } catch (const Error& error) {
    point["skipped"] = error.what();
  }
  return point;
}

double rate(const Json& point) { return point.value("tokens_per_s", 0.0); }

// The table's and the files' state after each point.
class Lengths {
 public:
  explicit Lengths(const BenchOptions& options) : o_(options) {
    for (const std::string& name : o_.presets) models_.push_back({name, preset_config(name)});
    for (const Contender& model : models_) {
      const bool alone = model.config.mixers.size() == 1;
      if (alone && model.config.mixer(0) == "prism" && model.config.rank == 3) parallel_ = &model;
      if (alone && model.config.mixer(0) == "ttt-mlp") serial_ = &model;
    }
  }

  void run() {
    say(cat("tokens/s of training, ", grouped(o_.tokens), " tokens a step, ", describe(o_.device), ", ",
            name_of(o_.dtype), "\n"));
    std::string head = cell("seq", 8);
    for (const Contender& model : models_) head += cell(model.name, width(model));
    say(head + (parallel_ && serial_ ? "  rank 3 / ttt-mlp" : "") + "\n");
    for (const int64_t T : o_.lengths) {
      say(cell(grouped(T), 8));
      std::string notes;
      for (Contender& model : models_) {
        const Json& point = model.points.emplace_back(measured(model, o_, T));
        say(cell(rate(point) > 0 ? grouped(std::llround(rate(point))) : "-", width(model)));
        if (point.contains("skipped"))
          notes += cat("          ", model.name, ": ", point["skipped"].get<std::string>(), "\n");
      }
      if (const double r = ratio(models_[0].points.size() - 1); r > 0)
        say(cell(cat(std::round(r * 100) / 100), 18));
      say("\n" + notes);
      save();
    }
    if (o_.json) std::printf("%s\n", result().dump().c_str());
  }

 private:
  static std::string cell(const std::string& text, size_t width) {
    return std::string(width - std::min(width, text.size()), ' ') + text;
  }
  static size_t width(const Contender& model) { return 2 + std::max<size_t>(model.name.size(), 9); }
  void say(const std::string& text) const {
    if (!o_.json) std::printf("%s", text.c_str()), std::fflush(stdout);
  }
  // Rank 3 over the serial solver; 0 where one of them is not there.
  double ratio(size_t i) const {
    const double serial = serial_ ? rate(serial_->points[i]) : 0;
    return parallel_ && serial > 0 ? rate(parallel_->points[i]) / serial : 0;
  }
  Json result() const {
    Json json = {{"device", describe(o_.device)}, {"dtype", name_of(o_.dtype)}, {"tokens", o_.tokens}};
    for (const Contender& model : models_)
      json["models"].push_back(
          {{"name", model.name}, {"config", Json::parse(to_json(model.config))}, {"points", model.points}});
    json["prism_over_ttt"] = Json::array();
    for (size_t i = 0; i < models_[0].points.size(); ++i)
      if (const double r = ratio(i); r > 0)
        json["prism_over_ttt"].push_back({{"seq", o_.lengths[i]}, {"ratio", r}});
    return json;
  }
  void save() const {
    const auto write = [](const std::string& path, const std::string& text) {
      if (!path.empty()) replace_file(path, [&](OutputFile& file) { file.write(text); });
    };
    write(o_.json_file, result().dump(1) + "\n");
    Plot plot{cat("Training on ", describe(o_.device), ", ", grouped(o_.tokens), " tokens a step"),
              "tokens a row",
              "tokens/s",
              {},
              true};
    for (const Contender& model : models_) {
      auto& line = plot.lines.emplace_back(Plot::Line{model.name, {}, true});
      for (const Json& point : model.points)
        if (rate(point) > 0) line.points.push_back({point["seq"], rate(point)});
    }
    write(o_.svg_file, svg_of(plot));
  }

  const BenchOptions& o_;
  std::vector<Contender> models_;
  const Contender *parallel_ = nullptr, *serial_ = nullptr;
};

}  // namespace

void bench_lengths(const BenchOptions& options) {
  BenchOptions o = options;
  const bool cuda = o.device == Device::cuda;
  if (o.tokens == 0) o.tokens = cuda ? 65536 : 1024;
  if (o.steps == 0) o.steps = cuda ? 8 : 5;
  if (o.lengths == std::vector<int64_t>{0})
    o.lengths = cuda ? std::vector<int64_t>{2048, 4096, 8192, 16384, 32768, 65536}
                     : std::vector<int64_t>{64, 128, 256, 512, 1024};
  if (o.presets.empty())
    o.presets = cuda ? std::vector<std::string>{"prism-124m:rank=1", "prism-124m:rank=2", "prism-124m:rank=3",
                                                "prism-124m:rank=4", "transformer-110m",  "prism-124m-hybrid",
                                                "ttt-124m"}
                     : std::vector<std::string>{"tiny:rank=1", "tiny:rank=3", "tiny:mixers=attention",
                                                "tiny:mixers=ttt-mlp:expand_v=1"};
  for (const int64_t T : o.lengths)
    if (T < 1 || o.tokens % T != 0)
      throw UsageError(cat("--lengths: expected divisors of the ", o.tokens, " tokens of a step, got ", T));
  Lengths(o).run();
}

}  // namespace prism
