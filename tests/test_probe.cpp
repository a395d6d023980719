// The probes' sequences, against a solver that reads the prompt alone, and the loop that trains on them.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "src/files.h"
#include "src/probe.h"
#include "tensor/parallel.h"
#include "tests/temporary.h"

using namespace prism;

namespace {

const char* const kNames[] = {"mqar",       "poly-recall", "variable-tracking", "local-xor",
                              "parity",     "modulo-add",  "palindrome",        "silence-gate",
                              "mux",        "recall:8:64", "recall:128:512",    "needle:8",
                              "needle:1000"};

using Ids = std::vector<int32_t>;

// The numbers of the ids in a row: set 0 holds the control ids, 1 and 2 are A and B, 3 noise.
struct Vocabulary {
  int32_t set;
  int kind(int32_t id) const { return id < 16 ? 0 : id < 16 + set ? 1 : id < 16 + 2 * set ? 2 : 3; }
};

// The id after the last `key` in the prompt that a B stands behind.
int32_t last_value(const Ids& prompt, const Vocabulary& v) {
  const int32_t key = prompt.back();
  for (size_t i = prompt.size() - 1; i-- > 0;)
    if (prompt[i] == key && v.kind(prompt[i + 1]) == 2) return prompt[i + 1];
  return -2;
}

// The answer of a prompt, which ends with the question, by its words: no generator's code is used.
int32_t answer(const std::string& name, const Ids& prompt, const Vocabulary& v) {
  const auto find = [&](int32_t id) { return std::find(prompt.begin(), prompt.end(), id) - prompt.begin(); };
  const auto n = static_cast<std::ptrdiff_t>(prompt.size());
  const std::ptrdiff_t op = find(kOp);
  const auto back = [&](int64_t count) { return prompt[static_cast<size_t>(op - count)]; };
  if (name == "local-xor") return (back(1) + back(2)) % 2 ? kYes : kNo;  // A begins at 16, which is even
  if (name == "parity") return (back(1) + back(2) + back(3)) % 2 ? kYes : kNo;
  if (name == "modulo-add") return 32 + (back(1) - 16 + back(2) - 16) % 16;
  if (name == "palindrome") return back(1) == back(4) && back(2) == back(3) ? kYes : kNo;
  if (name == "mux") return find(kLeft) < n ? back(2) : find(kRight) < n ? back(1) : -2;
  if (name == "silence-gate" && find(kOff) < n) return kNull;
  return last_value(prompt, v);
}

ProbeTask task_of(const std::string& name) {
  const auto tasks = find_probe_tasks(name);
  REQUIRE(tasks.size() == 1);
  return tasks[0];
}

Ids row_of(const Batch& batch, int64_t b) {
  const auto at = batch.tokens.begin() + b * batch.T;
  return {at, at + batch.T};
}

std::string usage_error(const std::string& name) {
  try {
    find_probe_tasks(name);
    return "";
  } catch (const UsageError& error) {
    return error.what();
  }
}

// Two small models of each mixer, few steps: enough to see that results are the same again.
ProbeOptions small(const std::string& task) {
  ProbeOptions o;
  o.tasks = {task}, o.seeds = 2, o.steps = 3, o.batch = 4;
  return o;
}

}  // namespace

TEST_CASE("probe: every answer follows from what stands before it, and no constant answer is right often") {
  for (const char* name : kNames) {
    CAPTURE(name);
    const ProbeTask task = task_of(name);
    const Vocabulary v{task.ids.set};
    const Batch batch = draw_probe(task, 7, ProbeSplit::train, 0, 400);
    std::map<int32_t, int64_t> answers;
    int64_t scored = 0, wrong = 0;
    for (int64_t i = 0; i < batch.B * batch.T; ++i) {
      const int32_t target = batch.targets[static_cast<size_t>(i)], id = batch.tokens[static_cast<size_t>(i)];
      CHECK((id >= 0 && id < task.ids.size()));
      if (target < 0) continue;
      const auto end = batch.tokens.begin() + i + 1;
      wrong += answer(name, Ids(end - 1 - i % batch.T, end), v) != target;
      ++scored, ++answers[target];
    }
    CHECK(wrong == 0);
    CHECK(scored == batch.scored);
    CHECK(scored == 400 * (task.name == "mqar" || task.name.starts_with("recall") ? task.pairs : 1));
    for (const auto& [id, count] : answers) CHECK(count < scored * 0.6);
    CHECK(std::all_of(batch.start.begin(), batch.start.end(), [](int32_t s) { return s == 0; }));
  }
}

TEST_CASE("probe: what a burst holds, and where it stands, varies; the rest is noise") {
  for (const char* name : {"local-xor", "parity", "modulo-add", "palindrome", "mux", "needle:64"}) {
    CAPTURE(name);
    const ProbeTask task = task_of(name);
    const Batch batch = draw_probe(task, 1, ProbeSplit::train, 0, 2000);
    std::set<int64_t> places;
    for (int64_t b = 0; b < batch.B; ++b) {
      const Ids row = row_of(batch, b);
      const auto quiet = [&](int32_t id) { return Vocabulary{task.ids.set}.kind(id) == 3; };
      const auto first = std::find_if_not(row.begin(), row.end(), quiet);
      places.insert(first - row.begin());
      const auto last = std::find_if(first, row.end(), quiet);
      CHECK(last - first <= 5);
      CHECK(std::all_of(last, row.end() - 2, quiet));
    }
    CHECK(*places.begin() == 0);
    CHECK(*places.rbegin() >= task.T - 8);
    CHECK(static_cast<int64_t>(places.size()) >= task.T - 8);
  }
}

