#include "kernels/elementwise.h"

#include "kernels/eigen.h"

namespace prism::cpu {

template <class T>
void swiglu_forward(T* y, const T* x, int64_t n, int64_t F) {
  parallel_tiles(n, 64, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const auto gate = array(x + i * 2 * F, F), up = array(x + i * 2 * F + F, F);
      array(y + i * F, F) = gate * sigmoid(gate) * up;
    }
  });
}

template <class T>
void swiglu_backward(T* dx, T* y, const T* dy, const T* x, int64_t n, int64_t F) {
  parallel_tiles(n, 64, [&](int64_t begin, int64_t end) {
    RowArray<T> sigma(F);
    for (int64_t i = begin; i < end; ++i) {
      const auto gate = array(x + i * 2 * F, F), up = array(x + i * 2 * F + F, F), d = array(dy + i * F, F);
      sigma = sigmoid(gate);
      array(dx + i * 2 * F, F) = d * up * silu_slope(gate, sigma);
      array(dx + i * 2 * F + F, F) = d * gate * sigma;
      if (y) array(y + i * F, F) = gate * sigma * up;
    }
  });
}

template <class T>
void add_rows(Rows<T> y, Rows<const T> x, int64_t n, int64_t columns) {
  parallel_tiles(n, 64, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) array(y[i], columns) += array(x[i], columns);
  });
}

template <class T>
void copy_rows(Rows<T> y, Rows<const T> x, int64_t n, int64_t columns) {
  parallel_tiles(n, 64, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) array(y[i], columns) = array(x[i], columns);
  });
}

template <class T>
void cast(T* y, const acc_t<T>* x, int64_t n) {
  array(y, n) = array(x, n);
}

#define INSTANTIATE(T)                                                         \
  template void swiglu_forward(T*, const T*, int64_t, int64_t);                \
  template void swiglu_backward(T*, T*, const T*, const T*, int64_t, int64_t); \
  template void add_rows(Rows<T>, Rows<const T>, int64_t, int64_t);            \
  template void copy_rows(Rows<T>, Rows<const T>, int64_t, int64_t);           \
  template void cast<T>(T*, const T*, int64_t);
INSTANTIATE(float)
INSTANTIATE(double)

}  // namespace prism::cpu
