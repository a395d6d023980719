#include "data/tokenizer.h"

#include <sentencepiece_trainer.h>

#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <unordered_map>

#include "data/text.h"
#include "tensor/check.h"

namespace prism {
namespace {

namespace fs = std::filesystem;
using sentencepiece::SentencePieceProcessor;

constexpr std::string_view kSpace = "\xe2\x96\x81";  // U+2581, which stands for a space in pieces

bool printable(char c) { return c > ' ' && c <= '~'; }

bool holds_space_after_text(std::string_view piece) {
  const size_t text = piece.find_first_not_of(kSpace);  // bytes of U+2581 don't occur alone in ASCII
  return text != piece.npos && piece.find(kSpace, text) != piece.npos;
}

// The ids of segments that continue a text, for one model and thread.
struct Cache {
  struct Hash : std::hash<std::string_view> {
    using is_transparent = void;
  };
  std::string model;  // its hash
  std::unordered_map<std::string, std::vector<int>, Hash, std::equal_to<>> words;
};
constexpr size_t kCachedWords = 400000, kCachedBytes = 40;

// Lines of the texts, as the SentencePiece trainer asks for them.
class Lines : public sentencepiece::SentenceIterator {
 public:
  explicit Lines(const std::function<bool(std::string&)>& next) : next_(next) { Next(); }
  bool done() const override { return done_; }
  const std::string& value() const override { return line_; }
  sentencepiece::util::Status status() const override { return {}; }
  void Next() override {
    while (at_ >= text_.size()) {
      at_ = 0;
      if (!next_(text_)) {
        done_ = true;
        return;
      }
    }
    const size_t end = std::min(text_.find('\n', at_), text_.size());
    line_ = text_.substr(at_, end - at_);
    at_ = end + 1;
  }

 private:
  const std::function<bool(std::string&)>& next_;
  std::string text_, line_;
  size_t at_ = 0;
  bool done_ = false;
};

}  // namespace

struct Tokenizer::Model {
  SentencePieceProcessor pieces;
  std::string content;  // of the .model file
  bool cut_spaces = false, cut_newlines = false;
  bool byte_pair = true;  // scores are merge ranks: the ids of a segment depend on nothing outside
  int32_t anchor = -1;    // a piece that decodes to its own text, anchor_size bytes, wherever it stands
  size_t anchor_size = 0;

  std::vector<int> encode(std::string_view text) const {
    std::vector<int> ids;
    const auto status = pieces.Encode(text, &ids);
    PRISM_CHECK(status.ok(), "tokenizer: ", status.message());
    return ids;
  }
  std::string decode(const std::vector<int>& ids) const {
    std::string text;
    const auto status = pieces.Decode(ids, &text);
    PRISM_CHECK(status.ok(), "tokenizer: ", status.message());
    return text;
  }

  bool can_cut(std::string_view text, size_t p) const {
    return (text[p] == ' ' && cut_spaces && printable(text[p - 1]) && printable(text[p + 1])) ||
           (text[p] == '\n' && cut_newlines);
  }

