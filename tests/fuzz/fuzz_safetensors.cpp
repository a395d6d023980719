// clang++ -std=c++20 -O2 -g -fsanitize=fuzzer,address,undefined -I. tests/fuzz/fuzz_safetensors.cpp
//   src/safetensors.cpp src/files.cpp tensor/device.cpp
// Any bytes as a safetensors file: an Error of one line, or a file whose every tensor can be read. An input
// that begins with { gets its header's length (up to the first zero byte) put before it, since mutations
// hardly find it.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

#include "src/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  using namespace prism;
  static const int memory = ::memfd_create("fuzz", 0);
  static const std::string path = cat("/proc/self/fd/", memory);
  std::string file_bytes(reinterpret_cast<const char*>(bytes), size);
  if (file_bytes.starts_with('{')) {
    const uint64_t length = std::min(file_bytes.find('\0'), size);
    file_bytes.insert(0, reinterpret_cast<const char*>(&length), sizeof length);
  }
  const auto count = static_cast<ssize_t>(file_bytes.size());
  if (::ftruncate(memory, 0) != 0 || ::pwrite(memory, file_bytes.data(), file_bytes.size(), 0) != count)
    std::abort();
  try {
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
  } catch (const Error& error) {
    const std::string message = error.what();
    if (message.find('\n') != std::string::npos || !message.starts_with(path + ": ")) std::abort();
  }
  return 0;
}
