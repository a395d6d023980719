// A matrix whose rows lie `stride` elements apart: a column slice of a wider row-major matrix, such as the q
// columns of the fused projection [n, q | k | v | g | a | b].
#pragma once

#include <concepts>

#include "tensor/dispatch.h"

namespace prism {

template <class T>
struct Rows {
  T* data = nullptr;
  int64_t stride = 0;

  PRISM_HD T* operator[](int64_t row) const { return data + row * stride; }
  PRISM_HD explicit operator bool() const { return data != nullptr; }
  template <std::same_as<const T> U>
  operator Rows<U>() const {
    return {data, stride};
  }
};

inline constexpr double kL2NormEps = 1e-6;  // in l2norm(x) = x / sqrt(sum x^2 + eps), SPEC section 3

// Column sums over n rows (gradients of norm weights, biases, convolutions) go in two steps, so that they
// have the same bits for any number of threads: partial sums over tiles of kSumTile rows into scratch
// [sum_tiles(n), columns], then the tiles in order.
inline constexpr int64_t kSumTile = 128;
inline int64_t sum_tiles(int64_t n) { return (n + kSumTile - 1) / kSumTile; }

}  // namespace prism
