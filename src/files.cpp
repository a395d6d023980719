#include "src/files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>
#include <vector>

namespace prism {

std::string system_reason() { return std::strerror(errno); }

File::File(std::string path, int flags) : path_(std::move(path)), fd_(::open(path_.c_str(), flags, 0666)) {
  PRISM_CHECK(fd_ >= 0, path_, ": cannot open: ", system_reason());
}

File::~File() {
  if (fd_ >= 0) ::close(fd_);
}

OutputFile::OutputFile(std::string path) : File(std::move(path), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC) {}

void OutputFile::write(const void* bytes, size_t count) {
  for (size_t done = 0; done < count;) {
    const ssize_t n = ::write(fd(), static_cast<const char*>(bytes) + done, count - done);
    if (n < 0 && errno == EINTR) continue;
    PRISM_CHECK(n > 0, path(), ": cannot write ", count - done, " bytes after the first ", written_ + done,
                ": ", system_reason());
    done += static_cast<size_t>(n);
  }
  written_ += count;
}

void OutputFile::flush() {
  PRISM_CHECK(::fsync(fd()) == 0, path(), ": cannot flush ", written_, " bytes to disk: ", system_reason());
}

InputFile::InputFile(std::string path) : File(std::move(path), O_RDONLY | O_CLOEXEC | O_NONBLOCK) {
  struct stat status;
  PRISM_CHECK(::fstat(fd(), &status) == 0, this->path(), ": cannot read: ", system_reason());
  PRISM_CHECK(S_ISREG(status.st_mode), this->path(), ": expected a regular file, got ",
              S_ISDIR(status.st_mode) ? "a directory" : "a device or pipe");
  size_ = static_cast<uint64_t>(status.st_size);
}

void InputFile::read(uint64_t offset, void* to, size_t count) const {
  for (size_t done = 0; done < count;) {
    const ssize_t n =
        ::pread(fd(), static_cast<char*>(to) + done, count - done, static_cast<off_t>(offset + done));
    if (n < 0 && errno == EINTR) continue;
    PRISM_CHECK(n > 0, path(), ": cannot read ", count - done, " bytes at ", offset + done, ": ",
                n == 0 ? "the file ends there" : system_reason());
    done += static_cast<size_t>(n);
  }
}

void replace_file(const std::string& path, const std::function<void(OutputFile&)>& write) {
  const std::string beside = path + ".tmp";
  try {
    OutputFile file(beside);
    write(file);
    file.flush();
  } catch (...) {
    ::unlink(beside.c_str());
    throw;
  }
  PRISM_CHECK(std::rename(beside.c_str(), path.c_str()) == 0, path, ": cannot replace: ", system_reason());
}

std::string read_text(const std::string& path, size_t max_bytes) {
  const InputFile file(path);
  PRISM_CHECK(file.size() <= max_bytes, path, ": expected at most ", max_bytes, " bytes, got ", file.size());
  std::string text(file.size(), '\0');
  file.read(0, text.data(), text.size());
  return text;
}

nlohmann::json parse_json(std::string_view text, const std::string& where) {
  using nlohmann::json;
  constexpr int kMaxDepth = 32;             // the library prints and compares values recursively
  std::vector<std::set<std::string>> open;  // the keys seen in each object not yet closed
  const auto watch = [&](int depth, json::parse_event_t event, json& value) {
    PRISM_CHECK(depth <= kMaxDepth, where, ": expected JSON of at most ", kMaxDepth, " levels, got more");
    if (event == json::parse_event_t::object_start) open.emplace_back();
    if (event == json::parse_event_t::object_end) open.pop_back();
    if (event == json::parse_event_t::key)
      PRISM_CHECK(open.back().insert(value.get<std::string>()).second, where, ": key ", shown(value),
                  ": expected once, got twice");
    return true;
  };
  json value;
  try {
    value = json::parse(text.begin(), text.end(), watch);
  } catch (const json::parse_error& error) {
    const auto line =
        1 + std::count(text.begin(), text.begin() + static_cast<ptrdiff_t>(error.byte) - 1, '\n');
    PRISM_FAIL(where, ": expected JSON, got a syntax error in line ", line, ", byte ", error.byte);
  } catch (const json::out_of_range&) {
    PRISM_FAIL(where, ": expected JSON, got a number beyond the range of double");
  }
  PRISM_CHECK(value.is_object(), where, ": expected a JSON object, got ", shown(value));
  return value;
}

std::string shown(const nlohmann::json& value) {
  const std::string text = value.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
  return text.size() <= 60 ? text : text.substr(0, 57) + "...";
}

}  // namespace prism
