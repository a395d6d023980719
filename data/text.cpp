#include "data/text.h"

#include <glob.h>
#include <zstd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "tensor/check.h"

namespace prism {
namespace {

namespace fs = std::filesystem;

constexpr size_t kChunk = size_t{256} << 10;     // bytes read at a time
constexpr size_t kTextPart = size_t{4} << 20;    // of a plain text in one record
constexpr size_t kMaxRecord = size_t{64} << 20;  // bytes
constexpr std::string_view kByteOrderMark = "\xef\xbb\xbf";

bool ends_with(const std::string& name, std::string_view end) {
  return std::string_view(name).ends_with(end);
}

// Length of a UTF-8 character by its first byte; 0 for a byte that begins none.
size_t character_size(unsigned char lead) {
  return lead < 0x80 ? 1 : lead < 0xc2 ? 0 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : lead < 0xf5 ? 4 : 0;
}

// How many bytes at `at` are a (beginning of a) character: overlong forms, surrogates and anything above
// U+10FFFF are excluded by their second byte.
size_t character_prefix(std::string_view text, size_t at) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(at);
  const size_t size = std::min(character_size(lead), text.size() - at);
  for (size_t i = 1; i < size; ++i) {
    const unsigned char low = i > 1 ? 0x80 : lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
    const unsigned char high = i > 1 ? 0xbf : lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
    if (byte(at + i) < low || byte(at + i) > high) return i;
  }
  return size;
}

bool looks_like_text(const fs::path& path) {
  const std::string name = path.filename();
  if (ends_with(name, ".zst"))
    return ends_with(name, ".jsonl.zst") || ends_with(name, ".json.zst") || ends_with(name, ".txt.zst");
  std::string head(8192, '\0');
  std::FILE* file = std::fopen(path.c_str(), "rb");
  PRISM_CHECK(file, path.string(), ": ", std::strerror(errno));
  head.resize(std::fread(head.data(), 1, head.size(), file));
  std::fclose(file);
  head.resize(head.size() - incomplete_tail(head));
  return head.find('\0') == head.npos && find_invalid_utf8(head) == head.npos;
}

void list_directory(const std::string& directory, std::vector<std::string>& files) {
  const size_t before = files.size();
  for (auto it = fs::recursive_directory_iterator(directory); it != fs::recursive_directory_iterator();
       ++it) {
    if (it->path().filename().string()[0] == '.')
      it.disable_recursion_pending();
    else if (it->is_regular_file() && looks_like_text(it->path()))
      files.push_back(it->path());
  }
  PRISM_CHECK(files.size() > before, directory, ": no text files in this directory");
  std::sort(files.begin() + static_cast<int64_t>(before), files.end());
}

// The bytes of a file, decompressed when it is zstd.
class ByteSource {
 public:
  explicit ByteSource(const std::string& path) : path_(path), in_(kChunk, '\0') {
    file_.reset(path == "-" ? stdin : std::fopen(path.c_str(), "rb"));
    PRISM_CHECK(file_, path, ": ", std::strerror(errno));
    refill();
    const std::string_view head(in_.data(), raw_.size);
    refuse_lfs_pointer(head, path);
    PRISM_CHECK(!head.starts_with("\x1f\x8b"), path, ": expected plain or zstd data, got gzip");
    if (ends_with(path, ".zst") || (path == "-" && head.starts_with("\x28\xb5\x2f\xfd")))
      zstd_.reset(ZSTD_createDStream());
  }

  // Fills `out` as far as there is data; fewer bytes mean the end.
  size_t read(char* out, size_t size) {
    ZSTD_outBuffer to{out, size, 0};
    while (to.pos < size) {
      if (raw_.pos == raw_.size && !more_ && !refill()) {
        PRISM_CHECK(!zstd_ || !in_frame_, path_, ": truncated: it ends at byte ", bytes_read_,
                    ", inside a zstd frame");
        break;
      }
      if (zstd_)
        decompress(to);
      else
        copy(to);
    }
    return to.pos;
  }
  int64_t bytes_read() const { return bytes_read_; }

 private:
  struct Close {
    void operator()(std::FILE* file) const {
      if (file != stdin) std::fclose(file);
    }
    void operator()(ZSTD_DStream* stream) const { ZSTD_freeDStream(stream); }
  };

  bool refill() {
    raw_ = {in_.data(), std::fread(in_.data(), 1, in_.size(), file_.get()), 0};
    PRISM_CHECK(!std::ferror(file_.get()), path_, ": ", std::strerror(errno));
    bytes_read_ += static_cast<int64_t>(raw_.size);
    return raw_.size > 0;
  }
  void copy(ZSTD_outBuffer& to) {
    const size_t n = std::min(to.size - to.pos, raw_.size - raw_.pos);
    std::memcpy(static_cast<char*>(to.dst) + to.pos, in_.data() + raw_.pos, n);
    to.pos += n, raw_.pos += n;
  }
  void decompress(ZSTD_outBuffer& to) {
    const size_t left = ZSTD_decompressStream(zstd_.get(), &to, &raw_);
    PRISM_CHECK(!ZSTD_isError(left), path_, ": corrupt zstd data before byte ",
                bytes_read_ - static_cast<int64_t>(raw_.size - raw_.pos), ": ", ZSTD_getErrorName(left));
    in_frame_ = left != 0;
    more_ = in_frame_ && to.pos == to.size;  // zstd may hold output that found no room
  }

