// Generation by the fused kernels and the graph against the ops one by one in double on the processor.
#include <doctest/doctest.h>

#include "src/compare.h"
#include "src/decoder.h"
#include "src/host.h"
#include "tests/gpu/memory.h"

using namespace prism;

namespace {

Config config_of(const char* mixer, int64_t rank) {
  Config c;
  c.vocab_size = 200, c.hidden_size = 64, c.num_hidden_layers = 2, c.num_heads = 2, c.head_dim = 40;
  c.intermediate_size = 72, c.solver_dim = 16, c.mixers = {mixer}, c.rank = rank;
  return c;
}

// Weights large enough that every path carries something, the same on both sides.
void draw(Model& model, Model& exact) {
  exact.parameters().initialise(3);
  for (const Parameter& p : exact.parameters().list()) {
    std::vector<double> values = to_host(exact.parameters().master(p));
    if (p.decays)
      for (double& x : values) x *= 8;
    if (p.decays && model.dtype() == DType::bf16) values = converted<double>(converted<bf16>(values));
    from_host(exact.parameters().master(p), values), from_host(model.parameters().master(p), values);
  }
  model.parameters().refresh_copies(), exact.parameters().refresh_copies();
}

double worst_logits(const Config& config, DType dtype) {
  Model model(config, Device::cuda, dtype, false), exact(config, Device::cpu, DType::f64, false);
  draw(model, exact);
  Decoder decoder(model), reference(exact);
  const std::vector<int32_t> prompt = {7, 1, 90, 33, 5};
  decoder.feed(prompt), reference.feed(prompt);
  double worst = 0;
  for (int32_t id : {3, 99, 42, 42, 8, 150, 0, 61}) {
    const std::vector<double> x = decoder.feed({&id, 1}), ref = reference.feed({&id, 1});
    worst = std::max(worst, relative_error(std::span<const double>(x), std::span<const double>(ref)));
  }
  return worst;
}

}  // namespace

TEST_CASE("cuda decoding: prompt, then token by token, is the whole-sequence pass for every mixer") {
  std::vector<Config> cases;
  for (const char* mixer : {"linear", "retnet", "mamba2", "deltanet", "gdn"})
    cases.push_back(config_of(mixer, 1));
  for (int64_t rank : {1, 2, 3, 4}) cases.push_back(config_of("prism", rank));
  cases.push_back(config_of("prism", 3));
  cases.back().solver_residual = SolverResidual::anchor, cases.back().solver_gain = SolverGain::gelu;
  cases.back().solver_key_norm = false, cases.back().tie_word_embeddings = true;
  cases.push_back(config_of("prism", 2));
  cases.back().conv_size = 1;
  cases.push_back(config_of("prism", 3));  // these two by the ops, in a graph
  cases.back().ablations = {"no_gain"};
  cases.push_back(config_of("prism-loop", 2));
  cases.back().hidden_size = 160;
  cases.push_back(config_of("ttt-mlp", 1));
  cases.back().expand_v = 1;
  cases.push_back(config_of("mom", 1));
  cases.push_back(config_of("gla", 1));
  for (size_t i = 0; i < cases.size(); i += kSmall ? 3 : 1) {
    const Config& c = cases[i];
    INFO(c.mixer(0), " rank ", c.rank, " ", c.ablations.size());
    CHECK(worst_logits(c, DType::f32) < 2e-5);
    Config all = c;  // bf16 rounds a router's values to other choices
    all.memories_active = c.memories;
    CHECK(worst_logits(all, DType::bf16) < 5e-2);
  }
}
