// A directory for one test, removed at its end.
#pragma once

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace prism {

class Scratch {
 public:
  Scratch() {
    std::string name = std::filesystem::temp_directory_path() / "prism-test-XXXXXX";
    path_ = ::mkdtemp(name.data());
  }
  ~Scratch() { std::filesystem::remove_all(path_); }
  Scratch(const Scratch&) = delete;
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  // Writes a file, and the directories it lies in; returns its path.
  std::string write(const std::string& name, const std::string& content) const {
    const std::string path = *this / name;
    std::filesystem::create_directories(std::filesystem::path(path).parent_path());
    std::ofstream(path, std::ios::binary) << content;
    return path;
  }

 private:
  std::string path_;
};

}  // namespace prism
