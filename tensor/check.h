// Errors. Everything that can go wrong is thrown as prism::Error with one line: what was expected, what came.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace prism {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A wrong command line: main() exits 2 for it, 1 for every other Error.
struct UsageError : Error {
  using Error::Error;
};

// Joins its arguments as operator<< prints them: cat("K = ", 64) is "K = 64".
template <class... Args>
std::string cat(const Args&... args) {
  std::ostringstream out;
  (out << ... << args);
  return out.str();
}

}  // namespace prism

#define PRISM_FAIL(...) throw ::prism::Error(::prism::cat(__VA_ARGS__))

#define PRISM_CHECK(condition, ...)            \
  do {                                         \
    if (!(condition)) PRISM_FAIL(__VA_ARGS__); \
  } while (0)
