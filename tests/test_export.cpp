// export: the folder for transformers. That transformers runs it is tests/peers/transformers_export.py's to
// show.
#include <doctest/doctest.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "src/commands.h"
#include "src/model_files.h"
#include "tests/temporary.h"

using namespace prism;
using nlohmann::json;
namespace fs = std::filesystem;

namespace {

// The exit status, and the message of an error.
int run(std::vector<std::string> args, std::string& message) {
  CLI::App app;
  add_export(app);
  args.insert(args.begin(), "export");
  std::reverse(args.begin(), args.end());
  try {
    app.parse(args);
    return 0;
  } catch (const CLI::ParseError& e) {
    message = e.what();
    return 2;
  } catch (const Error& e) {
    message = e.what();
    return 1;
  }
}

std::string text(const std::string& path) { return read_text(path, 1 << 20); }

// A mixed model with each tensor that this engine knows, and the byte tokenizer.
struct Saved : TemporaryDirectory {
  Saved() {
    Config c;
    c.vocab_size = 258, c.bos_token_id = 256, c.eos_token_id = 257, c.hidden_size = 64;
    c.num_hidden_layers = 4, c.num_heads = 2, c.head_dim = 16, c.intermediate_size = 96, c.rank = 3;
    c.mixers = {"prism", "prism-loop", "gdn", "attention"}, c.solver_dim = 8, c.solver_scale = true;
    c.solver_residual = SolverResidual::anchor;
    c.extra = R"({"dtype": "float16", "note": "kept"})";
    Model model(c, Device::cpu, DType::f64, false);
    model.parameters().initialise(1);
    save_model(*this / "m", model, Tokenizer());
  }
};

}  // namespace

TEST_CASE("export: config, weights in f32 or bf16, tokenizer and code, and the folder loads here, too") {
  const Saved dir;
  std::string message;
  for (const std::string dtype : {"f32", "bf16"}) {
    const std::string out = dir / dtype;
    REQUIRE(run({"--model", dir / "m", "--to", "hf", "--out", out, "--dtype", dtype}, message) == 0);
    const json config = json::parse(text(out + "/config.json"));
    CHECK(config["model_type"] == "prism");
    CHECK(config["auto_map"]["AutoModelForCausalLM"] == "modeling_prism.PrismForCausalLM");
    CHECK(config["torch_dtype"] == (dtype == "f32" ? "float32" : "bfloat16"));
    CHECK(!config.contains("dtype"));
    CHECK(config["note"] == "kept");
    CHECK(text(out + "/modeling_prism.py") == text("src/modeling_prism.py"));
    CHECK(text(out + "/prism_twin.py") == text("tests/reference/prism_twin.py"));
    CHECK(json::parse(text(out + "/tokenizer_config.json"))["bos_token"] == "<bos>");
    CHECK(json::parse(text(out + "/tokenizer.json"))["model"]["vocab"].size() == 258);
    CHECK(Tokenizer::load(out).bos() == 256);

    // Every value is the saved one, rounded once; matrices alone are bf16.
    const SafetensorsFile saved(dir / "m/model.safetensors"), written(out + "/model.safetensors");
    CHECK(written.metadata().at("format") == "pt");
    REQUIRE(written.names().size() == saved.names().size());
    for (const std::string& name : saved.names()) {
      CAPTURE(name);
      const Shape shape = saved.info(name).shape;
      const bool narrow = dtype == "bf16" && shape.rank() > 1;
      CHECK(written.info(name).dtype == (narrow ? "BF16" : "F32"));
      const auto n = static_cast<size_t>(shape.numel());
      std::vector<double> before(n), after(n);
      saved.read(name, {before.data(), shape, DType::f64, Device::cpu});
      written.read(name, {after.data(), shape, DType::f64, Device::cpu});
      for (size_t i = 0; i < n; ++i)
        before[i] =
            narrow ? static_cast<float>(bf16(static_cast<float>(before[i]))) : static_cast<float>(before[i]);
      CHECK(before == after);
    }
    CHECK(load_model(out, Device::cpu, DType::f32, false)->config().rank == 3);
  }
  const auto bytes = [&](const char* dtype) {
    return static_cast<double>(fs::file_size(dir / dtype + "/model.safetensors"));
  };
  CHECK(bytes("bf16") < 0.53 * bytes("f32"));  // the header and the vectors are not halved
}

TEST_CASE("export: the PyTorch code knows every mixer and every key of the configuration") {
  const std::string twin = text("tests/reference/prism_twin.py");
  for (const std::string& mixer : mixer_names()) {
    CAPTURE(mixer);
    CHECK(twin.find('"' + mixer + '"') != twin.npos);
  }
  const json config = json::parse(to_json(Config()));
  for (const auto& [key, value] : config.items()) {
    CAPTURE(key);
    // These three change no logit.
    if (key == "model_type" || key == "bos_token_id" || key == "eos_token_id") continue;
    CHECK(twin.find("\n    " + key + ": ") != twin.npos);
  }
}

TEST_CASE("export: what cannot be exported is named, and nothing is written over") {
  const Saved dir;
  std::string message;
  CHECK(run({"--model", dir / "none", "--out", dir / "x"}, message) == 1);
  CHECK(message.starts_with(dir / "none: cannot list: "));
  CHECK(run({"--model", dir / "m", "--out", dir / "m"}, message) == 1);
  CHECK(message == dir / "m: expected no model, got config.json");
  CHECK(run({"--model", dir / "m", "--out", dir / "m/config.json"}, message) == 1);
  CHECK(message.starts_with(dir / "m/config.json: cannot create the directory"));
  CHECK(run({"--model", dir / "m", "--out", dir / "x", "--to", "gguf"}, message) == 2);
  CHECK(message.starts_with("--to: gguf not in {hf}"));
  CHECK(run({"--model", dir / "m", "--out", dir / "x", "--dtype", "f16"}, message) == 2);
  CHECK(message.starts_with("--dtype: f16 not in {f32,bf16}"));
  const std::string config = text(dir / "m/config.json");
  replace_file(dir / "m/config.json", [&](OutputFile& file) { file.write(R"({"vocab_size": 258})"); });
  CHECK(run({"--model", dir / "m", "--out", dir / "x"}, message) == 1);
  CHECK(message.find("model.safetensors: tensor model.embeddings.weight: expected [258,2048]") !=
        message.npos);
  CHECK(!fs::exists(dir / "x"));
}