  // Finds where a text may be cut. No piece reaches across "x y" when none holds a space after text, and the
  // space of "y" alone comes from the dummy prefix. None reaches across a newline that is always a byte piece
  // of its own; that model must also leave white space as it is.
  void learn() {
    cut_spaces = true;
    for (int id = 0; id < pieces.GetPieceSize(); ++id) {
      const std::string& piece = pieces.IdToPiece(id);
      if (holds_space_after_text(piece)) cut_spaces = false;
      byte_pair = byte_pair && pieces.GetScore(id) == std::floor(pieces.GetScore(id));
      const bool plain = !pieces.IsControl(id) && !pieces.IsUnknown(id) && !pieces.IsByte(id);
      if (anchor < 0 && plain && piece.find(kSpace) == piece.npos && decode({id}) == piece)
        anchor = id, anchor_size = piece.size();
    }
    auto twice = encode("a");
    twice.insert(twice.end(), twice.begin(), twice.end());
    cut_spaces = cut_spaces && encode("a a") == twice;
    const std::vector<int> newline = encode("\n"), two = encode("\n\n");
    const std::string spaced = "  a \u3000 \n b ";
    cut_newlines = newline.size() == 2 && two.size() == 3 && pieces.IdToPiece(newline[0]) == kSpace &&
                   pieces.IsByte(newline[1]) && decode(encode(spaced)) == spaced;
  }
};

Tokenizer Tokenizer::from_model(std::string content, const std::string& where) {
  refuse_lfs_pointer(content, where);
  const auto model = std::make_shared<Model>();
  PRISM_CHECK(!content.empty() && model->pieces.LoadFromSerializedProto(content).ok(), where,
              ": expected a SentencePiece model, and it does not load as one");
  model->content = std::move(content);
  model->learn();
  Tokenizer t;
  t.name_ = "sentencepiece";
  char digits[17];
  std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(fnv1a(model->content)));
  t.hash_ = digits;
  t.vocab_ = model->pieces.GetPieceSize();
  t.bos_ = model->pieces.bos_id(), t.eos_ = model->pieces.eos_id();
  PRISM_CHECK(t.bos_ >= 0 && t.eos_ >= 0, where, ": expected a bos and an eos piece, got ids ", t.bos_,
              " and ", t.eos_);
  PRISM_CHECK(model->anchor >= 0, where, ": it has no piece of plain text");
  t.model_ = model;
  return t;
}

bool Tokenizer::lies_in(const std::string& directory) {
  return fs::exists(fs::path(directory) / "tokenizer.model") ||
         fs::exists(fs::path(directory) / "tokenizer.json");
}

Tokenizer Tokenizer::load(const std::string& name_or_path) {
  if (name_or_path == "byte") return {};
  const fs::path path = name_or_path;
  if (!fs::is_directory(path)) return from_model(read_file(path), path);
  if (fs::exists(path / "tokenizer.model"))
    return from_model(read_file(path / "tokenizer.model"), path / "tokenizer.model");
  const std::string file = path / "tokenizer.json";
  PRISM_CHECK(fs::exists(file), path.string(), ": no tokenizer.model or tokenizer.json in it");
  const auto json = nlohmann::json::parse(read_file(file), nullptr, false);
  PRISM_CHECK(json.is_object() && json.value("type", nlohmann::json()) == "byte", file,
              ": expected {\"type\": \"byte\"}; other tokenizers are read from a SentencePiece "
              "tokenizer.model only");
  return {};
}

std::string Tokenizer::content() const {
  return model_ ? model_->content
                : "{\"type\": \"byte\", \"vocab_size\": 258, \"bos_token_id\": 256, \"eos_token_id\": 257}\n";
}

void Tokenizer::save_into(const std::string& directory) const {
  const std::string path = fs::path(directory) / file();
  std::ofstream out(path, std::ios::binary);
  PRISM_CHECK((out << content()).flush(), path, ": cannot write it");
}

std::string Tokenizer::train(int64_t vocab, const std::function<bool(std::string&)>& next) {
  sentencepiece::SetRandomGeneratorSeed(0);
  Lines lines(next);
  std::string content;
  const auto status = sentencepiece::SentencePieceTrainer::Train(
      {{"model_type", "bpe"},
       {"vocab_size", std::to_string(vocab)},
       {"byte_fallback", "true"},
       {"split_digits", "true"},
       {"normalization_rule_name", "identity"},
       {"remove_extra_whitespaces", "false"},
       {"allow_whitespace_only_pieces", "true"},
       {"max_sentence_length", "16384"},
       {"input_sentence_size", "1000000"},  // a sample of the lines, so that memory stays bounded
       {"shuffle_input_sentence", "true"},
       {"minloglevel", "2"}},
      &lines, &content);
  PRISM_CHECK(status.ok(), "tokenize train: ", status.message());
  return content;
}

size_t Tokenizer::cut(std::string_view text) const {
  if (!model_) return text.size() - incomplete_tail(text);
  for (size_t p = text.size() - std::min<size_t>(text.size(), 1); p-- > 1;)
    if (model_->can_cut(text, p)) return p;
  return 0;
}

