#include <filesystem>
#include <sstream>

#include "data/dataset.h"

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
  return {name.substr(0, colon), weight};
}

// All documents of a text file, each bos + ids.
std::vector<int32_t> tokenize_file(const std::string& file, const Tokenizer& tokenizer) {
  ReadOptions options;
  options.json_files = false;
  options.cut = [&](std::string_view text) { return tokenizer.cut(text); };
  RecordReader reader({file}, options);
  std::vector<int32_t> ids;
  for (Record record; reader.next(record);) {
    const bool continues = record.continues;
    const Document document = parse_record(std::move(record), options);
    if (document.text.empty()) continue;
    if (!continues) ids.push_back(tokenizer.bos());
    tokenizer.encode(document.text, ids, continues);
  }
  return ids;
}

class Opener {
 public:
  Opener(Sources& sources, const SourceOptions& options) : sources_(sources), options_(options) {}

  void open(const std::string& path, TokenStream& train) {
    if (is_dataset(path)) {
      add(open_dataset(path), path, train);
    } else if (path.ends_with(".bin")) {
      add(open_shard(path, options_.raw_u16), train);
    } else {
      if (!sources_.tokenizer) sources_.tokenizer.emplace();
      for (const std::string& file : list_text_files({path})) add_text(file, train);
    }
  }

 private:
  void add(const Dataset& data, const std::string& path, TokenStream& train) {
    if (!sources_.tokenizer) sources_.tokenizer = data.tokenizer;
    const Tokenizer& expected = *sources_.tokenizer;
    PRISM_CHECK(data.tokenizer.hash() == expected.hash(), path, ": expected data of the tokenizer ",
                expected.name(), " ", expected.hash(), ", got ", data.tokenizer.name(), " ",
                data.tokenizer.hash());
    if (data.val.size() > 0) {
      train.append(data.train);
      sources_.val.append(data.val);
    } else {
      for (const TokenSpan& span : data.train.spans()) add(span, train);
    }
  }

  void add(const TokenSpan& span, TokenStream& train) {
    const int64_t held = options_.hold_out ? span.count / 10 : 0;
    train.append(span.slice(0, span.count - held));
    sources_.val.append(options_.hold_out ? span.slice(span.count - held, span.count) : span);
  }

  void add_text(const std::string& file, TokenStream& train) {
    std::vector<int32_t> ids = tokenize_file(file, *sources_.tokenizer);
    const auto n = static_cast<int64_t>(ids.size()), held = options_.hold_out ? n / 10 : 0;
    std::vector<int32_t> end(ids.end() - held, ids.end());
    // What is held out opens a document of its own.
    if (held > 0 && end[0] != sources_.tokenizer->bos()) end.insert(end.begin(), sources_.tokenizer->bos());
    const TokenSpan all = span_of(std::move(ids), file);
    train.append(all.slice(0, n - held));
    sources_.val.append(options_.hold_out ? span_of(std::move(end), file) : all);
  }

  Sources& sources_;
  const SourceOptions& options_;
};

}  // namespace

Sources open_sources(const std::vector<std::string>& paths, std::optional<Tokenizer> tokenizer,
                     const SourceOptions& options) {
  PRISM_CHECK(!paths.empty(), "no data: expected at least one path");
  Sources sources;
  sources.tokenizer = std::move(tokenizer);
  // Data sets know their tokenizer; text beside them must go through the same one.
  for (const std::string& name : paths)
    if (const std::string path = split_weight(name).first; !sources.tokenizer && is_dataset(path))
      sources.tokenizer = Tokenizer::load(path);
  Opener opener(sources, options);
  for (const std::string& name : paths) {
    const auto [path, weight] = split_weight(name);
    const bool first = sources.train.empty();
    if (first || weight) sources.train.push_back({{}, weight.value_or(0)});
    PRISM_CHECK(first || weight.has_value() == (sources.train[0].weight != 0), name,
                ": expected a weight for every path or for none, as in a:0.7 b:0.3");
    opener.open(path, sources.train.back().stream);
  }
  if (sources.train[0].weight == 0) sources.train[0].weight = 1;
  return sources;
}

}  // namespace prism
