// prism tokenize, tokenize train, detokenize: documents to token shards and back.
#include <CLI/CLI.hpp>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>

#include "data/dataset.h"
#include "src/commands.h"
#include "src/files.h"
#include "src/progress.h"

namespace prism {
namespace {

namespace fs = std::filesystem;

// How far it is: "12.3 MB, 4.56 MB/s  789 documents, 12/s  34567 tokens  89 %, 12s left".
std::string line_of(const TokenizeProgress& p, double seconds, bool last) {
  const double megabytes = static_cast<double>(p.bytes) * 1e-6, documents = static_cast<double>(p.documents);
  const double rate = 1 / std::max(seconds, 1e-9);
  char line[160];
  std::snprintf(line, sizeof line, "%.1f MB, %.2f MB/s  %lld documents, %.0f/s  %lld tokens", megabytes,
                megabytes * rate, static_cast<long long>(p.documents), documents * rate,
                static_cast<long long>(p.tokens));
  if (last || p.fraction <= 0) return line;
  return cat(line, "  ", std::lround(100 * p.fraction), " %, ",
             duration(seconds * (1 - p.fraction) / p.fraction), " left");
}

std::string quoted(const std::string& word) {
  if (word.find_first_of(" \t\n'\"\\$*?[](){}<>|&;#~") == word.npos && !word.empty()) return word;
  std::string out = "'";
  for (const char c : word) out += c == '\'' ? "'\\''" : std::string(1, c);
  return out + "'";
}

// The command that makes the same data set, without what does not change it (--out, --threads).
std::string command_of(const TokenizeOptions& o) {
  std::string command = "prism tokenize";
  for (const std::string& input : o.inputs) command += " " + quoted(input);
  command += " --tokenizer " + quoted(o.tokenizer) + " --field " + quoted(o.read.field) + " --set-field " +
             quoted(o.read.set_field);
  for (const std::string& set : o.sets) command += " --set " + quoted(set);
  command +=
      cat(" --val-fraction ", nlohmann::json(o.val_fraction).dump(), " --shard-tokens ", o.shard_tokens);
  if (o.limit_tokens != INT64_MAX) command += cat(" --limit-tokens ", o.limit_tokens);
  return command + (o.read.skip_bad ? " --skip-bad" : "");
}

void run_tokenize(TokenizeOptions& options) {
  options.command = command_of(options);
  using Clock = std::chrono::steady_clock;
  const Clock::time_point begin = Clock::now();
  const auto elapsed = [&] { return std::chrono::duration<double>(Clock::now() - begin).count(); };
  Progress progress;
  double kept = 0;  // when the last plain line was written
  const TokenizeProgress done = tokenize(options, [&](const TokenizeProgress& p) {
    const double seconds = elapsed();
    if (progress.terminal()) return progress.show(line_of(p, seconds, false));
    if (seconds < kept + 10) return;
    kept = seconds;
    progress.keep(line_of(p, seconds, false));
  });
  progress.keep(line_of(done, elapsed(), true));
  if (done.empty > 0) std::printf("%lld documents were empty\n", static_cast<long long>(done.empty));
  if (done.skipped > 0)
    std::printf("%lld documents could not be read and were skipped\n", static_cast<long long>(done.skipped));
  std::printf("written to %s\n", options.out.c_str());
}

struct TrainOptions {
  std::vector<std::string> inputs;
  std::string out;
  int64_t vocab = 8000;
  ReadOptions read;
};

void run_train(const TrainOptions& options) {
  PRISM_CHECK(!fs::exists(options.out), options.out, ": there is a file already");
  ReadOptions read = options.read;
  read.cut = [](std::string_view text) { return text.rfind('\n') + 1; };
  DocumentReader reader(list_text_files(options.inputs), read);
  int64_t documents = 0;
  const std::string model = Tokenizer::train(options.vocab, [&](std::string& text) {
    Document document;
    if (!reader.next(document)) return false;
    text = std::move(document.text);
    documents += !document.continues;
    return true;
  });
  replace_file(options.out, [&](OutputFile& file) { file.write(model); });
  std::printf("%lld pieces from %lld documents, written to %s\n", static_cast<long long>(options.vocab),
              static_cast<long long>(documents), options.out.c_str());
}

struct DetokenizeOptions {
  std::string shard, tokenizer;
  int64_t from = 0, count = 256;
  bool raw_u16 = false;
};

void run_detokenize(const DetokenizeOptions& options) {
  const TokenSpan span = open_shard(options.shard, options.raw_u16);
  const std::string beside = fs::absolute(options.shard).parent_path();
  const Tokenizer tokenizer = Tokenizer::load(options.tokenizer.empty() ? beside : options.tokenizer);
  PRISM_CHECK(options.from >= 0 && options.from < span.count, options.shard, ": --from ", options.from,
              ": expected a position below its ", span.count, " tokens");
  const int64_t end = options.from + std::min(options.count, span.count - options.from);
  StreamDecoder decoder(tokenizer);
  for (int64_t i = options.from; i < end; ++i) {
    const auto id = static_cast<int32_t>(span[i]);
    PRISM_CHECK(span[i] < static_cast<uint32_t>(tokenizer.vocab_size()), options.shard, ": token ", i,
                ": expected an id below the vocabulary's ", tokenizer.vocab_size(), ", got ", span[i]);
    if (id == tokenizer.bos() && i > options.from) std::cout << decoder.finish() << "\n----\n";
    std::cout << decoder.next(id);
  }
  std::cout << decoder.finish() << "\n";
}

void add_reading(CLI::App& command, std::vector<std::string>& inputs, ReadOptions& read) {
  command.add_option(
      "inputs", inputs,
      ".jsonl, .json, .txt, each also as .zst; other text files; directories; globs; - for stdin");
  command.add_option("--field", read.field, "key of a JSON document's text")->capture_default_str();
}

}  // namespace

void add_tokenize(CLI::App& app) {
  CLI::App* command = app.add_subcommand("tokenize", "Turn documents into a data set of token shards");
  const auto options = std::make_shared<TokenizeOptions>();
  options->threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  add_reading(*command, options->inputs, options->read);
  command->add_option("--tokenizer", options->tokenizer, "byte, or a SentencePiece .model file")
      ->capture_default_str();
  command->add_option("--out", options->out, "the data set's directory; it must not exist yet, or be empty");
  command->add_option("--set-field", options->read.set_field, "path of a document's set name")
      ->capture_default_str();
  command->add_option("--set", options->sets, "take documents of these sets only");
  command->add_option("--val-fraction", options->val_fraction, "share of documents kept for validation")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  command->add_option("--shard-tokens", options->shard_tokens, "tokens in a shard")->capture_default_str();
  command->add_option("--limit-tokens", options->limit_tokens, "stop after the document that reaches it");
  command->add_option("--threads", options->threads)->capture_default_str();
  command->add_flag("--skip-bad", options->read.skip_bad, "count documents that cannot be read, and go on");
  command->footer(
      "Example:\n  prism tokenize slimpajama/*.jsonl.zst --tokenizer mistral.model --out slim \\\n"
      "    --set RedPajamaC4 RedPajamaBook --limit-tokens 2000000000");

  CLI::App* train = command->add_subcommand("train", "Train a byte-pair SentencePiece model on documents");
  const auto train_options = std::make_shared<TrainOptions>();
  add_reading(*train, train_options->inputs, train_options->read);
  train->get_option("inputs")->required();
  train->add_option("--vocab", train_options->vocab, "number of pieces")->capture_default_str();
  train->add_option("--out", train_options->out, "the .model file to write")->required();
  train->footer("Example:\n  prism tokenize train books/ --vocab 8000 --out books.model");
  train->callback([train_options] { run_train(*train_options); });

  command->callback([command, train, options] {
    if (train->parsed()) return;
    if (options->inputs.empty()) throw CLI::RequiredError("inputs");
    if (options->out.empty()) throw CLI::RequiredError("--out");
    run_tokenize(*options);
  });
}

void add_detokenize(CLI::App& app) {
  CLI::App* command = app.add_subcommand("detokenize", "Print a range of a token shard as text");
  const auto options = std::make_shared<DetokenizeOptions>();
  command->add_option("shard", options->shard, "a .bin file")->required();
  command->add_option("--from", options->from, "first token")->capture_default_str();
  command->add_option("--count", options->count, "tokens at most")->capture_default_str();
  command->add_option("--tokenizer", options->tokenizer,
                      "byte or a .model file; else the one beside the shard");
  command->add_flag("--raw-u16", options->raw_u16, "the file is uint16 ids without a header");
  command->footer("Example:\n  prism detokenize slim/val_000000.bin --from 1000 --count 200");
  command->callback([options] { run_detokenize(*options); });
}

}  // namespace prism
