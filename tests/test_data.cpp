// Documents to data sets and back: reading, shards, tokenize(), and every bad input with its one line.
#include <doctest/doctest.h>
#include <sys/resource.h>
#include <zstd.h>

#include <csignal>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "data/dataset.h"
#include "src/sources.h"
#include "tests/scratch.h"

using namespace prism;
namespace fs = std::filesystem;

namespace {

const std::string kSample = "../shared/data/slimpajama/sample.jsonl.zst";

std::string compressed(const std::string& text) {
  std::string out(ZSTD_compressBound(text.size()), '\0');
  out.resize(ZSTD_compress(out.data(), out.size(), text.data(), text.size(), 3));
  return out;
}

std::string json_line(const std::string& text, const std::string& set = "") {
  nlohmann::json object = {{"text", text}};
  if (!set.empty()) object["meta"]["redpajama_set_name"] = set;
  return object.dump() + "\n";
}

std::vector<std::string> read_all(const std::vector<std::string>& names, const ReadOptions& options = {}) {
  DocumentReader reader(list_text_files(names), options);
  std::vector<std::string> texts;
  for (Document document; reader.next(document);) {
    if (document.continues)
      texts.back() += document.text;
    else
      texts.push_back(document.text);
  }
  return texts;
}

template <class Fn>
std::string error_of(const Fn& fn) {
  try {
    fn();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

TokenizeOptions options_for(const std::vector<std::string>& inputs, const std::string& out) {
  TokenizeOptions options;
  options.inputs = inputs;
  options.out = out;
  options.val_fraction = 0;
  return options;
}

std::vector<int32_t> all_ids(const TokenStream& stream) {
  std::vector<int32_t> ids(static_cast<size_t>(stream.size()));
  stream.copy(0, stream.size(), INT32_MAX, ids.data());
  return ids;
}

nlohmann::json description(const std::string& directory) {
  return nlohmann::json::parse(read_file(directory + "/dataset.json"));
}

// The ids of documents as tokenize() lays them out.
std::vector<int32_t> expected_ids(const std::vector<std::string>& texts) {
  std::vector<int32_t> ids;
  for (const auto& text : texts) {
    if (text.empty()) continue;
    ids.push_back(256);
    Tokenizer().encode(text, ids);
  }
  return ids;
}

// 500 documents of 0 to 400 bytes, many lengths, in three sets.
std::string many_documents() {
  std::string lines;
  for (int i = 0; i < 500; ++i) {
    std::string text;
    for (int j = 0; j < i * 7 % 80; ++j) text += cat("w", i * j % 97, j % 9 ? " " : "\n");
    lines += json_line(text, cat("Set", i % 3));
  }
  return lines;
}

}  // namespace

TEST_CASE("reading: every form gives the same documents") {
  const Scratch scratch;
  const std::vector<std::string> texts = {"one", "tw\u00f6 {\"}\\", "", "three\nlines\r\n"};
  std::string lines, objects;
  for (const auto& text : texts)
    lines += json_line(text), objects += cat(objects.empty() ? "" : ",", json_line(text));
  std::string crlf = lines;
  for (size_t at = 0; (at = crlf.find("}\n", at)) != crlf.npos; at += 3) crlf.insert(at + 1, 1, '\r');
  const std::string half = lines.substr(0, 20), rest = lines.substr(20);
  std::string pretty;
  for (const auto& text : texts)
    pretty += nlohmann::json{{"a", {{"b", "}"}}}, {"text", text}}.dump(2) + "\n\n";
  for (const auto& path : {
           scratch.write("a.jsonl", lines),
           scratch.write("no-newline.jsonl", lines.substr(0, lines.size() - 1)),
           scratch.write("bom.jsonl", "\xef\xbb\xbf" + lines),
           scratch.write("crlf.jsonl", crlf),
           scratch.write("blank.jsonl", "\n \r\n" + lines + "\n\n\t\n"),
           scratch.write("a.jsonl.zst", compressed(lines)),
           scratch.write("frames.jsonl.zst", compressed(half) + compressed("") + compressed(rest)),
           scratch.write("list.json", cat("[", objects, "]")),
           scratch.write("bom.json", cat("\xef\xbb\xbf[", objects, "]\n")),
           scratch.write("row.json", lines),
           scratch.write("pretty.json", pretty),
           scratch.write("list.json.zst", compressed(cat("[", objects, "]"))),
       })
    CHECK_MESSAGE(read_all({path}) == texts, path);
  const std::string text = "caf\u00e9\r\n\r\nend";
  CHECK(read_all({scratch.write("a.txt", text)}) == std::vector{text});
  CHECK(read_all({scratch.write("bom.txt", "\xef\xbb\xbf" + text)}) == std::vector{text});
  CHECK(read_all({scratch.write("a.txt.zst", compressed(text))}) == std::vector{text});
  CHECK(read_all({scratch.write("a.py", text)}) == std::vector{text});
  ReadOptions plain;
  plain.json_files = false;
  CHECK(read_all({scratch / "row.json"}, plain) == std::vector{lines});
  ReadOptions nested;
  nested.field = "a.b";
  CHECK(read_all({scratch / "pretty.json"}, nested) == std::vector<std::string>(4, "}"));
}

TEST_CASE("reading: a long plain text comes in parts that joined are the file") {
  const Scratch scratch;
  std::string text = "\xef\xbb\xbf";
  for (int i = 0; text.size() < 9'000'000; ++i) text += cat("line ", i, " caf\u00e9\n");
  ReadOptions options;
  options.cut = [](std::string_view part) { return Tokenizer().cut(part); };
  DocumentReader reader({scratch.write("long.txt.zst", compressed(text))}, options);
  std::string joined;
  int parts = 0;
  for (Document document; reader.next(document); ++parts) {
    CHECK(document.text.size() < 5'000'000);
    CHECK(document.continues == (parts > 0));
    joined += document.text;
  }
  CHECK(parts == 3);
  CHECK(joined == text.substr(3));
  CHECK(reader.fraction() == 1);
  options.cut = nullptr;
  const std::string solid = scratch.write("solid.txt", std::string(33 << 20, 'x'));
  CHECK(error_of([&] { read_all({solid}, options); }) ==
        solid + ": byte 0: expected a space or line end to cut this text at");
}

TEST_CASE("reading: directories are sorted, hidden and non-text files left out; globs match") {
  const Scratch scratch;
  scratch.write("d/b.txt", "b");
  scratch.write("d/a/z.md", "z");
  scratch.write("d/c.jsonl", json_line("c"));
  scratch.write("d/.hidden", "h");
  scratch.write("d/.git/x.txt", "h");
  scratch.write("d/nul.txt", std::string("n\0l", 3));
  scratch.write("d/latin1.txt", "caf\xe9 x");
  scratch.write("d/model.bin.zst", compressed("m"));
  CHECK(read_all({scratch / "d"}) == std::vector<std::string>{"z", "b", "c"});
  CHECK(list_text_files({scratch / "d/*.txt"}).size() == 3);
}

TEST_CASE("bad input: each gives one line with its file and place, and --skip-bad goes on where it can") {
  const Scratch scratch;
  const std::string good = json_line("good");
  const std::string zst = compressed(many_documents());
  std::string corrupt = zst;
  for (size_t i = corrupt.size() / 2; i < corrupt.size() / 2 + 40; ++i)
    corrupt[i] = static_cast<char>(~corrupt[i]);
  const std::string pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n";
  struct Case {
    std::string name, content, expected;  // "*" ends an expectation of which only the beginning is certain
    bool skippable = false;
  };
  const std::string lfs = "a Git LFS pointer lies in place of the data; fetch it with `git lfs pull`";
  const std::vector<Case> cases = {
      {"half.jsonl", good + "{\"text\": \"half", "line 2: not JSON at its byte 15", true},
      {"word.jsonl", good + good + "hello\n" + good, "line 3: not JSON at its byte 1", true},
      {"two.jsonl", "{\"text\": \"a\"} {\"text\": \"b\"}\n" + good, "line 1: not JSON at its byte 15", true},
      {"surrogate.jsonl", good + "{\"text\": \"\\ud800\"}\n", "line 2: not JSON at its byte 17", true},
      {"control.jsonl", good + "{\"text\": \"a\tb\"}\n", "line 2: not JSON at its byte 12", true},
      {"missing.jsonl", good + "\n{\"txt\": \"a\"}\n", "line 3: no field \"text\"", true},
      {"number.jsonl", good + "{\"text\": 3}\n", "line 2: field \"text\": expected a string, got number",
       true},
      {"null.jsonl", "{\"text\": null}\n" + good, "line 1: field \"text\": expected a string, got null",
       true},
      {"list.jsonl", "[\"text\"]\n" + good, "line 1: no field \"text\"", true},
      {"utf8.jsonl", good + "{\"text\": \"caf\xe9\"}\n", "line 2: invalid UTF-8 at its byte 15", true},
      {"missing.json", cat("[", good, ", {\"a\": 1}]"), "object 2: no field \"text\"", true},
      {"open.json", cat("[", good), "object 2: truncated: the list has no end"},
      {"cut.json", cat("[", good, ", {\"text\": \"ab"), "object 2: not JSON at its byte 13"},
      {"word.json", "{\"text\": \"a\"} hello", "object 2: not JSON"},
      {"utf8.json", "{\"text\": \"\xff\"}", "object 1: invalid UTF-8 at its byte 11"},
      {"utf8.txt", "caf\xc3\xa9 caf\xe9 x", "byte 9: invalid UTF-8"},
      {"nul-utf16.txt", std::string("\xff\xfeh\0i\0", 6), "byte 0: invalid UTF-8"},
      {"truncated.jsonl.zst", zst.substr(0, zst.size() / 2),
       cat("truncated: it ends at byte ", zst.size() / 2, ", inside a zstd frame")},
      {"second.jsonl.zst", zst + zst.substr(0, 9), "truncated: it ends at byte *"},
      {"empty.jsonl.zst", "", "truncated: it ends at byte 0, inside a zstd frame"},
      {"corrupt.jsonl.zst", corrupt, "corrupt zstd data before byte *"},
      {"plain.txt.zst", "not compressed", "corrupt zstd data before byte *"},
      {"lfs.jsonl", pointer, lfs},
      {"lfs.txt.zst", pointer, lfs},
      {"empty.jsonl", "", "tokenize: no tokens in 1 files, the first *"},
      {"empty.txt", "", "tokenize: no tokens in 1 files, the first *"},
      {"blank.jsonl", "\n\r\n", "tokenize: no tokens in 1 files, the first *"},
      {"no-text.jsonl", json_line("") + json_line(""), "tokenize: no tokens in 1 files, the first *"},
  };
  for (const Case& c : cases) {
    CAPTURE(c.name);
    const std::string path = scratch.write(c.name, c.content), out = scratch / "out";
    const bool begins = c.expected.back() == '*';
    const std::string where = c.expected.starts_with("tokenize") ? "" : path + ": ";
    const std::string expected = where + c.expected.substr(0, c.expected.size() - begins);
    for (const int threads : {1, 3}) {
      TokenizeOptions options = options_for({path}, out);
      options.threads = threads;
      const std::string error = error_of([&] { tokenize(options, {}); });
      CHECK((begins ? error.substr(0, expected.size()) : error) == expected);
      CHECK(error.find('\n') == error.npos);
      CHECK(!fs::exists(out));
      CHECK(!fs::exists(out + ".partial"));
    }
    if (!c.skippable) continue;
    TokenizeOptions options = options_for({path}, out);
    options.read.skip_bad = true;
    const TokenizeProgress done = tokenize(options, {});
    CHECK(done.skipped == 1);
    CHECK(done.documents >= 1);
    CHECK(description(out).at("skipped_documents") == 1);
    fs::remove_all(out);
  }
}

TEST_CASE("bad input: names that give nothing, an output in use, a full disk") {
  const Scratch scratch;
  const std::string in = scratch.write("in.jsonl", many_documents()), out = scratch / "out";
  const auto error_for = [&](const TokenizeOptions& options) {
    return error_of([&] { tokenize(options, {}); });
  };
  CHECK(error_for(options_for({scratch / "absent.jsonl"}, out)) ==
        (scratch / "absent.jsonl") + ": no such file or directory");
  CHECK(error_for(options_for({scratch / "*.txt"}, out)) ==
        (scratch / "*.txt") + ": no such file or directory");
  fs::create_directory(scratch / "none");
  CHECK(error_for(options_for({scratch / "none"}, out)) ==
        (scratch / "none") + ": no text files in this directory");
  CHECK(error_for(options_for({}, out)) == "tokenize: no input");
  TokenizeOptions options = options_for({in}, out);
  options.tokenizer = scratch.write("x.model", "x");
  CHECK(error_for(options) ==
        (scratch / "x.model") + ": expected a SentencePiece model, and it does not load as one");
  options = options_for({in}, out);
  options.sets = {"RedPajamaC5"};
  CHECK(error_for(options) ==
        "tokenize: no tokens in 1 files, the first " + in + "; expected documents of the set RedPajamaC5");
  scratch.write("used/dataset.json", "{}");
  CHECK(error_for(options_for({in}, scratch / "used")) ==
        (scratch / "used") + ": expected a directory that is empty or does not exist yet");
  CHECK(read_file(scratch / "used/dataset.json") == "{}");

  // A limit on the size of files fails writes as a full disk does.
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  const rlimit small{20'000, before.rlim_max};
  setrlimit(RLIMIT_FSIZE, &small);
  const std::string error = error_for(options_for({in}, out));
  setrlimit(RLIMIT_FSIZE, &before);
  CHECK(error == out + ".partial/train_000000.bin: File too large");
  CHECK(!fs::exists(out));
  CHECK(!fs::exists(out + ".partial"));
}

TEST_CASE("shards: what is written is read, in both widths; every damage is named") {
  const Scratch scratch;
  const std::vector<int32_t> ids = {0, 1, 65535, 7};
  for (const int width : {2, 4}) {
    const std::string path = scratch / "a.bin";
    std::vector<int32_t> wide = ids;
    if (width == 4) wide[3] = 1 << 20;
    {
      ShardWriter writer(path, width);
      writer.append(wide.data(), 3);
      CHECK(error_of([&] { open_shard(path); }) != "no error");
      writer.append(wide.data() + 3, 1);
      writer.finish();
    }
    TokenStream stream;
    stream.append(open_shard(path));
    CHECK(all_ids(stream) == wide);
    CHECK(stream.find(65535, 0) == 2);
    CHECK(stream.find(65535, 3) == 4);
    const std::string whole = read_file(path);
    CHECK(whole.size() == 1024 + 4 * static_cast<size_t>(width));
    std::string version_one = whole;
    version_one[4] = 1;  // the low byte of the second int32
    CHECK(open_shard(scratch.write("one.bin", version_one)).count == 4);
    const auto damaged = [&](const std::string& content) {
      const std::string name = scratch.write("damaged.bin", content);
      return error_of([&] { open_shard(name); }).substr(name.size() + 2);
    };
    const auto with_int = [&](size_t at, int32_t value) {
      std::string content = whole;
      content.replace(at * 4, 4, reinterpret_cast<const char*>(&value), 4);
      return damaged(content);
    };
    const std::string body = std::to_string(4 * width);
    CHECK(with_int(0, 12345) == "byte 0: expected the magic 20240520 or 20240801, got 12345");
    CHECK(with_int(1, 3) ==
          std::string("byte 4: expected version ") + (width == 2 ? "1" : "7 or 1") + ", got 3");
    CHECK(with_int(2, 5) ==
          cat("byte 8: the header says 5 ids, expected 4 (", body, " bytes of ", width, " an id follow)"));
    CHECK(with_int(2, 3).starts_with("byte 8: the header says 3 ids, expected 4"));
    CHECK(with_int(2, -1).starts_with("byte 8: the header says -1 ids, expected 4"));
    CHECK(
        damaged(whole.substr(0, whole.size() - 1)).starts_with("byte 8: the header says 4 ids, expected 3"));
    CHECK(damaged(whole.substr(0, 1000)) == "truncated: expected a header of 1024 bytes, got a file of 1000");
    CHECK(damaged("") == "expected a file of token ids, got an empty one");
    CHECK(damaged("version https://git-lfs.github.com/spec/v1\n").starts_with("a Git LFS pointer"));
  }
  CHECK(error_of([&] { open_shard(scratch / "absent.bin"); }) ==
        (scratch / "absent.bin") + ": No such file or directory");
  const TokenSpan raw = open_shard(scratch.write("raw.bin", std::string("\1\0\2\0\xff\xff", 6)), true);
  CHECK(raw.count == 3);
  CHECK(raw[2] == 65535);
  const std::string odd = scratch.write("odd.bin", "abc");
  CHECK(error_of([&] { open_shard(odd, true); }) ==
        odd + ": expected uint16 ids, got an odd number of bytes, 3");
}

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
  CHECK(error() == out + "/tokenizer.json: dataset.json says its hash is 0123, got byte");
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
