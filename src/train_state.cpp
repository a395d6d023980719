#include "src/train_state.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>

#include "optim/optimizer.h"

namespace prism {

using nlohmann::json;

namespace {

constexpr int kFormat = 1;  // of trainer_state.json

const std::array<StoredBuffer, 2> kMoments = {
    {{"m.", &Parameters::moment1, true}, {"v.", &Parameters::moment2, true}}};

// Counts that may be 0, and change on resume.
bool is_report(const std::string& name) {
  return name.ends_with("-every") || name == "eval-tokens" || name == "keep";
}

json settings_json(const TrainSettings& settings) {
  json object = {{"device", settings.device}, {"dtype", settings.dtype}};
  for_each_setting(settings, [&](const char* name, const auto& field, const char*) { object[name] = field; });
  return object;
}

}  // namespace

void check_settings(const TrainSettings& settings) {
  const auto check = [](bool right, const std::string& name, const std::string& expected, const auto& got) {
    if (!right) throw UsageError(cat("--", name, ": expected ", expected, ", got ", got));
  };
  for_each_setting(settings, [&](const std::string& name, const auto& field, const char*) {
    using T = std::decay_t<decltype(field)>;
    if constexpr (std::is_same_v<T, int64_t>) {
      const int64_t least = name == "warmup" || is_report(name) ? 0 : 1;
      check(field >= least && field <= INT32_MAX, name, cat(least, " to ", INT32_MAX), field);
    }
    if constexpr (std::is_same_v<T, double>) {
      const bool beta = name.starts_with("beta");
      check(std::isfinite(field) && field >= 0 && (!beta || field < 1), name,
            beta ? "0 to below 1" : "a number of at least 0", field);
    }
  });
  const Recipe& r = settings.recipe;
  check(r.batch * r.seq <= INT32_MAX / r.accumulate, "batch",
        cat("batch x seq x accumulate of at most ", INT32_MAX),
        cat(r.batch, " x ", r.seq, " x ", r.accumulate));
  check(!settings.data.empty(), "data", "at least one path", "none");
  check_schedule(settings.recipe.schedule);
}

std::vector<CheckpointFile> state_files(const Model& model, const TrainState& state) {
  const auto moments = [&model](OutputFile& file) {
    write_safetensors(file, stored_tensors(model.parameters(), kMoments));
  };
  const auto description = [&state](OutputFile& file) {
    const LoaderState& at = state.loader;
    const json object = {
        {"versions", {{"format", kFormat}, {"compiler", __VERSION__}}},
        {"step", state.step},
        {"settings", settings_json(state.settings)},
        {"loader", {{"seed", at.seed}, {"epoch", at.epoch}, {"window", at.window}, {"tokens", at.tokens}}},
        {"fingerprint", state.fingerprint},
        {"updates",
         {{"taken", state.taken}, {"skipped", state.skipped}, {"skipped_in_row", state.skipped_in_row}}},
        {"loss", state.loss},
        {"val_loss", state.val_loss}};
    file.write(object.dump(2, ' ', true) + "\n");
  };
  return {{"optimizer.safetensors", moments}, {"trainer_state.json", description}};
}

TrainState read_state(const std::string& checkpoint) {
  const std::string path = checkpoint + "/trainer_state.json";
  const json object = parse_json(read_text(path, 1 << 20), path);
  TrainState state;
  try {
    const int format = object.at("versions").at("format");
    PRISM_CHECK(format == kFormat, path, ": expected format ", kFormat, ", got ", format);
    object.at("step").get_to(state.step);
    const json& settings = object.at("settings");
    for_each_setting(state.settings,
                     [&](const char* name, auto& field, const char*) { settings.at(name).get_to(field); });
    settings.at("device").get_to(state.settings.device);
    settings.at("dtype").get_to(state.settings.dtype);
    const json &at = object.at("loader"), &updates = object.at("updates");
    state.loader = {at.at("seed"), at.at("epoch"), at.at("window"), at.at("tokens")};
    object.at("fingerprint").get_to(state.fingerprint);
    updates.at("taken").get_to(state.taken);
    updates.at("skipped").get_to(state.skipped);
    updates.at("skipped_in_row").get_to(state.skipped_in_row);
    check_settings(state.settings);
  } catch (const std::exception& error) {  // a key that is missing or of another type
    const std::string reason = error.what();
    if (reason.starts_with(path)) throw;
    PRISM_FAIL(path, ": ", reason);
  }
  PRISM_CHECK(std::min({state.step, state.loader.epoch, state.loader.window, int64_t{state.taken}}) >= 0,
              path, ": expected step, loader and updates of at least 0");
  return state;
}

void read_moments(const std::string& checkpoint, Model& model) {
  const SafetensorsFile file(checkpoint + "/optimizer.safetensors");
  check_tensors(file, model.parameters(), kMoments);
  for (const NamedTensor& t : stored_tensors(model.parameters(), kMoments)) file.read(t.name, t.tensor);
}

void check_unchanged(const TrainSettings& saved, const TrainSettings& given,
                     const std::set<std::string>& allowed) {
  const json before = settings_json(saved), now = settings_json(given);
  for (const auto& [name, value] : before.items())
    PRISM_CHECK(now[name] == value || is_report(name) || allowed.contains(name), "--", name, ": expected ",
                shown(value), " as when the run was saved, got ", shown(now[name]), "; --allow-change ", name,
                " changes it");
}

}  // namespace prism
