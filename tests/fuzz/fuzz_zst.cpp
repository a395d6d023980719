// Any bytes as documents compressed by zstd: an Error of one line, or documents of valid UTF-8.
#include "data/text.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  using namespace prism;
  static const FuzzFile file("x.jsonl.zst");
  const std::string& path = file.write({reinterpret_cast<const char*>(bytes), size});
  only_errors(path + ": ", [&] {
    DocumentReader reader({path}, {});
    for (Document document; reader.next(document);)
      if (find_invalid_utf8(document.text) != std::string::npos) std::abort();
  });
  return 0;
}
