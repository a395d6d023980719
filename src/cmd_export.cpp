// export: a model as a folder that transformers and lm-evaluation-harness run.
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "src/commands.h"
#include "src/model_files.h"

namespace prism {

namespace {

using nlohmann::json;

// Names and contents of the PyTorch files that go with a model: the Makefile's EXPORTED.
const std::pair<const char*, std::string_view> kPython[] = {
#include "exported.inc"
};

struct ExportOptions {
  std::string model, to = "hf", out, dtype = "f32";
};

// config.json with what transformers looks for.
std::string config_for_transformers(const Config& config, DType dtype) {
  json object = json::parse(to_json(config));
  object["model_type"] = "prism";
  object["architectures"] = {"PrismForCausalLM"};
  object["auto_map"] = {{"AutoConfig", "modeling_prism.PrismConfig"},
                        {"AutoModelForCausalLM", "modeling_prism.PrismForCausalLM"}};
  object.erase("dtype");  // of a file of theirs that this model began with
  object["torch_dtype"] = dtype == DType::bf16 ? "bfloat16" : "float32";
  return object.dump(2) + "\n";
}

std::string tokenizer_config(const Tokenizer& tokenizer) {
  const bool bytes = tokenizer.file() == std::string("tokenizer.json");
  const json object = {{"tokenizer_class", bytes ? "PreTrainedTokenizerFast" : "LlamaTokenizer"},
                       {"bos_token", tokenizer.special(tokenizer.bos())},
                       {"eos_token", tokenizer.special(tokenizer.eos())},
                       {"pad_token", tokenizer.special(tokenizer.eos())},
                       {"add_bos_token", true},
                       {"add_eos_token", false},
                       {"padding_side", "left"},
                       {"clean_up_tokenization_spaces", false},
                       {"legacy", false}};
  return object.dump(2) + "\n";
}

void export_model(const ExportOptions& o) {
  const std::string from = newest_checkpoint(o.model);
  const Config config = read_config(from + "/config.json");
  const Model model(config);
  const Parameters& parameters = model.parameters();
  const SafetensorsFile file(from + "/model.safetensors");
  const StoredBuffer weights{"", &Parameters::master};
  check_tensors(file, parameters, {&weights, 1});

  // Vectors stay float32: they are few, and decays are sensitive.
  const DType dtype = o.dtype == "bf16" ? DType::bf16 : DType::f32;
  std::vector<Buffer> memory;
  std::vector<NamedTensor> tensors;
  for (const Parameter& p : parameters.list()) {
    Tensor tensor{nullptr, p.shape, p.shape.rank() > 1 ? dtype : DType::f32, Device::cpu};
    tensor.data = memory.emplace_back(Device::cpu, tensor.bytes()).data();
    file.read(p.name, tensor);
    tensors.push_back({p.name, tensor});
  }
  std::vector<CheckpointFile> files = {{"model.safetensors", [&](OutputFile& out) {
                                          write_safetensors(out, tensors, {{"format", "pt"}});
                                        }}};
  const auto add = [&](const std::string& name, const std::string& text) {
    files.push_back({name, [text](OutputFile& out) { out.write(text); }});
  };
  for (const auto& [name, text] : kPython) add(name, std::string(text));
  if (Tokenizer::lies_in(from)) {
    const Tokenizer tokenizer = Tokenizer::load(from);
    add(tokenizer.file(), tokenizer.content());
    add("tokenizer_config.json", tokenizer_config(tokenizer));
  }
  add("config.json", config_for_transformers(config, dtype));
  write_model(o.out, files);
  std::printf(
      "%s: %lld parameters in %s; AutoModelForCausalLM.from_pretrained(\"%s\", trust_remote_code=True)\n",
      o.out.c_str(), static_cast<long long>(parameters.count()), o.dtype.c_str(), o.out.c_str());
}

}  // namespace

void add_export(CLI::App& app) {
  const auto o = std::make_shared<ExportOptions>();
  CLI::App* command = app.add_subcommand("export", "Write a model for other programs");
  command->add_option("--model", o->model, "checkpoint directory")->required();
  command->add_option("--to", o->to, "hf: a folder for transformers, with PyTorch code and tokenizer")
      ->check(CLI::IsMember({"hf"}))
      ->capture_default_str();
  command->add_option("--out", o->out, "directory to make")->required();
  command->add_option("--dtype", o->dtype, "of the matrices; bf16 halves the file")
      ->check(CLI::IsMember({"f32", "bf16"}))
      ->capture_default_str();
  command->footer("Example: prism export --model runs/first --to hf --out exported --dtype bf16");
  command->callback([o] { export_model(*o); });
}

}  // namespace prism
