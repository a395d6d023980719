#include "data/text.h"

#include <glob.h>
#include <zstd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <utility>

#include "tensor/check.h"

namespace prism {
namespace {

namespace fs = std::filesystem;

constexpr size_t kChunk = size_t{256} << 10;     // bytes read at a time
constexpr size_t kTextPart = size_t{4} << 20;    // of a plain text handed out at a time
constexpr size_t kMaxRecord = size_t{32} << 20;  // bytes of one document, or of text without a place to cut
constexpr size_t kNone = std::string::npos;

// Bytes of the character that `text` begins with: 0 when it is not UTF-8, -1 when text ends within it.
// Overlong forms, surrogates and what lies above U+10FFFF show in the second byte.
int character_size(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(0);
  const size_t size = lead < 0x80   ? 1
                      : lead < 0xc2 ? 0
                      : lead < 0xe0 ? 2
                      : lead < 0xf0 ? 3
                      : lead < 0xf5 ? 4
                                    : 0;
  for (size_t i = 1; i < std::min(size, text.size()); ++i) {
    const unsigned char low = i > 1 ? 0x80 : lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
    const unsigned char high = i > 1 ? 0xbf : lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
    if (byte(i) < low || byte(i) > high) return 0;
  }
  return size > text.size() ? -1 : static_cast<int>(size);
}

struct Close {
  void operator()(std::FILE* file) const {
    if (file != stdin) std::fclose(file);
  }
  void operator()(ZSTD_DStream* stream) const { ZSTD_freeDStream(stream); }
};
using FilePtr = std::unique_ptr<std::FILE, Close>;

FilePtr open_file(const std::string& path) {
  PRISM_CHECK(!fs::is_directory(path), path, ": expected a file, got a directory");
  FilePtr file(path == "-" ? stdin : std::fopen(path.c_str(), "rb"));
  PRISM_CHECK(file, path, ": ", std::strerror(errno));
  return file;
}

bool looks_like_text(const std::string& path) {
  if (path.ends_with(".zst"))
    return path.ends_with(".jsonl.zst") || path.ends_with(".json.zst") || path.ends_with(".txt.zst");
  std::string head(8192, '\0');
  head.resize(std::fread(head.data(), 1, head.size(), open_file(path).get()));
  head.resize(head.size() - incomplete_tail(head));
  return head.find('\0') == kNone && find_invalid_utf8(head) == kNone;
}

void list(const std::string& path, std::vector<std::string>& files) {
  if (!fs::is_directory(path)) return files.push_back(path);
  std::vector<std::string> found;
  for (auto it = fs::recursive_directory_iterator(path); it != fs::recursive_directory_iterator(); ++it) {
    if (it->path().filename().string()[0] == '.')
      it.disable_recursion_pending();
    else if (it->is_regular_file() && looks_like_text(it->path()))
      found.push_back(it->path());
  }
  PRISM_CHECK(!found.empty(), path, ": no text files in this directory");
  std::sort(found.begin(), found.end());
  files.insert(files.end(), found.begin(), found.end());
}

// The value at a dotted path of keys, or null.
const nlohmann::json* find_path(const nlohmann::json& object, const std::string& path) {
  const nlohmann::json* at = &object;
  for (size_t begin = 0; begin <= path.size();) {
    const size_t end = std::min(path.find('.', begin), path.size());
    const auto found = at->find(path.substr(begin, end - begin));  // end() for what is no object
    if (found == at->end()) return nullptr;
    at = &*found;
    begin = end + 1;
  }
  return at;
}

}  // namespace

uint64_t fnv1a(std::string_view bytes) {
  uint64_t hash = 0xcbf29ce484222325ull;
  for (const char c : bytes) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
  return hash;
}

size_t incomplete_tail(std::string_view text) {
  for (size_t n = 1; n <= std::min<size_t>(3, text.size()); ++n)
    if (character_size(text.substr(text.size() - n)) < 0) return n;
  return 0;
}

size_t find_invalid_utf8(std::string_view text) {
  for (size_t at = 0; at < text.size();) {
    const int size = character_size(text.substr(at));
    if (size <= 0) return at;
    at += static_cast<size_t>(size);
  }
  return kNone;
}

void refuse_lfs_pointer(std::string_view head, const std::string& path) {
  PRISM_CHECK(!head.starts_with("version https://git-lfs.github.com/spec/"), path,
              ": a Git LFS pointer lies in place of the data; fetch it with `git lfs pull`");
}

std::string read_file(const std::string& path) {
  const FilePtr file = open_file(path);
  std::string content;
  std::vector<char> chunk(kChunk);
  while (const size_t n = std::fread(chunk.data(), 1, chunk.size(), file.get()))
    content.append(chunk.data(), n);
  PRISM_CHECK(!std::ferror(file.get()), path, ": ", std::strerror(errno));
  return content;
}

std::vector<std::string> list_text_files(const std::vector<std::string>& names) {
  std::vector<std::string> files;
  for (const std::string& name : names) {
    if (name == "-" || fs::exists(name)) {
      list(name, files);
      continue;
    }
    glob_t found{};
    glob(name.c_str(), 0, nullptr, &found);
    const std::vector<std::string> paths(found.gl_pathv, found.gl_pathv + found.gl_pathc);
    globfree(&found);
    PRISM_CHECK(!paths.empty(), name, ": no such file or directory");
    for (const std::string& path : paths) list(path, files);
  }
  return files;
}

class DocumentReader::Bytes {
 public:
  explicit Bytes(const std::string& path) : path_(path), file_(open_file(path)), in_(kChunk, '\0') {
    refill();
    const std::string_view head(in_.data(), raw_.size);
    refuse_lfs_pointer(head, path);
    PRISM_CHECK(!head.starts_with("\x1f\x8b"), path, ": expected plain or zstd data, got gzip");
    if (path.ends_with(".zst") || head.starts_with("\x28\xb5\x2f\xfd")) zstd_.reset(ZSTD_createDStream());
  }

