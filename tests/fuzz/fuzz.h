// What the fuzz targets share.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <string_view>

#include "tensor/check.h"

namespace prism {

// A directory in memory of this process, and files in it that are written over for each input.
inline const std::string& fuzz_directory() {
  static const std::string path = cat("/dev/shm/prism-fuzz-", ::getpid());
  static const bool made = std::filesystem::create_directories(path);
  static const int at_exit = std::atexit([] { std::filesystem::remove_all(path); });
  if (!made || at_exit != 0) std::abort();
  return path;
}

class FuzzFile {
 public:
  explicit FuzzFile(const std::string& name)
      : path_(fuzz_directory() + "/" + name), file_(::open(path_.c_str(), O_RDWR | O_CREAT, 0600)) {}
  const std::string& write(std::string_view bytes) const {
    const auto count = static_cast<ssize_t>(bytes.size());
    if (::ftruncate(file_, 0) != 0 || ::pwrite(file_, bytes.data(), bytes.size(), 0) != count) std::abort();
    return path_;
  }

 private:
  std::string path_;
  int file_;
};

// Runs fn; an Error must be one line that begins with `where`.
template <class Fn>
void only_errors(const std::string& where, const Fn& fn) {
  try {
    fn();
  } catch (const Error& error) {
    const std::string message = error.what();
    if (message.find('\n') != std::string::npos || !message.starts_with(where)) std::abort();
  }
}

}  // namespace prism
