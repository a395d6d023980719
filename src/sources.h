// What --data and --val name, as token streams.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "data/dataset.h"
#include "data/loader.h"

namespace prism {

struct SourceOptions {
  bool raw_u16 = false;  // .bin files are uint16 ids without a header
  // Without validation data of their own, keep the last tenth of each file for it; false: all is in both.
  bool hold_out = true;
};

// Bytes of texts, and words: what stands between white space.
struct TextSize {
  int64_t bytes = 0, words = 0;
  void add(std::string_view text, bool continues);  // continues: the same text goes on

 private:
  bool in_word_ = false;
};

struct Sources {
  std::optional<Tokenizer> tokenizer;  // of the text and data sets; none when there are only .bin files
  std::vector<WeightedStream> train;   // one stream, or one for each weighted path
  TokenStream val;
  TextSize text;  // of the text files
};

// What --data and --val name: data set directories, .bin shards, text files and directories of them
// (tokenized here, a file is a document; .jsonl holds many), each with an optional weight, "PATH:0.7". Text
// goes through `tokenizer`, else a data set's, else bytes. Throws when a data set was made with another
// tokenizer.
Sources open_sources(const std::vector<std::string>& paths, std::optional<Tokenizer> tokenizer,
                     const SourceOptions& options = {});

}  // namespace prism
