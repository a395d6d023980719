// What the tests of data/ share: small documents, their expected ids, and a way to an error's message.
#pragma once

#include <zstd.h>

#include <nlohmann/json.hpp>

#include "data/dataset.h"

namespace prism {

inline std::string compressed(const std::string& text) {
  std::string out(ZSTD_compressBound(text.size()), '\0');
  out.resize(ZSTD_compress(out.data(), out.size(), text.data(), text.size(), 3));
  return out;
}

inline std::string json_line(const std::string& text, const std::string& set = "") {
  nlohmann::json object = {{"text", text}};
  if (!set.empty()) object["meta"]["redpajama_set_name"] = set;
  return object.dump() + "\n";
}

inline std::vector<std::string> read_all(const std::vector<std::string>& names,
                                         const ReadOptions& options = {}) {
  DocumentReader reader(list_text_files(names), options);
  std::vector<std::string> texts;
  for (Document document; reader.next(document);) {
    if (document.continues)
      texts.back() += document.text;
    else
      texts.push_back(document.text);
  }
  return texts;
}

template <class Fn>
inline std::string error_of(const Fn& fn) {
  try {
    fn();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

inline TokenizeOptions options_for(const std::vector<std::string>& inputs, const std::string& out) {
  TokenizeOptions options;
  options.inputs = inputs;
  options.out = out;
  options.val_fraction = 0;
  return options;
}

inline std::vector<int32_t> all_ids(const TokenStream& stream) {
  std::vector<int32_t> ids(static_cast<size_t>(stream.size()));
  stream.copy(0, stream.size(), INT32_MAX, ids.data());
  return ids;
}

inline nlohmann::json description(const std::string& directory) {
  return nlohmann::json::parse(read_file(directory + "/dataset.json"));
}

// The ids of documents as tokenize() lays them out.
inline std::vector<int32_t> expected_ids(const std::vector<std::string>& texts) {
  std::vector<int32_t> ids;
  for (const auto& text : texts) {
    if (text.empty()) continue;
    ids.push_back(256);
    Tokenizer().encode(text, ids);
  }
  return ids;
}

// 500 documents of 0 to 400 bytes, many lengths, in three sets.
inline std::string many_documents() {
  std::string lines;
  for (int i = 0; i < 500; ++i) {
    std::string text;
    for (int j = 0; j < i * 7 % 80; ++j) text += cat("w", i * j % 97, j % 9 ? " " : "\n");
    lines += json_line(text, cat("Set", i % 3));
  }
  return lines;
}

}  // namespace prism
