// Any bytes as config.json: an Error of one line, or a configuration that is written and read back equal.
#include "src/config.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  using namespace prism;
  only_errors("config.json: ", [&] {
    const Config config = parse_config({reinterpret_cast<const char*>(bytes), size}, "config.json");
    if (config.feed_forward() < 1 || config.value_dim() < 1) std::abort();
    if (parse_config(to_json(config), "again") != config) std::abort();
  });
  return 0;
}
