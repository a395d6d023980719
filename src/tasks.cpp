#include "src/tasks.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>

#include "src/sources.h"

namespace prism {

namespace {

using json = nlohmann::ordered_json;

constexpr const char* kWhite = " \t\r\n";

// Objects as they stand.
ReadOptions whole_objects() {
  ReadOptions options;
  options.field.clear();
  return options;
}

// A way to go on from a context: ids [begin, end) of the stream, `bytes` of text.
struct Option {
  int64_t begin, end, bytes;
};

// The examples of a file as documents of one stream, with what is asked of them.
struct Questions {
  std::vector<int32_t> ids;
  std::vector<Option> options;
  struct Example {
    size_t first, count;  // options
    int64_t gold;
  };
  std::vector<Example> examples;

  // The ids of context + delimiter + continuation, encoded as one text. The continuation's are those after
  // the context's own; white space between them is its part, as in the harness. Without a given delimiter it
  // is a space, or for a context whose last line is "Question: ..." (ARC, PIQA, BoolQ) "\nAnswer: ".
  void ask(const Tokenizer& tokenizer, std::string context, const std::string& continuation,
           const std::optional<std::string>& delimiter) {
    context.resize(context.find_last_not_of(kWhite) + 1);
    const bool question = context.compare(context.rfind('\n') + 1, 9, "Question:") == 0;
    context += delimiter.value_or(question ? "\nAnswer: " : " ");
    const std::string before = context.substr(0, context.find_last_not_of(kWhite) + 1);
    const auto begin = static_cast<int64_t>(ids.size() + 1 + tokenizer.encode(before).size());
    ids.push_back(tokenizer.bos());
    tokenizer.encode(context + continuation, ids);
    const auto end = static_cast<int64_t>(ids.size());
    PRISM_CHECK(!continuation.empty() && begin < end, "expected a continuation, got no text");
    options.push_back({begin, end, static_cast<int64_t>(continuation.size())});
  }

