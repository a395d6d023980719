// Whole models of two layers: every mixer, solver choice and ablation.
#include <algorithm>
#include <cmath>

#include "src/compare.h"
#include "src/engine.h"
#include "src/gradcheck.h"
#include "src/host.h"
#include "tensor/rng.h"

namespace prism {

namespace {

struct ModelCase {
  std::string name;
  Config config;
};

// Other types than double are for the card, whose kernels want widths that are multiples of 8.
std::vector<ModelCase> model_cases(DType dtype) {
  const bool aligned = dtype != DType::f64;
  Config base;
  base.vocab_size = aligned ? 40 : 11, base.num_hidden_layers = 2, base.num_heads = aligned ? 4 : 2;
  base.hidden_size = aligned ? 64 : 10, base.head_dim = aligned ? 16 : 11;
  base.expand_v = aligned ? 1 : 5.0 / 11;  // H V = D, for prism-loop
  // bf16 rounds the router's values to other choices, so there every memory is chosen.
  base.memories = 3, base.memories_active = dtype == DType::bf16 ? 3 : 2;
  base.attention_heads = 1;  // of width D: 64 where aligned, which the card's fast kernels take
  base.intermediate_size = aligned ? 48 : 7, base.solver_dim = aligned ? 8 : 3;
  // Norms of numbers near 0 bend faster than differences can follow.
  base.norm_eps = 0.1, base.tie_word_embeddings = true;
  std::vector<ModelCase> cases;
  const auto add = [&](const std::string& name, const std::string& mixer, int64_t rank, const auto& change) {
    Config c = base;
    c.mixers = {mixer}, c.rank = rank;
    if (mixer == "ttt-mlp") c.expand_v = 1;
    change(c);
    validate(c);
    cases.push_back({name, c});
  };
  const auto none = [](Config&) {};
  const auto ablation = [](const char* name) { return [=](Config& c) { c.ablations = {name}; }; };
  for (const std::string& mixer : mixer_names()) add(mixer, mixer, mixer.starts_with("prism") ? 3 : 1, none);
  add("gdn, head of its own", "gdn", 1, [](Config& c) { c.tie_word_embeddings = false; });
  for (const char* mixer : {"gdn", "prism-loop"})
    add(cat(mixer, ", no output gate"), mixer, 2, [](Config& c) { c.use_gate = false; });
  for (int64_t rank : {1, 2, 4}) {
    add(cat("prism, rank ", rank), "prism", rank, none);
    add(cat("prism-loop, rank ", rank), "prism-loop", rank, none);
  }
  add("prism, solver_residual anchor", "prism", 3,
      [](Config& c) { c.solver_residual = SolverResidual::anchor; });
  add("prism, solver_gain gelu", "prism", 3, [](Config& c) { c.solver_gain = SolverGain::gelu; });
  add("prism, solver_key_norm false", "prism", 3, [](Config& c) { c.solver_key_norm = false; });
  add("prism, the three together", "prism", 3, [](Config& c) {
    c.solver_residual = SolverResidual::anchor, c.solver_gain = SolverGain::gelu, c.solver_key_norm = false;
  });
  add("prism, solver_scale", "prism", 3, [](Config& c) { c.solver_scale = true; });
  for (const char* name : {"shared_key", "base_key", "first_base_key", "no_retain", "no_anchor", "no_gain"})
    add(cat("prism, ", name), "prism", 3, ablation(name));
  for (const char* name : {"no_gelu", "no_anchor", "no_gain"})
    add(cat("prism-loop, ", name), "prism-loop", 2, ablation(name));
  add("linear, then prism", "prism", 2, [](Config& c) { c.mixers = {"linear", "prism"}; });
  add("mom, every memory", "mom", 1, [](Config& c) { c.memories_active = c.memories; });
  add("prism, then attention", "prism", 2, [](Config& c) { c.mixers = {"prism", "attention"}; });
  return cases;
}

// Weights far from where training starts, so that every path carries something: the matrices of a model in
// bf16 are rounded to it in the masters too.
void draw_weights(Model& model) {
  Parameters& parameters = model.parameters();
  parameters.initialise(5);
  uint64_t stream = 0;
  for (const Parameter& p : parameters.list()) {
    std::vector<double> values = to_host(parameters.master(p));
    const double width = std::sqrt(static_cast<double>(p.shape[-1]));
    for (size_t i = 0; i < values.size(); ++i) values[i] += random_normal(5, stream, i) / width;
    if (p.decays && model.dtype() == DType::bf16) values = converted<double>(converted<bf16>(values));
    from_host(parameters.master(p), values);
    ++stream;
  }
  parameters.refresh_copies();
}

// Random ids, targets of which some are not scored, documents of random length.
Batch random_batch(int64_t B, int64_t T, int64_t vocab) {
  Batch batch;
  batch.B = B, batch.T = T;
  for (int64_t i = 0; i < B * T; ++i) {
    const auto draw = [&](uint64_t stream, int64_t below) {
      return static_cast<int32_t>(
          random_below(static_cast<uint64_t>(below), 6, stream, static_cast<uint64_t>(i)));
    };
    batch.tokens.push_back(draw(0, vocab));
    batch.targets.push_back(draw(1, vocab + 1) - 1);
    batch.scored += batch.targets.back() >= 0;
    const bool opens = i % T == 0 || draw(2, 8) == 0;
    batch.start.push_back(opens ? static_cast<int32_t>(i % T) : batch.start.back());
  }
  return batch;
}

// "layers.0.attn.q_proj" for "model.layers.0.attn.q_proj.weight"
std::string short_name(std::string name) {
  if (name.starts_with("model.")) name = name.substr(6);
  if (name.ends_with(".weight")) name.resize(name.size() - 7);
  return name;
}

void check_by_differences(Row& row, const Config& config) {
  Model model(config, Device::cpu, DType::f64, true);
  model.chunk = 8;
  draw_weights(model);
  const Batch batch = random_batch(2, 20, config.vocab_size);
  Engine engine(model, batch.B, batch.T);
  double loss = 0;
  engine.load({&batch, 1});
  engine.gradients({&loss, {}, DType::f64, Device::cpu});
  std::vector<Differentiated> inputs;
  for (const Parameter& p : model.parameters().list()) {
    const Tensor master = model.parameters().master(p);
    inputs.push_back({short_name(p.name),
                      {master.ptr<double>(), static_cast<size_t>(master.numel())},
                      to_host(model.parameters().grad(p))});
  }
  compare_with_differences(
      row, std::move(inputs), {"loss"},
      [&] {
        double sum = 0;
        for (double x : engine.evaluate(batch)) sum += x;
        return std::vector<double>{sum / static_cast<double>(batch.scored)};
      },
      0);
}

struct Results {
  std::vector<double> loss;
  Activations activations;
  std::vector<std::vector<double>> gradients;
};

Results results_of(Model& model, const Batch& batch) {
  Results r;
  const Buffer memory(model.device(), sizeof(double));
  const Tensor loss{memory.data(), {}, acc_of(model.dtype()), model.device()};
  Engine engine(model, batch.B, batch.T);
  engine.load({&batch, 1});
  engine.gradients(loss, &r.activations);
  r.loss = to_host(loss);
  for (const Parameter& p : model.parameters().list())
    r.gradients.push_back(to_host(model.parameters().grad(p)));
  return r;
}

void check_on_device(Row& row, const Config& config, Device device, DType dtype) {
  const bool half = dtype == DType::bf16;
  const double forward = half ? 1e-2 : 2.5e-5, reverse = half ? 1e-1 : 2.5e-5, median = 2e-2;
  Model model(config, device, dtype, true), exact(config, Device::cpu, DType::f64, true);
  draw_weights(model);
  const std::vector<Parameter>& list = model.parameters().list();
  for (const Parameter& p : list)  // the same declarations, so the same places
    from_host(exact.parameters().master(p), to_host(model.parameters().master(p)));
  const Batch batch = random_batch(2, 70, config.vocab_size);
  const Results x = results_of(model, batch), ref = results_of(exact, batch);
  row.compare("loss", x.loss, ref.loss, forward);
  row.compare("logits", x.activations.logits, ref.activations.logits, forward);
  std::vector<double> errors;
  for (size_t i = 0; i < list.size(); ++i) {
    row.compare("d" + short_name(list[i].name), x.gradients[i], ref.gradients[i], reverse);
    errors.push_back(
        relative_error(std::span<const double>(x.gradients[i]), std::span<const double>(ref.gradients[i])));
  }
  std::nth_element(errors.begin(), errors.begin() + static_cast<int64_t>(errors.size() / 2), errors.end());
  if (half) row.summarise("median of the gradients", errors[errors.size() / 2], median);
}

}  // namespace

void check_models(Table& table) {
  const Device device = table.options.device;
  const DType dtype = table.options.dtype;
  for (const ModelCase& c : model_cases(dtype))
    if (dtype == DType::f64)
      table.row("model " + c.name, "finite differences",
                [config = c.config](Row& row) { check_by_differences(row, config); });
    else
      table.row("model " + c.name, "cpu f64, same weights",
                [=, config = c.config](Row& row) { check_on_device(row, config, device, dtype); });
}

}  // namespace prism
