// A model and its directory (SPEC section 8): config.json, model.safetensors, the tokenizer's file.
#pragma once

#include <memory>
#include <optional>
#include <span>

#include "data/tokenizer.h"
#include "src/checkpoint.h"
#include "src/model.h"
#include "src/safetensors.h"

namespace prism {

// Opens the newest checkpoint in `dir`, whose tensors may be F32, F64, BF16 or F16. Before memory is taken
// for the weights it throws one line when config.json is no config, or when a tensor is missing from
// model.safetensors, foreign to the config, or of another shape.
std::unique_ptr<Model> load_model(const std::string& dir, Device device, DType dtype, bool training);

// The files of a model, F32 or F64 as its masters are. Without a tokenizer (a model of token shards alone)
// there is none. The model must outlive what is returned.
std::vector<CheckpointFile> model_files(const Model& model, const std::optional<Tokenizer>& tokenizer);
// Writes files into `dir`, which is made when it is not there; throws when a model lies there already.
void write_model(const std::string& dir, const std::vector<CheckpointFile>& files);
// A model's files in that way.
void save_model(const std::string& dir, const Model& model, const std::optional<Tokenizer>& tokenizer);

// One of the flat buffers in a file: NAME of its weights is stored as PREFIX + NAME.
struct StoredBuffer {
  std::string prefix;
  Tensor (Parameters::*view)(const Parameter&) const;
  bool trained_only = false;  // frozen weights are left out
};
std::vector<NamedTensor> stored_tensors(const Parameters& parameters, std::span<const StoredBuffer> buffers);
// Throws, naming the tensor, unless the file holds exactly these names with these shapes.
void check_tensors(const SafetensorsFile& file, const Parameters& parameters,
                   std::span<const StoredBuffer> buffers);

}  // namespace prism
