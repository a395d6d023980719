// Model directories: what is written is read again, and whatever does not fit its config is named.
#include "src/model_files.h"

#include <doctest/doctest.h>

#include <filesystem>
#include <functional>

#include "tests/temporary.h"

using namespace prism;

namespace {

Config small(bool tied) {
  Config c;
  c.vocab_size = 258, c.bos_token_id = 256, c.eos_token_id = 257, c.hidden_size = 16, c.num_hidden_layers = 2;
  c.num_heads = 2, c.head_dim = 8, c.intermediate_size = 24, c.mixers = {"prism"}, c.rank = 3,
  c.solver_dim = 4;
  c.tie_word_embeddings = tied;
  return c;
}

std::string masters(const Model& model) {
  return {static_cast<char*>(model.parameters().masters().data), model.parameters().masters().bytes()};
}

std::string error_of(const std::function<void()>& fn) {
  try {
    fn();
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}

}  // namespace

TEST_CASE("model files: a model, f32 or f64, tied or not, is the same after saving and loading") {
  for (const DType dtype : {DType::f32, DType::f64})
    for (const bool tied : {true, false}) {
      const TemporaryDirectory dir;
      Model model(small(tied), Device::cpu, dtype, false);
      model.parameters().initialise(3);
      save_model(dir / "m", model, Tokenizer());
      const auto loaded = load_model(dir / "m", Device::cpu, dtype, false);
      CHECK(loaded->config() == model.config());
      CHECK_MESSAGE(masters(*loaded) == masters(model), "weights");
      CHECK(Tokenizer::load(dir / "m").bos() == 256);
      CHECK(SafetensorsFile(dir / "m/model.safetensors").contains("lm_head.weight") == !tied);
      CHECK(error_of([&] {
              save_model(dir / "m", model, {});
            }).ends_with("expected no model, got config.json"));
      // Doubles of an f32 model are the same numbers.
      const auto wide = load_model(dir / "m", Device::cpu, DType::f64, false);
      const Parameter& p = wide->parameters().list().back();
      double sum = 0, expected = 0;
      for (int64_t i = 0; i < p.shape.numel(); ++i) {
        sum += wide->parameters().master(p).ptr<double>()[i];
        dispatch(dtype, [&]<class T>(Tag<T>) {
          if constexpr (!std::is_same_v<T, bf16>)
            expected += double(model.parameters().master(p).ptr<T>()[i]);
        });
      }
      CHECK(sum == expected);
    }
}

TEST_CASE(
    "model files: a tensor that is missing, foreign or of another shape is named, a head by its tying") {
  const TemporaryDirectory dir;
  Model model(small(true), Device::cpu, DType::f32, false);
  model.parameters().initialise(3);
  save_model(dir.path(), model, {});
  const StoredBuffer weights{"", &Parameters::master};
  const auto loading = [&](const std::function<void(std::vector<NamedTensor>&)>& change) {
    std::vector<NamedTensor> tensors = stored_tensors(model.parameters(), {&weights, 1});
    change(tensors);
    write_safetensors(dir / "model.safetensors", tensors);
    const std::string message = error_of([&] { load_model(dir.path(), Device::cpu, DType::f32, false); });
    CHECK(message.find("model.safetensors: tensor ") != message.npos);
    return message.substr(message.find("tensor "));
  };
  CHECK(loading([](auto& t) { t.erase(t.begin() + 1); }) ==
        "tensor model.layers.0.attn_norm.weight: expected [16] by config.json, got none");
  CHECK(loading([](auto& t) { t[1].name += "x"; }) ==
        "tensor model.layers.0.attn_norm.weight: expected [16] by config.json, got none");
  CHECK(loading([](auto& t) {
          t.push_back({"extra", t[1].tensor});
        }) == "tensor extra: expected none by config.json, got [16]");
  CHECK(loading([](auto& t) {
          t[1].tensor = t[1].tensor.view({4, 4});
        }) == "tensor model.layers.0.attn_norm.weight: expected [16] by config.json, got [4,4]");
  CHECK(loading([](auto& t) {
          t.push_back({"lm_head.weight", t[0].tensor});
        }) ==
        "tensor lm_head.weight: expected none by config.json, got [258,16] (tie_word_embeddings true: the "
        "embedding "
        "serves as the head)");
  Config untied = small(false);
  replace_file(dir / "config.json", [&](OutputFile& file) { file.write(to_json(untied)); });
  CHECK(loading([](auto&) {}) ==
        "tensor lm_head.weight: expected [258,16] by config.json, got none (tie_word_embeddings true: the "
        "embedding "
        "serves as the head)");
}