  void add(const json& object, bool choice, const Tokenizer& tokenizer,
           const std::optional<std::string>& delimiter) {
    const auto field = [&]<class T>(const char* key, T) {
      PRISM_CHECK(object.contains(key), "no field \"", key, "\"");
      return object[key].get<T>();
    };
    using Texts = std::vector<std::string>;
    const bool by_context = choice && object.contains("context_options");
    const Texts contexts = by_context ? field("context_options", Texts())
                                      : Texts{field(choice ? "query" : "context", std::string())};
    const Texts continuations =
        choice && !by_context ? field("choices", Texts()) : Texts{field("continuation", std::string())};
    const size_t first = options.size();
    const int64_t gold = choice ? field("gold", int64_t()) : 0;
    for (const std::string& context : contexts)
      for (const std::string& continuation : continuations) ask(tokenizer, context, continuation, delimiter);
    const size_t count = options.size() - first;
    PRISM_CHECK(gold >= 0 && gold < static_cast<int64_t>(count), "gold: expected one of ", count,
                " choices, got ", gold);
    examples.push_back({first, count, gold});
  }
};

Questions read_questions(const std::string& path, bool choice, const Tokenizer& tokenizer,
                         const TaskOptions& options) {
  DocumentReader reader({path}, whole_objects());
  Questions questions;
  int64_t number = 0;
  for (Document document; ++number <= options.limit && reader.next(document);) try {
      questions.add(json::parse(document.text), choice, tokenizer, options.delimiter);
    } catch (const std::exception& error) {  // ours, or the JSON library's of a wrong type
      PRISM_FAIL(path, ": example ", number, ": ", error.what());
    }
  PRISM_CHECK(!questions.examples.empty(), path, ": no examples in it");
  return questions;
}

// The text that the ids stand for, specials having none.
TextSize size_of_text(const TokenStream& stream, const Tokenizer& tokenizer) {
  TextSize size;
  for (int64_t begin = 0, end; begin < stream.size(); begin = end) {
    end = stream.find(tokenizer.bos(), begin + 1);
    std::vector<int32_t> ids(static_cast<size_t>(end - begin));
    stream.copy(begin, end - begin, tokenizer.vocab_size(), ids.data());
    size.add(tokenizer.decode(ids), false);
  }
  return size;
}

// The share of `right` among n examples, and its standard error.
void put_share(json& row, const std::string& name, double right, double n) {
  const double share = right / n;
  row[name] = share;
  row[name + "_stderr"] = n > 1 ? std::sqrt(share * (1 - share) / (n - 1)) : 0;
}

}  // namespace

std::string task_of(const std::string& path) {
  if (!path.ends_with(".jsonl") && !path.ends_with(".jsonl.zst")) return "ppl";
  Document document;
  if (!DocumentReader({path}, whole_objects()).next(document)) return "ppl";
  const json object = json::parse(document.text);
  if (object.contains("choices") || object.contains("context_options")) return "choice";
  return object.contains("continuation") ? "lambada" : "ppl";
}

TextScore& TextScore::operator+=(const TextScore& other) {
  score.loss += other.score.loss, score.scored += other.score.scored;
  score.documents += other.score.documents, bytes += other.bytes, words += other.words;
  return *this;
}

json TextScore::row(const std::string& file) const {
  json row = {{"task", "ppl"}, {"file", file}, {"documents", score.documents}, {"ids", score.scored}};
  row["loss"] = score.mean(), row["perplexity"] = score.perplexity();
  if (words > 0) row["word_perplexity"] = std::exp(score.loss / static_cast<double>(words));
  if (bytes > 0) row["bits_per_byte"] = score.loss / std::log(2.0) / static_cast<double>(bytes);
  return row;
}

TextScore score_text(Model& model, const std::string& path, const std::optional<Tokenizer>& tokenizer,
                     const TaskOptions& o) {
  const Sources sources = open_sources({path}, tokenizer, {.raw_u16 = o.raw_u16, .hold_out = false});
  const auto bos =
      static_cast<int32_t>(sources.tokenizer ? sources.tokenizer->bos() : model.config().bos_token_id);
  TextSize text = sources.text;
  if (text.bytes == 0 && sources.tokenizer) text = size_of_text(sources.val, *sources.tokenizer);
  return {evaluate(model, sources.val, bos, o.batch, o.seq, o.report), text.bytes, text.words};
}

json score_examples(Model& model, const std::string& task, const std::string& path,
                    const Tokenizer& tokenizer, const TaskOptions& o) {
  const bool choice = task == "choice";
  Questions questions = read_questions(path, choice, tokenizer, o);
  Marks marks;
  marks.wanted.resize(questions.ids.size());
  for (const Option& option : questions.options)
    std::fill(marks.wanted.begin() + option.begin, marks.wanted.begin() + option.end, true);
  TokenStream stream;
  stream.append(span_of(std::move(questions.ids), path));
  evaluate(model, stream, tokenizer.bos(), o.batch, o.seq, o.report, &marks);

  double right = 0, right_norm = 0, loss = 0, chance = 0;
  for (const auto& [first, count, gold] : questions.examples) {
    std::vector<double> losses, by_byte;
    for (size_t i = first; i < first + count; ++i) {
      const auto [begin, end, bytes] = questions.options[i];
      losses.push_back(std::accumulate(marks.loss.begin() + begin, marks.loss.begin() + end, 0.0));
      by_byte.push_back(losses.back() / static_cast<double>(bytes));
      if (!choice)
        right += std::count(marks.likeliest.begin() + begin, marks.likeliest.begin() + end, false) == 0;
    }
    const auto least = [&](const std::vector<double>& x) {
      return std::min_element(x.begin(), x.end()) - x.begin();
    };
    if (choice) right += least(losses) == gold, right_norm += least(by_byte) == gold;
    loss += losses[static_cast<size_t>(gold)], chance += 1 / static_cast<double>(count);
  }
  const auto n = static_cast<double>(questions.examples.size());
  json row = {{"task", task}, {"file", path}, {"examples", questions.examples.size()}};
  put_share(row, "acc", right, n);
  if (choice)
    put_share(row, "acc_norm", right_norm, n), row["chance"] = chance / n;
  else
    row["perplexity"] = std::exp(loss / n);
  return row;
}

}  // namespace prism
