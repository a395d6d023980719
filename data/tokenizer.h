// Text to ids and back: bytes, or a SentencePiece model (the library does the encoding and decoding).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace prism {

// A cheap value; all its functions are const and may be called from many threads at once.
class Tokenizer {
 public:
  // Bytes: byte b is id b, bos 256, eos 257, vocabulary 258.
  Tokenizer() = default;
  // "byte", a SentencePiece .model file, or a directory that save_into() wrote to; throws for anything else.
  static Tokenizer load(const std::string& name_or_path);
  static bool lies_in(const std::string& directory);
  // Trains a byte-pair SentencePiece model of `vocab` pieces (bytes as fallback, text unchanged, unk 0, bos
  // 1, eos 2) on the texts that `next` hands out until it returns false; returns the .model file's content.
  static std::string train(int64_t vocab, const std::function<bool(std::string&)>& next);

  // Appends the ids of `text`, without bos, equal to SentencePiece's own of the whole text. With `continues`,
  // `text` is what follows a cut() of a longer one.
  void encode(std::string_view text, std::vector<int32_t>& ids, bool continues = false) const;
  std::vector<int32_t> encode(std::string_view text) const;
  // The last position p > 0 such that the ids of text[0, p) and of text[p, end), continuing, joined, are the
  // ids of the whole; 0 when there is none.
  size_t cut(std::string_view text) const;
  // Special ids (bos, eos) have no text. Throws for an id outside the vocabulary.
  std::string decode(const std::vector<int32_t>& ids) const;

  const char* name() const { return model_ ? "sentencepiece" : "byte"; }
  const std::string& hash() const { return hash_; }  // FNV-1a of the .model file, in hexadecimal
  int32_t vocab_size() const { return vocab_; }
  int32_t bos() const { return bos_; }
  int32_t eos() const { return eos_; }
  const char* file() const {
    return model_ ? "tokenizer.model" : "tokenizer.json";
  }                             // what save_into() writes
  std::string content() const;  // and what is in it; of bytes, JSON that the tokenizers library reads, too
  std::string special(int32_t id) const;  // the name of bos or eos
  void save_into(const std::string& directory) const;

 private:
  friend class StreamDecoder;
  struct Model;  // a loaded SentencePiece model and what was found out about it
  explicit Tokenizer(std::shared_ptr<const Model> model);
  size_t segment_end(std::string_view text) const;

  std::shared_ptr<const Model> model_;  // null: bytes
  std::string hash_ = "byte";
  int32_t vocab_ = 258, bos_ = 256, eos_ = 257;
};

// Text of ids that arrive one by one, characters whole; joined it is decode() of all ids.
class StreamDecoder {
 public:
  explicit StreamDecoder(Tokenizer tokenizer) : tokenizer_(std::move(tokenizer)) {}
  std::string next(int32_t id);
  std::string finish();  // what was held back; the stream starts afresh

 private:
  std::string take(size_t count);
  Tokenizer tokenizer_;
  std::vector<int32_t> pending_;
  std::string tail_;      // the bytes that pending_ ends with
  bool started_ = false;  // text has come out
};

}  // namespace prism
