#include "src/model_files.h"

#include <filesystem>
#include <set>

namespace prism {

namespace {

const StoredBuffer kMasters{"", &Parameters::master};

// What a tied or untied head means for the one tensor that depends on it.
std::string hint(const std::string& name) {
  return name != "lm_head.weight" ? "" : " (tie_word_embeddings true: the embedding serves as the head)";
}

}  // namespace

std::vector<NamedTensor> stored_tensors(const Parameters& parameters, std::span<const StoredBuffer> buffers) {
  std::vector<NamedTensor> tensors;
  for (const StoredBuffer& buffer : buffers)
    for (const Parameter& p : parameters.list())
      if (!buffer.trained_only || !p.frozen)
        tensors.push_back({buffer.prefix + p.name, (parameters.*buffer.view)(p)});
  return tensors;
}

void check_tensors(const SafetensorsFile& file, const Parameters& parameters,
                   std::span<const StoredBuffer> buffers) {
  std::set<std::string> expected;
  for (const StoredBuffer& buffer : buffers)
    for (const Parameter& p : parameters.list()) {
      if (buffer.trained_only && p.frozen) continue;
      const std::string name = *expected.insert(buffer.prefix + p.name).first;
      PRISM_CHECK(file.contains(name), file.path(), ": tensor ", name, ": expected ", p.shape,
                  " by config.json, got none", hint(p.name));
      PRISM_CHECK(file.info(name).shape == p.shape, file.path(), ": tensor ", name, ": expected ", p.shape,
                  " by config.json, got ", file.info(name).shape);
    }
  for (const std::string& name : file.names())
    PRISM_CHECK(expected.contains(name), file.path(), ": tensor ", name,
                ": expected none by config.json, got ", file.info(name).shape, hint(name));
}

std::unique_ptr<Model> load_model(const std::string& dir, Device device, DType dtype, bool training) {
  const std::string newest = newest_checkpoint(dir);
  const Config config = read_config(newest + "/config.json");
  const SafetensorsFile file(newest + "/model.safetensors");
  check_tensors(file, Model(config).parameters(), {&kMasters, 1});
  auto model = std::make_unique<Model>(config, device, dtype, training);
  for (const NamedTensor& t : stored_tensors(model->parameters(), {&kMasters, 1}))
    file.read(t.name, t.tensor);
  model->parameters().refresh_copies();
  return model;
}

std::vector<CheckpointFile> model_files(const Model& model, const std::optional<Tokenizer>& tokenizer) {
  std::vector<CheckpointFile> files = {
      {"config.json", [&model](OutputFile& file) { file.write(to_json(model.config())); }},
      {"model.safetensors", [&model](OutputFile& file) {
         // transformers refuses a file that does not name a framework.
         write_safetensors(file, stored_tensors(model.parameters(), {&kMasters, 1}), {{"format", "pt"}});
       }}};
  if (tokenizer)
    files.push_back(
        {tokenizer->file(), [text = tokenizer->content()](OutputFile& file) { file.write(text); }});
  return files;
}

void write_model(const std::string& dir, const std::vector<CheckpointFile>& files) {
  for (const char* name : {"config.json", "model.safetensors"})
    PRISM_CHECK(!std::filesystem::exists(dir + "/" + name), dir, ": expected no model, got ", name);
  std::error_code error;
  std::filesystem::create_directories(dir, error);
  PRISM_CHECK(!error, dir, ": cannot create the directory: ", error.message());
  for (const CheckpointFile& file : files) replace_file(dir + "/" + file.name, file.write);
}

void save_model(const std::string& dir, const Model& model, const std::optional<Tokenizer>& tokenizer) {
  write_model(dir, model_files(model, tokenizer));
}

}  // namespace prism
