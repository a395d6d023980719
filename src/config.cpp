#include "src/config.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>

#include "src/files.h"

namespace prism {

using nlohmann::json;

namespace {

constexpr const char* kResiduals[] = {"value", "anchor"};  // by SolverResidual
constexpr const char* kGains[] = {"sigmoid", "gelu"};      // by SolverGain

[[noreturn]] void fail(const std::string& where, std::string_view key, const std::string& expected,
                       const std::string& got) {
  PRISM_FAIL(where, ": ", key, ": expected ", expected, ", got ", got);
}

std::string listed(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

bool contains(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// Every key of ours but model_type, in one place for reading and writing.
template <class C, class Visit>
void for_each_key(C& c, Visit visit) {
  visit("vocab_size", c.vocab_size);
  visit("hidden_size", c.hidden_size);
  visit("num_hidden_layers", c.num_hidden_layers);
  visit("num_heads", c.num_heads);
  visit("head_dim", c.head_dim);
  visit("expand_v", c.expand_v);
  visit("intermediate_size", c.intermediate_size);
  visit("hidden_ratio", c.hidden_ratio);
  visit("conv_size", c.conv_size);
  visit("norm_eps", c.norm_eps);
  visit("tie_word_embeddings", c.tie_word_embeddings);
  visit("initializer_range", c.initializer_range);
  visit("bos_token_id", c.bos_token_id);
  visit("eos_token_id", c.eos_token_id);
  visit("mixers", c.mixers);
  visit("rank", c.rank);
  visit("solver_dim", c.solver_dim);
  visit("solver_residual", c.solver_residual);
  visit("solver_gain", c.solver_gain);
  visit("solver_key_norm", c.solver_key_norm);
  visit("solver_gate_init", c.solver_gate_init);
  visit("ablations", c.ablations);
}

// Takes our keys out of a config.json; the rest stays in `object`.
struct Reader {
  json object;
  const std::string& where;

  template <class T>
  void operator()(const char* key, T& field) {
    const auto at = object.find(key);
    if (at == object.end()) return;
    read(key, *at, field);
    object.erase(at);
  }

  void read(const char* key, const json& value, int64_t& field) {
    // The two keys that flash-linear-attention writes as null for "derive it".
    if (value.is_null() && std::string_view(key) == "intermediate_size") return;
    if (!value.is_number_integer() ||
        (value.is_number_unsigned() && value.get<uint64_t>() > std::numeric_limits<int64_t>::max()))
      fail(where, key, "an integer", shown(value));
    field = value.get<int64_t>();
    if (field < 1 && std::string_view(key) == "intermediate_size")
      fail(where, key, "null or at least 1", shown(value));
  }
  void read(const char* key, const json& value, double& field) {
    if (value.is_null() && std::string_view(key) == "hidden_ratio") return;
    if (!value.is_number()) fail(where, key, "a number", shown(value));
    field = value.get<double>();
  }
  void read(const char* key, const json& value, bool& field) {
    if (!value.is_boolean()) fail(where, key, "true or false", shown(value));
    field = value.get<bool>();
  }
  // A list of names; for the mixers also one name, for all layers.
  void read(const char* key, const json& value, std::vector<std::string>& field) {
    const bool one = value.is_string() && std::string_view(key) == "mixers";
    const bool list = value.is_array() && std::all_of(value.begin(), value.end(),
                                                      [](const json& name) { return name.is_string(); });
    if (!one && !list) fail(where, key, "a list of names", shown(value));
    field = one ? std::vector{value.get<std::string>()} : value.get<std::vector<std::string>>();
  }
  void read(const char* key, const json& value, SolverResidual& field) {
    choose(key, value, field, kResiduals);
  }
  void read(const char* key, const json& value, SolverGain& field) { choose(key, value, field, kGains); }

  template <class Enum>
  void choose(const char* key, const json& value, Enum& field, const char* const (&names)[2]) {
    for (int i = 0; i < 2; ++i)
      if (value == names[i]) return void(field = static_cast<Enum>(i));
    fail(where, key, cat(names[0], " or ", names[1]), shown(value));
  }
};

struct Writer {
  json object;

  template <class T>
  void operator()(const char* key, const T& field) {
    object[key] = field;
  }
  void operator()(const char* key, const int64_t& field) {
    const bool derived = std::string_view(key) == "intermediate_size" && field == 0;
    object[key] = derived ? json() : json(field);
  }
  void operator()(const char* key, const std::vector<std::string>& names) {
    const bool one = std::string_view(key) == "mixers" && names.size() == 1;
    object[key] = one ? json(names[0]) : json(names);
  }
  void operator()(const char* key, SolverResidual field) {
    object[key] = kResiduals[static_cast<int>(field)];
  }
  void operator()(const char* key, SolverGain field) { object[key] = kGains[static_cast<int>(field)]; }
};

// The switches a mixer has; at most one of the first three.
const std::vector<std::string>& ablations_of(const std::string& mixer) {
  static const std::map<std::string, std::vector<std::string>> table = {
      {"prism", {"shared_key", "base_key", "first_base_key", "no_retain", "no_anchor", "no_gain"}},
      {"prism-loop", {"no_gelu", "no_anchor", "no_gain"}}};
  static const std::vector<std::string> none;
  const auto at = table.find(mixer);
  return at == table.end() ? none : at->second;
}

void check_sizes(const Config& c, const std::string& where) {
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();  // token ids are int32
  const auto within = [&](const char* key, int64_t value, int64_t low, int64_t high) {
    if (value < low || value > high) fail(where, key, cat(low, " to ", high), cat(value));
  };
  const auto positive = [&](const char* key, double value, bool zero_too) {
    if (!std::isfinite(value) || value < 0 || (value == 0 && !zero_too))
      fail(where, key, zero_too ? "a number of at least 0" : "a number above 0", cat(value));
  };
  within("vocab_size", c.vocab_size, 1, kMax);
  within("hidden_size", c.hidden_size, 1, kMax);
  within("num_hidden_layers", c.num_hidden_layers, 1, kMax);
  within("num_heads", c.num_heads, 1, kMax);
  within("head_dim", c.head_dim, 1, kMax);
  within("intermediate_size", c.intermediate_size, 0, kMax);
  within("conv_size", c.conv_size, 1, kMax);
  within("rank", c.rank, 1, kMax);
  within("solver_dim", c.solver_dim, 1, kMax);
  within("bos_token_id", c.bos_token_id, 0, c.vocab_size - 1);
  within("eos_token_id", c.eos_token_id, 0, c.vocab_size - 1);
  positive("expand_v", c.expand_v, false);
  positive("hidden_ratio", c.hidden_ratio, false);
  positive("norm_eps", c.norm_eps, false);
  positive("initializer_range", c.initializer_range, true);
  if (!std::isfinite(c.solver_gate_init))
    fail(where, "solver_gate_init", "a number", cat(c.solver_gate_init));
  const double V = static_cast<double>(c.head_dim) * c.expand_v;
  if (V < 1 || V > kMax || std::abs(V - std::round(V)) > 1e-6 * V)
    fail(where, "expand_v", cat("a whole number of values per head, at most ", kMax),
         cat(c.head_dim, " x ", c.expand_v, " = ", V));
  // Every size fits by itself; their products must too, or the bytes of a buffer would overflow.
  const double D = static_cast<double>(c.hidden_size), heads = static_cast<double>(c.num_heads);
  const double F = c.intermediate_size ? static_cast<double>(c.intermediate_size) : D * c.hidden_ratio;
  const double widest =
      std::max({static_cast<double>(c.vocab_size), F, D, static_cast<double>(c.conv_size),
                static_cast<double>(c.rank) * heads * std::max(V, static_cast<double>(c.head_dim)),
                static_cast<double>(c.rank * c.solver_dim)});
  const double most =
      std::max(D, static_cast<double>(c.solver_dim)) * widest * static_cast<double>(c.num_hidden_layers);
  if (most > 1e14) fail(where, "hidden_size", "a model of fewer than 1e14 parameters", cat("about ", most));
}

void check_names(const Config& c, const std::string& where) {
  if (c.mixers.size() != 1 && static_cast<int64_t>(c.mixers.size()) != c.num_hidden_layers)
    fail(where, "mixers", cat("one name, or one a layer (", c.num_hidden_layers, ")"),
         cat(c.mixers.size(), " names"));
  for (const std::string& mixer : c.mixers)
    if (!contains(mixer_names(), mixer))
      fail(where, "mixers", "names of " + listed(mixer_names()), shown(mixer));
  if (contains(c.mixers, "prism-loop") && c.num_heads * c.value_dim() != c.hidden_size)
    fail(where, "hidden_size", "num_heads x head_dim x expand_v, which mixer prism-loop needs",
         cat(c.hidden_size, " and ", c.num_heads, " x ", c.value_dim(), " = ", c.num_heads * c.value_dim()));

  // A switch must change the model, so some layer's mixer must have it; in a mixed model the other layers are
  // what they are without it.
  std::string key_switch;
  for (size_t i = 0; i < c.ablations.size(); ++i) {
    const std::string& name = c.ablations[i];
    std::vector<std::string> known;
    for (const std::string& mixer : c.mixers)
      for (const std::string& a : ablations_of(mixer))
        if (!contains(known, a)) known.push_back(a);
    if (!contains(known, name))
      fail(where, "ablations",
           known.empty() ? "none for mixers " + listed(c.mixers) : "names of " + listed(known), shown(name));
    if (contains({c.ablations.begin(), c.ablations.begin() + static_cast<int64_t>(i)}, name))
      fail(where, "ablations", "each name once", name + " twice");
    if (!name.ends_with("_key")) continue;
    if (!key_switch.empty())
      fail(where, "ablations", "at most one of shared_key, base_key, first_base_key",
           key_switch + " and " + name);
    key_switch = name;
  }
}

void check(const Config& config, const std::string& where) {
  check_sizes(config, where);
  check_names(config, where);
}

}  // namespace

int64_t Config::feed_forward() const {
  if (intermediate_size) return intermediate_size;
  const auto wanted = static_cast<int64_t>(static_cast<double>(hidden_size) * hidden_ratio * 2 / 3);
  return 256 * ((wanted + 255) / 256);
}

bool Config::ablated(std::string_view name) const {
  return std::find(ablations.begin(), ablations.end(), name) != ablations.end();
}

const std::vector<std::string>& mixer_names() {
  static const std::vector<std::string> names = {"linear", "retnet", "mamba2",    "deltanet",
                                                 "gdn",    "prism",  "prism-loop"};
  return names;
}

void validate(const Config& config) { check(config, "config"); }

Config parse_config(const std::string& json_text, const std::string& where) {
  Reader reader{parse_json(json_text, where), where};
  if (const auto type = reader.object.find("model_type"); type != reader.object.end()) {
    if (*type != "gated_deltanet" && *type != "prism")
      fail(where, "model_type", "gated_deltanet or prism", shown(*type));
    reader.object.erase(type);
  }
  // Settings of flash-linear-attention that this engine has only at their default.
  static const json fixed = {{"use_gate", true},       {"use_short_conv", true}, {"allow_neg_eigval", false},
                             {"num_v_heads", nullptr}, {"attn", nullptr},        {"hidden_act", "swish"}};
  for (const auto& [key, value] : fixed.items())
    if (reader.object.contains(key) && reader.object[key] != value)
      fail(where, key, shown(value), shown(reader.object[key]));
  Config config;
  for_each_key(config, std::ref(reader));
  config.extra = reader.object.dump();
  check(config, where);
  return config;
}

Config read_config(const std::string& path) { return parse_config(read_text(path, 1 << 20), path); }

std::string to_json(const Config& config) {
  Writer writer{json::parse(config.extra)};
  for_each_key(config, std::ref(writer));
  const bool gated_deltanet = config.ablations.empty() &&
                              std::all_of(config.mixers.begin(), config.mixers.end(), [&](const auto& mixer) {
                                return mixer == "gdn" || (mixer == "prism" && config.rank == 1);
                              });
  writer.object["model_type"] = gated_deltanet ? "gated_deltanet" : "prism";
  return writer.object.dump(2) + "\n";
}

}  // namespace prism
