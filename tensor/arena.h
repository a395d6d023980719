// One block of memory with two ends, reset each step: what must last (activations) grows up from the bottom,
// what is soon released (scratch) is a stack from the top. The same step asks for the same sizes in the same
// order, so addresses repeat and a CUDA graph of the step stays valid.
#pragma once

#include <algorithm>

#include "tensor/tensor.h"

namespace prism {

class Arena {
 public:
  // Reserves `bytes` on `device`.
  Arena(Device device, size_t bytes)
      : buffer_(device, bytes), device_(device), high_(bytes), capacity_(bytes) {}
  // An arena without memory: hands out addresses that must not be touched and counts. peak() is then what a
  // real one needs.
  static Arena measuring(Device device) {
    Arena arena;
    arena.device_ = device;
    arena.high_ = arena.capacity_ = size_t{1} << 50;
    return arena;
  }

  Tensor low(DType dtype, const Shape& shape) {
    const size_t at = low_;
    low_ += padded(shape.numel() * size_of(dtype));
    return make(at, dtype, shape);
  }
  Tensor high(DType dtype, const Shape& shape) {
    const size_t size = padded(shape.numel() * size_of(dtype));
    require(size);
    high_ -= size;
    return make(high_, dtype, shape);
  }

  size_t low_mark() const { return low_; }
  size_t high_mark() const { return high_; }
  void release_low(size_t mark) { low_ = mark; }
  void release_high(size_t mark) { high_ = mark; }
  void reset() { low_ = 0, high_ = capacity_; }

  size_t peak() const { return peak_; }  // bytes in use at most, both ends together
  size_t capacity() const { return capacity_; }
  Device device() const { return device_; }
  bool measures() const { return buffer_.data() == nullptr; }

 private:
  Arena() = default;
  static size_t padded(int64_t bytes) { return (static_cast<size_t>(bytes) + 255) / 256 * 256; }
  void require(size_t more) const {
    PRISM_CHECK(low_ + more <= high_, "arena: ", low_ + more + capacity_ - high_, " bytes needed, ",
                capacity_, " reserved on ", device_);
  }
  Tensor make(size_t at, DType dtype, const Shape& shape) {
    require(0);
    peak_ = std::max(peak_, low_ + capacity_ - high_);
    char* base = measures() ? reinterpret_cast<char*>(size_t{1} << 52) : buffer_.data();
    return {base + at, shape, dtype, device_};
  }

  Buffer buffer_;
  Device device_ = Device::cpu;
  size_t low_ = 0, high_ = 0, capacity_ = 0, peak_ = 0;
};

}  // namespace prism
