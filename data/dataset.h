// A data set: a directory of token shards (train_*.bin, val_*.bin), their tokenizer, and dataset.json, which
// says what is in them and where it came from.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "data/shards.h"
#include "data/text.h"
#include "data/tokenizer.h"

namespace prism {

struct TokenizeOptions {
  std::vector<std::string> inputs;  // as list_text_files takes them
  std::string tokenizer = "byte";   // as Tokenizer::load takes it
  std::string out;                  // a directory that does not exist yet, or is empty
  ReadOptions read;
  std::vector<std::string> sets;  // documents of these sets only; empty: of all
  double val_fraction = 0.01;
  int64_t shard_tokens = 100'000'000;
  int64_t limit_tokens = INT64_MAX;  // stop after the document that reaches it
  int threads = 1;
  std::string command;  // for dataset.json
};

struct TokenizeProgress {
  double fraction = 0;  // of the input files' bytes; 0 when unknown
  int64_t bytes = 0, documents = 0, tokens = 0;
  int64_t empty = 0, skipped = 0;  // documents without text; unreadable ones
};

using Report = std::function<void(const TokenizeProgress&)>;  // called often, by one thread at a time

// Writes a data set. Each document is bos + ids; which ones are validation depends on their text (its first
// part for a long plain text) alone. The output is byte-identical for any number of threads. Throws for bad
// input and when there are no tokens; `out` appears only when all is written.
TokenizeProgress tokenize(const TokenizeOptions& options, const Report& report);

struct Dataset {
  Tokenizer tokenizer;
  TokenStream train, val;
};

bool is_dataset(const std::string& path);
// Opens a data set; throws when a shard or the tokenizer disagrees with dataset.json.
Dataset open_dataset(const std::string& directory);

}  // namespace prism