  std::string path_, in_;
  std::unique_ptr<std::FILE, Close> file_;
  std::unique_ptr<ZSTD_DStream, Close> zstd_;
  ZSTD_inBuffer raw_{};
  int64_t bytes_read_ = 0;
  bool in_frame_ = true, more_ = false;
};

// The value at a dotted path of keys, or null.
const nlohmann::json* find_path(const nlohmann::json& object, std::string_view path) {
  const nlohmann::json* at = &object;
  for (size_t begin = 0; begin <= path.size();) {
    const size_t end = std::min(path.find('.', begin), path.size());
    const auto key = std::string(path.substr(begin, end - begin));
    if (!at->is_object() || !at->contains(key)) return nullptr;
    at = &(*at)[key];
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
  for (size_t n = 1; n <= std::min<size_t>(3, text.size()); ++n) {
    const size_t at = text.size() - n;
    if (character_size(static_cast<unsigned char>(text[at])) > n && character_prefix(text, at) == n) return n;
  }
  return 0;
}

size_t find_invalid_utf8(std::string_view text) {
  for (size_t at = 0; at < text.size();) {
    const size_t size = character_size(static_cast<unsigned char>(text[at]));
    if (size == 0 || (size > 1 && character_prefix(text, at) < size)) return at;
    at += size;
  }
  return text.npos;
}

std::string read_file(const std::string& path) {
  PRISM_CHECK(!fs::is_directory(path), path, ": expected a file, got a directory");
  std::FILE* file = std::fopen(path.c_str(), "rb");
  PRISM_CHECK(file, path, ": ", std::strerror(errno));
  std::string content;
  std::vector<char> chunk(kChunk);
  while (const size_t n = std::fread(chunk.data(), 1, chunk.size(), file)) content.append(chunk.data(), n);
  std::fclose(file);
  return content;
}

void refuse_lfs_pointer(std::string_view head, const std::string& path) {
  PRISM_CHECK(!head.starts_with("version https://git-lfs.github.com/spec/"), path,
              ": a Git LFS pointer lies in place of the data; fetch it with `git lfs pull`");
}

std::vector<std::string> list_text_files(const std::vector<std::string>& names) {
  std::vector<std::string> files;
  for (const std::string& name : names) {
    if (fs::is_directory(name)) {
      list_directory(name, files);
    } else if (name == "-" || fs::exists(name)) {
      files.push_back(name);
    } else {
      glob_t found{};
      const bool any = glob(name.c_str(), 0, nullptr, &found) == 0;
      const std::vector<std::string> paths(found.gl_pathv, found.gl_pathv + (any ? found.gl_pathc : 0));
      globfree(&found);
      PRISM_CHECK(any, name, ": no such file or directory");
      for (const std::string& path : paths) {
        if (fs::is_directory(path))
          list_directory(path, files);
        else
          files.push_back(path);
      }
    }
  }
  return files;
}

std::string Record::where() const { return cat(*file, by_line ? ": line " : ": byte ", place); }

struct RecordReader::Impl {
  enum class Form { lines, objects, text };

  std::vector<std::string> files;
  ReadOptions options;
  size_t next_file = 0;
  int64_t bytes_done = 0, bytes_total = 0;

  // the open file
  std::unique_ptr<ByteSource> source;
  std::shared_ptr<const std::string> path;
  Form form = Form::text;
  std::string buffer;  // read and not handed out: [at, end)
  size_t at = 0;
  int64_t offset = 0, line = 0;  // of buffer[at]
  bool ended = false, in_list = false, continues = false;

  std::string_view rest() const { return std::string_view(buffer).substr(at); }

  // Reads on; false at the file's end.
  bool fill() {
    buffer.erase(0, at);
    at = 0;
    PRISM_CHECK(buffer.size() < kMaxRecord, *path, ": byte ", offset,
                form == Form::text ? ": no place to cut this text" : ": this document is too long",
                ", expected one within ", kMaxRecord >> 20, " MiB");
    const size_t had = buffer.size();
    buffer.resize(had + kChunk);
    buffer.resize(had + source->read(buffer.data() + had, kChunk));
    return buffer.size() > had;
  }

  void skip(size_t count) { at += count, offset += static_cast<int64_t>(count); }

  void take(Record& record, size_t count) {
    record.bytes.assign(buffer, at, count);
    record.file = path;
    record.json = form != Form::text;
    record.by_line = form == Form::lines;
    record.place = record.by_line ? line : offset;
    record.continues = continues;
    skip(count);
  }

  void open(const std::string& file) {
    source = std::make_unique<ByteSource>(file);
    path = std::make_shared<const std::string>(file == "-" ? "standard input" : file);
    buffer.clear();
    at = 0, offset = 0, line = 0;
    ended = in_list = continues = false;
    form = Form::text;
    fill();
    if (rest().starts_with(kByteOrderMark)) skip(kByteOrderMark.size());
    const std::string name = ends_with(file, ".zst") ? file.substr(0, file.size() - 4) : file;
    const size_t first = buffer.find_first_not_of(" \t\r\n", at);
    if (ends_with(name, ".jsonl") || (file == "-" && first != buffer.npos && buffer[first] == '{'))
      form = Form::lines;
    else if (ends_with(name, ".json") && options.json_files)
      form = Form::objects;
  }

  void close() {
    bytes_done += source->bytes_read();
    source.reset();
  }

  // Each returns false at the file's end.
  bool next_line(Record& record) {
    while (!ended) {
      size_t end;
      size_t scanned = 0;
      while ((end = buffer.find('\n', at + scanned)) == buffer.npos) {
        scanned = buffer.size() - at;
        if (fill()) continue;
        ended = true;
        end = buffer.size();
        break;
      }
      ++line;
      if (rest().substr(0, end - at).find_first_not_of(" \t\r") != buffer.npos) {
        take(record, end - at);
        skip(ended ? 0 : 1);
        return true;
      }
      skip(end - at + (ended ? 0 : 1));
    }
    return false;
  }

  // Objects that stand one after another, or in one list.
  bool next_object(Record& record) {
    for (;; skip(1)) {
      if (at == buffer.size() && !fill()) {
        PRISM_CHECK(!in_list, *path, ": truncated: its list of documents has no end");
        return false;
      }
      const char c = buffer[at];
      if (c == '{') break;
      PRISM_CHECK(std::strchr(" \t\r\n,[]", c) && c, *path, ": byte ", offset, ": expected a JSON object");
      if (c == '[' || c == ']') in_list = c == '[';
    }
    int depth = 0;
    bool quoted = false;
    for (size_t i = 0;; ++i) {
      while (at + i >= buffer.size())
        PRISM_CHECK(fill(), *path, ": truncated: the object at byte ", offset, " has no end");
      const char c = buffer[at + i];
      if (quoted && c == '\\') {
        ++i;  // an escaped quote does not end the string
      } else if (c == '"') {
        quoted = !quoted;
      } else if (!quoted && (c == '{' || c == '}')) {
        depth += c == '{' ? 1 : -1;
        if (depth == 0) return take(record, i + 1), true;
      }
    }
  }

  bool next_text(Record& record) {
    if (ended) return false;
    size_t end = 0;
    while (!ended && end == 0) {
      ended = !fill();
      if (!ended && rest().size() >= kTextPart) end = options.cut ? options.cut(rest()) : 0;
    }
    take(record, ended ? rest().size() : end);
    continues = true;
    return true;
  }
};

RecordReader::RecordReader(std::vector<std::string> files, ReadOptions options) : impl_(new Impl) {
  for (const std::string& file : files) {
    std::error_code unknown;  // standard input, pipes
    const auto size = fs::file_size(file, unknown);
    impl_->bytes_total += unknown ? 0 : static_cast<int64_t>(size);
  }
  impl_->files = std::move(files);
  impl_->options = std::move(options);
}

RecordReader::~RecordReader() = default;

bool RecordReader::next(Record& record) {
  Impl& r = *impl_;
  for (;;) {
    if (!r.source) {
      if (r.next_file == r.files.size()) return false;
      r.open(r.files[r.next_file++]);
    }
    const bool found = r.form == Impl::Form::lines     ? r.next_line(record)
                       : r.form == Impl::Form::objects ? r.next_object(record)
                                                       : r.next_text(record);
    if (found) return true;
    r.close();
  }
}

int64_t RecordReader::bytes_read() const {
  return impl_->bytes_done + (impl_->source ? impl_->source->bytes_read() : 0);
}
int64_t RecordReader::bytes_total() const { return impl_->bytes_total; }

Document parse_record(Record&& record, const ReadOptions& options) {
  Document document;
  if (!record.json) {
    const size_t bad = find_invalid_utf8(record.bytes);
    PRISM_CHECK(bad == record.bytes.npos, *record.file, ": byte ", record.place + static_cast<int64_t>(bad),
                ": invalid UTF-8");
    document.text = std::move(record.bytes);
    return document;
  }
  nlohmann::json object;
  try {
    object = nlohmann::json::parse(record.bytes);
  } catch (const nlohmann::json::parse_error& error) {
    const size_t bad = find_invalid_utf8(record.bytes);
    PRISM_CHECK(bad == record.bytes.npos, record.where(), ": invalid UTF-8 at its byte ", bad);
    PRISM_FAIL(record.where(), ": not JSON, at its byte ", error.byte);
  }
  const nlohmann::json* text = find_path(object, options.field);
  PRISM_CHECK(text, record.where(), ": no field \"", options.field, "\"");
  PRISM_CHECK(text->is_string(), record.where(), ": field \"", options.field, "\": expected a string, got ",
              text->type_name());
  document.text = text->get<std::string>();
  if (const nlohmann::json* set = find_path(object, options.set_field); set && set->is_string())
    document.set = set->get<std::string>();
  return document;
}

}  // namespace prism
