#include "data/text.h"

#include <glob.h>
#include <zstd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>

#include "tensor/check.h"

namespace prism {
namespace {

namespace fs = std::filesystem;

constexpr size_t kChunk = size_t{256} << 10;   // bytes read at a time
constexpr size_t kTextPart = size_t{4} << 20;  // of a plain text handed out at a time
constexpr size_t kMaxPart = size_t{32} << 20;
constexpr size_t kNone = std::string::npos;

// Bytes of the character that `text` begins with: 0 when it is not UTF-8, -1 when text ends within it.
// Overlong forms, surrogates and what lies above U+10FFFF show in the second byte.
int character_size(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(0);
  if (lead < 0x80) return 1;
  if (lead < 0xc2 || lead > 0xf4) return 0;
  const size_t size = lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
  for (size_t i = 1; i < std::min(size, text.size()); ++i) {
    const unsigned char low = i > 1 ? 0x80 : lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
    const unsigned char high = i > 1 ? 0xbf : lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
    if (byte(i) < low || byte(i) > high) return 0;
  }
  return size > text.size() ? -1 : static_cast<int>(size);
}

void open_file(std::filebuf& file, const std::string& path) {
  PRISM_CHECK(!fs::is_directory(path), path, ": expected a file, got a directory");
  file.open(path == "-" ? "/dev/stdin" : path, std::ios::in | std::ios::binary);
  PRISM_CHECK(file.is_open(), path, ": ", std::strerror(errno));
}

std::string read_head(const std::string& path) {
  std::filebuf file;
  open_file(file, path);
  std::string head(8192, '\0');
  head.resize(static_cast<size_t>(file.sgetn(head.data(), static_cast<int64_t>(head.size()))));
  return head;
}

bool looks_like_text(const std::string& path) {
  if (path.ends_with(".zst"))
    return path.ends_with(".jsonl.zst") || path.ends_with(".json.zst") || path.ends_with(".txt.zst");
  std::string head = read_head(path);
  head.resize(head.size() - incomplete_tail(head));
  return head.find('\0') == kNone && find_invalid_utf8(head) == kNone;
}

void list(const std::string& path, std::vector<std::string>& files) {
  PRISM_CHECK(path == "-" || fs::exists(path), path, ": no such file or directory");
  if (!fs::is_directory(path)) return files.push_back(path);
  const size_t before = files.size();
  for (auto it = fs::recursive_directory_iterator(path); it != fs::recursive_directory_iterator(); ++it) {
    if (it->path().filename().string()[0] == '.')
      it.disable_recursion_pending();
    else if (it->is_regular_file() && looks_like_text(it->path()))
      files.push_back(it->path());
  }
  PRISM_CHECK(files.size() > before, path, ": no text files in this directory");
  std::sort(files.begin() + static_cast<int64_t>(before), files.end());
}

// What a zstd file holds, frame after frame.
class ZstdBuffer : public std::streambuf {
 public:
  ZstdBuffer(std::filebuf& file, const std::string& path) : file_(file), path_(path) {}

 private:
  int_type underflow() override {
    ZSTD_outBuffer to{out_.data(), out_.size(), 0};
    while (to.pos == 0) {
      if (from_.pos == from_.size && !more_) {
        from_ = {in_.data(), static_cast<size_t>(file_.sgetn(in_.data(), static_cast<int64_t>(in_.size()))),
                 0};
        read_ += from_.size;
        PRISM_CHECK(from_.size > 0 || !in_frame_, path_, ": truncated: it ends at byte ", read_,
                    ", inside a zstd frame");
        if (from_.size == 0) return traits_type::eof();
      }
      const size_t left = ZSTD_decompressStream(stream_.get(), &to, &from_);
      PRISM_CHECK(!ZSTD_isError(left), path_, ": corrupt zstd data before byte ",
                  read_ - from_.size + from_.pos, ": ", ZSTD_getErrorName(left));
      in_frame_ = left != 0;
      more_ = in_frame_ && to.pos == to.size;  // zstd may hold output that found no room
    }
    setg(out_.data(), out_.data(), out_.data() + to.pos);
    return traits_type::to_int_type(out_[0]);
  }

