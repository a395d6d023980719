// Any bytes as a data set: dataset.json up to the first zero byte, the rest its first shard. Zeros that fill
// the shard's header are put after its first 12 bytes, since mutations hardly find them. An Error of one
// line, or ids that can be read.
#include <algorithm>

#include "data/dataset.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  using namespace prism;
  static const FuzzFile json("dataset.json"), tokenizer("tokenizer.json"), first("train_000000.bin");
  static const std::string with_tokenizer = tokenizer.write("{\"type\": \"byte\"}");
  const std::string_view input(reinterpret_cast<const char*>(bytes), size);
  const size_t end = std::min(input.find('\0'), size);
  json.write(input.substr(0, end));
  std::string shard(input.substr(std::min(end + 1, size)));
  if (shard.size() >= 12) shard.insert(12, 1024 - 12, '\0');
  const std::string& path = first.write(shard);
  const auto read = [](const TokenStream& stream) {
    std::vector<int32_t> ids(static_cast<size_t>(stream.size()));
    if (stream.find(256, 0) < 0) std::abort();
    stream.check_ids(258, 1);
    stream.copy(0, stream.size(), 258, ids.data());
    if (std::any_of(ids.begin(), ids.end(), [](int32_t id) { return id < 0 || id >= 258; })) std::abort();
  };
  only_errors(fuzz_directory() + "/", [&] {
    const Dataset data = open_dataset(fuzz_directory());
    only_errors(fuzz_directory() + "/", [&] { read(data.train); });
    read(data.val);
  });
  for (const bool raw_u16 : {false, true})
    only_errors(path + ": ", [&] {
      TokenStream stream;
      stream.append(open_shard(path, raw_u16));
      read(stream);
    });
  return 0;
}
