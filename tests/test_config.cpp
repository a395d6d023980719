#include <doctest/doctest.h>

#include <nlohmann/json.hpp>

#include "src/config.h"
#include "tensor/check.h"

using namespace prism;
using nlohmann::json;

namespace {

// The message of the error that parsing `text` as the file "dir/config.json" gives; "" when it is accepted.
std::string error_of(const std::string& text) {
  try {
    parse_config(text, "dir/config.json");
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// Parameters that a layer has without its solver, and that the solver adds (SPEC sections 3, 4 and 8).
int64_t block_parameters(const Config& c, const std::string& mixer_name) {
  const int64_t D = c.hidden_size, HK = c.num_heads * c.head_dim, HV = c.num_heads * c.value_dim();
  const int64_t M = 4 * c.head_dim, K = c.head_dim;
  // W1, W2, b1, b2, the layer norm; no a, A_log, dt_bias
  const int64_t memory = mixer_name == "ttt-mlp" ? c.num_heads * (2 * M * K + M + 3 * K - D - 2) : 0;
  const int64_t mixer = D * (2 * HK + 3 * HV + 2 * c.num_heads)      // q, k; v, g, o; a, b
                        + (2 * HK + HV) * c.conv_size                // convolutions
                        + 2 * c.num_heads + c.value_dim() + memory;  // A_log, dt_bias; o_norm
  return (mixer_name == "attention" ? 4 * D * D : mixer) + 3 * D * c.feed_forward() + 2 * D;
}
int64_t solver_parameters(const Config& c, const std::string& mixer_name) {
  const int64_t D = c.hidden_size, HK = c.num_heads * c.head_dim, HV = c.num_heads * c.value_dim();
  const int64_t steps = c.rank - 1, R = c.solver_dim;
  if (steps == 0 || mixer_name != "prism") return 0;
  return D * c.conv_size + steps * (2 * R * D + (HK + HV) * R + c.num_heads * (D + 1));
}
int64_t model_parameters(const Config& c) {
  int64_t sum = c.hidden_size + c.vocab_size * c.hidden_size * (c.tie_word_embeddings ? 1 : 2);
  for (int64_t i = 0; i < c.num_hidden_layers; ++i)
    sum += block_parameters(c, c.mixer(i)) + solver_parameters(c, c.mixer(i));
  return sum;
}

}  // namespace

TEST_CASE("config: an empty file is flash-linear-attention's default Gated DeltaNet") {
  const Config c = parse_config("{}", "config.json");
  CHECK(c == Config());
  CHECK(c.hidden_size == 2048);
  CHECK(c.num_hidden_layers == 21);
  CHECK(c.num_heads == 6);
  CHECK(c.head_dim == 256);
  CHECK(c.value_dim() == 512);
  CHECK(c.feed_forward() == 5632);  // 2048 * 4 * 2 / 3 = 5461, the next multiple of 256
  CHECK(c.conv_size == 4);
  CHECK(c.norm_eps == 1e-6);
  CHECK(c.vocab_size == 32000);
  CHECK(c.bos_token_id == 1);
  CHECK(c.eos_token_id == 2);
  CHECK_FALSE(c.tie_word_embeddings);
  CHECK(c.initializer_range == 0.02);
  CHECK(c.mixers == std::vector<std::string>{"gdn"});
  CHECK(c.rank == 1);
  CHECK(c.solver_dim == 64);
  CHECK(c.solver_key_norm);
  CHECK(c.solver_gate_init == -2);
  CHECK(c.ablations.empty());
}

TEST_CASE("config: a file of flash-linear-attention's is read, its foreign keys are written back") {
  const std::string text =
      R"({"architectures": ["GatedDeltaNetForCausalLM"], "model_type": "gated_deltanet", "use_gate": true,
          "attn": null, "attn_mode": "chunk", "expand_v": 2, "attnres_block_size": null,
          "output_gate_activation": "silu", "hidden_act": "swish", "hidden_ratio": null,
          "hidden_size": 768, "num_v_heads": null, "intermediate_size": null, "torch_dtype": "bfloat16"})";
  const Config c = parse_config(text, "config.json");
  CHECK(c.hidden_size == 768);
  CHECK(c.feed_forward() == 2048);
  const json back = json::parse(to_json(c));
  CHECK(back["architectures"] == json{"GatedDeltaNetForCausalLM"});
  CHECK(back["attn_mode"] == "chunk");
  CHECK(back["torch_dtype"] == "bfloat16");
  CHECK(back["use_gate"] == true);
  CHECK(back["output_gate_activation"] == "silu");
  CHECK(back["intermediate_size"].is_null());
  CHECK(back["model_type"] == "gated_deltanet");
  CHECK(parse_config(to_json(c), "again") == c);
}