  // Fills `out` as far as there is data; fewer bytes mean the end.
  size_t read(char* out, size_t size) {
    ZSTD_outBuffer to{out, size, 0};
    while (to.pos < size) {
      if (raw_.pos == raw_.size && !more_ && !refill()) {
        PRISM_CHECK(!zstd_ || !in_frame_, path_, ": truncated: it ends at byte ", read_,
                    ", inside a zstd frame");
        break;
      }
      if (zstd_) {
        const size_t left = ZSTD_decompressStream(zstd_.get(), &to, &raw_);
        PRISM_CHECK(!ZSTD_isError(left), path_, ": corrupt zstd data before byte ",
                    read_ - static_cast<int64_t>(raw_.size - raw_.pos), ": ", ZSTD_getErrorName(left));
        in_frame_ = left != 0;
        more_ = in_frame_ && to.pos == size;  // zstd may hold output that found no room
      } else {
        const size_t n = std::min(size - to.pos, raw_.size - raw_.pos);
        std::memcpy(out + to.pos, in_.data() + raw_.pos, n);
        to.pos += n, raw_.pos += n;
      }
    }
    return to.pos;
  }
  int64_t bytes_read() const { return read_; }

 private:
  bool refill() {
    raw_ = {in_.data(), std::fread(in_.data(), 1, in_.size(), file_.get()), 0};
    PRISM_CHECK(!std::ferror(file_.get()), path_, ": ", std::strerror(errno));
    read_ += static_cast<int64_t>(raw_.size);
    return raw_.size > 0;
  }

