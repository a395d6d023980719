#include <doctest/doctest.h>
#include <sentencepiece_processor.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "data/text.h"
#include "data/tokenizer.h"
#include "tensor/check.h"
#include "tests/scratch.h"

using namespace prism;

namespace {

const std::string kShared = "../shared/data/";
const std::string kMistral = kShared + "tokenizer/mistral-v1.model";

bool missing(const std::string& path) {
  const bool absent = !std::filesystem::exists(path);
  if (absent) MESSAGE("skipped: " << path << " is not there");
  return absent;
}

// SentencePiece itself, called without anything of ours around it.
class Library {
 public:
  explicit Library(const std::string& path) { REQUIRE(pieces_.Load(path).ok()); }
  std::vector<int> encode(const std::string& text) const { return pieces_.EncodeAsIds(text); }
  std::string decode(const std::vector<int>& ids) const { return pieces_.DecodeIds(ids); }

 private:
  sentencepiece::SentencePieceProcessor pieces_;
};

std::string streamed(const Tokenizer& tokenizer, const std::vector<int32_t>& ids) {
  StreamDecoder decoder(tokenizer);
  std::string text;
  for (const int32_t id : ids) {
    const std::string piece = decoder.next(id);
    if (tokenizer.name() == std::string("byte")) CHECK(incomplete_tail(piece) == 0);
    text += piece;
  }
  return text + decoder.finish();
}

// The ids of a text that is cut wherever cut() says for prefixes of it.
std::vector<int32_t> encoded_in_parts(const Tokenizer& tokenizer, std::string_view text, size_t step) {
  std::vector<int32_t> ids;
  bool continues = false;
  while (text.size() > step) {
    const size_t end = tokenizer.cut(text.substr(0, step));
    if (end == 0) break;
    tokenizer.encode(text.substr(0, end), ids, continues);
    text.remove_prefix(end);
    continues = true;
  }
  tokenizer.encode(text, ids, continues);
  return ids;
}

const std::vector<std::string> kAwkward = {
    "",
    " ",
    "\n",
    "\n\n\n",
    "a",
    " a",
    "  a  b  ",
    "a\nb",
    "a \n b",
    "a\n\n  indented\n\ttab\n",
    "trailing\n",
    "trailing ",
    "x\r\ny\r\n",
    "<s> and </s> and <unk> and <0x0A> are text",
    "caf\u00e9 na\u00efve \u4f60\u597d\uff0c\u4e16\u754c\u3002\n\u7b2c\u4e8c\u884c",
    "\u3000ideographic\u3000space \u00a0nbsp\u00a0 \u2581 lower block \u2581\u2581",
    "\U0001F600\U0001F9D1\u200D\U0001F680 emoji",
    "e\u0301 a \u0301 combining after a space",
    std::string("nul\0inside", 10),
    "if (x)  {\n    return y ; }  // two  spaces\n",
    "1234567890 3.14159 1e-9",
    "\u00df\u0130\ufb01 \u2126 \u212b",
};

}  // namespace

TEST_CASE("utf-8: every invalid form is found where it begins, every valid one passes") {
  for (const auto& good : kAwkward) CHECK(find_invalid_utf8(good) == std::string::npos);
  CHECK(find_invalid_utf8("\xf4\x8f\xbf\xbf \xed\x9f\xbf \xee\x80\x80 \xc2\x80 \xe0\xa0\x80") ==
        std::string::npos);
  for (const std::string bad :
       {"\x80", "\xbf", "\xc0\x80", "\xc1\xbf", "\xe0\x9f\xbf", "\xed\xa0\x80", "\xf0\x8f\xbf\xbf",
        "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\xff", "\xe4\xbd", "\xe4\xbd\x20", "\xc3", "\xf0\x9f\x98"})
    CHECK_MESSAGE(find_invalid_utf8(cat("ok \u00e9", bad)) == 5,
                  nlohmann::json::binary({bad.begin(), bad.end()}).dump());
  CHECK(incomplete_tail("a\xe4\xbd") == 2);
  CHECK(incomplete_tail("a\xf0\x9f\x98") == 3);
  CHECK(incomplete_tail("a\xc3") == 1);
  CHECK(incomplete_tail("\u4f60") == 0);
  CHECK(incomplete_tail("a\x80") == 0);
  CHECK(incomplete_tail("\xff") == 0);
}