TEST_CASE("config: what is written reads back equal, every key at another value than its default") {
  Config c;
  c.vocab_size = 258, c.hidden_size = 64, c.num_hidden_layers = 2, c.num_heads = 3, c.head_dim = 5;
  c.attention_heads = 8, c.memories = 6, c.memories_active = 3;
  c.expand_v = 1.4, c.intermediate_size = 77, c.hidden_ratio = 3.3, c.conv_size = 2, c.use_gate = false,
  c.norm_eps = 1e-5;
  c.tie_word_embeddings = true, c.initializer_range = 0.1, c.bos_token_id = 256, c.eos_token_id = 257;
  c.mixers = {"prism", "gdn"}, c.rank = 3, c.solver_dim = 7, c.solver_residual = SolverResidual::anchor;
  c.solver_gain = SolverGain::gelu, c.solver_key_norm = false, c.solver_gate_init = 2.0 / 3;
  c.solver_scale = true;
  c.ablations = {"base_key", "no_gain"}, c.extra = R"({"note":"kept"})";
  CHECK(c.value_dim() == 7);
  CHECK(parse_config(to_json(c), "config.json") == c);
  const json written = json::parse(to_json(c)), absent = json::parse(to_json(Config()));
  for (const auto& [key, value] : absent.items()) CHECK_MESSAGE(written[key] != value, key);
}

TEST_CASE("config: model_type is gated_deltanet only where the model is one, and a reader takes either") {
  const auto type = [](std::vector<std::string> mixers, int64_t rank, std::vector<std::string> ablations) {
    Config c;
    c.num_hidden_layers = 2, c.mixers = mixers, c.rank = rank, c.ablations = ablations;
    validate(c);
    return json::parse(to_json(c))["model_type"].get<std::string>();
  };
  CHECK(type({"gdn"}, 1, {}) == "gated_deltanet");
  CHECK(type({"prism"}, 1, {}) == "gated_deltanet");
  CHECK(type({"gdn", "prism"}, 1, {}) == "gated_deltanet");
  CHECK(type({"prism"}, 1, {"no_gain"}) == "prism");
  CHECK(type({"prism"}, 2, {}) == "prism");
  CHECK(type({"gdn", "prism"}, 2, {}) == "prism");
  CHECK(type({"gdn", "mamba2"}, 1, {}) == "prism");
  for (const char* either : {R"({"model_type": "prism"})", R"({"model_type": "gated_deltanet"})"})
    CHECK(parse_config(either, "config.json") == Config());
}

TEST_CASE("config: each mixer takes its own ablations, each alone, and no other's") {
  const std::vector<std::string> prism = {"shared_key", "base_key",  "first_base_key",
                                          "no_retain",  "no_anchor", "no_gain"};
  const std::vector<std::string> loop = {"no_gelu", "no_anchor", "no_gain"};
  for (const std::string& mixer : mixer_names())
    for (const char* name :
         {"shared_key", "base_key", "first_base_key", "no_retain", "no_anchor", "no_gain", "no_gelu"}) {
      Config c;
      c.hidden_size = 3072, c.rank = 2, c.mixers = {mixer}, c.ablations = {name};
      const auto& own = mixer == "prism" ? prism : mixer == "prism-loop" ? loop : std::vector<std::string>{};
      const bool has_it = std::find(own.begin(), own.end(), name) != own.end();
      CAPTURE(mixer);
      CAPTURE(name);
      if (has_it)
        CHECK_NOTHROW(validate(c));
      else
        CHECK_THROWS_AS(validate(c), Error);
    }
  Config mixed;
  mixed.num_hidden_layers = 2, mixed.mixers = {"gdn", "prism"}, mixed.ablations = {"no_retain"};
  CHECK_NOTHROW(validate(mixed));
}

