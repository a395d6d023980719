#include "src/report.h"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "src/decoder.h"
#include "src/inspect.h"
#include "src/model_files.h"
#include "src/run_log.h"

namespace prism {

namespace {

using Json = nlohmann::ordered_json;
namespace fs = std::filesystem;

constexpr size_t kMostBytes = size_t{1} << 26;  // of a JSON file beside a log
constexpr int kDigits = 6;                      // of a curve's numbers: more than any screen shows

// A number to kDigits, which keeps pages of long logs small; null for anything else.
Json rounded(const Json& value) {
  if (!value.is_number_float()) return value.is_number() ? value : Json();
  char text[32];
  std::snprintf(text, sizeof text, "%.*g", kDigits, value.get<double>());
  return std::strtod(text, nullptr);
}

Json columns_of(const std::string& path, Json& notes) {
  int64_t broken = 0;
  const std::vector<Json> lines = read_log(path, &broken);
  PRISM_CHECK(!lines.empty(), path, ": expected lines with a step, got none");
  if (broken > 0)
    notes.push_back(cat("log.jsonl: ", broken, " of ", broken + std::ssize(lines),
                        " lines left out: cut short, or not an object with a step"));
  Json log;
  for (const char* key : {"step", "loss", "val_loss", "lr", "grad_norm", "tokens_per_second"}) {
    Json& column = log[key] = Json::array();
    for (const Json& line : lines) column.push_back(line.contains(key) ? rounded(line[key]) : Json());
  }
  return log;
}

// The numbers of eval's tables, "task file measure" each.
Json evaluations(const std::string& dir, Json& notes) {
  Json out = Json::object();
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(dir))
    if (const std::string name = entry.path().filename(); name.starts_with("eval") && name.ends_with(".json"))
      files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  for (const fs::path& file : files) {
    const Json table = Json::parse(read_text(file, kMostBytes), nullptr, false);
    if (!table.is_object() || !table.contains("results") || !table["results"].is_array()) {
      notes.push_back(file.filename().string() + ": expected a table as of prism eval --json; left out");
      continue;
    }
    for (const Json& row : table["results"]) {
      if (!row.is_object()) continue;
      std::string of;
      for (const auto& [key, value] : row.items())
        if (value.is_string()) of += fs::path(value.get<std::string>()).filename().string() + " ";
      for (const auto& [key, value] : row.items())
        if (value.is_number()) out[of + key] = rounded(value);
    }
  }
  return out;
}

Json sample_of(Model& model, const Tokenizer& tokenizer, const ReportOptions& o) {
  std::vector<int32_t> ids = {tokenizer.bos()}, drawn;
  tokenizer.encode(o.prompt, ids);
  Decoder decoder(model);
  const auto feed = [&](std::span<const int32_t> more) {
    std::vector<double> logits = decoder.feed(more);
    logits.resize(std::min(logits.size(), static_cast<size_t>(tokenizer.vocab_size())));  // those with a text
    return logits;
  };
  std::vector<double> logits = feed(ids);
  const Sampling how{.temperature = 0.8, .top_p = 0.95};
  while (std::ssize(drawn) < o.tokens) {
    const int32_t id = sample(logits, how, drawn.size());
    if (id == tokenizer.bos() || id == tokenizer.eos()) break;
    drawn.push_back(id);
    logits = feed({&id, 1});
  }
  return {{"prompt", o.prompt}, {"text", tokenizer.decode(drawn)}};
}

// A setting as it is shown and compared: lists as their JSON.
Json setting(const Json& value) {
  return value.is_structured() ? Json(value.dump(-1, ' ', false, Json::error_handler_t::replace)) : value;
}

// What the newest checkpoint says of the run, and what its model shows.
void add_model(Json& run, const std::string& dir, const ReportOptions& o) {
  const std::string newest = newest_checkpoint(dir);
  const Config config = read_config(newest + "/config.json");
  run["parameters"] = Model(config).parameters().count();
  const Json keys = Json::parse(to_json(config));
  for (const auto& [key, value] : keys.items()) run["settings"][key] = setting(value);
  // Read as it stands, not by read_state(): runs of another version, with other settings, have their place
  // here.
  const std::string path = newest + "/trainer_state.json";
  const Json state = fs::exists(path) ? Json::parse(read_text(path, kMostBytes), nullptr, false) : Json();
  const Json settings = state.is_object() ? state.value("settings", Json::object()) : Json::object();
  int64_t tokens = 1;
  for (const char* factor : {"batch", "seq", "accumulate"})
    tokens *= settings.contains(factor) && settings[factor].is_number() ? settings[factor].get<int64_t>() : 0;
  for (const auto& [key, value] : settings.items()) run["settings"]["--" + key] = setting(value);
  if (tokens > 0)
    run["tokens_per_step"] = tokens;
  else
    run["notes"].push_back("no trainer_state.json that says its batch: its tokens and time are not known");
  if (o.tokens == 0 && o.inspect.empty()) return;
  const std::unique_ptr<Model> model = load_model(newest, Device::cpu, DType::f32, false);
  if (!o.inspect.empty()) run["inspect"] = inspect_data(*model, newest, o.inspect, {});
  if (o.tokens > 0 && Tokenizer::lies_in(newest))
    run["sample"] = sample_of(*model, Tokenizer::load(newest), o);
  else if (o.tokens > 0)
    run["notes"].push_back("no sample: no tokenizer lies beside the model");
}

}  // namespace

Json describe_run(const std::string& dir, const ReportOptions& o) {
  PRISM_CHECK(fs::is_directory(dir), dir, ": expected the directory of a run, got ",
              fs::exists(dir) ? "a file" : "nothing there");
  PRISM_CHECK(fs::exists(dir + "/log.jsonl"), dir, ": expected a run's log.jsonl in it, got none");
  Json run = {{"name", dir}, {"notes", Json::array()}, {"settings", Json::object()}};
  run["log"] = columns_of(dir + "/log.jsonl", run["notes"]);
  run["evaluation"] = evaluations(dir, run["notes"]);
  if (const std::string path = dir + "/inspect.json"; o.inspect.empty() && fs::exists(path)) {
    const Json seen = Json::parse(read_text(path, kMostBytes), nullptr, false);
    if (seen.is_object() && seen.contains("layers"))
      run["inspect"] = seen;
    else
      run["notes"].push_back("inspect.json: expected the numbers of prism inspect --json; left out");
  }
  // A run that was stopped before its first checkpoint has a log all the same.
  if (fs::exists(dir + "/config.json"))
    add_model(run, dir, o);
  else
    run["notes"].push_back("no checkpoint: its model, tokens and time are not known");
  return run;
}

}  // namespace prism
