// A temporary directory that tests write small files into.
#pragma once

#include <fstream>

#include "tests/temporary.h"

namespace prism {

struct Scratch : TemporaryDirectory {
  // Writes a file, and the directories it lies in; returns its path.
  std::string write(const std::string& name, const std::string& content) const {
    const std::string path = *this / name;
    std::filesystem::create_directories(std::filesystem::path(path).parent_path());
    std::ofstream(path, std::ios::binary) << content;
    return path;
  }
};

}  // namespace prism
