// A run's directory as one JSON object, for the page that lays runs side by side.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace prism {

struct ReportOptions {
  std::vector<std::string> inspect;  // data to inspect each run's model on; none: its inspect.json, if any
  std::string prompt;
  int64_t tokens = 120;  // of a sample; 0: none
};

// {"name", "log": columns of log.jsonl, "settings", "parameters", "tokens_per_step", "evaluation": numbers of
// the run's eval*.json, "inspect", "sample", "notes": what is not there, and why}. Throws when `dir` is no
// run: a directory with a log.jsonl that has a step.
nlohmann::ordered_json describe_run(const std::string& dir, const ReportOptions& options);

}  // namespace prism
