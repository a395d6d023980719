#include "src/sources.h"

#include <cctype>
#include <filesystem>
#include <sstream>

namespace prism {
namespace {

namespace fs = std::filesystem;

// Splits "PATH:0.7" into path and weight; a path that exists as it stands has none.
std::pair<std::string, std::optional<double>> split_weight(const std::string& name) {
  const size_t colon = name.rfind(':');
  if (colon == name.npos || fs::exists(name)) return {name, {}};
  std::istringstream number(name.substr(colon + 1));
  double weight;
  if (!(number >> weight) || !number.eof()) return {name, {}};
  PRISM_CHECK(weight > 0, name, ": expected a weight above 0");
  return {name.substr(0, colon), weight};
}

// All documents of a text file, each bos + ids. Adds to the size of what was read.
std::vector<int32_t> tokenize_file(const std::string& file, const Tokenizer& tokenizer, TextSize& size) {
  ReadOptions options;
  options.json_files = false;
  options.cut = [&](std::string_view text) { return tokenizer.cut(text); };
  DocumentReader reader({file}, options);
  std::vector<int32_t> ids;
  for (Document document; reader.next(document);) {
    if (!document.continues && !document.text.empty()) ids.push_back(tokenizer.bos());
    tokenizer.encode(document.text, ids, document.continues);
    size.add(document.text, document.continues);
  }
  return ids;
}

// Appends the ids to train, or with `hold_out` all but the last tenth, and that, or all, to val; there it
// opens a document of its own, with `bos` (none: -1).
void divide(const TokenSpan& ids, bool hold_out, int32_t bos, TokenStream& train, TokenStream& val) {
  const int64_t held = hold_out ? ids.count / 10 : 0, kept = ids.count - held;
  train.append(ids.slice(0, kept));
  if (held > 0 && bos >= 0 && ids[kept] != static_cast<uint32_t>(bos)) val.append(span_of({bos}, ids.file));
  val.append(hold_out ? ids.slice(kept, ids.count) : ids);
}

}  // namespace

void TextSize::add(std::string_view text, bool continues) {
  bytes += static_cast<int64_t>(text.size());
  in_word_ = in_word_ && continues;
  for (const unsigned char c : text) {
    const bool word = !std::isspace(c);
    words += word && !in_word_;
    in_word_ = word;
  }
}

Sources open_sources(const std::vector<std::string>& paths, std::optional<Tokenizer> tokenizer,
                     const SourceOptions& options) {
  PRISM_CHECK(!paths.empty(), "no data: expected at least one path");
  Sources sources;
  sources.tokenizer = std::move(tokenizer);
  // Data sets know their tokenizer; text beside them must go through the same one.
  for (const std::string& name : paths)
    if (const std::string path = split_weight(name).first; !sources.tokenizer && is_dataset(path))
      sources.tokenizer = Tokenizer::load(path);
  const auto open = [&](const std::string& path, TokenStream& train) {
    if (is_dataset(path)) {
      const Dataset data = open_dataset(path);
      const Tokenizer& expected = *sources.tokenizer;
      PRISM_CHECK(data.tokenizer.hash() == expected.hash(), path, ": expected data of the tokenizer ",
                  expected.name(), " ", expected.hash(), ", got ", data.tokenizer.name(), " ",
                  data.tokenizer.hash());
      if (data.val.size() > 0) {
        train.append(data.train);
        sources.val.append(data.val);
        return;
      }
      for (const TokenSpan& span : data.train.spans()) divide(span, options.hold_out, -1, train, sources.val);
    } else if (path.ends_with(".bin")) {
      divide(open_shard(path, options.raw_u16), options.hold_out, -1, train, sources.val);
    } else {
      if (!sources.tokenizer) sources.tokenizer.emplace();
      const Tokenizer& text = *sources.tokenizer;
      for (const std::string& file : list_text_files({path}))
        divide(span_of(tokenize_file(file, text, sources.text), file), options.hold_out, text.bos(), train,
               sources.val);
    }
  };
  for (const std::string& name : paths) {
    const auto [path, weight] = split_weight(name);
    const bool first = sources.train.empty();
    if (first || weight) sources.train.push_back({{}, weight.value_or(0)});
    PRISM_CHECK(first || weight.has_value() == (sources.train[0].weight != 0), name,
                ": expected a weight for every path or for none, as in a:0.7 b:0.3");
    open(path, sources.train.back().stream);
  }
  if (sources.train[0].weight == 0) sources.train[0].weight = 1;
  return sources;
}

}  // namespace prism
