// init, grad: a model as files, as numbers any framework can check.
#include <cstdio>
#include <memory>

#include "src/commands.h"
#include "src/device_options.h"
#include "src/engine.h"
#include "src/model_files.h"

namespace prism {

namespace {

// --- init

struct InitOptions {
  std::string config, preset, from, out;
  std::vector<std::string> set;
  int64_t rank = 3, solver_dim = 64;
  uint64_t seed = 0;
};

// A trained gdn becomes prism: the same function, until the bypass's scales leave 0. Its other weights are
// freshly drawn.
std::pair<std::unique_ptr<Model>, std::optional<Tokenizer>> with_bypass(const InitOptions& o) {
  const std::unique_ptr<Model> base = load_model(o.from, Device::cpu, DType::f32, false);
  Config config = base->config();
  PRISM_CHECK(config.rank == 1, o.from, ": rank: expected 1, of a model without a solver, got ", config.rank);
  for (std::string& mixer : config.mixers) mixer = mixer == "gdn" ? "prism" : mixer;
  config.rank = o.rank, config.solver_dim = o.solver_dim, config.solver_scale = true;
  validate(config);
  auto model = std::make_unique<Model>(config, Device::cpu, DType::f32, false);
  model->parameters().initialise(o.seed);
  for (const Parameter& p : base->parameters().list()) {
    const Tensor from = base->parameters().master(p);
    copy_within(Device::cpu, model->parameters().master(*model->parameters().find(p.name)).data, from.data,
                from.bytes());
  }
  const std::string dir = newest_checkpoint(o.from);
  return {std::move(model), Tokenizer::lies_in(dir) ? std::optional(Tokenizer::load(dir)) : std::nullopt};
}

void init(const InitOptions& o) {
  if (!o.config.empty() + !o.preset.empty() + !o.from.empty() != 1)
    throw UsageError("init: expected one of --config, --preset and --from");
  if (!o.set.empty() && !o.from.empty()) throw UsageError("--set: expected --config or --preset, got --from");
  std::unique_ptr<Model> model;
  std::optional<Tokenizer> tokenizer = Tokenizer();
  if (!o.from.empty()) {
    std::tie(model, tokenizer) = with_bypass(o);
  } else {
    const Config config =
        with_settings(o.preset.empty() ? read_config(o.config) : find_preset(o.preset).config, o.set);
    model = std::make_unique<Model>(config, Device::cpu, DType::f32, false);
    model->parameters().initialise(o.seed);
    if (config.vocab_size != tokenizer->vocab_size()) tokenizer.reset();
  }
  save_model(o.out, *model, tokenizer);
  std::printf("%s: %lld parameters, seed %llu\n", o.out.c_str(),
              static_cast<long long>(model->parameters().count()), static_cast<unsigned long long>(o.seed));
}

// --- grad

struct GradOptions {
  std::string model, tokens, out;
  int64_t batch = 1, seq = 64, separator = -1;
  bool activations = false;
  DeviceOptions device;
};

// Rows of T ids one after another; every position scored; documents begin at `separator`.
Batch rows_of(const GradOptions& o, const Config& config) {
  TokenStream stream;
  stream.append(open_shard(o.tokens));
  const int64_t need = o.batch * o.seq + 1;
  PRISM_CHECK(stream.size() >= need, o.tokens, ": expected at least batch x seq + 1 = ", need, " ids, got ",
              stream.size());
  std::vector<int32_t> ids(static_cast<size_t>(need));
  stream.copy(0, need, config.vocab_size, ids.data());
  Batch batch;
  batch.B = o.batch, batch.T = o.seq, batch.scored = o.batch * o.seq;
  batch.tokens.assign(ids.begin(), ids.end() - 1);
  batch.targets.assign(ids.begin() + 1, ids.end());
  for (int64_t i = 0, start = 0; i < o.batch * o.seq; ++i) {
    const int64_t t = i % o.seq;
    if (t == 0 || batch.tokens[static_cast<size_t>(i)] == o.separator) start = t;
    batch.start.push_back(static_cast<int32_t>(start));
  }
  return batch;
}

void grad(const GradOptions& o) {
  DeviceOptions where = o.device;
  Device device;
  DType dtype;
  where.resolve(device, dtype);
  const std::unique_ptr<Model> model = load_model(o.model, device, dtype, true);
  const Batch batch = rows_of(o, model->config());
  Engine engine(*model, o.batch, o.seq);
  const DType acc = acc_of(dtype);
  const Buffer loss_memory(device, 8);
  const Tensor loss{loss_memory.data(), {}, acc, device};
  Activations activations;
  engine.load({&batch, 1});
  engine.gradients(loss, &activations);

  // Logits and layers come as doubles; files hold what the engine computed in.
  std::vector<std::vector<float>> floats;
  const auto host = [&](std::vector<double>& x, const Shape& shape) -> Tensor {
    if (acc == DType::f64) return {x.data(), shape, DType::f64, Device::cpu};
    floats.emplace_back(x.begin(), x.end());
    return {floats.back().data(), shape, DType::f32, Device::cpu};
  };
  std::vector<NamedTensor> tensors = {
      {"loss", loss}, {"logits", host(activations.logits, {o.batch, o.seq, model->config().vocab_size})}};
  for (size_t i = 0; o.activations && i < activations.layers.size(); ++i)
    tensors.push_back(
        {cat("layers.", i), host(activations.layers[i], {o.batch, o.seq, model->config().hidden_size})});
  for (const Parameter& p : model->parameters().list())
    tensors.push_back({"grad." + p.name, model->parameters().grad(p)});
  write_safetensors(o.out, tensors);
  double value = 0;
  dispatch_acc(acc, [&]<class A>(Tag<A>) {
    A x;
    copy_out(device, &x, loss.data, sizeof x);
    value = static_cast<double>(x);
  });
  std::printf("%s: loss %.15g, %zu tensors, %s\n", o.out.c_str(), value, tensors.size(), name_of(acc));
}

}  // namespace

void add_init(CLI::App& app) {
  const auto o = std::make_shared<InitOptions>();
  CLI::App* command = app.add_subcommand("init", "Write a checkpoint directory with freshly drawn weights");
  command->add_option("--config", o->config, "config.json of the model");
  command->add_option("--preset", o->preset,
                      "a model this program knows: tiny, gdn-15m, prism-15m, gdn-119m, ...");
  command->add_option(
      "--from", o->from,
      "a trained gdn's checkpoint, to which a bypass is added: a solver that changes nothing yet");
  command->add_option("--rank", o->rank, "with --from: writes a token, the base's one included")
      ->check(CLI::Range(2, 64))
      ->capture_default_str();
  command->add_option("--solver-dim", o->solver_dim, "with --from: width of the low-rank maps")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  add_set_option(*command, o->set);
  command->add_option("--seed", o->seed, "of the random weights")->capture_default_str();
  command->add_option("--out", o->out, "directory to make")->required();
  command->footer(
      "Example: prism init --preset tiny --seed 1 --out models/tiny\n"
      "         prism init --from runs/gdn --rank 3 --out models/bypass\n"
      "         prism train --model models/bypass --freeze base --data code.jsonl --out runs/code");
  command->callback([o] { init(*o); });
}

void add_grad(CLI::App& app) {
  const auto o = std::make_shared<GradOptions>();
  o->device.dtype_name = "f64";
  o->device.device_name = "cpu";
  CLI::App* command = app.add_subcommand(
      "grad", "Write loss, logits and every gradient of one batch, for another framework to check");
  command->add_option("--model", o->model, "checkpoint directory")->required();
  command->add_option("--tokens", o->tokens, "token shard (.bin); its first batch x seq + 1 ids are used")
      ->required();
  command->add_option("--batch", o->batch, "rows")->check(CLI::PositiveNumber)->capture_default_str();
  command->add_option("--seq", o->seq, "ids a row")->check(CLI::PositiveNumber)->capture_default_str();
  command
      ->add_option("--separator", o->separator,
                   "a document begins at each position that holds this id; -1: none")
      ->capture_default_str();
  command->add_flag("--activations", o->activations, "write each layer's output, too");
  command->add_option("--out", o->out, "safetensors file to write")->required();
  add_device_options(*command, o->device);
  command->footer(
      "Example: prism grad --model models/tiny --tokens ids.bin --batch 2 --seq 64 --out grad.safetensors");
  command->callback([o] { grad(*o); });
}

}  // namespace prism
