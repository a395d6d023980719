// Files and JSON. Every failure is one line: the path, what was tried, the system's reason.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <utility>

#include "tensor/check.h"

namespace prism {

// An open file descriptor and the path that errors name.
class File {
 public:
  File(std::string path, int flags);
  File(File&& other) noexcept : path_(std::move(other.path_)), fd_(std::exchange(other.fd_, -1)) {}
  File& operator=(File&&) = delete;
  ~File();
  const std::string& path() const { return path_; }
  int fd() const { return fd_; }

 private:
  std::string path_;
  int fd_;
};

// A file being written from its start. It is complete, and on the disk, once flush() has returned.
class OutputFile : public File {
 public:
  explicit OutputFile(std::string path);
  void write(const void* bytes, size_t count);
  void write(std::string_view text) { write(text.data(), text.size()); }
  void flush();

 private:
  uint64_t written_ = 0;
};

// A regular file being read at any place.
class InputFile : public File {
 public:
  explicit InputFile(std::string path);
  uint64_t size() const { return size_; }
  void read(uint64_t offset, void* to, size_t count) const;

 private:
  uint64_t size_;
};

// The path then holds either all that `write` wrote or what it held before: written beside it, flushed,
// renamed.
void replace_file(const std::string& path, const std::function<void(OutputFile&)>& write);

// Throws when the file is larger than max_bytes.
std::string read_text(const std::string& path, size_t max_bytes);

// A JSON object. Errors, each naming `where`: not JSON, not an object, a key twice in one object, more than
// 32 levels.
nlohmann::json parse_json(std::string_view text, const std::string& where);

// A value as a message shows it: ASCII, one line, not longer than 60 characters.
std::string shown(const nlohmann::json& value);

// The system's reason for the last failure: "No space left on device".
std::string system_reason();

}  // namespace prism
