// Documents to data sets and back: tokenize(), open_dataset(), and what --data names.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>

#include "src/sources.h"
#include "tests/data_helpers.h"
#include "tests/scratch.h"

using namespace prism;
namespace fs = std::filesystem;

const std::string kSample = "../shared/data/slimpajama/sample.jsonl.zst";

TEST_CASE(
    "tokenize: shards hold bos + ids of each document in order; counts agree with an independent count") {
  const Scratch scratch;
  const std::string in = scratch.write("in.jsonl.zst", compressed(many_documents())), out = scratch / "out";
  TokenizeOptions options = options_for({in}, out);
  options.shard_tokens = 1000;  // documents span shards
  options.command = "prism tokenize";
  int reports = 0;
  const TokenizeProgress done = tokenize(options, [&](const TokenizeProgress&) { ++reports; });
  CHECK(reports > 0);
  const std::vector<std::string> texts = read_all({in});
  const std::vector<int32_t> expected = expected_ids(texts);
  const Dataset data = open_dataset(out);
  CHECK(data.tokenizer.hash() == Tokenizer().hash());
  CHECK(all_ids(data.train) == expected);
  CHECK(data.val.size() == 0);
  for (const TokenSpan& span : data.train.spans()) {
    CHECK(span.width == 2);
    CHECK((span.count == 1000 || &span == &data.train.spans().back()));
  }
  size_t bytes = 0, empty = 0;
  for (const auto& text : texts) bytes += text.size(), empty += text.empty();
  const nlohmann::json json = description(out);
  CHECK(json.at("documents") == 500);
  CHECK(json.at("empty_documents") == empty);
  CHECK(json.at("bytes") == bytes);
  CHECK(json.at("tokens") == expected.size());
  CHECK(json.at("splits").at("train").at("tokens") == expected.size());
  CHECK(json.at("splits").at("val").at("documents") == 0);
  CHECK(json.at("sets").at("Set0").at("documents") == 167);
  CHECK(json.at("sources") == nlohmann::json{in});
  CHECK(done.tokens == static_cast<int64_t>(expected.size()));
  CHECK(done.empty == static_cast<int64_t>(empty));
}

TEST_CASE("tokenize: --skip-bad begins a document after a part of a text that it skips") {
  const Scratch scratch;
  std::string text = "\xff";
  for (int i = 0; text.size() < 6'000'000; ++i) text += cat("word ", i, "\n");
  TokenizeOptions options = options_for({scratch.write("a.txt", "first"), scratch.write("long.txt", text)},
                                        scratch / "sets/");  // as the shell completes it
  options.read.skip_bad = true;
  const TokenizeProgress done = tokenize(options, {});
  CHECK(done.skipped == 1);
  CHECK(done.documents == 2);
  CHECK(!fs::exists(scratch / "sets.partial"));
}

TEST_CASE(
    "tokenize: the output is byte-identical for 1 and 3 threads, with limits, sets and bad documents too") {
  const Scratch scratch;
  std::string lines = many_documents() + "not JSON\n";
  while (lines.size() < 2'000'000) lines += many_documents();
  const std::string in = scratch.write("in.jsonl", lines);
  std::string long_text;
  for (int i = 0; long_text.size() < 6'000'000; ++i) long_text += cat("word ", i, "\n");
  const std::string text = scratch.write("long.txt", long_text);
  const auto differs = [&](const std::function<void(TokenizeOptions&)>& change) {
    for (const int threads : {1, 3}) {
      TokenizeOptions options = options_for({in, text, in}, scratch / cat("out", threads));
      options.threads = threads;
      options.read.skip_bad = true;
      options.val_fraction = 0.1;
      change(options);
      tokenize(options, {});
    }
    const int status =
        std::system(cat("diff -r ", scratch / "out1", " ", scratch / "out3", " > /dev/null").c_str());
    fs::rename(scratch / "out1", scratch / "kept");
    fs::remove_all(scratch / "out3");
    const nlohmann::json json = description(scratch / "kept");
    fs::remove_all(scratch / "kept");
    return std::pair(status != 0, json);
  };
  const auto [plain, all] = differs([](TokenizeOptions&) {});
  CHECK(!plain);
  CHECK(all.at("skipped_documents") == 2);
  const int64_t half = all.at("tokens").get<int64_t>() / 2;
  const auto [limited, part] =
      differs([&](TokenizeOptions& o) { o.limit_tokens = half, o.shard_tokens = 77777; });
  CHECK(!limited);
  CHECK(part.at("tokens") >= half);
  // Documents have 400 bytes at most; the long text is cut at about 4 MiB, so its part may stand over by
  // that.
  CHECK(part.at("tokens") < half + (5 << 20));
  const auto [sets, some] = differs([](TokenizeOptions& o) { o.sets = {"Set1"}; });
  CHECK(!sets);
  CHECK(some.at("sets").size() == 1);
}

