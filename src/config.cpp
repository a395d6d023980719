#include "src/config.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "src/files.h"

namespace prism {

using nlohmann::json;

NLOHMANN_JSON_SERIALIZE_ENUM(SolverResidual,
                             {{SolverResidual::value, "value"}, {SolverResidual::anchor, "anchor"}})
NLOHMANN_JSON_SERIALIZE_ENUM(SolverGain, {{SolverGain::sigmoid, "sigmoid"}, {SolverGain::gelu, "gelu"}})

namespace {

using Names = std::vector<std::string>;

constexpr int64_t kMostMemories = 64;  // a token compares each with all
constexpr double kAny = -std::numeric_limits<double>::infinity();

// Every key of ours but model_type, for reading, writing and checking: visit(key, field, bound). Integers are
// at least `bound`, other numbers above it.
template <class C, class Visit>
void for_each_key(C& c, Visit visit) {
  visit("vocab_size", c.vocab_size, 1);
  visit("hidden_size", c.hidden_size, 1);
  visit("num_hidden_layers", c.num_hidden_layers, 1);
  visit("num_heads", c.num_heads, 1);
  visit("head_dim", c.head_dim, 1);
  visit("attention_heads", c.attention_heads, 0);
  visit("memories", c.memories, 1);
  visit("memories_active", c.memories_active, 1);
  visit("expand_v", c.expand_v, 0);
  visit("intermediate_size", c.intermediate_size, 0);
  visit("hidden_ratio", c.hidden_ratio, 0);
  visit("conv_size", c.conv_size, 1);
  visit("use_gate", c.use_gate, 0);
  visit("norm_eps", c.norm_eps, 0);
  visit("tie_word_embeddings", c.tie_word_embeddings, 0);
  visit("initializer_range", c.initializer_range, 0);
  visit("bos_token_id", c.bos_token_id, 0);
  visit("eos_token_id", c.eos_token_id, 0);
  visit("mixers", c.mixers, 0);
  visit("rank", c.rank, 1);
  visit("solver_dim", c.solver_dim, 1);
  visit("solver_residual", c.solver_residual, 0);
  visit("solver_gain", c.solver_gain, 0);
  visit("solver_key_norm", c.solver_key_norm, 0);
  visit("solver_gate_init", c.solver_gate_init, kAny);
  visit("solver_scale", c.solver_scale, 0);
  visit("ablations", c.ablations, 0);
}

const char* kind(const int64_t&) { return "an integer"; }
const char* kind(const double&) { return "a number"; }
const char* kind(const bool&) { return "true or false"; }
const char* kind(const Names&) { return "a list of names"; }
const char* kind(const SolverResidual&) { return "value or anchor"; }
const char* kind(const SolverGain&) { return "sigmoid or gelu"; }

[[noreturn]] void fail(const std::string& where, std::string_view key, const std::string& expected,
                       const std::string& got) {
  PRISM_FAIL(where, ": ", key, ": expected ", expected, ", got ", got);
}

std::string listed(const Names& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

bool contains(const Names& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// Takes a key of ours out of a file's object, so that the foreign ones are left.
template <class T>
void take(json& object, const std::string& where, const char* key, T& field) {
  const auto at = object.find(key);
  if (at == object.end()) return;
  bool fits = !std::is_same_v<T, int64_t> || (at->is_number_integer() && at->template get<double>() < 9e18);
  try {
    if (fits) field = at->template get<T>();
    fits = fits && json(field) == *at;  // an unknown name of an enum reads as its first
  } catch (const json::type_error&) {
    fits = false;
  }
  if (!fits) fail(where, key, kind(field), shown(*at));
  object.erase(at);
}

// The switches a mixer has; at most one of those that end in _key.
Names ablations_of(const std::string& mixer) {
  if (mixer == "prism")
    return {"shared_key", "base_key", "first_base_key", "no_retain", "no_anchor", "no_gain"};
  if (mixer == "prism-loop") return {"no_gelu", "no_anchor", "no_gain"};
  return {};
}

void check_numbers(const Config& c, const std::string& where) {
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();  // token ids are int32
  for_each_key(c, [&](const char* key, const auto& field, double bound) {
    using T = std::decay_t<decltype(field)>;
    if constexpr (std::is_same_v<T, int64_t>)
      if (static_cast<double>(field) < bound || field > kMax)
        fail(where, key, cat(bound, " to ", kMax), cat(field));
    if constexpr (std::is_same_v<T, double>)
      if (!std::isfinite(field) || field <= bound)
        fail(where, key, bound == kAny ? "a finite number" : cat("a number above ", bound), cat(field));
  });
  for (int64_t id : {c.bos_token_id, c.eos_token_id})
    if (id >= c.vocab_size)
      fail(where, "vocab_size", "more than bos_token_id and eos_token_id", cat(c.vocab_size, " and ", id));

  const double K = static_cast<double>(c.head_dim), V = K * c.expand_v;
  if (V < 1 || V > kMax || std::abs(V - std::round(V)) > 1e-6 * V)
    fail(where, "expand_v", "head_dim x expand_v to be a whole number", cat(K, " x ", c.expand_v, " = ", V));
  // Each size is in range; so must their products be, or the bytes of a buffer would overflow.
  const auto real = [](int64_t size) { return static_cast<double>(size); };
  const double D = real(c.hidden_size), F = std::max(real(c.intermediate_size), D * c.hidden_ratio);
  const double widest = std::max({real(c.vocab_size), F, D, real(c.conv_size), real(c.rank * c.solver_dim),
                                  real(c.rank * c.num_heads) * std::max(K, V)});
  const double total = std::max(D, real(c.solver_dim)) * widest * real(c.num_hidden_layers);
  if (total > 1e14) fail(where, "hidden_size", "a model of fewer than 1e14 parameters", cat("about ", total));
}

void check_mixers(const Config& c, const std::string& where) {
  if (c.mixers.size() != 1 && static_cast<int64_t>(c.mixers.size()) != c.num_hidden_layers)
    fail(where, "mixers", cat("one name, or one a layer (", c.num_hidden_layers, ")"),
         cat(c.mixers.size(), " names"));
  for (const std::string& mixer : c.mixers)
    if (!contains(mixer_names(), mixer))
      fail(where, "mixers", "names of " + listed(mixer_names()), shown(mixer));
  if (c.solver_scale && (c.rank < 2 || !contains(c.mixers, "prism")))
    fail(where, "solver_scale", "false without a prism layer of rank 2 or more", "true");
  const int64_t HV = c.num_heads * c.value_dim();
  if (contains(c.mixers, "prism-loop") && HV != c.hidden_size)
    fail(where, "hidden_size", cat("num_heads x head_dim x expand_v = ", HV, " as prism-loop needs"),
         cat(c.hidden_size));
  const int64_t heads = c.attention_head_count();
  if (contains(c.mixers, "attention") && c.hidden_size % (2 * heads) != 0)
    fail(where, "hidden_size", cat("a multiple of twice the ", heads, " heads of attention"),
         cat(c.hidden_size));
  if (contains(c.mixers, "ttt-mlp") && c.value_dim() != c.head_dim)
    fail(where, "expand_v", "1, as ttt-mlp needs", cat(c.expand_v));
  if (!contains(c.mixers, "mom")) return;
  if (c.memories > kMostMemories) fail(where, "memories", cat("1 to ", kMostMemories), cat(c.memories));
  if (c.memories_active > c.memories)
    fail(where, "memories_active", cat("1 to the ", c.memories, " of memories"), cat(c.memories_active));
}

// A switch must change the model, so some layer's mixer must have it; in a mixed model the other layers stay
// what they are without it.
void check_ablations(const Config& c, const std::string& where) {
  Names known, seen, key_switches;
  for (const std::string& mixer : c.mixers)
    for (const std::string& name : ablations_of(mixer))
      if (!contains(known, name)) known.push_back(name);
  for (const std::string& name : c.ablations) {
    if (!contains(known, name))
      fail(where, "ablations",
           known.empty() ? "none for mixers " + listed(c.mixers) : "names of " + listed(known), shown(name));
    if (contains(seen, name)) fail(where, "ablations", "each name once", name + " twice");
    seen.push_back(name);
    if (name.ends_with("_key")) key_switches.push_back(name);
  }
  if (key_switches.size() > 1)
    fail(where, "ablations", "at most one that ends in _key", listed(key_switches));
}

void check(const Config& config, const std::string& where) {
  check_numbers(config, where);
  check_mixers(config, where);
  check_ablations(config, where);
}

}  // namespace

int64_t Config::feed_forward() const {
  if (intermediate_size) return intermediate_size;
  const auto wanted = static_cast<int64_t>(static_cast<double>(hidden_size) * hidden_ratio * 2 / 3);
  return 256 * ((wanted + 255) / 256);
}

bool Config::ablated(std::string_view name) const { return contains(ablations, name); }

const Names& mixer_names() {
  static const Names names = {"linear",     "retnet",    "mamba2",  "deltanet", "gdn", "prism",
                              "prism-loop", "attention", "ttt-mlp", "mom",      "gla"};
  return names;
}

void validate(const Config& config) { check(config, "config"); }

Config parse_config(const std::string& json_text, const std::string& where) {
  json object = parse_json(json_text, where);
  // Settings of flash-linear-attention that this engine has only at their default.
  static const json fixed = {{"use_short_conv", true},
                             {"allow_neg_eigval", false},
                             {"num_v_heads", nullptr},
                             {"attn", nullptr},
                             {"hidden_act", "swish"},
                             {"attnres_block_size", nullptr},
                             {"output_gate_activation", "swish"}};
  for (const auto& [key, value] : fixed.items()) {
    const bool alias = key == "output_gate_activation" && object.value(key, json()) == "silu";
    if (object.contains(key) && object[key] != value && !alias)
      fail(where, key, shown(value), shown(object[key]));
  }
  const json type = object.value("model_type", json("prism"));
  if (type != "gated_deltanet" && type != "prism")
    fail(where, "model_type", "gated_deltanet or prism", shown(type));
  object.erase("model_type");
  for (const char* key : {"intermediate_size", "hidden_ratio"})  // its null: the value taken when absent
    if (object.contains(key) && object[key].is_null()) object.erase(key);
  if (object.contains("mixers") && object["mixers"].is_string())
    object["mixers"] = json::array({object["mixers"]});

  Config config;
  for_each_key(config, [&](const char* key, auto& field, double) { take(object, where, key, field); });
  config.extra = object.dump();
  check(config, where);
  return config;
}

Config read_config(const std::string& path) { return parse_config(read_text(path, 1 << 20), path); }

std::string to_json(const Config& config) {
  json object = json::parse(config.extra);
  for_each_key(config, [&](const char* key, const auto& field, double) { object[key] = field; });
  if (config.intermediate_size == 0) object["intermediate_size"] = nullptr;
  if (config.mixers.size() == 1) object["mixers"] = config.mixers[0];
  const bool gated_deltanet = config.ablations.empty() &&
                              std::all_of(config.mixers.begin(), config.mixers.end(), [&](const auto& mixer) {
                                return mixer == "gdn" || (mixer == "prism" && config.rank == 1);
                              });
  object["model_type"] = gated_deltanet ? "gated_deltanet" : "prism";
  return object.dump(2) + "\n";
}

Config with_settings(const Config& config, const std::vector<std::string>& settings) {
  json object = json::parse(to_json(config));
  const json keys = json::parse(to_json(Config()));
  for (const std::string& setting : settings) {
    const size_t at = setting.find('=');
    const std::string key = setting.substr(0, at),
                      text = at == std::string::npos ? "" : setting.substr(at + 1);
    if (text.empty() || !keys.contains(key) || key == "model_type")
      fail("--set", key, "KEY=VALUE with a key of config.json", shown(setting));
    const json value = json::parse(text, nullptr, false);
    object[key] = value.is_discarded() ? json(text) : value;
  }
  return settings.empty() ? config : parse_config(object.dump(), "--set");
}

}  // namespace prism
