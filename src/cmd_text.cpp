// generate and eval: what a model writes, and how well it predicts.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <iomanip>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "data/text.h"
#include "src/commands.h"
#include "src/decoder.h"
#include "src/device_options.h"
#include "src/model_files.h"
#include "src/progress.h"
#include "src/tasks.h"

namespace prism {

namespace {

struct GenerateOptions {
  std::string model, prompt, prompt_file;
  int64_t tokens = 200, samples = 1;
  Sampling how{.temperature = 0.8, .top_p = 0.95};
  std::vector<std::string> stops;
  bool interactive = false;
  DeviceOptions device;
};

void show(const std::string& text) {
  std::fputs(valid_utf8(text).c_str(), stdout);
  std::fflush(stdout);
}

// One text: what was fed so far, and how the next ids are drawn.
struct Writer {
  Decoder& decoder;
  const Tokenizer& tokenizer;
  const GenerateOptions& options;
  uint64_t draw;  // the next one's number
  std::vector<int32_t> ids = {};

  // Feeds `more`, then draws ids and shows their text up to a stop string, an end of text, or the limit.
  void answer(std::vector<int32_t> more, StreamDecoder& text) {
    Stops stops(options.stops);
    for (int64_t i = 0;; ++i) {
      ids.insert(ids.end(), more.begin(), more.end());
      std::vector<double> logits = decoder.feed(more);
      logits.resize(
          std::min(logits.size(), static_cast<size_t>(tokenizer.vocab_size())));  // those with a text
      if (i == options.tokens || stops.met()) break;
      penalise(logits, ids, options.how.repetition_penalty);
      more = {sample(logits, options.how, draw++)};
      if (more[0] == tokenizer.bos() || more[0] == tokenizer.eos()) break;
      show(stops.next(text.next(more[0])));
    }
    show(stops.next(text.finish()) + stops.finish() + "\n");
  }