  std::filebuf& file_;
  const std::string& path_;
  std::vector<char> in_ = std::vector<char>(kChunk), out_ = in_;
  std::unique_ptr<ZSTD_DStream, size_t (*)(ZSTD_DStream*)> stream_{ZSTD_createDStream(), ZSTD_freeDStream};
  ZSTD_inBuffer from_{};
  size_t read_ = 0;
  bool in_frame_ = true, more_ = false;
};

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

// Whether lists and objects lie deeper than that within one another: dump() calls itself for each level.
bool deeper(const nlohmann::json& value, int levels) {
  return value.is_structured() &&
         (levels == 0 || std::any_of(value.begin(), value.end(),
                                     [&](const nlohmann::json& v) { return deeper(v, levels - 1); }));
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

std::string valid_utf8(std::string_view text) {
  std::string valid;
  for (size_t bad; (bad = find_invalid_utf8(text)) != kNone; text.remove_prefix(bad + 1))
    valid.append(text.substr(0, bad)).append("\xef\xbf\xbd");
  return valid.append(text);
}

void refuse_lfs_pointer(std::string_view head, const std::string& path) {
  PRISM_CHECK(!head.starts_with("version https://git-lfs.github.com/spec/"), path,
              ": a Git LFS pointer lies in place of the data; fetch it with `git lfs pull`");
}

std::string read_file(const std::string& path) {
  std::filebuf file;
  open_file(file, path);
  return std::string(std::istreambuf_iterator<char>(&file), {});
}

std::vector<std::string> list_text_files(const std::vector<std::string>& names) {
  std::vector<std::string> files;
  for (const std::string& name : names) {
    glob_t found{};
    if (!fs::exists(name)) glob(name.c_str(), 0, nullptr, &found);
    std::vector<std::string> paths(found.gl_pathv, found.gl_pathv + found.gl_pathc);
    globfree(&found);
    if (paths.empty()) paths = {name};
    for (const std::string& path : paths) list(path, files);
  }
  return files;
}

struct DocumentReader::Input {
  std::string path;
  std::filebuf file;
  std::optional<ZstdBuffer> zstd;
  std::istream stream{&file};

  explicit Input(const std::string& name) : path(name) {
    if (fs::is_regular_file(path)) refuse_lfs_pointer(read_head(path), path);
    open_file(file, path);
    if (path.ends_with(".zst")) stream.rdbuf(&zstd.emplace(file, path));
    stream.exceptions(std::ios::badbit);  // passes on what the buffer throws
  }
};

DocumentReader::DocumentReader(std::vector<std::string> files, ReadOptions options)
    : files_(std::move(files)), options_(std::move(options)) {
  std::error_code unknown;  // standard input, pipes: -1
  for (const std::string& file : files_) bytes_total_ += static_cast<int64_t>(fs::file_size(file, unknown));
}

DocumentReader::~DocumentReader() = default;

double DocumentReader::fraction() const {
  const int64_t here = input_ ? int64_t{input_->file.pubseekoff(0, std::ios::cur, std::ios::in)} : 0;
  return bytes_total_ > 0 ? static_cast<double>(bytes_done_ + here) / static_cast<double>(bytes_total_) : 0;
}

void DocumentReader::open(const std::string& file) {
  input_ = std::make_unique<Input>(file);
  number_ = offset_ = 0;
  in_list_ = false;
  const std::string name = file.ends_with(".zst") ? file.substr(0, file.size() - 4) : file;
  const bool piped_json = file == "-" && (input_->stream >> std::ws).peek() == '{';
  form_ = name.ends_with(".jsonl") || piped_json           ? Form::lines
          : name.ends_with(".json") && options_.json_files ? Form::objects
                                                           : Form::text;
  if (form_ != Form::text && input_->stream.peek() == 0xef) input_->stream.ignore(3);  // a byte order mark
}

bool DocumentReader::next(Document& document) {
  while (input_ || opened_ < files_.size()) {
    if (!input_) open(files_[opened_++]);
    std::string problem;
    if (form_ == Form::text ? read_part(document, problem) : read_object(document, problem)) {
      if (problem.empty()) return true;
      PRISM_CHECK(options_.skip_bad, problem);
      ++skipped_;
    } else {
      bytes_done_ += input_->file.pubseekoff(0, std::ios::cur, std::ios::in);
      input_.reset();
    }
  }
  return false;
}

// Objects stand one a line, or in .json one after another or in one list.
bool DocumentReader::read_object(Document& document, std::string& problem) {
  std::istream& in = input_->stream;
  const auto where = [&] {
    return cat(input_->path, form_ == Form::lines ? ": line " : ": object ", number_, ": ");
  };
  nlohmann::json object;
  try {
    if (form_ == Form::lines) {
      std::string line;
      do {
        if (!std::getline(in, line)) return false;
        ++number_;
      } while (line.find_first_not_of(" \t\r") == kNone);
      object = nlohmann::json::parse(line);
    } else {
      ++number_;
      for (int c; (c = in.peek()) != '{'; in.ignore()) {
        PRISM_CHECK(c != EOF || !in_list_, where(), "truncated: the list has no end");
        if (c == EOF) return false;
        PRISM_CHECK(c && std::strchr("[], \t\r\n", c), where(), "not JSON");
        if (c == '[' || c == ']') in_list_ = c == '[';
      }
      in >> object;
    }
  } catch (const nlohmann::json::exception& error) {
    const auto* syntax = dynamic_cast<const nlohmann::json::parse_error*>(&error);
    problem = syntax ? cat(where(), std::strstr(error.what(), "ill-formed") ? "invalid UTF-8" : "not JSON",
                           " at its byte ", syntax->byte)
                     : cat(where(), "a number beyond those of 64 bits");
    PRISM_CHECK(form_ == Form::lines, problem);  // the next object cannot be found
    return true;
  }
  if (options_.field.empty()) {
    if (deeper(object, 100))
      problem = cat(where(), "lists and objects nested deeper than 100 levels");
    else
      document = {object.dump(), "", false};
    return true;
  }
  const nlohmann::json* text = find_path(object, options_.field);
  const nlohmann::json* set = find_path(object, options_.set_field);
  if (!text)
    problem = cat(where(), "no field \"", options_.field, "\"");
  else if (!text->is_string())
    problem = cat(where(), "field \"", options_.field, "\": expected a string, got ", text->type_name());
  else
    document = {text->get<std::string>(), set && set->is_string() ? set->get<std::string>() : "", false};
  return true;
}

// The rest of a plain text, or as much of it as kTextPart and the places to cut it allow.
bool DocumentReader::read_part(Document& document, std::string& problem) {
  std::istream& in = input_->stream;
  if (!in) return false;
  size_t end = 0;
  while (in && end == 0) {
    const size_t had = text_.size();
    PRISM_CHECK(had < kMaxPart, input_->path, ": byte ", offset_,
                ": expected a space or line end to cut this text at");
    text_.resize(had + kChunk);
    in.read(text_.data() + had, kChunk);
    text_.resize(had + static_cast<size_t>(in.gcount()));
    if (in && text_.size() >= kTextPart && options_.cut) end = options_.cut(text_);
  }
  if (end == 0) end = text_.size();
  const size_t mark = offset_ == 0 && text_.starts_with("\xef\xbb\xbf") ? 3 : 0;  // a byte order mark
  document = {text_.substr(mark, end - mark), "", number_++ > 0};
  if (const size_t bad = find_invalid_utf8(document.text); bad != kNone) {
    problem = cat(input_->path, ": byte ", offset_ + static_cast<int64_t>(mark + bad), ": invalid UTF-8");
    number_ = 0;  // what follows a part that is skipped continues nothing
  }
  text_.erase(0, end);
  offset_ += static_cast<int64_t>(end);
  return true;
}

}  // namespace prism