TEST_CASE("config: bad files give one line with the file, the key, what was expected and what came") {
  struct Bad {
    std::string text, key, got;
  };
  const std::vector<Bad> bad = {
      {"", "syntax error in line 1, byte 1", ""},
      {"{", "syntax error", ""},
      {"[1, 2]", "object", "[1,2]"},
      {"{\"hidden_size\": 12\n,}", "syntax error in line 2, byte 21", ""},
      {"{\"hidden_size\": NaN}", "syntax error", ""},
      {"{\"\xff\": 1}", "syntax error", ""},
      {R"({"rank": 1, "rank": 2})", "\"rank\"", "twice"},
      {R"({"x": {"y": 1, "y": 2}})", "\"y\"", "twice"},
      {R"({"norm_eps": 1e999})", "double", ""},
      {"{\"x\": " + std::string(40, '[') + std::string(40, ']') + "}", "32 levels", ""},
      {R"({"hidden_size": "big"})", "hidden_size", "\"big\""},
      {R"({"hidden_size": 64.0})", "hidden_size", "64.0"},
      {R"({"hidden_size": 0})", "hidden_size", "0"},
      {R"({"hidden_size": -64})", "hidden_size", "-64"},
      {R"({"hidden_size": 18446744073709551615})", "hidden_size", "18446744073709551615"},
      {R"({"hidden_size": 2147483647, "vocab_size": 2147483647, "num_hidden_layers": 2147483647})",
       "hidden_size", ""},
      {R"({"num_heads": null})", "num_heads", "null"},
      {R"({"num_hidden_layers": 3000000000})", "num_hidden_layers", "3000000000"},
      {R"({"head_dim": 5, "expand_v": 0.5})", "expand_v", "2.5"},
      {R"({"expand_v": 0})", "expand_v", "0"},
      {R"({"intermediate_size": -1})", "intermediate_size", "-1"},
      {R"({"intermediate_size": [1]})", "intermediate_size", "[1]"},
      {R"({"hidden_ratio": 1e300})", "hidden_size", ""},
      {R"({"norm_eps": 0})", "norm_eps", "0"},
      {R"({"norm_eps": "1e-6"})", "norm_eps", "\"1e-6\""},
      {R"({"initializer_range": -0.1})", "initializer_range", "-0.1"},
      {R"({"tie_word_embeddings": 1})", "tie_word_embeddings", "1"},
      {R"({"vocab_size": 258, "bos_token_id": 258})", "bos_token_id", "258 and 258"},
      {R"({"eos_token_id": [2, 3]})", "eos_token_id", "[2,3]"},
      {R"({"mixers": "hyena"})", "mixers", "\"hyena\""},
      {R"({"mixers": "attention", "attention_heads": 3})", "hidden_size", "2048"},
      {R"({"mixers": "attention", "hidden_size": 6, "attention_heads": 2})", "hidden_size", "6"},
      {R"({"memories": 0})", "memories", "0"},
      {R"({"mixers": "mom", "memories": 65})", "memories", "65"},
      {R"({"mixers": "mom", "memories": 1})", "memories_active", "2"},
      {R"({"mixers": "mom", "memories_active": 5})", "memories_active", "5"},
      {R"({"attention_heads": -1})", "attention_heads", "-1"},
      {R"({"mixers": ["gdn", "gdn"]})", "mixers", "2 names"},
      {R"({"mixers": []})", "mixers", "0 names"},
      {R"({"mixers": ["gdn", 3]})", "mixers", "[\"gdn\",3]"},
      {R"({"mixers": "a\nb"})", "mixers", "\"a\\nb\""},
      {R"({"mixers": "prism-loop"})", "hidden_size", "2048"},
      {R"({"rank": 0})", "rank", "0"},
      {R"({"solver_dim": 0})", "solver_dim", "0"},
      {R"({"solver_residual": "none"})", "solver_residual", "\"none\""},
      {R"({"solver_gain": 3})", "solver_gain", "3"},
      {R"({"solver_key_norm": "yes"})", "solver_key_norm", "\"yes\""},
      {R"({"solver_gate_init": true})", "solver_gate_init", "true"},
      {R"({"ablations": "no_gain"})", "ablations", "\"no_gain\""},
      {R"({"ablations": ["no_gain"]})", "ablations", "no_gain"},
      {R"({"mixers": "prism", "ablations": ["no_such"]})", "ablations", "no_such"},
      {R"({"mixers": "prism", "ablations": ["no_gelu"]})", "ablations", "no_gelu"},
      {R"({"mixers": "prism", "ablations": ["no_gain", "no_gain"]})", "ablations", "no_gain twice"},
      {R"({"mixers": "prism", "ablations": ["base_key", "no_gain", "shared_key"]})", "ablations",
       "base_key, shared_key"},
      {R"({"model_type": "llama"})", "model_type", "\"llama\""},
      {R"({"model_type": 7})", "model_type", "7"},
      {R"({"use_gate": 1})", "use_gate", "1"},
      {R"({"use_short_conv": false})", "use_short_conv", "false"},
      {R"({"allow_neg_eigval": true})", "allow_neg_eigval", "true"},
      {R"({"num_v_heads": 8})", "num_v_heads", "8"},
      {R"({"attn": {"layers": [0]}})", "attn", "{\"layers\":[0]}"},
      {R"({"hidden_act": "powlu"})", "hidden_act", "\"powlu\""},
      {R"({"attnres_block_size": 4})", "attnres_block_size", "4"},
      {R"({"output_gate_activation": "sigmoid"})", "output_gate_activation", "\"sigmoid\""},
      {R"({"output_gate_activation": null})", "output_gate_activation", "null"},
      {R"({"head_dim": 64, "expand_v": 1.1})", "expand_v", "70.4"},
  };
  for (const Bad& b : bad) {
    const std::string message = error_of(b.text);
    CAPTURE(b.text);
    CAPTURE(message);
    CHECK(message.starts_with("dir/config.json: "));
    CHECK(has(message, "expected "));
    CHECK(has(message, "got "));
    CHECK(has(message, b.key));
    CHECK(has(message, b.got));
    CHECK_FALSE(has(message, "\n"));
    CHECK(message.size() < 300);
  }
}

