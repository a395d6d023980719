// Reading documents, shards, and every bad input with its one line.
#include <doctest/doctest.h>
#include <sys/resource.h>

#include <csignal>
#include <filesystem>

#include "tests/data_helpers.h"
#include "tests/scratch.h"

using namespace prism;
namespace fs = std::filesystem;

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
      {"bare.jsonl", good + "{text: \"a\"}\n", "line 2: not JSON at its byte 3", true},
      {"single.jsonl", good + "{'text': 'a'}\n", "line 2: not JSON at its byte 2", true},
      {"comma.jsonl", good + "{\"text\": \"a\",}\n", "line 2: not JSON at its byte 14", true},
      {"nan.jsonl", good + "{\"text\": NaN}\n", "line 2: not JSON at its byte 10", true},
      {"escape.jsonl", good + "{\"text\": \"\\x\"}\n", "line 2: not JSON at its byte 12", true},
      {"zero.jsonl", good + std::string("\0\n", 2), "line 2: not JSON at its byte 1", true},
      {"huge.jsonl", good + "{\"text\": \"a\", \"x\": 1e999}\n", "line 2: a number beyond those of 64 bits",
       true},
      {"huge.json", "{\"text\": \"a\", \"x\": 1e999}", "object 1: a number beyond those of 64 bits"},
      {"string.jsonl", "\"text\"\n" + good, "line 1: no field \"text\"", true},
      {"object.jsonl", good + "{\"text\": {\"text\": \"a\"}}\n",
       "line 2: field \"text\": expected a string, got object", true},
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

TEST_CASE("bad input: objects nested without end are refused where they are wanted whole") {
  const Scratch scratch;
  const auto nested = [&](size_t levels) {  // the object one of them
    const std::string lists = std::string(levels - 1, '[') + std::string(levels - 1, ']');
    return scratch.write("deep.jsonl", cat("{\"x\": ", lists, "}"));
  };
  ReadOptions whole;
  whole.field = "";
  CHECK(read_all({nested(100)}, whole).size() == 1);
  const std::string path = nested(101),
                    error = path + ": line 1: lists and objects nested deeper than 100 levels";
  CHECK(error_of([&] { read_all({path}, whole); }) == error);
  CHECK(error_of([&] { read_all({nested(300'000)}, whole); }) == error);
}

TEST_CASE(
    "bad input: a zstd file cut at any length, or with any byte changed, is named, or nothing is lost") {
  const Scratch scratch;
  const std::string text = json_line("a text that is said twice, a text that is said twice, and 0123456789");
  std::string zst(ZSTD_compressBound(text.size()), '\0');
  const std::unique_ptr<ZSTD_CCtx, size_t (*)(ZSTD_CCtx*)> context(ZSTD_createCCtx(), ZSTD_freeCCtx);
  ZSTD_CCtx_setParameter(context.get(), ZSTD_c_checksumFlag, 1);
  zst.resize(ZSTD_compress2(context.get(), zst.data(), zst.size(), text.data(), text.size()));
  int refused = 0;
  const auto error = [&](const std::string& bytes) {
    const std::string path = scratch.write("x.jsonl.zst", bytes);
    std::vector<std::string> read;
    const std::string message = error_of([&] { read = read_all({path}); });
    if (message == "no error") {
      CHECK(read == read_all({scratch.write("x.jsonl", text)}));
      return;
    }
    ++refused;
    CHECK(message.starts_with(path + ": "));
    CHECK(message.find('\n') == message.npos);
  };
  for (size_t size = 0; size < zst.size(); ++size) error(zst.substr(0, size));
  CHECK(refused == static_cast<int>(zst.size()));
  for (size_t i = 0; i < zst.size(); ++i)
    for (const int change : {0x01, 0x80, 0xff}) {
      std::string bytes = zst;
      bytes[i] = static_cast<char>(bytes[i] ^ change);
      error(bytes);
    }
  error(zst + "more");
  CHECK(refused > static_cast<int>(3 * zst.size()));  // a wider window alone changes nothing
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
