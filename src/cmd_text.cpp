// generate and eval: what a model writes, and how well it predicts.
#include <cmath>
#include <cstdio>
#include <memory>

#include "src/commands.h"
#include "src/decoder.h"
#include "src/device_options.h"
#include "src/evaluate.h"
#include "src/model_files.h"
#include "src/sources.h"

namespace prism {

namespace {

struct GenerateOptions {
  std::string model, prompt;
  int64_t tokens = 200;
  Sampling how{.temperature = 0.8, .top_p = 0.95};
  DeviceOptions device;
};

void generate(const GenerateOptions& o) {
  Device device;
  DType dtype;
  o.device.resolve(device, dtype);
  const std::unique_ptr<Model> model = load_model(o.model, device, dtype, false);
  const Tokenizer tokenizer = Tokenizer::load(newest_checkpoint(o.model));
  std::vector<int32_t> ids = {tokenizer.bos()};
  tokenizer.encode(o.prompt, ids);
  Decoder decoder(*model);
  StreamDecoder text(tokenizer);
  std::vector<double> logits = decoder.feed(ids);
  for (int32_t id : ids) std::fputs(text.next(id).c_str(), stdout);
  for (int64_t i = 0; i < o.tokens; ++i) {
    const int32_t id = sample(logits, o.how, static_cast<uint64_t>(i));
    if (id == tokenizer.bos() || id == tokenizer.eos()) break;
    std::fputs(text.next(id).c_str(), stdout);
    std::fflush(stdout);
    logits = decoder.feed({&id, 1});
  }
  std::printf("%s\n", text.finish().c_str());
}

struct EvalOptions {
  std::string model;
  std::vector<std::string> data;
  int64_t batch = 16, seq = 512;
  bool raw_u16 = false;
  DeviceOptions device;
};

// Bytes of text the ids stand for, specials having none.
int64_t text_bytes(const TokenStream& stream, const Tokenizer& tokenizer, int64_t vocab) {
  int64_t bytes = 0;
  for (int64_t begin = 0, end; begin < stream.size(); begin = end) {
    end = stream.find(tokenizer.bos(), begin + 1);
    std::vector<int32_t> ids(static_cast<size_t>(end - begin));
    stream.copy(begin, end - begin, vocab, ids.data());
    bytes += static_cast<int64_t>(tokenizer.decode(ids).size());
  }
  return bytes;
}

void eval(const EvalOptions& o) {
  Device device;
  DType dtype;
  o.device.resolve(device, dtype);
  const std::unique_ptr<Model> model = load_model(o.model, device, dtype, false);
  const std::string dir = newest_checkpoint(o.model);
  const std::optional<Tokenizer> tokenizer =
      Tokenizer::lies_in(dir) ? std::optional(Tokenizer::load(dir)) : std::nullopt;
  const Sources sources = open_sources(o.data, tokenizer, {.raw_u16 = o.raw_u16, .hold_out = false});
  const Config& c = model->config();
  const int32_t bos = static_cast<int32_t>(tokenizer ? tokenizer->bos() : c.bos_token_id);
  const Score score = evaluate(*model, sources.val, bos, o.batch, o.seq);
  std::printf("documents %lld   scored ids %lld   loss %.6f   perplexity %.4f",
              static_cast<long long>(score.documents), static_cast<long long>(score.scored), score.mean(),
              score.perplexity());
  if (tokenizer)
    if (const int64_t bytes = text_bytes(sources.val, *tokenizer, c.vocab_size); bytes > 0)
      std::printf("   bits per byte %.6f", score.loss / std::log(2.0) / static_cast<double>(bytes));
  std::printf("\n");
}

}  // namespace

void add_generate(CLI::App& app) {
  const auto o = std::make_shared<GenerateOptions>();
  CLI::App* command = app.add_subcommand("generate", "Continue a text, token by token");
  command->add_option("--model", o->model, "checkpoint directory")->required();
  command->add_option("--prompt", o->prompt, "text to continue");
  command->add_option("--tokens", o->tokens, "tokens to add, at most")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command->add_option("--temperature", o->how.temperature, "0: always the likeliest token")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command->add_option("--top-k", o->how.top_k, "draw from the k likeliest; 0: from all")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command
      ->add_option("--top-p", o->how.top_p, "draw from the likeliest that hold this probability; 1: from all")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  command->add_option("--seed", o->how.seed, "of the draws")->capture_default_str();
  add_device_options(*command, o->device);
  command->footer(
      "Example: prism generate --model runs/quickstart --prompt 'int main' --tokens 100 --temperature 0.7");
  command->callback([o] { generate(*o); });
}

void add_eval(CLI::App& app) {
  const auto o = std::make_shared<EvalOptions>();
  CLI::App* command = app.add_subcommand("eval", "Loss, perplexity and bits per byte of a text");
  command->add_option("--model", o->model, "checkpoint directory")->required();
  command->add_option("--data", o->data, "text files, directories, token shards (.bin), data sets")
      ->required();
  command->add_option("--batch", o->batch, "rows at once (speed only)")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command->add_option("--seq", o->seq, "ids a row and pass (speed only)")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command->add_flag("--raw-u16", o->raw_u16, ".bin files are uint16 ids without a header");
  add_device_options(*command, o->device);
  command->footer("Example: prism eval --model runs/quickstart --data README.md");
  command->callback([o] { eval(*o); });
}

}  // namespace prism