TEST_CASE("tokenize: validation documents are chosen by their text, whatever else is there") {
  const Scratch scratch;
  const auto val_of = [&](const std::string& lines) {
    TokenizeOptions options = options_for({scratch.write("in.jsonl", lines)}, scratch / "out");
    options.val_fraction = 0.2;
    tokenize(options, {});
    const Dataset data = open_dataset(scratch / "out");
    const std::vector<int32_t> ids = all_ids(data.val);
    fs::remove_all(scratch / "out");
    return ids;
  };
  std::string first, second;
  for (int i = 0; i < 500; ++i) (i < 250 ? first : second) += json_line(cat("document ", i));
  const auto alone = val_of(first), with_more = val_of(first + second);
  CHECK(alone == std::vector(with_more.begin(), with_more.begin() + static_cast<int64_t>(alone.size())));
  const auto documents = std::count(with_more.begin(), with_more.end(), 256);
  CHECK(std::abs(documents - 100) < 36);  // binomial, standard deviation 9: four of them
}

TEST_CASE("data sets: a shard or tokenizer that disagrees with dataset.json is named") {
  const Scratch scratch;
  const std::string in = scratch.write("in.jsonl", many_documents()), out = scratch / "out";
  tokenize(options_for({in}, out), {});
  const std::string shard = out + "/train_000000.bin", json = read_file(out + "/dataset.json");
  const auto count = open_shard(shard).count;
  {
    ShardWriter writer(shard, 2);
    const int32_t id = 1;
    writer.append(&id, 1);
    writer.finish();
  }
  const auto error = [&] { return error_of([&] { open_dataset(out); }); };
  CHECK(error() == cat(shard, ": dataset.json says ", count, " ids of 2 bytes, got 1 of 2"));
  fs::remove(shard);
  CHECK(error() == shard + ": No such file or directory");
  scratch.write("out/dataset.json", "{\"tokenizer\": 1}");
  CHECK(error().starts_with(out + "/dataset.json: not a data set's description: "));
  std::string other = json;
  other.replace(other.find("\"byte\""), 6, "\"0123\"");
  scratch.write("out/dataset.json", other);
  CHECK(error() == out + "/tokenizer.json: dataset.json says its hash is \"0123\", got byte");
}

TEST_CASE("data sets: each malformed dataset.json gives one line with its file and what is wrong") {
  const Scratch scratch;
  const std::string out = scratch / "out";
  tokenize(options_for({scratch.write("in.jsonl", json_line("abc"))}, out), {});
  const std::string json = read_file(out + "/dataset.json");
  const auto with = [&](const char* at, const nlohmann::json& value) {
    nlohmann::json changed = nlohmann::json::parse(json);
    changed[nlohmann::json::json_pointer(at)] = value;
    return changed.dump();
  };
  const auto without = [&](const char* parent, const char* key) {
    nlohmann::json changed = nlohmann::json::parse(json);
    changed[nlohmann::json::json_pointer(parent)].erase(key);
    return changed.dump();
  };
  const std::string shard = "/splits/train/shards/0", file = shard + "/file", tokens = shard + "/tokens";
  const std::string description = "/dataset.json: not a data set's description: ";
  const std::string name = "/dataset.json: expected the name of a file beside it, got ";
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"", description},
      {"{", description},
      {json.substr(0, json.size() / 2), description},
      {"\xff", description},
      {"[]", description},
      {"3", description},
      {"{\"x\": 1e999}", description},
      {json + "}", description},
      {without("", "tokenizer"), description},
      {without("/tokenizer", "hash"), description},
      {without("", "bytes_per_id"), description},
      {without("", "splits"), description},
      {without("/splits", "train"), description},
      {without("/splits", "val"), description},
      {without("/splits/train", "shards"), description},
      {without(shard.c_str(), "file"), description},
      {without(shard.c_str(), "tokens"), description},
      {with("/tokenizer/hash", 3), description},
      {with("/tokenizer/hash", "a\nb"), "/tokenizer.json: dataset.json says its hash is \"a\\nb\", got byte"},
      {with("/splits/train/shards", {1}), description},
      {with(file.c_str(), nullptr), description},
      {with(file.c_str(), ""), name + "\"\""},
      {with(file.c_str(), "../train_000000.bin"), name + "\"../train_000000.bin\""},
      {with(file.c_str(), "a\nb"), name + "\"a\\nb\""},
      {with(file.c_str(), std::string("a\0b", 3)), name + "\"a\\u0000b\""},
      {with(file.c_str(), "absent.bin"), "/absent.bin: No such file or directory"},
      {with(file.c_str(), "."), "/.: expected a file of token ids, got another thing"},
      {with(file.c_str(), "tokenizer.json"), "/tokenizer.json: byte 0: expected the magic "},
      {with(tokens.c_str(), 1e30), "/dataset.json: tokens: expected an integer, got a fraction"},
      {with(tokens.c_str(), "4"), "/dataset.json: tokens: expected an integer, got a string"},
      {with(tokens.c_str(), 5), "/train_000000.bin: dataset.json says 5 ids of 2 bytes, got 4 of 2"},
      {with(tokens.c_str(), -1), "/train_000000.bin: dataset.json says -1 ids of 2 bytes, got 4 of 2"},
      {with("/bytes_per_id", 4), "/train_000000.bin: dataset.json says 4 ids of 4 bytes, got 4 of 2"},
      {with("/bytes_per_id", (int64_t{1} << 32) + 2),
       "/train_000000.bin: dataset.json says 4 ids of 4294967298"},
      {with("/bytes_per_id", 2.0), "/dataset.json: bytes_per_id: expected an integer, got a fraction"},
  };
  scratch.write("out/dataset.json", json);
  CHECK(all_ids(open_dataset(out).train) == expected_ids({"abc"}));
  for (const auto& [content, expected] : cases) {
    CAPTURE(content);
    scratch.write("out/dataset.json", content);
    const std::string error = error_of([&] { open_dataset(out); });
    CAPTURE(error);
    CHECK(error.starts_with(out + expected));
    CHECK(error.find('\n') == error.npos);
  }
}

