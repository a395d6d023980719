// Eigen views of row-major memory, for the CPU kernels.
#pragma once

#include <Eigen/Core>

#include "kernels/rows.h"
#include "tensor/parallel.h"

namespace prism {

template <class T>
using Matrix = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
template <class T>
using RowArray = Eigen::Array<T, 1, Eigen::Dynamic>;

template <class T>
auto array(T* data, int64_t n) {
  if constexpr (std::is_const_v<T>)
    return Eigen::Map<const RowArray<std::remove_const_t<T>>>(data, n);
  else
    return Eigen::Map<RowArray<T>>(data, n);
}

template <class T>
auto matrix(Rows<T> x, int64_t rows, int64_t columns) {
  using Plain = Matrix<std::remove_const_t<T>>;
  using Target = std::conditional_t<std::is_const_v<T>, const Plain, Plain>;
  return Eigen::Map<Target, 0, Eigen::OuterStride<>>(x.data, rows, columns, Eigen::OuterStride<>(x.stride));
}

template <class X>
auto sigmoid(const Eigen::ArrayBase<X>& x) {
  return ((-x.derived()).exp() + typename X::Scalar(1)).inverse();
}
template <class T>
T sigmoid(T x) requires std::is_floating_point_v<T> {
  return T(1) / (T(1) + std::exp(-x));
}

// d SiLU(x) / dx, given sigma = sigmoid(x)
template <class X, class S>
auto silu_slope(const Eigen::ArrayBase<X>& x, const Eigen::ArrayBase<S>& sigma) {
  using T = typename X::Scalar;
  return sigma.derived() * (T(1) + x.derived() * (T(1) - sigma.derived()));
}

// out[c] += sum over tiles i of partial[i,c], tile after tile.
template <class T>
void add_partials(T* out, const T* partial, int64_t tiles, int64_t columns) {
  for (int64_t i = 0; i < tiles; ++i) array(out, columns) += array(partial + i * columns, columns);
}

}  // namespace prism
