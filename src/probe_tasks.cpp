#include "src/probe_tasks.h"

#include <algorithm>
#include <charconv>
#include <numeric>

#include "tensor/check.h"
#include "tensor/rng.h"

namespace prism {

// A row being made: its own stream of random numbers, and where its ids and targets go.
struct ProbeRow {
  uint64_t seed, stream;
  int64_t T;
  const ProbeVocabulary& vocabulary;
  int32_t *ids, *targets;
  uint64_t drawn = 0;

  int64_t below(int64_t n) {
    return static_cast<int64_t>(random_below(static_cast<uint64_t>(n), seed, stream, drawn++));
  }
  int32_t a() { return vocabulary.a(below(vocabulary.set)); }
  int32_t b() { return vocabulary.b(below(vocabulary.set)); }
  // `count` different numbers below n.
  std::vector<int64_t> distinct(int64_t n, int64_t count) {
    std::vector<int64_t> all(static_cast<size_t>(n));
    std::iota(all.begin(), all.end(), 0);
    for (int64_t i = 0; i < count; ++i)
      std::swap(all[static_cast<size_t>(i)], all[static_cast<size_t>(i + below(n - i))]);
    all.resize(static_cast<size_t>(count));
    return all;
  }
  void put(int64_t at, std::initializer_list<int32_t> what) { std::copy(what.begin(), what.end(), ids + at); }
  // At a random place before the question.
  void burst(std::initializer_list<int32_t> what) {
    put(below(T - 1 - static_cast<int64_t>(what.size())), what);
  }
  void ask(int32_t answer) { ids[T - 1] = kQuery, targets[T - 1] = answer; }
  void ask(int32_t key, int32_t answer) { put(T - 2, {kQuery, key}), targets[T - 1] = answer; }
};

namespace {

void mqar(ProbeRow& row, const ProbeTask& task) {
  const auto keys = row.distinct(task.ids.set, task.pairs), slots = row.distinct(row.T / 4, task.pairs);
  const auto asked = row.distinct(row.T - row.T / 2, task.pairs);
  for (size_t i = 0; i < keys.size(); ++i) {
    const int32_t key = task.ids.a(keys[i]), value = row.b();
    row.put(2 * slots[i], {key, value});
    row.put(row.T / 2 + asked[i], {key});
    row.targets[row.T / 2 + asked[i]] = value;
  }
}

void poly_recall(ProbeRow& row, const ProbeTask& task) {
  const auto keys = row.distinct(task.ids.set, 2);
  const int32_t key[] = {task.ids.a(keys[0]), task.ids.a(keys[1])}, value[] = {row.b(), row.b()};
  row.burst({key[0], value[0], key[1], value[1]});
  const int64_t asked = row.below(2);
  row.ask(key[asked], value[asked]);
}

void variable_tracking(ProbeRow& row, const ProbeTask& task) {
  const auto names = row.distinct(task.ids.set, 3);
  auto slots = row.distinct(row.T / 2 - 1, 8);
  std::sort(slots.begin(), slots.end());
  std::vector<std::pair<int32_t, int32_t>> last;  // of each variable that has been assigned
  for (int64_t slot : slots) {
    const int32_t name = task.ids.a(names[static_cast<size_t>(row.below(3))]), value = row.b();
    row.put(2 * slot, {name, value});
    std::erase_if(last, [&](const auto& one) { return one.first == name; });
    last.emplace_back(name, value);
  }
  const auto& [name, value] = last[static_cast<size_t>(row.below(static_cast<int64_t>(last.size())))];
  row.ask(name, value);
}

int32_t yes_if(bool holds) { return holds ? kYes : kNo; }

void local_xor(ProbeRow& row, const ProbeTask& task) {
  const int64_t a = row.below(16), b = row.below(16);
  row.burst({task.ids.a(a), task.ids.a(b), kOp});
  row.ask(yes_if(a % 2 != b % 2));
}

void parity(ProbeRow& row, const ProbeTask& task) {
  const int64_t bits[] = {row.below(2), row.below(2), row.below(2)};
  row.burst({task.ids.a(bits[0]), task.ids.a(bits[1]), task.ids.a(bits[2]), kOp});
  row.ask(yes_if((bits[0] + bits[1] + bits[2]) % 2 == 1));
}

void modulo_add(ProbeRow& row, const ProbeTask& task) {
  const int64_t a = row.below(16), b = row.below(16);
  row.burst({task.ids.a(a), task.ids.a(b), kOp});
  row.ask(task.ids.b((a + b) % 16));
}

void palindrome(ProbeRow& row, const ProbeTask&) {
  const int32_t a = row.a(), b = row.a();
  int32_t c = b, d = a;
  const bool holds = row.below(2) == 1;
  if (!holds) {
    int32_t& broken = row.below(2) ? c : d;
    const int32_t was = broken;
    while (broken == was) broken = row.a();
  }
  row.burst({a, b, c, d, kOp});
  row.ask(yes_if(holds));
}

void silence_gate(ProbeRow& row, const ProbeTask&) {
  const int32_t key = row.a(), value = row.b();
  const bool on = row.below(2) == 1;
  row.burst({on ? kOn : kOff, key, value});
  row.ask(key, on ? value : int32_t{kNull});
}

void mux(ProbeRow& row, const ProbeTask&) {
  const int32_t x = row.b(), y = row.b();
  const bool left = row.below(2) == 1;
  row.burst({left ? kLeft : kRight, x, y, kOp});
  row.ask(left ? x : y);
}

void needle(ProbeRow& row, const ProbeTask&) {
  const int32_t key = row.a(), value = row.b();
  row.burst({key, value});
  row.ask(key, value);
}

const std::vector<ProbeTask>& paper_tasks() {
  static const std::vector<ProbeTask> tasks = {
      {"mqar", mqar, 64, 128, 1500},
      {"poly-recall", poly_recall, 64, 128, 1500},
      {"variable-tracking", variable_tracking, 64, 128, 1500},
      {"local-xor", local_xor, 64},
      {"parity", parity, 64},
      {"modulo-add", modulo_add, 64},
      {"palindrome", palindrome, 64},
      {"silence-gate", silence_gate, 64},
      {"mux", mux, 64},
  };
  return tasks;
}

ProbeTask recall_task(int64_t pairs, int64_t T) {
  return {cat("recall:", pairs, ":", T), mqar, T, 64, 5000, pairs, {128}};
}
ProbeTask needle_task(int64_t T) { return {cat("needle:", T), needle, T, 64, 5000, 1, {128}}; }

// The numbers of "NAME:1:2" after NAME; none where the text is not that.
std::vector<int64_t> numbers_after(const std::string& text, const std::string& name) {
  std::vector<int64_t> numbers;
  if (!text.starts_with(name + ":")) return numbers;
  const char* at = text.data() + name.size();
  const char* const end = text.data() + text.size();
  while (at != end && *at == ':') {
    const auto [next, error] = std::from_chars(at + 1, end, numbers.emplace_back());
    if (error != std::errc()) return {};
    at = next;
  }
  return at == end ? numbers : std::vector<int64_t>{};
}

}  // namespace

std::vector<ProbeTask> find_probe_tasks(const std::string& name) {
  if (name == "all") return paper_tasks();
  if (name == "recall")
    return {recall_task(8, 256), recall_task(16, 256), recall_task(32, 512), recall_task(64, 1024)};
  if (name == "needle") return {needle_task(512), needle_task(1024), needle_task(2048), needle_task(4096)};
  for (const ProbeTask& task : paper_tasks())
    if (task.name == name) return {task};
  const auto recall = numbers_after(name, "recall"), depth = numbers_after(name, "needle");
  if (recall.size() == 2 && recall[0] >= 1 && recall[0] <= 128 && recall[1] >= 4 * recall[0] &&
      recall[1] <= 65536)
    return {recall_task(recall[0], recall[1])};
  if (depth.size() == 1 && depth[0] >= 8 && depth[0] <= 65536) return {needle_task(depth[0])};
  std::string known;
  for (const ProbeTask& task : paper_tasks()) known += task.name + ", ";
  throw UsageError(
      "--task: expected " + known +
      "all, recall, recall:PAIRS:T (PAIRS up to 128, T from 4 PAIRS to 65536), needle, needle:T (T "
      "from 8 to 65536) or error-growth, got " +
      name);
}

Batch draw_probe(const ProbeTask& task, uint64_t seed, ProbeSplit split, int64_t first, int64_t B) {
  const auto n = static_cast<size_t>(B * task.T);
  Batch batch{B, task.T, std::vector<int32_t>(n), std::vector<int32_t>(n, -1), std::vector<int32_t>(n, 0), 0};
  for (int64_t b = 0; b < B; ++b) {
    const uint64_t stream = static_cast<uint64_t>(split) << 60 | static_cast<uint64_t>(first + b);
    ProbeRow row{seed,
                 stream,
                 task.T,
                 task.ids,
                 &batch.tokens[static_cast<size_t>(b * task.T)],
                 &batch.targets[static_cast<size_t>(b * task.T)]};
    std::generate_n(row.ids, row.T, [&] { return task.ids.noise(row.below(kControls)); });
    task.fill(row, task);
  }
  batch.scored = static_cast<int64_t>(n) - std::count(batch.targets.begin(), batch.targets.end(), -1);
  return batch;
}

}  // namespace prism