TEST_CASE("byte tokenizer: ids are the bytes, and streaming holds characters back until they are whole") {
  const Tokenizer bytes;
  CHECK(bytes.vocab_size() == 258);
  CHECK(bytes.bos() == 256);
  CHECK(bytes.eos() == 257);
  CHECK(bytes.encode("a\u00e9") == std::vector<int32_t>{97, 0xc3, 0xa9});
  for (const auto& text : kAwkward) {
    CHECK(bytes.decode(bytes.encode(text)) == text);
    CHECK(streamed(bytes, bytes.encode(text)) == text);
    for (const size_t step : {4, 5, 9}) CHECK(encoded_in_parts(bytes, text, step) == bytes.encode(text));
  }
  StreamDecoder decoder(bytes);
  CHECK(decoder.next(256) == "");
  CHECK(decoder.next(0xe4) == "");
  CHECK(decoder.next(0xbd) == "");
  CHECK(decoder.next(0xa0) == "\u4f60");
  CHECK(decoder.next(0xe4) == "");
  CHECK(decoder.finish() == "\xe4");
  CHECK_THROWS_WITH_AS(bytes.decode({1, 258}), "decode: expected ids below 258, got 258", Error);
  CHECK_THROWS_WITH_AS(decoder.next(-1), "decode: expected ids below 258, got -1", Error);
}

