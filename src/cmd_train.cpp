// train: from data to a checkpoint.
#include <array>
#include <cmath>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>

#include "src/commands.h"
#include "src/device_options.h"
#include "src/ngram.h"
#include "src/trainer.h"

namespace prism {

namespace {

struct TrainOptions {
  std::string preset, config, model;
  TrainSettings given;
  std::set<std::string> named;  // the settings that the command line gives
  DeviceOptions where;
  std::vector<std::string> set;
  std::string out;
  int64_t stop_after = 0;
  bool resume = false, ngrams = false, no_graph = false;
  std::set<std::string> allowed;
};

// The command line's settings over those of `base`.
TrainSettings settings_over(TrainSettings base, const TrainOptions& o) {
  // Values that follow another one, when that one is given and they are not.
  Recipe& r = base.recipe;
  if (!o.resume && o.named.contains("lr")) r.min_lr = o.given.recipe.lr / 10;
  if (!o.resume && o.named.contains("steps")) r.warmup = std::min(r.warmup, o.given.recipe.steps / 10);
  nlohmann::json values;
  for_each_setting(o.given, [&](const char* name, const auto& field, const char*) { values[name] = field; });
  for_each_setting(base, [&](const char* name, auto& field, const char*) {
    if (o.named.contains(name)) values[name].get_to(field);
  });
  return base;
}

// A preset's vocabulary is its data's; any other configuration must have the data's already.
Config fitted(Config config, const std::optional<Tokenizer>& tokenizer, bool preset,
              const std::string& where) {
  if (!tokenizer) return config;
  const int64_t vocab = tokenizer->vocab_size(), bos = tokenizer->bos(), eos = tokenizer->eos();
  if (preset) {
    if (config.vocab_size != vocab)
      std::printf("the preset's vocabulary of %lld becomes the data's %lld\n",
                  static_cast<long long>(config.vocab_size), static_cast<long long>(vocab));
    config.vocab_size = vocab, config.bos_token_id = bos, config.eos_token_id = eos;
  }
  PRISM_CHECK(config.vocab_size >= vocab && config.bos_token_id == bos && config.eos_token_id == eos, where,
              ": expected vocab_size of at least ", vocab, ", bos_token_id ", bos, " and eos_token_id ", eos,
              " as the data's tokenizer has, got ", config.vocab_size, ", ", config.bos_token_id, " and ",
              config.eos_token_id);
  return config;
}

// A model named again on resume must be the one that lies there.
void check_same(const Config& saved, const Config& given, const std::string& where) {
  const auto before = nlohmann::json::parse(to_json(saved)), now = nlohmann::json::parse(to_json(given));
  for (const auto& [key, value] : before.items())
    PRISM_CHECK(now.contains(key) && now[key] == value, where, ": ", key, ": expected ", shown(value),
                " as when the run was saved, got ", shown(now.value(key, nlohmann::json())));
}

void check_memory(const Config& config, Device device, DType dtype) {
  // Master, gradient and two moments of each weight, and its bf16 copy.
  const auto each = static_cast<size_t>(4 * size_of(acc_of(dtype)) + (dtype == DType::bf16 ? 2 : 0));
  const auto count = static_cast<size_t>(Model(config).parameters().count());
  const size_t free = memory_info(device).free;
  PRISM_CHECK(count * each <= free, "memory: ", byte_count(count * each), " needed for ",
              grouped(int64_t(count)), " parameters with gradients and moments, ", byte_count(free),
              " free on ", device, "; a smaller model is needed, or --dtype f32 in place of f64");
}

void compare_with_ngrams(Trainer& trainer, const Sources& data, const Config& config) {
  const bool documents = !trainer.state().settings.no_document_reset;
  const Ngrams ngrams(data.train, config.vocab_size,
                      documents ? static_cast<int32_t>(config.bos_token_id) : -1);
  std::array<double, 3> loss{};
  int64_t scored = 0;
  trainer.for_each_validation_batch([&](const Batch& batch) {
    ngrams.add_losses(batch, loss);
    scored += batch.scored;
  });
  std::printf("\nvalidation loss, nats a token, over the same %s tokens\n", grouped(scored).c_str());
  constexpr const char* names[] = {"unigram", "bigram", "trigram"};
  for (size_t n = 0; n < 3; ++n)
    std::printf("  %-12s %.4f\n", names[n], loss[n] / static_cast<double>(scored));
  std::printf("  %-12s %.4f\n", "this model", trainer.state().val_loss);
}

// The weights a run begins with, or goes on with.
std::unique_ptr<Model> make_model(const TrainOptions& o, const std::string& from, const Sources& data,
                                  Device device, DType dtype, uint64_t seed) {
  Config config;
  if (!o.preset.empty()) config = fitted(find_preset(o.preset).config, data.tokenizer, true, "--preset");
  if (!o.config.empty()) config = fitted(read_config(o.config), data.tokenizer, false, o.config);
  config = with_settings(config, o.set);
  if (!from.empty()) {
    const std::string path = from + "/config.json";
    const Config saved = fitted(read_config(path), data.tokenizer, false, path);
    if (!o.preset.empty() || !o.config.empty())
      check_same(saved, config, o.preset.empty() ? o.config : "--preset");
    config = saved;
  }
  check_memory(config, device, dtype);
  if (!from.empty()) return load_model(from, device, dtype, true);
  auto model = std::make_unique<Model>(config, device, dtype, true);
  model->parameters().initialise(seed);
  return model;
}

void train(TrainOptions& o) {
  const auto models = !o.preset.empty() + !o.config.empty() + !o.model.empty();
  if (models != 1 && !(o.resume && models == 0))
    throw UsageError("train: expected one of --preset, --config and --model");
  if (!o.set.empty() && o.preset.empty() && o.config.empty())
    throw UsageError("--set: expected --preset or --config, whose keys it changes");
  if (o.resume && !o.model.empty()) throw UsageError("--model: expected none with --resume, got " + o.model);

  CheckpointWriter writer(o.out, o.resume);
  const std::string from = o.resume          ? newest_checkpoint(o.out)
                           : o.model.empty() ? ""
                                             : newest_checkpoint(o.model);
  TrainState state;
  if (!o.preset.empty()) state.settings.recipe = find_preset(o.preset).recipe;
  if (o.resume) {
    state = read_state(from);
    if (!o.named.contains("device")) o.where.device_name = state.settings.device;
    if (!o.named.contains("dtype")) o.where.dtype_name = state.settings.dtype;
  }
  Device device;
  DType dtype;
  o.where.resolve(device, dtype);
  TrainSettings settings = settings_over(state.settings, o);
  settings.device = name_of(device), settings.dtype = name_of(dtype);
  check_settings(settings);
  if (o.resume) {
    check_unchanged(state.settings, settings, o.allowed);
    // Windows of another length: about as far into the epoch.
    state.loader.window = state.loader.window * state.settings.recipe.seq / settings.recipe.seq;
  }
  state.settings = settings;

  std::optional<Tokenizer> tokenizer;
  if (!from.empty() && Tokenizer::lies_in(from)) tokenizer = Tokenizer::load(from);
  SourceOptions how;
  how.raw_u16 = settings.raw_u16, how.hold_out = settings.val.empty();
  Sources data = open_sources(settings.data, tokenizer, how);
  if (!settings.val.empty()) data.val = open_sources(settings.val, data.tokenizer, how).val;

  const auto model = make_model(o, from, data, device, dtype, settings.seed);
  if (!settings.train_only.empty()) model->parameters().train_only(settings.train_only);
  Trainer trainer(*model, state, data, o.out, writer, o.allowed.contains("data"));
  trainer.engine().use_graph = !o.no_graph;
  if (const int code = trainer.run(o.stop_after)) throw Exit{code};
  if (trainer.state().step < settings.recipe.steps) return;
  const double loss = trainer.state().val_loss;
  if (o.ngrams && !std::isnan(loss)) compare_with_ngrams(trainer, data, model->config());
  std::printf("\n%s/ holds the model (config.json, model.safetensors) and its losses (log.jsonl, loss.svg)\n",
              o.out.c_str());
  if (!std::isnan(loss)) std::printf("validation loss %.4f, perplexity %.2f\n", loss, std::exp(loss));
}

}  // namespace

void add_train(CLI::App& app) {
  const auto o = std::make_shared<TrainOptions>();
  CLI::App* command = app.add_subcommand("train", "Train a model, or go on with a run");
  command->add_option("--preset", o->preset,
                      "a model and its recipe: tiny, gdn-15m, prism-15m, gdn-119m, ...");
  command->add_option("--config", o->config, "config.json of a new model");
  add_set_option(*command, o->set);
  command->add_option("--model", o->model, "checkpoint directory whose weights a new run begins with");
  command->add_option("--out", o->out, "directory of the run; it holds the newest checkpoint")->required();
  std::vector<std::string> names = {"device", "dtype"};
  for_each_setting(o->given, [&](const std::string& name, auto& field, const char* help) {
    names.push_back(name);
    if constexpr (std::is_same_v<decltype(field), bool&>)
      command->add_flag("--" + name, field, help);
    else
      command->add_option("--" + name, field, help);
  });
  command
      ->add_option_function<std::string>(
          "--freeze",
          [o](const std::string&) { o->given.train_only = {".solver."}, o->named.insert("train-only"); },
          "base: train only the solver, such as a bypass that init --from added")
      ->check(CLI::IsMember({"base"}));
  command->add_option("--stop-after", o->stop_after, "save after this step and stop; --resume goes on");
  command->add_flag("--resume", o->resume, "go on from --out's newest checkpoint, with its settings");
  command->add_option("--allow-change", o->allowed, "settings that may differ from the resumed run's")
      ->check(CLI::IsMember(names).description("NAME"));
  command->add_flag("--ngrams", o->ngrams, "compare with n-gram models of the same text at the end");
  command->add_flag("--no-graph", o->no_graph,
                    "cuda: launch each kernel by itself; the same weights, slower");
  add_device_options(*command, o->where);
  command->footer(
      "All but the data and --out has a default, from the preset's recipe.\n"
      "Example: prism train --preset tiny --data src kernels --out runs/first --steps 500");
  command->callback([o, command, names] {
    for (const std::string& name : names)
      if (command->count("--" + name) > 0) o->named.insert(name);
    train(*o);
  });
}

}  // namespace prism
