// Benchmarks in files: ppl for texts, lambada and choice for JSON objects, one a line. The measures are those
// of EleutherAI's lm-evaluation-harness.
#pragma once

#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "data/tokenizer.h"
#include "src/evaluate.h"

namespace prism {

struct TaskOptions {
  int64_t batch = 16, seq = 512;         // rows at once, ids a row and pass: speed only
  int64_t limit = INT64_MAX;             // examples, the first ones of the file
  std::optional<std::string> delimiter;  // between context and continuation; absent: as the files mean it
  bool raw_u16 = false;                  // .bin files are uint16 ids without a header
  std::function<void(int64_t, int64_t)> report;  // (done, all), in ids
};

// What the path is for: "lambada" or "choice" by the keys of a .jsonl file's first object, else "ppl".
std::string task_of(const std::string& path);

// ppl: documents, each from an empty state, every id but its first scored. Sums over all of them:
//   loss = mean -log p of an id in nats, perplexity = e^loss, word_perplexity = e^(sum / words),
//   bits_per_byte = sum / ln 2 / bytes, of the text itself, or for token shards of the text their ids stand
//   for.
// Adding scores gives that of all the texts together.
struct TextScore {
  Score score;
  int64_t bytes = 0, words = 0;
  TextScore& operator+=(const TextScore& other);
  nlohmann::ordered_json row(const std::string& file) const;
};
TextScore score_text(Model& model, const std::string& path, const std::optional<Tokenizer>& tokenizer,
                     const TaskOptions& options);

// lambada, {context, continuation}: acc = share of examples whose every continuation id is the likeliest,
//   perplexity = e^(mean over examples of -log p(continuation)).
// choice, {query, choices, gold} or {context_options, continuation, gold}: acc = share of examples whose gold
//   continuation has the highest log p, acc_norm = the highest log p / its bytes.
// Standard errors are sqrt(a (1 - a) / (n - 1)). Throws, with file and example, for what cannot be asked.
nlohmann::ordered_json score_examples(Model& model, const std::string& task, const std::string& path,
                                      const Tokenizer& tokenizer, const TaskOptions& options);

}  // namespace prism
