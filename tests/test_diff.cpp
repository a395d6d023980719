#include <doctest/doctest.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>

#include "src/commands.h"
#include "src/safetensors.h"
#include "tests/temporary.h"

using namespace prism;

namespace {

struct Answer {
  int code;
  std::string text;
};

// Runs the command line with standard output going to a file.
Answer run(const TemporaryDirectory& dir, std::vector<std::string> words) {
  CLI::App app;
  add_diff(app);
  std::fflush(stdout);
  const int terminal = ::dup(1), file = ::open((dir / "stdout").c_str(), O_RDWR | O_CREAT | O_TRUNC, 0600);
  ::dup2(file, 1);
  Answer answer{0, ""};
  try {
    std::reverse(words.begin(), words.end());  // as CLI11 wants them
    app.parse(words);
  } catch (const Exit& exit) {
    answer.code = exit.code;
  } catch (...) {
    answer.code = -1;
  }
  std::fflush(stdout);
  ::dup2(terminal, 1);
  ::close(terminal);
  ::close(file);
  answer.text = read_text(dir / "stdout", 1 << 20);
  return answer;
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

void write(const std::string& path, std::vector<std::pair<std::string, std::vector<double>>> tensors) {
  std::vector<NamedTensor> named;
  for (auto& [name, values] : tensors)
    named.push_back(
        {name, {values.data(), {static_cast<int64_t>(values.size()) / 2, 2}, DType::f64, Device::cpu}});
  write_safetensors(path, named);
}

}  // namespace

TEST_CASE("diff: equal files exit 0, whatever the type they are stored in") {
  const TemporaryDirectory dir;
  std::vector<double> d = {1, 2, -0.5, INFINITY};
  std::vector<float> f = {1, 2, -0.5f, INFINITY};
  const std::vector<NamedTensor> a = {{"x", {d.data(), {4}, DType::f64, Device::cpu}}};
  const std::vector<NamedTensor> b = {{"x", {f.data(), {4}, DType::f32, Device::cpu}}};
  write_safetensors(dir / "a", a);
  write_safetensors(dir / "b", b);
  CHECK(run(dir, {"diff", dir / "a", dir / "b"}).code == 0);
}

TEST_CASE("diff: the relative norm and the worst element decide at the tolerance") {
  const TemporaryDirectory dir;
  write(dir / "a", {{"w", {3, 4, 0, 0.05}}, {"same", {1, 2}}});
  write(dir / "b", {{"w", {3, 4, 0, 0}}, {"same", {1, 2}}});  // ||a - b|| / ||b|| = 0.05 / 5
  const Answer above = run(dir, {"diff", dir / "a", dir / "b", "--tolerance", "0.0099"});
  CHECK(above.code == 1);
  CHECK(has(above.text, "1.000e-02  [1,1]  0.05  0\n"));
  CHECK(has(above.text, "2 compared, 1 above 0.0099, 0 in one file only"));
  CHECK(run(dir, {"diff", dir / "a", dir / "b", "--tolerance", "0.0101"}).code == 0);
  CHECK(run(dir, {"diff", dir / "a", dir / "b"}).code == 1);
}

TEST_CASE("diff: an absolute norm where the reference is 0") {
  const TemporaryDirectory dir;
  write(dir / "a", {{"w", {0, 0.25}}});
  write(dir / "b", {{"w", {0, 0}}});
  CHECK(run(dir, {"diff", dir / "a", dir / "b", "--tolerance", "0.2"}).code == 1);
  CHECK(run(dir, {"diff", dir / "a", dir / "b", "--tolerance", "0.3"}).code == 0);
}

TEST_CASE("diff: tensors of one file only and of other shapes are named, at any tolerance") {
  const TemporaryDirectory dir;
  write(dir / "a", {{"w", {1, 2}}, {"mine", {1, 2}}});
  write(dir / "b", {{"w", {1, 2, 3, 4}}, {"theirs", {1, 2}}});
  const Answer answer = run(dir, {"diff", dir / "a", dir / "b", "--tolerance", "1e9"});
  CHECK(answer.code == 1);
  CHECK(has(answer.text, "only in " + dir / "a"));
  CHECK(has(answer.text, "only in " + dir / "b"));
  CHECK(has(answer.text, "[1,2] and [2,2]"));
  CHECK(has(answer.text, "0 compared, 0 above 1e+09, 3 in one file only or of two shapes"));
}

TEST_CASE("diff: NaN, infinity against a number, and huge values never pass for equal") {
  const TemporaryDirectory dir;
  const auto code = [&](std::vector<double> a, std::vector<double> b) {
    write(dir / "a", {{"w", a}});
    write(dir / "b", {{"w", b}});
    return run(dir, {"diff", dir / "a", dir / "b", "--tolerance", "0.1"}).code;
  };
  CHECK(code({NAN, 1}, {NAN, 1}) == 1);
  CHECK(code({NAN, 1}, {1, 1}) == 1);
  CHECK(code({1, 1}, {1, INFINITY}) == 1);
  CHECK(code({INFINITY, 1}, {INFINITY, 2}) == 1);
  CHECK(code({INFINITY, 1}, {-INFINITY, 1}) == 1);
  CHECK(code({1e300, 1}, {2e300, 1}) == 1);
  CHECK(code({1e300, 1}, {1e300, 1}) == 0);
}
