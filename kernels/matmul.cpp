// Dense products on the CPU: Eigen on fixed tiles of C, spread over the threads. Which tiles depends on the
// shape alone.
#include "kernels/matmul.h"

#include "kernels/eigen.h"

namespace prism::cpu {

namespace {

// Rows or columns of C a tile has: enough that Eigen's packing of the other operand is small beside the
// product.
int64_t tile_of(int64_t extent) { return std::clamp<int64_t>((extent / 16 + 15) / 16 * 16, 128, 512); }

template <class C, class X>
void assign(C&& c, const X& product, bool accumulate) {
  if (accumulate)
    c.noalias() += product;
  else
    c.noalias() = product;
}

// The product with both transposes fixed: A and B are m x k and k x n expressions.
template <class C, class A, class B>
void tiled(C& c, const A& a, const B& b, bool accumulate) {
  const int64_t m = c.rows(), n = c.cols();
  if (m >= n)
    parallel_tiles(m, tile_of(m), [&](int64_t begin, int64_t end) {
      assign(c.middleRows(begin, end - begin), a.middleRows(begin, end - begin) * b, accumulate);
    });
  else
    parallel_tiles(n, tile_of(n), [&](int64_t begin, int64_t end) {
      assign(c.middleCols(begin, end - begin), a * b.middleCols(begin, end - begin), accumulate);
    });
}

}  // namespace

template <class T>
void matmul(Rows<T> c_rows, const MatmulArgs<T>& x) {
  auto c = matrix(c_rows, x.m, x.n);
  const auto a = x.a_transposed ? matrix(x.a, x.k, x.m) : matrix(x.a, x.m, x.k);
  const auto b = x.b_transposed ? matrix(x.b, x.n, x.k) : matrix(x.b, x.k, x.n);
  if (x.a_transposed && x.b_transposed)
    tiled(c, a.transpose(), b.transpose(), x.accumulate);
  else if (x.a_transposed)
    tiled(c, a.transpose(), b, x.accumulate);
  else if (x.b_transposed)
    tiled(c, a, b.transpose(), x.accumulate);
  else
    tiled(c, a, b, x.accumulate);
}

// The accumulation type of float and double is the type itself.
template <class T>
void matmul_acc(Rows<acc_t<T>> c, const MatmulArgs<T>& args) {
  matmul<T>(c, args);
}

template void matmul(Rows<float>, const MatmulArgs<float>&);
template void matmul(Rows<double>, const MatmulArgs<double>&);
template void matmul_acc(Rows<float>, const MatmulArgs<float>&);
template void matmul_acc(Rows<double>, const MatmulArgs<double>&);

}  // namespace prism::cpu