  std::string path_;
  FilePtr file_;
  std::string in_;
  std::unique_ptr<ZSTD_DStream, Close> zstd_;
  ZSTD_inBuffer raw_{};
  int64_t read_ = 0;
  bool in_frame_ = true, more_ = false;
};

DocumentReader::DocumentReader(std::vector<std::string> files, ReadOptions options)
    : files_(std::move(files)), options_(std::move(options)) {
  for (const std::string& file : files_) {
    std::error_code unknown;  // standard input, pipes
    const auto size = fs::file_size(file, unknown);
    bytes_total_ += unknown ? 0 : static_cast<int64_t>(size);
  }
}

DocumentReader::~DocumentReader() = default;

double DocumentReader::fraction() const {
  const int64_t read = bytes_done_ + (bytes_ ? bytes_->bytes_read() : 0);
  return bytes_total_ > 0 ? static_cast<double>(read) / static_cast<double>(bytes_total_) : 0;
}

void DocumentReader::open(const std::string& file) {
  bytes_ = std::make_unique<Bytes>(file);
  path_ = file == "-" ? "standard input" : file;
  buffer_.clear();
  at_ = 0, offset_ = 0, line_ = 1;
  ended_ = in_list_ = continues_ = false;
  fill();
  if (buffer_.starts_with("\xef\xbb\xbf")) at_ = 3, offset_ = 3;  // the byte order mark
  const std::string name = file.ends_with(".zst") ? file.substr(0, file.size() - 4) : file;
  const size_t first = buffer_.find_first_not_of(" \t\r\n", at_);
  const bool piped_json = file == "-" && first != kNone && buffer_[first] == '{';
  form_ = name.ends_with(".jsonl") || piped_json           ? Form::lines
          : name.ends_with(".json") && options_.json_files ? Form::objects
                                                           : Form::text;
}

// Reads on; false, and ended_, at the file's end.
bool DocumentReader::fill() {
  buffer_.erase(0, std::exchange(at_, 0));
  const size_t had = buffer_.size();
  PRISM_CHECK(had < kMaxRecord, path_, ": byte ", offset_, ": expected ",
              form_ == Form::text ? "a space or line end to cut this text at" : "the end of this document",
              " within ", kMaxRecord >> 20, " MiB");
  buffer_.resize(had + kChunk);
  buffer_.resize(had + bytes_->read(buffer_.data() + had, kChunk));
  ended_ = buffer_.size() == had;
  return !ended_;
}

// Each returns how many bytes from at_ on are the next record, kNone at the file's end.

size_t DocumentReader::next_line() {
  size_t scanned = 0, end;
  while ((end = buffer_.find('\n', at_ + scanned)) == kNone) {
    scanned = buffer_.size() - at_;
    if (!fill()) return scanned > 0 ? scanned : kNone;
  }
  return end + 1 - at_;
}

// Objects that stand one after another, or in one list.
size_t DocumentReader::next_object() {
  for (;; ++at_, ++offset_) {
    if (at_ == buffer_.size() && !fill()) {
      PRISM_CHECK(!in_list_, path_, ": truncated: its list of documents has no end");
      return kNone;
    }
    const char c = buffer_[at_];
    if (c == '{') break;
    PRISM_CHECK(c && std::strchr(" \t\r\n,[]", c), path_, ": byte ", offset_, ": expected a JSON object");
    if (c == '[' || c == ']') in_list_ = c == '[';
  }
  int depth = 0;
  bool quoted = false;
  for (size_t i = 0;; ++i) {
    while (at_ + i >= buffer_.size())
      PRISM_CHECK(fill(), path_, ": truncated: the object at byte ", offset_, " has no end");
    const char c = buffer_[at_ + i];
    if (quoted && c == '\\')
      ++i;  // an escaped quote does not end the string
    else if (c == '"')
      quoted = !quoted;
    else if (!quoted && (c == '{' || c == '}'))
      depth += c == '{' ? 1 : -1;
    if (depth == 0) return i + 1;
  }
}

// The rest of a plain text, or as much of it as kTextPart and the places to cut it allow.
size_t DocumentReader::next_part() {
  while (!ended_) {
    if (!fill()) return buffer_.size();
    if (buffer_.size() < kTextPart || !options_.cut) continue;
    if (const size_t end = options_.cut(buffer_)) return end;
  }
  return kNone;
}

bool DocumentReader::next(Document& document) {
  for (;;) {
    if (!bytes_) {
      if (opened_ == files_.size()) return false;
      open(files_[opened_++]);
    }
    const size_t size = form_ == Form::lines     ? next_line()
                        : form_ == Form::objects ? next_object()
                                                 : next_part();
    if (size == kNone) {
      bytes_done_ += bytes_->bytes_read();
      bytes_.reset();
      continue;
    }
    const auto record = std::string_view(buffer_).substr(at_, size);
    bool found = form_ != Form::lines || record.find_first_not_of(" \t\r\n") != kNone;
    try {
      if (found) parse(record, document);
    } catch (const Error&) {
      if (!options_.skip_bad) throw;
      ++skipped_;
      found = false;
    }
    at_ += size, offset_ += static_cast<int64_t>(size), ++line_;
    continues_ = true;
    if (found) return true;
  }
}

void DocumentReader::parse(std::string_view record, Document& document) const {
  if (form_ == Form::text) {
    const size_t bad = find_invalid_utf8(record);
    PRISM_CHECK(bad == kNone, path_, ": byte ", offset_ + static_cast<int64_t>(bad), ": invalid UTF-8");
    document = {std::string(record), "", continues_};
    return;
  }
  const std::string where = path_ + (form_ == Form::lines ? cat(": line ", line_) : cat(": byte ", offset_));
  const auto object = nlohmann::json::parse(record, nullptr, false);
  PRISM_CHECK(!object.is_discarded(), where,
              find_invalid_utf8(record) == kNone ? ": not JSON" : ": invalid UTF-8");
  const nlohmann::json* text = find_path(object, options_.field);
  PRISM_CHECK(text, where, ": no field \"", options_.field, "\"");
  PRISM_CHECK(text->is_string(), where, ": field \"", options_.field, "\": expected a string, got ",
              text->type_name());
  const nlohmann::json* set = find_path(object, options_.set_field);
  document = {text->get<std::string>(), set && set->is_string() ? set->get<std::string>() : "", false};
}

}  // namespace prism
