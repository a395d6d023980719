// log.jsonl, one JSON object for each reported step, and the picture of it.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "src/files.h"

namespace prism {

class RunLog {
 public:
  // Goes on after `step`: lines of later steps, and what a killed run left of a line, are dropped. Step 0
  // begins a new log.
  RunLog(const std::string& path, int64_t step);
  // Appends one line, in one write: it is in the file when this returns.
  void write(const nlohmann::ordered_json& line);

 private:
  File file_;
};

// The lines of a log that are objects with a step; none when there is no file. `broken` counts the others.
std::vector<nlohmann::ordered_json> read_log(const std::string& path, int64_t* broken = nullptr);

// Draws the training and validation loss of a log.jsonl as an SVG for light and dark pages.
void draw_losses(const std::string& log_path, const std::string& svg_path);

}  // namespace prism
