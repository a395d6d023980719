// Any bytes as a file of documents, read as its first byte says: j as .json, t as plain text, others as
// .jsonl, where an upper-case letter asks for whole objects. An Error of one line, or documents of valid
// UTF-8.
#include <cctype>

#include "data/text.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  using namespace prism;
  if (size == 0) return 0;
  static const FuzzFile lines("x.jsonl"), objects("x.json"), text("x.txt");
  const int how = std::tolower(bytes[0]);
  const std::string& path = (how == 'j'   ? objects
                             : how == 't' ? text
                                          : lines)
                                .write({reinterpret_cast<const char*>(bytes) + 1, size - 1});
  for (const bool skip_bad : {false, true})
    only_errors(path + ": ", [&] {
      ReadOptions options;
      options.skip_bad = skip_bad;
      options.field = std::isupper(bytes[0]) ? "" : bytes[0] == 'm' ? "meta.text" : "text";
      DocumentReader reader({path}, options);
      for (Document document; reader.next(document);)
        if (find_invalid_utf8(document.text) != std::string::npos) std::abort();
      if (!skip_bad && reader.skipped() > 0) std::abort();
    });
  return 0;
}
