#include "src/run_log.h"

#include <fcntl.h>
#include <unistd.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>

#include "src/plot.h"

namespace prism {

namespace {

constexpr size_t kMostBytes = size_t{1} << 30;

// The path, once the file there holds the lines up to `step` alone.
std::string cut_to(const std::string& path, int64_t step) {
  std::string kept;
  for (const nlohmann::ordered_json& line : read_log(path))
    if (line["step"] <= step && step > 0) kept += line.dump() + "\n";
  replace_file(path, [&](OutputFile& file) { file.write(kept); });
  return path;
}

}  // namespace

std::vector<nlohmann::ordered_json> read_log(const std::string& path, int64_t* broken) {
  std::vector<nlohmann::ordered_json> objects;
  if (!std::filesystem::exists(path)) return objects;
  std::istringstream lines(read_text(path, kMostBytes));
  for (std::string line; std::getline(lines, line);) {
    auto object = nlohmann::ordered_json::parse(line, nullptr, false);
    if (object.is_object() && object.contains("step") && object["step"].is_number())
      objects.push_back(std::move(object));
    else if (broken)
      ++*broken;
  }
  return objects;
}

RunLog::RunLog(const std::string& path, int64_t step)
    : file_(cut_to(path, step), O_WRONLY | O_APPEND | O_CLOEXEC) {}

void RunLog::write(const nlohmann::ordered_json& line) {
  const std::string text = line.dump() + "\n";
  PRISM_CHECK(::write(file_.fd(), text.data(), text.size()) == static_cast<ssize_t>(text.size()),
              file_.path(), ": cannot write ", text.size(), " bytes: ", system_reason());
}

void draw_losses(const std::string& log_path, const std::string& svg_path) {
  Plot plot{"Training and validation loss", "step", "loss, nats a token", {{"training"}, {"validation"}}};
  plot.lines[1].dots = true;
  for (const nlohmann::ordered_json& line : read_log(log_path)) {
    const auto take = [&](const char* key, Plot::Line& curve) {
      if (line.contains(key) && line[key].is_number()) curve.points.push_back({line["step"], line[key]});
    };
    take("loss", plot.lines[0]);
    take("val_loss", plot.lines[1]);
  }
  replace_file(svg_path, [&](OutputFile& file) { file.write(svg_of(plot)); });
}

}  // namespace prism
