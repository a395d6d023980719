// Any bytes as a safetensors file: an Error of one line, or a file whose every tensor can be read. An input
// that begins with { gets its header's length (up to the first zero byte) put before it, since mutations
// hardly find it.
#include <algorithm>

#include "src/safetensors.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  using namespace prism;
  static const FuzzFile written("x.safetensors");
  std::string file_bytes(reinterpret_cast<const char*>(bytes), size);
  if (file_bytes.starts_with('{')) {
    const uint64_t length = std::min(file_bytes.find('\0'), size);
    file_bytes.insert(0, reinterpret_cast<const char*>(&length), sizeof length);
  }
  const std::string& path = written.write(file_bytes);
  only_errors(path + ": ", [&] {
    const SafetensorsFile file(path);
    std::vector<char> values;
    for (const std::string& name : file.names()) {
      const StoredTensor& stored = file.info(name);
      for (DType type : {DType::f64, DType::f32, DType::bf16, DType::i32}) {
        if ((stored.dtype == "I32") != (type == DType::i32) && !(stored.dtype == "I32" && type == DType::f64))
          continue;
        Tensor target{nullptr, stored.shape, type, Device::cpu};
        values.resize(target.bytes());
        target.data = values.data();
        file.read(name, target);
      }
    }
  });
  return 0;
}
