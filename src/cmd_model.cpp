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
  std::string config, preset, out;
  uint64_t seed = 0;
};

void init(const InitOptions& o) {
  if (o.config.empty() == o.preset.empty()) throw UsageError("init: expected one of --config and --preset");
  const Config config = o.preset.empty() ? read_config(o.config) : find_preset(o.preset).config;
  Model model(config, Device::cpu, DType::f32, false);
  model.parameters().initialise(o.seed);
  const Tokenizer bytes;
  save_model(o.out, model, config.vocab_size == bytes.vocab_size() ? std::optional(bytes) : std::nullopt);
  std::printf("%s: %lld parameters, seed %llu\n", o.out.c_str(),
              static_cast<long long>(model.parameters().count()), static_cast<unsigned long long>(o.seed));
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
  command->add_option("--seed", o->seed, "of the random weights")->capture_default_str();
  command->add_option("--out", o->out, "directory to make")->required();
  command->footer("Example: prism init --preset tiny --seed 1 --out models/tiny");
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