// Where the segment that text begins with ends. Byte-pair models go from cut to cut, about a word. A
// lattice's best path may hang on rounding anywhere in its text, so that is cut only to bound memory.
size_t Tokenizer::segment_end(std::string_view text) const {
  if (model_->byte_pair) {
    for (size_t p = 1; p + 1 < text.size(); ++p)
      if (model_->can_cut(text, p)) return p;
  } else {
    for (size_t size = size_t{1} << 20; size < text.size(); size *= 2)
      if (const size_t end = cut(text.substr(0, size))) return end;
  }
  return text.size();
}

void Tokenizer::encode(std::string_view text, std::vector<int32_t>& ids, bool continues) const {
  if (!model_) {
    for (const char c : text) ids.push_back(static_cast<unsigned char>(c));
    return;
  }
  // Most words have been encoded before, in the same way.
  thread_local Cache cache;
  if (cache.model != hash_ || cache.words.size() > kCachedWords) cache = {hash_, {}};
  for (; !text.empty(); continues = true) {
    const std::string_view segment = text.substr(0, segment_end(text));
    text.remove_prefix(segment.size());
    auto found = cache.words.find(segment);
    if (!continues || found == cache.words.end()) {
      // The dummy prefix stands for the space of "x y"; before a newline it is dropped.
      const bool after_space = continues && segment[0] == ' ';
      std::vector<int> fresh = model_->encode(segment.substr(after_space ? 1 : 0));
      if (continues && !after_space) fresh.erase(fresh.begin());
      if (!continues || segment.size() > kCachedBytes) {
        ids.insert(ids.end(), fresh.begin(), fresh.end());
        continue;
      }
      found = cache.words.emplace(segment, std::move(fresh)).first;
    }
    ids.insert(ids.end(), found->second.begin(), found->second.end());
  }
}

std::vector<int32_t> Tokenizer::encode(std::string_view text) const {
  std::vector<int32_t> ids;
  encode(text, ids);
  return ids;
}

std::string Tokenizer::decode(const std::vector<int32_t>& ids) const {
  for (const int32_t id : ids)
    PRISM_CHECK(id >= 0 && id < vocab_, "decode: expected ids below ", vocab_, ", got ", id);
  if (model_) return model_->decode(ids);
  std::string text;
  for (const int32_t id : ids)
    if (id < 256) text += static_cast<char>(id);
  return text;
}

// Decodes the first `count` pending ids as they read after what came before: only the very first text loses
// the space of its dummy prefix, so later ids are decoded behind the anchor.
std::string StreamDecoder::take(size_t count) {
  std::vector<int32_t> ids(pending_.begin(), pending_.begin() + static_cast<int64_t>(count));
  const bool anchored = started_ && tokenizer_.model_;
  if (anchored) ids.insert(ids.begin(), tokenizer_.model_->anchor);
  const std::string text = tokenizer_.decode(ids).substr(anchored ? tokenizer_.model_->anchor_size : 0);
  if (text.empty() && !started_) return text;
  started_ = true;
  pending_.erase(pending_.begin(), pending_.begin() + static_cast<int64_t>(count));
  return text;
}

std::string StreamDecoder::next(int32_t id) {
  PRISM_CHECK(id >= 0 && id < tokenizer_.vocab_, "decode: expected an id below ", tokenizer_.vocab_, ", got ",
              id);
  pending_.push_back(id);
  const auto& model = tokenizer_.model_;
  if (model ? model->pieces.IsByte(id) : id < 256)
    tail_ += static_cast<char>(model ? std::stoi(model->pieces.IdToPiece(id).substr(3, 2), nullptr, 16) : id);
  else if (model)
    tail_.clear();
  else
    pending_.pop_back();  // bos and eos are no bytes: they don't even part the bytes around them
  tail_ = tail_.substr(tail_.size() - incomplete_tail(tail_));
  return take(pending_.size() - tail_.size());
}

std::string StreamDecoder::finish() {
  const std::string text = take(pending_.size());
  *this = StreamDecoder(tokenizer_);
  return text;
}

}  // namespace prism
