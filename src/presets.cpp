#include <algorithm>

#include "src/config.h"
#include "tensor/check.h"

namespace prism {

namespace {

// Models of bytes: the byte tokenizer's vocabulary. `train` takes another tokenizer's sizes from its data.
Config of_bytes(Config c) {
  c.vocab_size = 258, c.bos_token_id = 256, c.eos_token_id = 257;
  c.tie_word_embeddings = true;
  return c;
}

// Models of a 32,000-piece vocabulary (config.h's default, with its bos 1 and eos 2).
Config of_pieces(Config c) {
  c.tie_word_embeddings = true;
  return c;
}

Config sized(int64_t D, int64_t layers, int64_t K, int64_t F) {
  Config c;
  c.hidden_size = D, c.num_hidden_layers = layers, c.num_heads = 4, c.head_dim = K, c.intermediate_size = F;
  return c;  // V = 2 K
}

Config with_solver(Config c, int64_t rank, int64_t solver_dim) {
  c.mixers = {"prism"}, c.rank = rank, c.solver_dim = solver_dim;
  return c;
}

// Every `every`-th layer is attention, in heads of width 64.
Config with_attention(Config c, int64_t every) {
  const std::string other = c.mixers[0];
  c.mixers.clear();
  for (int64_t i = 1; i <= c.num_hidden_layers; ++i) c.mixers.push_back(i % every ? other : "attention");
  c.attention_heads = c.hidden_size / 64;
  return c;
}

}  // namespace

// Steps are set for about 20 tokens a parameter from 119 M on, far fewer below, where minutes on a CPU count.
const std::vector<Preset>& presets() {
  static const std::vector<Preset> all = [] {
    const Config tiny = of_bytes(sized(128, 4, 32, 344));
    const Config base15 = of_bytes(sized(384, 8, 64, 896));
    const Config base119 = of_pieces(sized(768, 12, 128, 2048));
    const Config base353 = of_pieces(sized(1024, 24, 128, 2816));
    Config ttt124 = of_pieces(sized(768, 12, 64, 2136));
    ttt124.num_heads = 12, ttt124.expand_v = 1, ttt124.mixers = {"ttt-mlp"};
    const Recipe minutes = {.steps = 1000, .batch = 8, .seq = 256, .lr = 3e-3, .min_lr = 3e-4, .warmup = 50};
    const Recipe hours = {.steps = 5000, .batch = 8, .seq = 512, .lr = 2e-3, .min_lr = 2e-4, .warmup = 200};
    // 32 x 2048 x 8 = 524,288 tokens a step.
    const Recipe card = {
        .steps = 4800, .batch = 32, .seq = 2048, .accumulate = 8, .lr = 1e-3, .min_lr = 1e-4, .warmup = 400};
    Recipe card353 = card;
    card353.steps = 13500, card353.batch = 16, card353.accumulate = 16, card353.lr = 6e-4,
    card353.min_lr = 6e-5;
    return std::vector<Preset>{
        {"tiny", "1.1 M, bytes, rank 3: minutes on two CPU cores", with_solver(tiny, 3, 16), minutes},
        {"gdn-15m", "15 M, bytes, Gated DeltaNet: hours on a CPU", base15, hours},
        {"prism-15m", "15 M, bytes, rank 3: hours on a CPU", with_solver(base15, 3, 32), hours},
        {"gdn-119m", "119 M, 32,000 pieces, Gated DeltaNet: one GPU", base119, card},
        {"prism-124m", "124 M, 32,000 pieces, rank 3: one GPU", with_solver(base119, 3, 64), card},
        {"prism-124m-hybrid", "prism-124m with attention every fourth layer: one GPU",
         with_attention(with_solver(base119, 3, 64), 4), card},
        {"transformer-110m", "110 M, 32,000 pieces, attention in every layer: one GPU",
         with_attention(base119, 1), card},
        {"ttt-124m", "124 M, 32,000 pieces, the serial solver that PRISM replaces: to measure", ttt124, card},
        {"prism-353m", "353 M, 32,000 pieces, rank 3: GPUs", with_solver(base353, 3, 64), card353},
    };
  }();
  return all;
}

const Preset& find_preset(const std::string& name) {
  const auto at =
      std::find_if(presets().begin(), presets().end(), [&](const Preset& p) { return p.name == name; });
  if (at != presets().end()) return *at;
  std::string known;
  for (const Preset& p : presets()) known += (known.empty() ? "" : ", ") + p.name;
  PRISM_FAIL("--preset: expected one of ", known, ", got ", name);
}

}  // namespace prism