  // Lines of standard input, each answered; the state goes on from turn to turn.
  void converse() {
    const bool terminal = ::isatty(STDIN_FILENO);
    const bool cuts_lines = tokenizer.cut("a\na") == 1;
    for (std::string line;;) {
      if (terminal) show("> ");
      if (!std::getline(std::cin, line)) break;
      std::vector<int32_t> more;
      if (ids.empty())
        more.push_back(tokenizer.bos());
      else
        line.insert(0, "\n");
      tokenizer.encode(line, more, !ids.empty() && cuts_lines);
      StreamDecoder text(tokenizer);
      answer(more, text);
    }
    if (terminal) show("\n");
  }
};

void generate(const GenerateOptions& o) {
  for (const std::string& stop : o.stops)
    if (stop.empty()) throw UsageError("--stop: expected some text, got none");
  Device device;
  DType dtype;
  o.device.resolve(device, dtype);
  const std::unique_ptr<Model> model = load_model(o.model, device, dtype, false);
  const Tokenizer tokenizer = Tokenizer::load(newest_checkpoint(o.model));
  const std::string prompt = o.prompt_file.empty() ? o.prompt : read_file(o.prompt_file);
  Decoder decoder(*model);
  for (int64_t s = 0; s < o.samples; ++s) {
    if (o.samples > 1)
      std::printf("--- sample %lld of %lld\n", static_cast<long long>(s + 1),
                  static_cast<long long>(o.samples));
    decoder.reset();
    Writer writer{decoder, tokenizer, o, static_cast<uint64_t>(s) << 32};
    if (!o.interactive || !prompt.empty()) {
      std::vector<int32_t> ids = {tokenizer.bos()};
      tokenizer.encode(prompt, ids);
      StreamDecoder text(tokenizer);
      for (int32_t id : ids) show(text.next(id));
      writer.answer(ids, text);
    }
    if (o.interactive) writer.converse();
  }
}

struct EvalOptions {
  std::string model, task = "auto", json;
  std::vector<std::string> data;
  TaskOptions how;
  DeviceOptions device;
};

// A row of the table, below its head when that is another one than the row before had.
void print_row(const nlohmann::ordered_json& row, std::string& head, Progress& progress) {
  std::string names, values;
  for (const auto& [key, value] : row.items()) {
    std::string text = value.is_string() ? value.get<std::string>() : value.dump();
    if (value.is_number_integer()) text = grouped(value.get<int64_t>());
    if (value.is_number_float()) {
      const auto x = value.get<double>();
      text = x < 10 ? cat(std::fixed, std::setprecision(4), x) : cat(std::setprecision(6), x);
    }
    if (key == "file" && text.size() > 28) text = "..." + text.substr(text.size() - 25);
    const int width = key == "file" ? 28 : static_cast<int>(std::max<size_t>(key.size(), 8));
    const auto side = value.is_string() ? std::left : std::right;
    names += cat(side, std::setw(width), key, "  ");
    values += cat(side, std::setw(width), text, "  ");
  }
  if (names != head) progress.keep(head.empty() ? names : "\n" + names);
  head = names;
  progress.keep(values);
}

void eval(EvalOptions& o) {
  Device device;
  DType dtype;
  o.device.resolve(device, dtype);
  const std::unique_ptr<Model> model = load_model(o.model, device, dtype, false);
  const std::string dir = newest_checkpoint(o.model);
  const std::optional<Tokenizer> tokenizer =
      Tokenizer::lies_in(dir) ? std::optional(Tokenizer::load(dir)) : std::nullopt;
  Progress progress;
  std::string head;
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  TextScore total;
  int texts = 0;
  for (const std::string& path : o.data) {
    using Clock = std::chrono::steady_clock;
    o.how.report = [&, begin = Clock::now()](int64_t done, int64_t all) {
      const double left = std::chrono::duration<double>(Clock::now() - begin).count() *
                          static_cast<double>(all - done) / static_cast<double>(done);
      progress.show(cat(path, "  ", 100 * done / all, " %, ", duration(left), " left"));
    };
    const std::string task = o.task == "auto" ? task_of(path) : o.task;
    if (task == "ppl") {
      const TextScore score = score_text(*model, path, tokenizer, o.how);
      total += score, ++texts;
      rows.push_back(score.row(path));
    } else {
      PRISM_CHECK(tokenizer, dir, ": no tokenizer in it, and ", path, " is text");
      rows.push_back(score_examples(*model, task, path, *tokenizer, o.how));
    }
    print_row(rows.back(), head, progress);
  }
  if (texts > 1) rows.push_back(total.row("all")), print_row(rows.back(), head, progress);
  if (o.json.empty()) return;
  const nlohmann::ordered_json all = {{"model", dir}, {"dtype", name_of(dtype)}, {"results", rows}};
  replace_file(o.json, [&](OutputFile& file) { file.write(all.dump(2) + "\n"); });
}

}  // namespace

void add_generate(CLI::App& app) {
  const auto o = std::make_shared<GenerateOptions>();
  CLI::App* command = app.add_subcommand("generate", "Continue a text, token by token");
  command->add_option("--model", o->model, "checkpoint directory")->required();
  CLI::Option* prompt = command->add_option("--prompt", o->prompt, "text to continue");
  command->add_option("--prompt-file", o->prompt_file, "a file with that text, taken as it stands; -: stdin")
      ->excludes(prompt);
  command->add_option("--tokens", o->tokens, "tokens to add, at most")
      ->check(number_above_zero(true))
      ->capture_default_str();
  command->add_option("--temperature", o->how.temperature, "0: always the likeliest token")
      ->check(number_above_zero(true))
      ->capture_default_str();
  command->add_option("--top-k", o->how.top_k, "draw from the k likeliest; 0: from all")
      ->check(number_above_zero(true))
      ->capture_default_str();
  command
      ->add_option("--top-p", o->how.top_p, "draw from the likeliest that hold this probability; 1: from all")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  command
      ->add_option("--repetition-penalty", o->how.repetition_penalty,
                   "divides positive logits of ids that were there before, multiplies negative ones; 1: off")
      ->check(number_above_zero(false))
      ->capture_default_str();
  command->add_option("--stop", o->stops, "end before this text; may be given several times")
      ->allow_extra_args(false);
  CLI::Option* samples = command->add_option("--samples", o->samples, "texts to write, each from the prompt")
                             ->check(number_above_zero(false))
                             ->capture_default_str();
  command
      ->add_flag("--interactive", o->interactive,
                 "answer each line of standard input, going on from all that came before; Ctrl-D ends")
      ->excludes(samples);
  command->add_option("--seed", o->how.seed, "of the draws")->capture_default_str();
  add_device_options(*command, o->device);
  command->footer(
      "Example: prism generate --model runs/quickstart --prompt 'int main' --tokens 100 --stop '}' --samples "
      "3");
  command->callback([o] { generate(*o); });
}

void add_eval(CLI::App& app) {
  const auto o = std::make_shared<EvalOptions>();
  CLI::App* command = app.add_subcommand("eval", "How well a model predicts texts, and answers benchmarks");
  command->add_option("--model", o->model, "checkpoint directory")->required();
  command
      ->add_option(
          "--data", o->data,
          "ppl: text files, directories, token shards (.bin), data sets; lambada: .jsonl of {context, "
          "continuation}; choice: of {query, choices, gold} or {context_options, continuation, gold}")
      ->required();
  command->add_option("--task", o->task, "ppl, lambada, choice; auto: what each file is for, by its keys")
      ->check(CLI::IsMember({"auto", "ppl", "lambada", "choice"}))
      ->capture_default_str();
  command->add_option("--limit", o->how.limit, "the first examples of a lambada or choice file, so many")
      ->check(number_above_zero(false));
  command->add_option(
      "--delimiter", o->how.delimiter,
      "between context and continuation; by default a space, after a last line \"Question: ...\" "
      "a new line and \"Answer: \"");
  command->add_option("--json", o->json, "file to write the table to");
  command->add_option("--batch", o->how.batch, "rows at once (speed only)")
      ->check(number_above_zero(false))
      ->capture_default_str();
  command->add_option("--seq", o->how.seq, "ids a row and pass (speed only)")
      ->check(number_above_zero(false))
      ->capture_default_str();
  command->add_flag("--raw-u16", o->how.raw_u16, ".bin files are uint16 ids without a header");
  add_device_options(*command, o->device);
  command->footer(
      "Example: prism eval --model runs/quickstart --data README.md lambada_openai.jsonl piqa.jsonl");
  command->callback([o] { eval(*o); });
}

}  // namespace prism
