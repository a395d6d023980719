#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>

#include "src/safetensors.h"
#include "tests/temporary.h"

using namespace prism;

namespace {

// A safetensors file of any header and any data, right or wrong.
std::string file_of(const std::string& header, const std::string& data) {
  const uint64_t length = header.size();
  std::string bytes(sizeof length, '\0');
  std::memcpy(bytes.data(), &length, sizeof length);
  return bytes + header + data;
}

void put(const std::string& path, const std::string& bytes) {
  OutputFile file(path);
  file.write(bytes);
}

std::string error_of(const std::string& path) {
  try {
    SafetensorsFile file(path);
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

template <class T>
Tensor tensor_of(std::vector<T>& values, Shape shape) {
  return {values.data(), shape, dtype_of<T>, Device::cpu};
}

template <class T>
std::vector<T> read_as(const SafetensorsFile& file, const std::string& name) {
  std::vector<T> values(static_cast<size_t>(file.info(name).shape.numel()));
  file.read(name, tensor_of(values, file.info(name).shape));
  return values;
}

}  // namespace

TEST_CASE(
    "safetensors: every type round-trips bit for bit, shapes of any rank, in the order given within a "
    "width") {
  const TemporaryDirectory dir;
  std::vector<double> d = {0, -0.0, 1.0 / 3, std::numeric_limits<double>::denorm_min(), 1e308, -INFINITY};
  std::vector<float> f = {1.5f, NAN, -INFINITY, 1e-45f};
  std::vector<bf16> b = {bf16(3.14f), bf16(-0.f), bf16(INFINITY)};
  std::vector<int32_t> i = {INT32_MIN, -1, 0, INT32_MAX};
  std::vector<float> scalar = {7}, none;
  const std::vector<NamedTensor> tensors = {
      {"b", tensor_of(b, {3, 1, 1})},     {"z", tensor_of(f, {2, 2})},
      {"a", tensor_of(i, {4})},           {"scalar", tensor_of(scalar, {})},
      {"empty", tensor_of(none, {0, 5})}, {"d", tensor_of(d, {1, 2, 1, 3, 1})}};
  write_safetensors(dir / "x.safetensors", tensors, {{"format", "pt"}, {"step", "12"}});

  const SafetensorsFile file(dir / "x.safetensors");
  CHECK(file.names().front() == "d");
  CHECK(file.names().back() == "b");
  CHECK(file.names().size() == 6);
  CHECK(file.metadata() == std::map<std::string, std::string>{{"format", "pt"}, {"step", "12"}});
  for (const NamedTensor& t : tensors) {
    CAPTURE(t.name);
    CHECK(file.info(t.name).shape == t.tensor.shape);
    std::vector<char> bytes(t.tensor.bytes() + 1, 'x');
    file.read(t.name, {bytes.data(), t.tensor.shape, t.tensor.dtype, Device::cpu});
    CHECK(std::equal(bytes.begin(), bytes.end() - 1, static_cast<const char*>(t.tensor.data)));
    CHECK(bytes.back() == 'x');
    CHECK(file.info(t.name).begin % static_cast<uint64_t>(size_of(t.tensor.dtype)) == 0);
  }
  write_safetensors(dir / "y.safetensors", tensors, {{"step", "12"}, {"format", "pt"}});
  CHECK(read_text(dir / "x.safetensors", 1 << 20) == read_text(dir / "y.safetensors", 1 << 20));
}

TEST_CASE("safetensors: float32, float64, bf16 and float16 load into float32, float64 and bf16 by value") {
  const TemporaryDirectory dir;
  const uint16_t halves[] = {0x3c00, 0xc000, 0x3555, 0x0001, 0x83ff, 0x7bff, 0x7c00, 0xfc00};
  const double exact[] = {1,     -2,       0.333251953125, std::ldexp(1, -24), -std::ldexp(1023, -24),
                          65504, INFINITY, -INFINITY};
  std::string data(reinterpret_cast<const char*>(halves), sizeof halves);
  put(dir / "half", file_of(R"({"h":{"dtype":"F16","shape":[8],"data_offsets":[0,16]}})", data));
  const SafetensorsFile half(dir / "half");
  const auto as_double = read_as<double>(half, "h");
  const auto as_float = read_as<float>(half, "h");
  const auto as_bf16 = read_as<bf16>(half, "h");
  for (size_t k = 0; k < 8; ++k) {
    CHECK(as_double[k] == exact[k]);
    CHECK(as_float[k] == static_cast<float>(exact[k]));
    CHECK(as_bf16[k].bits == bf16(static_cast<float>(exact[k])).bits);
  }

  std::vector<double> d = {1.0 / 3, -1e300};
  std::vector<float> f = {1.f / 3, -2.5f};
  std::vector<bf16> b = {bf16(1.f / 3), bf16(-2.5f)};
  std::vector<int32_t> i = {1 << 30, INT32_MAX};
  const std::vector<NamedTensor> tensors = {
      {"d", tensor_of(d, {2})}, {"f", tensor_of(f, {2})}, {"b", tensor_of(b, {2})}, {"i", tensor_of(i, {2})}};
  write_safetensors(dir / "mixed", tensors);
  const SafetensorsFile mixed(dir / "mixed");
  CHECK(read_as<float>(mixed, "d") == std::vector<float>{static_cast<float>(1.0 / 3), -INFINITY});
  CHECK(read_as<double>(mixed, "f") == std::vector<double>{1.f / 3, -2.5f});
  CHECK(read_as<bf16>(mixed, "f")[0].bits == bf16(1.f / 3).bits);
  CHECK(read_as<double>(mixed, "b")[1] == -2.5);
  CHECK(read_as<double>(mixed, "i") == std::vector<double>{1 << 30, INT32_MAX});
  CHECK_THROWS_WITH(read_as<float>(mixed, "i"),
                    (dir / "mixed" + ": tensor \"i\": expected values for f32, got I32").c_str());
  CHECK_THROWS_WITH(read_as<int32_t>(mixed, "f"),
                    (dir / "mixed" + ": tensor \"f\": expected values for i32, got F32").c_str());
  std::vector<float> other(3);
  CHECK_THROWS_WITH(mixed.read("f", tensor_of(other, {3})),
                    (dir / "mixed" + ": tensor \"f\": expected [3], got [2]").c_str());
  CHECK_THROWS_WITH(mixed.info("g"),
                    (dir / "mixed" + ": tensor \"g\": expected, got none of that name").c_str());
}

TEST_CASE("safetensors: a conversion longer than one slice converts every element") {
  const TemporaryDirectory dir;
  const size_t n = (1 << 20) * 2 + 3;
  std::vector<float> f(n);
  for (size_t k = 0; k < n; ++k) f[k] = static_cast<float>(k);
  const std::vector<NamedTensor> tensors = {{"f", tensor_of(f, {static_cast<int64_t>(n)})}};
  write_safetensors(dir / "long", tensors);
  const auto d = read_as<double>(SafetensorsFile(dir / "long"), "f");
  size_t wrong = 0;
  for (size_t k = 0; k < n; ++k) wrong += d[k] != static_cast<double>(k);
  CHECK(wrong == 0);
}

TEST_CASE(
    "safetensors: malformed files give one line with the file, the tensor, what was expected and what came") {
  const TemporaryDirectory dir;
  const std::string path = dir / "bad.safetensors", four(4, 'x'), eight(8, 'x');
  const auto one = [](const std::string& name, const std::string& dtype, const std::string& shape,
                      const std::string& offsets) {
    return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape +
           ",\"data_offsets\":" + offsets + "}";
  };
  const auto single = [&](const std::string& dtype, const std::string& shape, const std::string& offsets) {
    return "{" + one("w", dtype, shape, offsets) + "}";
  };
  const auto pair = [&](const std::string& first, const std::string& second) {
    return "{" + one("a", "F32", "[1]", first) + "," + one("b", "F32", "[1]", second) + "}";
  };
  const std::string w = single("F32", "[1]", "[0,4]");
  REQUIRE((put(path, file_of(w, four)), error_of(path)) == "");
  REQUIRE((put(path, file_of(w + "   ", four)), error_of(path)) == "");  // padding

  struct Bad {
    std::string bytes, part, got;
  };
  const std::vector<Bad> bad = {
      {"", "at least 10 bytes", "got 0"},
      {"1234567", "at least 10 bytes", "got 7"},
      {std::string(9, '\0'), "at least 10 bytes", "got 9"},
      {std::string(8, '\xff') + w, "header", "18446744073709551615"},
      {file_of(w, "").substr(0, 30), "header", ""},
      {file_of("", four), "header of 2 to 4 bytes", "got 0"},
      {file_of(" " + w, four), "begin with {", "\" \""},
      {file_of("[]", ""), "begin with {", "\"[\""},
      {file_of("\xff" + w, four), "begin with {", "\"\\ufffd\""},
      {file_of("{]", ""), "syntax error in line 1, byte 2", ""},
      {file_of("{\"\xff\xfe\":1}", ""), "syntax error", ""},
      {file_of("{\"w\":" + std::string(100, '['), ""), "32 levels", ""},
      {file_of(w + "{}", four), "syntax error", ""},
      {file_of("{" + one("w", "F32", "[1]", "[0,4]") + "," + one("w", "F32", "[1]", "[4,8]") + "}", eight),
       "\"w\"", "twice"},
      {file_of(R"({"w":{"dtype":"F32","dtype":"F64","shape":[1],"data_offsets":[0,4]}})", four), "\"dtype\"",
       "twice"},
      {file_of(R"({"__metadata__":{"a":1}})", ""), "__metadata__", "{\"a\":1}"},
      {file_of(R"({"__metadata__":["a"]})", ""), "__metadata__", "[\"a\"]"},
      {file_of("{\"w\":7}", ""), "tensor \"w\"", "7"},
      {file_of(R"({"w":{"dtype":"F32","shape":[1]}})", ""), "tensor \"w\"", ""},
      {file_of(R"({"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":1}})", four), "tensor \"w\"", ""},
      {file_of("{" + one("", "F32", "[1]", "[0,4]") + "}", four), "tensor \"\"", "none"},
      {file_of("{" + one("a\\nb", "F32", "[2]", "[0,4]") + "}", four), "tensor \"a\\nb\"", ""},
      {file_of(single("F8", "[4]", "[0,4]"), four), "tensor \"w\"", "\"F8\""},
      {file_of(R"({"w":{"dtype":5,"shape":[1],"data_offsets":[0,4]}})", four), "tensor \"w\"", "5"},
      {file_of(single("F32", "4", "[0,4]"), four), "tensor \"w\"", "got 4"},
      {file_of(single("F32", "[-1]", "[0,4]"), four), "tensor \"w\"", "[-1]"},
      {file_of(single("F32", "[1.0]", "[0,4]"), four), "tensor \"w\"", "[1.0]"},
      {file_of(single("F32", "[\"1\"]", "[0,4]"), four), "tensor \"w\"", "[\"1\"]"},
      {file_of(single("F32", "[1,1,1,1,1,1]", "[0,4]"), four), "tensor \"w\"", "[1,1,1,1,1,1]"},
      {file_of(single("F32", "[4294967296,4294967296]", "[0,4]"), four), "2^63", ""},
      {file_of(single("F32", "[4611686018427387905]", "[0,4]"), four), "2^63", ""},  // 4 x it is 4 in 64 bits
      {file_of(single("F32", "[4294967296,4294967296,0]", "[0,0]"), ""), "2^63", ""},
      {file_of(single("F32", "[18446744073709551615]", "[0,4]"), four), "2^63", ""},
      {file_of(single("F32", "[1]", "[0]"), four), "tensor \"w\"", "[0]"},
      {file_of(single("F32", "[1]", "[0,4,8]"), four), "tensor \"w\"", "[0,4,8]"},
      {file_of(single("F32", "[1]", "[-4,0]"), four), "tensor \"w\"", "[-4,0]"},
      {file_of(single("F32", "[1]", "[4,0]"), four), "tensor \"w\"", "[4,0]"},
      {file_of(single("F32", "[1]", "[0,8]"), four), "within the 4 bytes", "[0,8]"},
      {file_of(single("F32", "[2]", "[0,4]"), four), "8 bytes for F32 [2]", "got 4"},
      {file_of(single("F64", "[1]", "[0,4]"), four), "8 bytes for F64 [1]", "got 4"},
      {file_of(pair("[0,4]", "[0,4]"), four), "tensor \"b\"", "overlap"},
      {file_of(pair("[0,4]", "[2,6]"), eight), "tensor \"b\"", "overlap"},
      {file_of(pair("[0,4]", "[8,12]"), eight + four), "tensor \"b\"", "hole"},
      {file_of(single("F32", "[1]", "[4,8]"), eight), "tensor \"w\"", "hole"},
      {file_of(w, eight), "after the last tensor", "4 bytes more"},
      {file_of("{}", four), "after the last tensor", "4 bytes more"},
  };
  for (const Bad& b : bad) {
    put(path, b.bytes);
    const std::string message = error_of(path);
    CAPTURE(b.bytes);
    CAPTURE(message);
    CHECK(message.starts_with(path + ": "));
    CHECK(has(message, "expected "));
    CHECK(has(message, "got "));
    CHECK(has(message, b.part));
    CHECK(has(message, b.got));
    CHECK_FALSE(has(message, "\n"));
    CHECK(message.size() < 300);
  }
}

TEST_CASE("safetensors: a file cut at any length is an error, and so is one cut after it was opened") {
  const TemporaryDirectory dir;
  std::vector<float> f = {1, 2, 3};
  std::vector<bf16> b = {bf16(1.f), bf16(2.f)};
  const std::vector<NamedTensor> tensors = {{"f", tensor_of(f, {3})}, {"b", tensor_of(b, {2})}};
  write_safetensors(dir / "whole", tensors, {{"k", "v"}});
  const std::string whole = read_text(dir / "whole", 1 << 20);
  for (size_t length = 0; length < whole.size(); ++length) {
    put(dir / "cut", whole.substr(0, length));
    const std::string message = error_of(dir / "cut");
    CAPTURE(length);
    CHECK(message.starts_with(dir / "cut"));
    CHECK_FALSE(has(message, "\n"));
  }
  const SafetensorsFile file(dir / "whole");
  CHECK(::truncate((dir / "whole").c_str(), static_cast<off_t>(whole.size() - 2)) == 0);
  CHECK(read_as<float>(file, "f") == f);
  CHECK_THROWS_WITH(
      read_as<bf16>(file, "b"),
      cat(dir / "whole", ": cannot read 2 bytes at ", whole.size() - 2, ": the file ends there").c_str());
}

TEST_CASE("safetensors: a header longer than the format's limit is refused before it is read") {
  const TemporaryDirectory dir;
  const uint64_t length = 200'000'000;
  put(dir / "sparse", std::string(reinterpret_cast<const char*>(&length), sizeof length));
  CHECK(::truncate((dir / "sparse").c_str(), 1 << 30) == 0);
  CHECK(error_of(dir / "sparse") ==
        dir / "sparse" + ": expected a header of 2 to 100000000 bytes, got 200000000");
}

TEST_CASE("safetensors: writing names what fails and leaves the file that was there") {
  const TemporaryDirectory dir;
  std::vector<float> f(1000);
  const std::vector<NamedTensor> twice = {{"f", tensor_of(f, {1000})}, {"f", tensor_of(f, {1000})}};
  put(dir / "x", "before");
  CHECK_THROWS_WITH(write_safetensors(dir / "x", twice),
                    (dir / "x.tmp: tensor \"f\": expected once, got twice").c_str());
  CHECK(read_text(dir / "x", 100) == "before");
  CHECK_FALSE(std::filesystem::exists(dir / "x.tmp"));

  const std::vector<NamedTensor> once = {{"f", tensor_of(f, {1000})}};
  CHECK_THROWS_WITH(write_safetensors(dir / "none/x", once),
                    (dir / "none/x.tmp: cannot open: No such file or directory").c_str());
  OutputFile full("/dev/full");
  CHECK_THROWS_WITH(write_safetensors(full, once),
                    "/dev/full: cannot write 8 bytes after the first 0: No space left on device");
}

TEST_CASE("safetensors: only regular files are opened") {
  const TemporaryDirectory dir;
  REQUIRE(::mkfifo((dir / "pipe").c_str(), 0600) == 0);
  CHECK(error_of(dir / "pipe") == dir / "pipe" + ": expected a regular file, got a device or pipe");
  CHECK(error_of(dir / "") == dir / "" + ": expected a regular file, got a directory");
  CHECK(error_of("/dev/zero") == "/dev/zero: expected a regular file, got a device or pipe");
}