TEST_CASE("sources: the last tenth of each file is held out, data sets bring their own validation") {
  const Scratch scratch;
  const std::string a = scratch.write("t/a.txt", std::string(99, 'a')),
                    b = scratch.write("t/b.json", std::string(49, 'b'));
  Sources sources = open_sources({scratch / "t"}, {});
  REQUIRE(sources.train.size() == 1);
  CHECK(sources.tokenizer->name() == std::string("byte"));
  std::vector<int32_t> train = {256}, val = {256};
  train.insert(train.end(), 89, 'a'), val.insert(val.end(), 10, 'a');
  train.push_back(256), val.push_back(256);
  train.insert(train.end(), 44, 'b'), val.insert(val.end(), 5, 'b');
  CHECK(all_ids(sources.train[0].stream) == train);
  CHECK(all_ids(sources.val) == val);
  SourceOptions whole;
  whole.hold_out = false;
  sources = open_sources({a}, {}, whole);
  CHECK(all_ids(sources.val) == expected_ids({std::string(99, 'a')}));
  CHECK(all_ids(sources.train[0].stream) == all_ids(sources.val));

  TokenizeOptions options = options_for({scratch.write("in.jsonl", many_documents())}, scratch / "set");
  options.val_fraction = 0.3;
  tokenize(options, {});
  const Dataset data = open_dataset(scratch / "set");
  sources = open_sources({scratch / "set:3", a + ":1", (scratch / "set") + "/train_000000.bin:0.5"}, {});
  REQUIRE(sources.train.size() == 3);
  CHECK(sources.train[0].weight == 3);
  CHECK(sources.train[2].weight == 0.5);
  CHECK(all_ids(sources.train[0].stream) == all_ids(data.train));
  CHECK(sources.train[2].stream.size() == data.train.size() - data.train.size() / 10);
  CHECK(sources.val.size() == data.val.size() + 1 + 10 + data.train.size() / 10);
  CHECK(error_of([&] {
          open_sources({a + ":1", b}, {});
        }) == b + ": expected a weight for every path or for none, as in a:0.7 b:0.3");
  CHECK(error_of([&] { open_sources({a + ":-1"}, {}); }) == a + ":-1: expected a weight above 0");
  CHECK(error_of([&] { open_sources({}, {}); }) == "no data: expected at least one path");
  CHECK(error_of([&] { open_sources({a + ":x"}, {}); }) == a + ":x: no such file or directory");
  int handed = 0;
  const std::string model = scratch.write("m.model", Tokenizer::train(300, [&](std::string& text) {
                                            text = many_documents();
                                            return handed++ < 1;
                                          }));
  const Tokenizer other = Tokenizer::load(model);
  CHECK(error_of([&] { open_sources({scratch / "set"}, other); }) ==
        cat(scratch / "set", ": expected data of the tokenizer sentencepiece ", other.hash(),
            ", got byte byte"));
}

TEST_CASE("tokenize: the sample's counts are those of the sample") {
  const std::string mistral = "../shared/data/tokenizer/mistral-v1.model";
  if (!fs::exists(kSample) || !fs::exists(mistral)) {
    MESSAGE("skipped: " << kSample << " or " << mistral << " is not there");
    return;
  }
  const Scratch scratch;
  TokenizeOptions options = options_for({kSample}, scratch / "out");
  options.tokenizer = mistral;
  options.threads = 2;
  options.val_fraction = 0.01;
  const TokenizeProgress done = tokenize(options, {});
  // Counted with Python's json module and the SentencePiece library: 3,460,713 ids and a bos for each
  // document.
  CHECK(done.documents == 4262);
  CHECK(done.bytes == 13072772);
  CHECK(done.tokens == 3460713 + 4262);
  CHECK(description(scratch / "out").at("sets").at("RedPajamaStackExchange").at("documents") == 2000);
  const Dataset data = open_dataset(scratch / "out");
  CHECK(data.train.size() + data.val.size() == done.tokens);
  int64_t documents = 0;
  for (int64_t at = 0; at < data.val.size(); at = data.val.find(data.tokenizer.bos(), at + 1)) ++documents;
  CHECK(description(scratch / "out").at("splits").at("val").at("documents") == documents);
}
