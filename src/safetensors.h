// The safetensors format: 8 bytes of header length, a JSON header {"name": {"dtype", "shape",
// "data_offsets"}}, then the tensors' bytes, little-endian and row-major.
#pragma once

#include <map>
#include <span>
#include <string>
#include <vector>

#include "src/files.h"
#include "tensor/tensor.h"

namespace prism {

struct NamedTensor {
  std::string name;
  Tensor tensor;  // on any device
};

// Wider types come first, so that every tensor is aligned; otherwise the tensors stand in the order given.
// The same input gives the same bytes. Throws when a name comes twice.
void write_safetensors(OutputFile& file, std::span<const NamedTensor> tensors,
                       const std::map<std::string, std::string>& metadata = {});
// The path then holds either the whole new file or what it held before.
void write_safetensors(const std::string& path, std::span<const NamedTensor> tensors,
                       const std::map<std::string, std::string>& metadata = {});

// A tensor as a file holds it.
struct StoredTensor {
  std::string dtype;  // F64, F32, BF16, F16 or I32
  Shape shape;
  uint64_t begin;  // bytes from the start of the file
};

// A file that is checked whole when it is opened, and not trusted: header length, JSON, dtypes, shapes
// against offsets, then overlaps, holes and trailing bytes. Nothing is allocated by a size that the file
// states, but the header, once it is known to be there. Errors name the file and the tensor.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::string& path);
  const std::string& path() const { return file_.path(); }
  // In the order of their bytes.
  const std::vector<std::string>& names() const { return names_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  bool contains(const std::string& name) const { return tensors_.contains(name); }
  const StoredTensor& info(const std::string& name) const;
  // Fills `target`, whose shape must be the stored one, converting to its dtype. F16 and the floating types
  // go to any floating type; I32 only to i32 and f64, which hold it exactly.
  void read(const std::string& name, Tensor target) const;

 private:
  InputFile file_;
  std::vector<std::string> names_;
  std::map<std::string, StoredTensor> tensors_;
  std::map<std::string, std::string> metadata_;
};

}  // namespace prism
