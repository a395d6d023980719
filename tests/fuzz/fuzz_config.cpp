// clang++ -std=c++20 -O2 -g -fsanitize=fuzzer,address,undefined -I. tests/fuzz/fuzz_config.cpp src/config.cpp
//   src/files.cpp
// Any bytes as config.json: an Error of one line, or a configuration that is written and read back equal.
#include <cstdlib>

#include "src/config.h"
#include "tensor/check.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  using namespace prism;
  try {
    const Config config = parse_config({reinterpret_cast<const char*>(bytes), size}, "config.json");
    if (config.feed_forward() < 1 || config.value_dim() < 1) std::abort();
    if (parse_config(to_json(config), "again") != config) std::abort();
  } catch (const Error& error) {
    const std::string message = error.what();
    if (message.find('\n') != std::string::npos || !message.starts_with("config.json: ")) std::abort();
  }
  return 0;
}
