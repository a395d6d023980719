#include "data/tokenizer.h"

#include <sentencepiece_trainer.h>

#include <cmath>
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

// The ids of segments that continue a text, for one model and thread.
struct Cache {
  struct Hash : std::hash<std::string_view> {
    using is_transparent = void;
  };
  std::string model;  // its hash
  std::unordered_map<std::string, std::vector<int>, Hash, std::equal_to<>> ids;
};
constexpr size_t kCachedSegments = 40000, kCachedBytes = 40;

void check(const sentencepiece::util::Status& status) {
  PRISM_CHECK(status.ok(), "tokenizer: ", status.message());
}

// Lines of the texts, as the SentencePiece trainer asks for them.
class Lines : public sentencepiece::SentenceIterator {
 public:
  explicit Lines(const std::function<bool(std::string&)>& next) : next_(next) { Next(); }
  bool done() const override { return done_; }
  const std::string& value() const override { return line_; }
  sentencepiece::util::Status status() const override { return {}; }
  void Next() override {
    for (; at_ >= text_.size(); at_ = 0)
      if ((done_ = !next_(text_))) return;
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

// The byte tokenizer as the tokenizers library writes one: its byte-level models name a byte that prints by
// the character of that number, the others by characters from 256 on.
nlohmann::json bytes_json() {
  nlohmann::json vocab, added;
  for (int byte = 0, next = 256; byte < 256; ++byte) {
    const bool prints = (byte > 32 && byte < 127) || (byte > 160 && byte != 173);
    const int character = prints ? byte : next++;
    const char utf8[] = {static_cast<char>(0xc0 | character >> 6),
                         static_cast<char>(0x80 | (character & 63))};
    vocab[character < 128 ? std::string(1, static_cast<char>(character)) : std::string(utf8, 2)] = byte;
  }
  for (const auto& [name, id] : {std::pair("<bos>", 256), {"<eos>", 257}}) {
    vocab[name] = id;
    added.push_back({{"id", id},
                     {"content", name},
                     {"special", true},
                     {"normalized", false},
                     {"single_word", false},
                     {"lstrip", false},
                     {"rstrip", false}});
  }
  const nlohmann::json byte_level = {
      {"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", false}, {"use_regex", false}};
  const auto piece = [](const char* kind, const char* id) {
    return nlohmann::json{{kind, {{"id", id}, {"type_id", 0}}}};
  };
  return {{"version", "1.0"},
          {"added_tokens", added},
          {"pre_tokenizer", byte_level},
          {"decoder", byte_level},
          {"post_processor",
           {{"type", "TemplateProcessing"},
            {"single", {piece("SpecialToken", "<bos>"), piece("Sequence", "A")}},
            {"pair", {piece("SpecialToken", "<bos>"), piece("Sequence", "A"), piece("Sequence", "B")}},
            {"special_tokens", {{"<bos>", {{"id", "<bos>"}, {"ids", {256}}, {"tokens", {"<bos>"}}}}}}}},
          {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", nlohmann::json::array()}}}};
}

}  // namespace

struct Tokenizer::Model {
  SentencePieceProcessor pieces;
  const std::string content;  // of the .model file
  // Where a text may be cut. No piece reaches across "x y" when none holds a space after text, and the space
  // of a lone "y" comes from the dummy prefix. None reaches across a newline that is a byte piece behind the
  // dummy prefix; such a model must also leave white space as it is.
  bool cut_spaces, cut_newlines;
  bool byte_pair = true;  // scores are merge ranks: the ids of a segment depend on nothing outside
  int32_t anchor = -1;    // a piece that decodes to its own text, anchor_size bytes, wherever it stands
  size_t anchor_size = 0;

  Model(std::string file_content, const std::string& where) : content(std::move(file_content)) {
    refuse_lfs_pointer(content, where);
    PRISM_CHECK(!content.empty() && pieces.LoadFromSerializedProto(content).ok(), where,
                ": expected a SentencePiece model, and it does not load as one");
    PRISM_CHECK(pieces.bos_id() >= 0 && pieces.eos_id() >= 0, where,
                ": expected a bos and an eos piece, got ids ", pieces.bos_id(), " and ", pieces.eos_id());
    std::vector<int> twice = encode("a"), newline = encode("\n");
    twice.insert(twice.end(), twice.begin(), twice.end());
    cut_spaces = encode("a a") == twice;
    const std::string spaced = "  a \u3000 \n b ";
    cut_newlines = newline.size() == 2 && pieces.IdToPiece(newline[0]) == kSpace &&
                   pieces.IsByte(newline[1]) && decode(encode(spaced)) == spaced;
    for (int id = 0; id < pieces.GetPieceSize(); ++id) {
      const std::string_view piece = pieces.IdToPiece(id);
      const size_t text = std::min(piece.find_first_not_of(kSpace), piece.size());
      cut_spaces = cut_spaces && piece.find(kSpace, text) == piece.npos;
      cut_newlines = cut_newlines && piece.find('\n') == piece.npos;
      byte_pair = byte_pair && pieces.GetScore(id) == std::floor(pieces.GetScore(id));
      const bool plain = !pieces.IsControl(id) && !pieces.IsUnknown(id) && !pieces.IsByte(id) && text == 0;
      if (anchor < 0 && plain && decode({id}) == piece) anchor = id, anchor_size = piece.size();
    }
    PRISM_CHECK(anchor >= 0, where, ": it has no piece of plain text");
  }

  std::vector<int> encode(std::string_view text) const {
    std::vector<int> ids;
    check(pieces.Encode(text, &ids));
    return ids;
  }
  std::string decode(const std::vector<int>& ids) const {
    std::string text;
    check(pieces.Decode(ids, &text));
    return text;
  }
  bool can_cut(std::string_view text, size_t p) const {
    return (text[p] == ' ' && cut_spaces && printable(text[p - 1]) && printable(text[p + 1])) ||
           (text[p] == '\n' && cut_newlines);
  }
};

Tokenizer::Tokenizer(std::shared_ptr<const Model> model)
    : model_(std::move(model)),
      hash_(cat(std::hex, fnv1a(model_->content))),
      vocab_(model_->pieces.GetPieceSize()),
      bos_(model_->pieces.bos_id()),
      eos_(model_->pieces.eos_id()) {}

bool Tokenizer::lies_in(const std::string& directory) {
  return fs::exists(directory + "/tokenizer.model") || fs::exists(directory + "/tokenizer.json");
}

Tokenizer Tokenizer::load(const std::string& name_or_path) {
  if (name_or_path == "byte") return {};
  std::string file = name_or_path;
  if (fs::is_directory(file)) {
    PRISM_CHECK(lies_in(file), file, ": no tokenizer.model or tokenizer.json in it");
    file += fs::exists(file + "/tokenizer.model") ? "/tokenizer.model" : "/tokenizer.json";
  }
  if (!file.ends_with(".json")) return Tokenizer(std::make_shared<const Model>(read_file(file), file));
  const auto json = nlohmann::json::parse(read_file(file), nullptr, false);
  const bool bytes = json == nlohmann::json{{"type", "byte"}} || json == bytes_json();
  PRISM_CHECK(
      bytes, file,
      ": expected {\"type\": \"byte\"}; other tokenizers are read as a SentencePiece tokenizer.model");
  return {};
}

std::string Tokenizer::content() const { return model_ ? model_->content : bytes_json().dump() + "\n"; }

std::string Tokenizer::special(int32_t id) const {
  return model_ ? model_->pieces.IdToPiece(id) : id == bos_ ? "<bos>" : "<eos>";
}

void Tokenizer::save_into(const std::string& directory) const {
  const std::string path = directory + "/" + file();
  std::ofstream out(path, std::ios::binary);
  PRISM_CHECK((out << content()).flush(), path, ": cannot write it");
}

std::string Tokenizer::train(int64_t vocab, const std::function<bool(std::string&)>& next) {
  sentencepiece::SetRandomGeneratorSeed(0);
  Lines lines(next);
  std::string content;
  check(sentencepiece::SentencePieceTrainer::Train(
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
      &lines, &content));
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
  thread_local Cache cache;  // most words have been encoded before, in the same way
  if (cache.model != hash_ || cache.ids.size() > kCachedSegments) cache = {hash_, {}};
  for (; !text.empty(); continues = true) {
    const std::string_view segment = text.substr(0, segment_end(text));
    text.remove_prefix(segment.size());
    std::vector<int> fresh;
    const auto known = continues ? cache.ids.find(segment) : cache.ids.end();
    if (known == cache.ids.end()) {
      // The dummy prefix stands for the space of "x y"; before a newline it is dropped.
      const bool space = continues && segment[0] == ' ';
      fresh = model_->encode(segment.substr(space ? 1 : 0));
      if (continues && !space) fresh.erase(fresh.begin());
    }
    const std::vector<int>& found = known == cache.ids.end() ? fresh : known->second;
    ids.insert(ids.end(), found.begin(), found.end());
    if (continues && !fresh.empty() && segment.size() <= kCachedBytes)
      cache.ids.emplace(segment, std::move(fresh));
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
  PRISM_CHECK(id >= 0 && id < tokenizer_.vocab_, "decode: expected ids below ", tokenizer_.vocab_, ", got ",
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