TEST_CASE(
    "probe: training, stopping and test rows differ, and a row is the same whatever batch it comes in") {
  const ProbeTask task = task_of("modulo-add");
  std::set<Ids> seen;
  const ProbeSplit splits[] = {ProbeSplit::train, ProbeSplit::stop, ProbeSplit::test};
  for (const uint64_t seed : {0, 1})
    for (const ProbeSplit split : splits) {
      const Batch whole = draw_probe(task, seed, split, 0, 300),
                  part = draw_probe(task, seed, split, 100, 50);
      for (int64_t b = 0; b < 300; ++b) CHECK(seen.insert(row_of(whole, b)).second);
      for (int64_t b = 0; b < 50; ++b) CHECK(row_of(part, b) == row_of(whole, 100 + b));
    }
}

TEST_CASE("probe: names that are no task say which there are") {
  for (const char* name :
       {"", "mqr", "recall:0:64", "recall:129:1024", "recall:8:31", "recall:8", "recall:8:64:1",
        "recall:8:65537", "recall:8:x", "needle:7", "needle:", "needle:1e3", "needle:-8", "parity:3"}) {
    CAPTURE(name);
    CHECK(usage_error(name).find("--task: expected mqar, ") == 0);
    CHECK(usage_error(name).ends_with(cat("got ", name)));
  }
  CHECK(find_probe_tasks("all").size() == 9);
  CHECK(find_probe_tasks("recall").back().T == 1024);
  CHECK(find_probe_tasks("needle").back().T == 4096);
}

TEST_CASE("probe: models have states of one size, and a grid has each model once") {
  ProbeOptions o;
  const ProbeTask task = task_of("parity");
  const auto names = [&] {
    std::vector<std::string> all;
    for (const ProbeModel& m : probe_models(task, o)) {
      all.push_back(m.name);
      CHECK(m.config.scan_heads(0) * m.config.head_dim * m.config.value_dim() == 16 * 16);
    }
    return all;
  };
  CHECK(names().size() ==
        mixer_names().size() + 3);  // ranks 2, 4 of prism (its 1 is gdn), 1, 2, 4 of prism-loop
  o.mixers = {"prism"}, o.grid = {"solver_gain=sigmoid,gelu", "solver_gate_init=-2,0,2"};
  CHECK(names().size() == 1 + 2 * 6);
  o.ranks = {2}, o.grid = {"solver_gain=gelu", "conv_size=2,7"};
  CHECK(names() == std::vector<std::string>{"prism 2 gelu 2", "prism 2 gelu 7"});
  CHECK(probe_models(task, o)[1].config.solver_gain == SolverGain::gelu);
  o.mixers = {"prism+attention"}, o.layers = 3;
  CHECK(probe_models(task, o)[0].config.mixers == std::vector<std::string>{"prism", "attention", "prism"});
  CHECK(names()[0] == "prism+attention 2 gelu 2");
  o.layers = 1;  // the second mixer would go unused
  CHECK_THROWS_AS(names(), Error);
  o.layers = 2;
  for (const char* wrong : {"prism+nothing", "prism+", "+prism", "+"}) {
    o.mixers = {wrong};
    CHECK_THROWS_AS(names(), Error);
  }
  o.mixers = {"prism"};
  o.bare = true;
  CHECK_FALSE(probe_models(task, o)[0].config.use_gate);
  for (const char* wrong : {"solver_gain=relu", "solver_gain", "solver_gain=", "=2", "nothing=1", "rank=x"}) {
    o.grid = {wrong};
    CAPTURE(wrong);
    CHECK_THROWS_AS(names(), Error);
  }
}

TEST_CASE(
    "probe: every mixer runs, with the same accuracies for any number of threads, and writes its lines") {
  const TemporaryDirectory dir;
  ProbeOptions o = small("mux");
  const auto before = probe(o);
  REQUIRE(before.size() == 1);
  set_threads(1);
  o.json = dir / "lines.jsonl";
  const auto again = probe(o);
  set_threads(2);
  for (size_t i = 0; i < before[0].size(); ++i) {
    CHECK(again[0][i].accuracy == before[0][i].accuracy);
    CHECK(again[0][i].steps == std::vector<int64_t>{3, 3});
  }
  const std::string text = read_text(o.json, 1 << 20);
  CHECK(std::count(text.begin(), text.end(), '\n') == static_cast<int64_t>(before[0].size()));
  const auto line = nlohmann::json::parse(text.substr(0, text.find('\n')));
  CHECK(line["task"] == "mux");
  CHECK(line["seeds"].get<std::vector<double>>() == before[0][0].accuracy);
}

TEST_CASE("probe: gdn learns parity, and stops when it has") {
  ProbeOptions o;
  o.tasks = {"parity"}, o.mixers = {"gdn"}, o.seeds = 1;
  const ProbeResult result = probe(o)[0][0];
  CHECK(result.accuracy[0] >= 0.98);
  CHECK(result.steps[0] < 2000);
}

TEST_CASE("error growth: a noisy decay drifts as the closed form says, a noisy write does not") {
  for (const ErrorGrowth& r : error_growth()) {
    CAPTURE(r.alpha);
    CAPTURE(r.T);
    CAPTURE(r.erases);
    double drift = 0, size = 0;
    for (int64_t i = 0; i < r.T; ++i) {
      const double kept = std::pow(r.alpha, 2.0 * static_cast<double>(i));
      drift += static_cast<double>(i) * kept, size += kept;
    }
    const double expected = std::sqrt(drift / size);
    if (r.erases) {
      CHECK(r.decay < expected + 0.01);  // what is erased drifts no further
      continue;
    }
    CHECK(r.decay == doctest::Approx(expected).epsilon(0.2));  // 64 runs of a random walk
    CHECK(r.writes == doctest::Approx(1).epsilon(0.2));
  }
}
