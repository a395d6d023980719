// What a model is (SPEC section 8's config.json) and how a preset is trained.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace prism {

enum class SolverResidual { value, anchor };
enum class SolverGain { sigmoid, gelu };

// Field names are config.json's keys. Values here are those taken when a key is absent.
struct Config {
  int64_t vocab_size = 32000;
  int64_t hidden_size = 2048;  // D
  int64_t num_hidden_layers = 21;
  int64_t num_heads = 6;          // H
  int64_t head_dim = 256;         // K
  int64_t attention_heads = 0;    // of attention layers, each of width D / heads; 0: num_heads
  int64_t memories = 4;           // M, routed memories of mom layers, beside the shared one
  int64_t memories_active = 2;    // of them, how many a token uses
  double expand_v = 2;            // V / K
  int64_t intermediate_size = 0;  // F; 0 (null in the file): 256 ceil(floor(D hidden_ratio 2/3) / 256)
  double hidden_ratio = 4;
  int64_t conv_size = 4;  // W
  bool use_gate = true;   // false: no g_proj, the mixers' output is o_proj RMSNorm_V(o)
  double norm_eps = 1e-6;
  bool tie_word_embeddings = false;
  double initializer_range = 0.02;
  int64_t bos_token_id = 1;
  int64_t eos_token_id = 2;
  std::vector<std::string> mixers = {"gdn"};  // one name for all layers, or one a layer
  int64_t rank = 1;                           // L
  int64_t solver_dim = 64;                    // R
  SolverResidual solver_residual = SolverResidual::value;
  SolverGain solver_gain = SolverGain::sigmoid;
  bool solver_key_norm = true;
  double solver_gate_init = -2;
  bool solver_scale = false;  // a scale per head and step, from 0: a bypass added to a trained base
  std::vector<std::string> ablations;
  std::string extra = "{}";  // unknown keys of config.json, kept and written back: a JSON object

  int64_t value_dim() const {
    return static_cast<int64_t>(static_cast<double>(head_dim) * expand_v + 0.5);
  }  // V
  // Heads of a layer's scan: mom's memories have all the model's heads each.
  int64_t scan_heads(int64_t layer) const {
    return mixer(layer) == "mom" ? (memories + 1) * num_heads : num_heads;
  }
  int64_t attention_head_count() const { return attention_heads ? attention_heads : num_heads; }
  int64_t feed_forward() const;  // F
  const std::string& mixer(int64_t layer) const {
    return mixers.size() == 1 ? mixers[0] : mixers.at(static_cast<size_t>(layer));
  }
  bool ablated(std::string_view name) const;
  bool operator==(const Config&) const = default;
};

// The mixers this engine has: linear, retnet, mamba2, deltanet, gdn, prism, prism-loop, attention, ttt-mlp,
// mom, gla.
const std::vector<std::string>& mixer_names();

// Throws one line (key, expected, got) when the parts don't fit: unknown mixer or ablation, an ablation that
// no mixer of the model has, more than one key switch, prism-loop with H V != D, attention heads that do not
// divide D evenly, ttt-mlp with V != K, mom with more active memories than there are, sizes < 1, a mixer list
// of another length than the layers.
void validate(const Config& config);

// `where` names the file in errors. Reading validates; flash-linear-attention's keys that would change the
// model are errors.
Config parse_config(const std::string& json_text, const std::string& where);
Config read_config(const std::string& path);
std::string to_json(const Config& config);
// The configuration with keys of config.json at other values: "rank=2", "solver_gain=gelu",
// "ablations=[\"no_gain\"]".
Config with_settings(const Config& config, const std::vector<std::string>& settings);

// How a preset is trained unless the command line says otherwise. Learning rate by schedule (SPEC section 9).
struct Recipe {
  int64_t steps = 1000;
  int64_t batch = 8;       // rows a micro-batch
  int64_t seq = 256;       // T, tokens a row
  int64_t accumulate = 1;  // micro-batches a step
  double lr = 1e-3;
  double min_lr = 1e-4;
  int64_t warmup = 100;
  std::string schedule = "cosine";  // cosine, constant, linear, wsd
  double weight_decay = 0.1;
  double beta1 = 0.9, beta2 = 0.95;
  double clip = 1.0;
};

struct Preset {
  std::string name, summary;
  Config config;
  Recipe recipe;
};
const std::vector<Preset>& presets();
// Throws, naming the presets there are.
const Preset& find_preset(const std::string& name);

}  // namespace prism
