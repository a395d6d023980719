// What an op reads and writes in a test, made the same way for the CPU in double and for the card: an op
// under test is one generic function that asks for its buffers here and calls the kernel. Inputs are rounded
// to the card's types on both sides; everything else starts as NaN bits, and what lies between and beyond the
// rows must keep them.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "kernels/rows.h"
#include "src/compare.h"
#include "tensor/device.h"
#include "tensor/rng.h"

namespace prism {

// Under compute-sanitizer, a hundred times slower, each kernel runs once or twice at small size.
inline const bool kSmall = std::getenv("PRISM_SMALL") != nullptr;

enum class Use { in, out, inout, scratch };

class Memory {
 public:
  // `storage` is the card's storage type; shift and gap, in numbers, move every buffer off 16-byte alignment.
  Memory(Device device, DType storage, int64_t shift, int64_t gap)
      : device_(device), storage_(storage), shift_(shift), gap_(gap) {}

  Device device() const { return device_; }

  // n numbers of the storage or the accumulation type, drawn from [low, high].
  template <class T>
  T* store(const char* name, Use use, int64_t n, double low = -1, double high = 1) {
    return take<T>(name, use, 1, n, n, storage_, low, high);
  }
  template <class T>
  acc_t<T>* acc(const char* name, Use use, int64_t n, double low = -1, double high = 1) {
    return take<acc_t<T>>(name, use, 1, n, n, DType::f32, low, high);
  }
  template <class T>
  Rows<T> rows(const char* name, Use use, int64_t n, int64_t columns, double low = -1, double high = 1) {
    const int64_t stride = columns + gap_;
    return {take<T>(name, use, n, columns, stride, storage_, low, high), stride};
  }
  template <class T>
  T* copy_of(const std::vector<T>& values) {
    Buffer& buffer = others_.emplace_back(device_, values.size() * sizeof(T) + 4);
    copy_in(device_, buffer.data(), values.data(), values.size() * sizeof(T));
    return reinterpret_cast<T*>(buffer.data());
  }
  // Numbers that the op's function worked out itself.
  void record(const char* name, const std::vector<double>& values) { recorded_[name] = values; }

  // Every output by name. Checks that all other bytes are as they were.
  std::map<std::string, std::vector<double>> results() {
    auto results = recorded_;
    for (const Item& item : items_) {
      std::vector<char> bytes(item.buffer.bytes());
      copy_out(device_, bytes.data(), item.buffer.data(), bytes.size());
      const size_t size = static_cast<size_t>(size_of(item.dtype));
      const bool is_output = item.use == Use::out || item.use == Use::inout;
      std::vector<bool> inside(bytes.size() / size, false);
      std::vector<double> values;
      for (int64_t r = 0; r < item.rows; ++r)
        for (int64_t c = 0; c < item.columns; ++c) {
          const size_t at = static_cast<size_t>(shift_ + r * item.stride + c);
          inside[at] = true;
          if (is_output) values.push_back(read(bytes.data() + at * size, item.dtype));
        }
      bool kept = true;
      for (size_t i = 0; i < inside.size() * size; ++i)
        kept = kept && (inside[i / size] || bytes[i] == static_cast<char>(0xff));
      CHECK_MESSAGE(kept, "bytes around ", item.name, " were written");
      if (is_output) results[item.name] = values;
    }
    return results;
  }

 private:
  struct Item {
    std::string name;
    Use use;
    int64_t rows, columns, stride;
    DType dtype;
    Buffer buffer;
  };

  static double read(const char* at, DType dtype) {
    const auto as = [&](auto x) {
      std::memcpy(&x, at, sizeof x);
      return x;
    };
    if (dtype == DType::f64) return as(0.0);
    return dtype == DType::f32 ? as(0.f) : static_cast<float>(as(bf16(0.f)));
  }

  template <class T>
  T* take(const char* name, Use use, int64_t rows, int64_t columns, int64_t stride, DType rounding,
          double low, double high) {
    constexpr int64_t kGuard = 64;
    std::vector<T> host(static_cast<size_t>(shift_ + rows * stride + kGuard));
    std::memset(static_cast<void*>(host.data()), 0xff, host.size() * sizeof(T));
    for (int64_t i = 0; (use == Use::in || use == Use::inout) && i < rows * columns; ++i) {
      const double u = random_uniform(7, items_.size(), static_cast<uint64_t>(i));
      const float x = static_cast<float>(low + (high - low) * u);
      host[static_cast<size_t>(shift_ + i / columns * stride + i % columns)] =
          static_cast<T>(rounding == DType::bf16 ? static_cast<float>(bf16(x)) : x);
    }
    Buffer buffer(device_, host.size() * sizeof(T));
    copy_in(device_, buffer.data(), host.data(), buffer.bytes());
    T* const data = reinterpret_cast<T*>(buffer.data()) + shift_;
    items_.push_back({name, use, rows, columns, stride, dtype_of<T>, std::move(buffer)});
    return data;
  }

  Device device_;
  DType storage_;
  int64_t shift_, gap_;
  std::vector<Item> items_;
  std::vector<Buffer> others_;
  std::map<std::string, std::vector<double>> recorded_;
};

// The largest errors seen, by op and storage type.
inline std::map<std::string, double>& worst_errors() {
  static std::map<std::string, double> errors;
  return errors;
}

// Runs op(Tag<T>, memory) in T on the card, twice, and in double on the CPU; on and off 16-byte alignment.
template <class T, class Op>
void compare_with_cpu(const char* name, const std::string& shape, const Op& op) {
  const double tolerance = dtype_of<T> == DType::bf16 ? 1.4e-2 : 3e-6;  // seen: 3.9e-3 and 6e-7
  for (const int64_t shift : {0, 1}) {
    const int64_t gap = shift == 0 ? 8 : 3;
    Memory reference(Device::cpu, dtype_of<T>, shift, gap), first(Device::cuda, dtype_of<T>, shift, gap),
        second(Device::cuda, dtype_of<T>, shift, gap);
    op(Tag<double>{}, reference);
    op(Tag<T>{}, first);
    op(Tag<T>{}, second);
    const auto expected = reference.results(), got = first.results(), again = second.results();
    for (const auto& [output, values] : expected) {
      const std::string what = cat(name, " ", dtype_of<T>, " ", shape, " shift ", shift, ": ", output);
      const double error = relative_error<double, double>(got.at(output), values);
      double& worst = worst_errors()[cat(name, " ", dtype_of<T>)];
      worst = std::max(worst, error);
      CHECK_MESSAGE(error <= tolerance, what, " is off by ", error);
      CHECK_MESSAGE(got.at(output) == again.at(output), what, " differs between two runs");
    }
  }
}
template <class Op>
void compare_with_cpu(const char* name, const std::string& shape, const Op& op) {
  compare_with_cpu<float>(name, shape, op);
  compare_with_cpu<bf16>(name, shape, op);
}

}  // namespace prism