TEST_CASE("config: an unreadable file is named with the system's reason") {
  CHECK_THROWS_WITH(read_config("no/such/config.json"),
                    "no/such/config.json: cannot open: No such file or directory");
  CHECK_THROWS_WITH(read_config("tests"), "tests: expected a regular file, got a directory");
}

TEST_CASE("presets: sizes as their names say, and the solver adds at most a tenth of the block") {
  const std::map<std::string, std::pair<double, double>> millions = {{"tiny", {1.0, 1.3}},
                                                                     {"gdn-15m", {14.5, 15.5}},
                                                                     {"prism-15m", {14.5, 15.7}},
                                                                     {"gdn-119m", {118.5, 119.5}},
                                                                     {"prism-124m", {123.5, 124.5}},
                                                                     {"prism-353m", {352.5, 353.5}},
                                                                     {"prism-124m-hybrid", {120, 121}},
                                                                     {"transformer-110m", {109, 110}},
                                                                     {"ttt-124m", {123.9, 124.1}}};
  CHECK(presets().size() == millions.size());
  for (const Preset& preset : presets()) {
    CAPTURE(preset.name);
    validate(preset.config);
    const auto [low, high] = millions.at(preset.name);
    const double count = static_cast<double>(model_parameters(preset.config)) / 1e6;
    CAPTURE(count);
    CHECK(count > low);
    CHECK(count < high);
    CHECK(solver_parameters(preset.config, "prism") * 10 <= block_parameters(preset.config, "prism"));
    CHECK((preset.config.rank == 3) == (preset.name.starts_with("prism") || preset.name == "tiny"));
    CHECK(preset.recipe.warmup < preset.recipe.steps);
    CHECK(preset.recipe.min_lr < preset.recipe.lr);
    CHECK(&find_preset(preset.name) == &preset);
    CHECK(parse_config(to_json(preset.config), preset.name) == preset.config);
  }
  CHECK_THROWS_WITH(
      find_preset("huge"),
      "--preset: expected one of tiny, gdn-15m, prism-15m, gdn-119m, prism-124m, prism-124m-hybrid, "
      "transformer-110m, ttt-124m, prism-353m, got huge");
}