TEST_CASE("tokenizer: saved and loaded again it is the same; anything else is refused by name") {
  const Scratch scratch;
  CHECK(Tokenizer::load("byte").hash() == Tokenizer().hash());
  CHECK(!Tokenizer::lies_in(scratch / ""));
  Tokenizer().save_into(scratch / "");
  CHECK(Tokenizer::lies_in(scratch / ""));
  CHECK(Tokenizer::load(scratch / "").vocab_size() == 258);
  const auto message = [](const std::string& path) {
    try {
      Tokenizer::load(path);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("no error");
  };
  const std::string empty = scratch.write("empty.model", ""),
                    noise = scratch.write("noise.model", "not a model");
  const std::string pointer =
      scratch.write("lfs.model", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n");
  const std::string other = scratch.write("other/tokenizer.json", R"({"model": {"type": "BPE"}})");
  std::filesystem::create_directory(scratch / "none");
  CHECK(message(scratch / "absent.model") == (scratch / "absent.model") + ": No such file or directory");
  CHECK(message(empty) == empty + ": expected a SentencePiece model, and it does not load as one");
  CHECK(message(noise) == noise + ": expected a SentencePiece model, and it does not load as one");
  CHECK(message(pointer) ==
        pointer + ": a Git LFS pointer lies in place of the data; fetch it with `git lfs pull`");
  CHECK(message(scratch / "none") == (scratch / "none") + ": no tokenizer.model or tokenizer.json in it");
  CHECK(message(scratch / "other") ==
        other +
            ": expected {\"type\": \"byte\"}; other tokenizers are read as a SentencePiece tokenizer.model");
}

TEST_CASE("trained SentencePiece model: any text comes back, and cut texts have the ids of the whole") {
  const Scratch scratch;
  const std::string source = read_file("tensor/tensor.h") + read_file("tests/test_data_tokenizer.cpp");
  int handed = 0;
  const std::string model = Tokenizer::train(500, [&](std::string& text) {
    text = source;
    return handed++ < 1;
  });
  const std::string path = scratch.write("tokenizer.model", model);
  const Tokenizer tokenizer = Tokenizer::load(path);
  const Library library(path);
  CHECK(tokenizer.vocab_size() == 500);
  CHECK(tokenizer.bos() == 1);
  CHECK(tokenizer.eos() == 2);
  std::filesystem::create_directory(scratch / "copy");
  tokenizer.save_into(scratch / "copy");
  CHECK(Tokenizer::load(scratch / "copy").hash() == tokenizer.hash());
  std::vector<std::string> texts = kAwkward;
  texts.push_back(source);
  for (const auto& text : texts) {
    const auto ids = tokenizer.encode(text);
    CHECK(ids == library.encode(text));
    CHECK(tokenizer.decode(ids) == library.decode(ids));
    CHECK(streamed(tokenizer, ids) == library.decode(ids));
    if (text.find("\u2581") == text.npos)
      CHECK(tokenizer.decode(ids) == text);  // SentencePiece's sign for a space
    for (const size_t step : {5, 17, 1000}) CHECK(encoded_in_parts(tokenizer, text, step) == ids);
  }
  CHECK(tokenizer.cut(source) > 0);
  CHECK_THROWS_AS(
      Tokenizer::train(500'000, [&](std::string& text) { return text = "few words", handed++ < 3; }), Error);
}

TEST_CASE("mistral tokenizer: golden ids") {
  if (missing(kMistral)) return;
  const Tokenizer mistral = Tokenizer::load(kMistral);
  CHECK(mistral.vocab_size() == 32000);
  CHECK(mistral.encode("Hello Gated DeltaNet, this is 1.5 tokens.") ==
        std::vector<int32_t>{22557, 420, 601, 25220, 4428, 28725, 456, 349, 28705, 28740, 28723, 28782, 16246,
                             28723});
  // The golden text is written as pieces: <s> and </s> stand for bos and eos, U+2581 for a space.
  std::string text = read_file(kShared + "tokenizer/golden_no_tools_text_v1.txt");
  for (size_t at; (at = text.find("\u2581")) != text.npos;) text.replace(at, 3, 1, ' ');
  std::vector<int32_t> ids;
  while (!text.empty()) {
    const size_t end = text[0] == '<' ? text.find('>') + 1
                                      : std::min(std::min(text.find("<s>"), text.find("</s>")), text.size());
    const std::string part = text.substr(0, end);
    text.erase(0, end);
    if (part == "<s>" || part == "</s>")
      ids.push_back(part == "<s>" ? mistral.bos() : mistral.eos());
    else
      mistral.encode(part.substr(part[0] == ' ' ? 1 : 0), ids);
  }
  const auto golden = nlohmann::json::parse(read_file(kShared + "tokenizer/golden_no_tools_tokens_v1.json"));
  CHECK(ids == golden.at("tokens").get<std::vector<int32_t>>());
  CHECK(ids.size() == 118);
}

TEST_CASE(
    "mistral tokenizer: awkward texts have SentencePiece's ids, cut or not, and stream as they decode") {
  if (missing(kMistral)) return;
  const Tokenizer mistral = Tokenizer::load(kMistral);
  const Library library(kMistral);
  for (const auto& text : kAwkward) {
    CAPTURE(text);
    const auto ids = mistral.encode(text);
    CHECK(ids == library.encode(text));
    CHECK(mistral.decode(ids) == library.decode(ids));
    CHECK(streamed(mistral, ids) == library.decode(ids));
    for (const size_t step : {4, 5, 9, 16}) CHECK(encoded_in_parts(mistral, text, step) == ids);
  }
  // Ids that no text encodes to: bos inside, bytes that are no character, a space piece first.
  for (const std::vector<int32_t>& ids : std::vector<std::vector<int32_t>>{
           {1, 28705, 28705, 22557},
           {1, 1, 22557, 2, 22557},
           {22557, 3 + 0xe4, 3 + 0xbd, 22557},
           {3 + 0xf0, 3 + 0x9f, 3 + 0x98, 3 + 0xf0, 3 + 0x9f, 3 + 0x98, 3 + 0x80, 22557},
           {3 + 0x80, 3 + 0xff, 3 + 0xe4, 3 + 0xbd, 1, 3 + 0xa0},
           {0, 22557, 0}})
    CHECK(streamed(mistral, ids) == library.decode(ids));
}

TEST_CASE(
    "mistral tokenizer: every document of the sample has SentencePiece's ids and text, from two threads at "
    "once") {
  const std::string sample = kShared + "slimpajama/sample.jsonl.zst";
  if (missing(kMistral) || missing(sample)) return;
  const Tokenizer mistral = Tokenizer::load(kMistral);
  const Library library(kMistral);
  std::vector<std::string> texts;
  DocumentReader reader({sample}, {});
  for (Document document; reader.next(document);) texts.push_back(document.text);
  REQUIRE(texts.size() == 4262);
  std::atomic<size_t> next{0}, ids_differ{0}, text_differs{0}, stream_differs{0}, parts_differ{0}, tokens{0};
  const auto work = [&] {
    // A third of the documents, to keep the suite short; which third changes nothing.
    for (size_t i; (i = 3 * next++) < texts.size();) {
      const auto ids = mistral.encode(texts[i]);
      tokens += ids.size();
      ids_differ += ids != library.encode(texts[i]);
      const std::string text = library.decode(ids);
      text_differs += mistral.decode(ids) != text;
      if (i % 30 == 0) stream_differs += streamed(mistral, ids) != text;
      parts_differ += encoded_in_parts(mistral, texts[i], 1000) != ids;
    }
  };
  std::thread other(work);
  work();
  other.join();
  CHECK(ids_differ == 0);
  CHECK(text_differs == 0);
  CHECK(stream_differs == 0);
  CHECK(parts_differ == 0);
  CHECK(tokens > 500'000);
}

TEST_CASE("mistral tokenizer: spm_encode prints the same ids") {
  if (missing(kMistral) || missing(kShared + "slimpajama/small.jsonl") || missing("/usr/bin/spm_encode"))
    return;
  const Tokenizer mistral = Tokenizer::load(kMistral);
  const Scratch scratch;
  DocumentReader reader({kShared + "slimpajama/small.jsonl"}, {});
  std::string lines, expected;  // spm_encode takes a line as a text
  for (Document document; reader.next(document);) lines += document.text + "\n";
  for (size_t at = 0; at < lines.size();) {
    const size_t end = lines.find('\n', at);
    std::string row;
    for (const int32_t id : mistral.encode(lines.substr(at, end - at)))
      row += cat(row.empty() ? "" : " ", id);
    expected += row + "\n";
    at = end + 1;
  }
  const std::string in = scratch.write("lines.txt", lines), out = scratch / "ids.txt";
  REQUIRE(std::system(cat("/usr/bin/spm_encode --model=", kMistral, " --output_format=id < ", in, " > ", out)
                          .c_str()) == 0);
  CHECK(read_file(out) == expected);
}
