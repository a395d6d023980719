// A tensor: a row-major view of memory somebody else owns (an arena, a parameter buffer). Copying one copies
// the view.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <ostream>

#include "tensor/device.h"

namespace prism {

// Up to five extents, outermost first; row-major. [] is a scalar.
class Shape {
 public:
  static constexpr int kMaxRank = 5;
  Shape() = default;
  Shape(std::initializer_list<int64_t> extents) {
    for (int64_t e : extents) push_back(e);
  }
  void push_back(int64_t extent) {
    PRISM_CHECK(rank_ < kMaxRank, "shape: at most ", kMaxRank, " dimensions");
    extents_[rank_++] = extent;
  }
  int rank() const { return rank_; }
  // Negative i counts from the end, as in shape[-1], the innermost extent.
  int64_t operator[](int i) const { return extents_[i < 0 ? i + rank_ : i]; }
  int64_t numel() const {
    int64_t n = 1;
    for (int i = 0; i < rank_; ++i) n *= extents_[i];
    return n;
  }
  bool operator==(const Shape&) const = default;
  friend std::ostream& operator<<(std::ostream& out, const Shape& s) {
    out << '[';
    for (int i = 0; i < s.rank_; ++i) out << (i ? "," : "") << s.extents_[i];
    return out << ']';
  }

 private:
  std::array<int64_t, kMaxRank> extents_{};
  int rank_ = 0;
};

struct Tensor {
  void* data = nullptr;
  Shape shape;
  DType dtype = DType::f32;
  Device device = Device::cpu;

  explicit operator bool() const { return data != nullptr; }
  int64_t numel() const { return shape.numel(); }
  size_t bytes() const { return static_cast<size_t>(numel() * size_of(dtype)); }
  // All but the innermost extent multiplied: a tensor seen as rows of shape[-1] numbers.
  int64_t rows() const { return shape.rank() == 0 ? 1 : numel() / shape[-1]; }

  // The memory as T; null for an absent tensor. Throws when the dtype is another.
  template <class T>
  T* ptr() const {
    if (!data) return nullptr;
    PRISM_CHECK(dtype == dtype_of<T>, "tensor ", shape, ": expected ", dtype_of<T>, ", got ", dtype);
    return static_cast<T*>(data);
  }
  Tensor view(const Shape& s) const {
    PRISM_CHECK(s.numel() == numel(), "view: ", shape, " has ", numel(), " elements, ", s, " has ",
                s.numel());
    return {data, s, dtype, device};
  }
  // Rows [begin, begin + count) of the outermost dimension.
  Tensor slice(int64_t begin, int64_t count) const {
    Shape s;
    s.push_back(count);
    for (int i = 1; i < shape.rank(); ++i) s.push_back(shape[i]);
    const int64_t row_bytes = shape[0] == 0 ? 0 : static_cast<int64_t>(bytes()) / shape[0];
    return {static_cast<char*>(data) + begin * row_bytes, s, dtype, device};
  }
};

}  // namespace prism
