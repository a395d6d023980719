// Dense products on the CPU, in loops around a kernel in registers (Goto and van de Geijn 2008, "Anatomy of
// high-performance matrix multiplication"). For each slice of k, a tile's rows of A are copied into strips of
// kRows rows and its columns of B, a panel at a time, into strips of kColumns columns, in the order in which
// the kernel reads them and transposed where asked; then the kernel multiplies each strip of A with each of
// the panel's.
//
// Every element of C is the sum over slices of k of a sum in the order of k. That does not depend on the tile
// or the strip it lies in, so neither do the bits, for any number of threads. Products too narrow for strips
// are Eigen's.
#include "kernels/matmul.h"

#include <cstring>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels/eigen.h"

namespace prism::cpu {

namespace {

#if defined(__AVX512F__)
constexpr int kBytes = 64, kVectors = 4;  // of 32 registers, 24 hold sums, 4 a row of B's strip
#elif defined(__AVX__)
constexpr int kBytes = 32, kVectors = 2;  // of 16 registers, 12 and 2
#else
constexpr int kBytes = 16, kVectors = 2;
#endif

template <class T>
struct VectorOf {
  typedef T type __attribute__((vector_size(kBytes)));
};
template <class T>
using Vector = typename VectorOf<T>::type;

constexpr int kRows = 6;
template <class T>
constexpr int kLanes = kBytes / static_cast<int>(sizeof(T));
template <class T>
constexpr int kColumns = kVectors* kLanes<T>;

// A strip of A of kDepth columns stays in the first cache (9 KiB in float) while B's panel comes from the
// second (576 KiB).
constexpr int64_t kDepth = 384, kWidth = 384;

// a[0], b[0], a[1], b[1], .. : the lower halves in turn, or the upper ones.
template <bool kUpper, class T, size_t... i>
Vector<T> interleave(Vector<T> a, Vector<T> b, std::index_sequence<i...>) {
#ifdef __clang__
  return __builtin_shufflevector(a, b, ((i + kUpper * sizeof...(i)) / 2 + i % 2 * sizeof...(i))...);
#else
  using Index = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;
  return __builtin_shuffle(
      a, b, Vector<Index>{static_cast<Index>((i + kUpper * sizeof...(i)) / 2 + i % 2 * sizeof...(i))...});
#endif
}

// to[j][i] = from[i][j] for kLanes rows and columns. Each round moves the first bit of a value's row number
// to the end of its column number and the first of that to the end of the row number: after log2 kLanes
// rounds they have changed places.
template <class T>
void transpose_block(T* to, int64_t to_stride, Rows<const T> from, int64_t line, int64_t k) {
  constexpr int n = kLanes<T>;
  constexpr auto lanes = std::make_index_sequence<n>();
  Vector<T> x[n], y[n];
#pragma GCC unroll 16
  for (int i = 0; i < n; ++i) std::memcpy(&x[i], from[line + i] + k, kBytes);
#pragma GCC unroll 4
  for (int round = 1; round < n; round *= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < n / 2; ++i) {
      y[2 * i] = interleave<false, T>(x[i], x[i + n / 2], lanes);
      y[2 * i + 1] = interleave<true, T>(x[i], x[i + n / 2], lanes);
    }
#pragma GCC unroll 16
    for (int i = 0; i < n; ++i) x[i] = y[i];
  }
#pragma GCC unroll 16
  for (int i = 0; i < n; ++i) std::memcpy(to + i * to_stride, &x[i], kBytes);
}

int64_t divide_up(int64_t n, int64_t by) { return (n + by - 1) / by; }
int64_t round_up(int64_t n, int64_t to) { return divide_up(n, to) * to; }

// A^T or B as the copies see it: lines are rows of C for A, columns of C for B.
template <class T>
struct Operand {
  Rows<const T> x;
  bool lines_are_rows;  // of x

  // to[strip][k][line]: lines [first, first + n) of k in [k0, k1), a strip of kStrip after another, what lay
  // there after the last: no one reads its products.
  template <int kStrip>
  void pack(T* to, int64_t first, int64_t n, int64_t k0, int64_t k1) const {
    const int64_t depth = k1 - k0;
    for (int64_t begin = 0; begin < n; begin += kStrip, to += kStrip * depth) {
      const int64_t lines = std::min<int64_t>(kStrip, n - begin);
      const int64_t across = kStrip % kLanes<T> ? 0 : lines / kLanes<T> * kLanes<T>,
                    along = depth / kLanes<T> * kLanes<T>;  // what whole blocks cover
      for (int64_t i = 0; lines_are_rows && i < across; i += kLanes<T>)
        for (int64_t k = 0; k < along; k += kLanes<T>)
          transpose_block<T>(to + k * kStrip + i, kStrip, x, first + begin + i, k0 + k);
      for (int64_t i = 0; lines_are_rows && i < lines; ++i) {
        const T* from = x[first + begin + i] + k0;
        for (int64_t k = i < across ? along : 0; k < depth; ++k) to[k * kStrip + i] = from[k];
      }
      for (int64_t k = 0; !lines_are_rows && k < depth; ++k)
        std::copy_n(x[k0 + k] + first + begin, lines, to + k * kStrip);
    }
  }
};

// c[kRows,kColumns] = or += a strip of A times a strip of B.
template <class T>
void multiply_strips(Rows<T> c, const T* a, const T* b, int64_t depth, bool add) {
  Vector<T> sums[kRows][kVectors] = {};
  for (int64_t k = 0; k < depth; ++k, a += kRows, b += kColumns<T>) {
    Vector<T> row[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) std::memcpy(&row[v], b + v * kLanes<T>, kBytes);
#pragma GCC unroll 6
    for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sums[i][v] += a[i] * row[v];
  }
#pragma GCC unroll 6
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      Vector<T> before;
      if (add) std::memcpy(&before, c[i] + v * kLanes<T>, kBytes), sums[i][v] += before;
      std::memcpy(c[i] + v * kLanes<T>, &sums[i][v], kBytes);
    }
}

// A tile of C and the operands' lines of it.
template <class T>
struct Product {
  Rows<T> c;
  Operand<T> a, b;
  int64_t k;
  bool accumulate;

  void tile(int64_t i0, int64_t i1, int64_t j0, int64_t j1) const {
    constexpr int64_t kStrip = kColumns<T>;
    const int64_t width = std::min(kWidth, round_up(j1 - j0, kStrip)), slice = std::min(k, kDepth);
    thread_local std::vector<T> memory;
    const auto size = static_cast<size_t>(slice * (width + round_up(i1 - i0, kRows)) + kBytes);
    if (memory.size() < size) memory.resize(size);
    void* start = memory.data();
    size_t space = memory.size() * sizeof(T);
    T* panel = static_cast<T*>(std::align(kBytes, 1, start, space));
    T* strips = panel + slice * width;
    for (int64_t k0 = 0; k0 < k; k0 += kDepth) {
      const int64_t k1 = std::min(k, k0 + kDepth);
      a.template pack<kRows>(strips, i0, i1 - i0, k0, k1);
      for (int64_t j = j0; j < j1; j += width) {
        const int64_t end = std::min(j + width, j1);
        b.template pack<kStrip>(panel, j, end - j, k0, k1);
        for (int64_t i = i0; i < i1; i += kRows)
          for (int64_t s = j; s < end; s += kStrip)
            strip({c[i] + s, c.stride}, std::min<int64_t>(kRows, i1 - i), std::min<int64_t>(kStrip, end - s),
                  strips + (i - i0) * (k1 - k0), panel + (s - j) * (k1 - k0), k1 - k0, accumulate || k0 > 0);
      }
    }
  }

  // rows x columns of the strips' product, through a whole one where they are fewer.
  void strip(Rows<T> to, int64_t rows, int64_t columns, const T* left, const T* right, int64_t depth,
             bool add) const {
    if (rows == kRows && columns == kColumns<T>) return multiply_strips<T>(to, left, right, depth, add);
    alignas(kBytes) T whole[kRows * kColumns<T>];
    multiply_strips<T>({whole, kColumns<T>}, left, right, depth, false);
    for (int64_t r = 0; r < rows; ++r) {
      const auto from = array(static_cast<const T*>(whole + r * kColumns<T>), columns);
      auto row = array(to[r], columns);
      if (add)
        row += from;
      else
        row = from;
    }
  }
};

// C = or += A B, both Eigen expressions.
template <class T, class A, class B>
void narrow(Rows<T> to, const A& a, const B& b, bool accumulate) {
  auto c = matrix(to, a.rows(), b.cols());
  constexpr int64_t kTile = 512;
  parallel_tiles(c.rows(), kTile, [&](int64_t begin, int64_t end) {
    const int64_t n = end - begin;
    if (accumulate)
      c.middleRows(begin, n).noalias() += a.middleRows(begin, n) * b;
    else
      c.middleRows(begin, n).noalias() = a.middleRows(begin, n) * b;
  });
}

}  // namespace

template <class T>
void matmul(Rows<T> c, const MatmulArgs<T>& x) {
  if (x.m < kRows || 2 * x.n < kColumns<T> || x.k == 0) {
    const auto a = matrix(x.a, x.a_transposed ? x.k : x.m, x.a_transposed ? x.m : x.k);
    const auto b = matrix(x.b, x.b_transposed ? x.n : x.k, x.b_transposed ? x.k : x.n);
    if (x.a_transposed)
      return x.b_transposed ? narrow(c, a.transpose(), b.transpose(), x.accumulate)
                            : narrow(c, a.transpose(), b, x.accumulate);
    return x.b_transposed ? narrow(c, a, b.transpose(), x.accumulate) : narrow(c, a, b, x.accumulate);
  }
  const Product<T> product{c, {x.a, !x.a_transposed}, {x.b, x.b_transposed}, x.k, x.accumulate};
  // Equal tiles, as many for each thread, and wide, for each copies the other operand.
  const auto tile = [](int64_t extent, int64_t strip) {
    const int64_t pieces = thread_count() * divide_up(extent, 1024 * thread_count());
    return round_up(divide_up(extent, pieces), strip);
  };
  if (x.m >= x.n)
    parallel_tiles(x.m, tile(x.m, kRows), [&](int64_t i0, int64_t i1) { product.tile(i0, i1, 0, x.n); });
  else
    parallel_tiles(x.n, tile(x.n, kColumns<T>),
                   [&](int64_t j0, int64_t j1) { product.tile(0, x.m, j0, j1); });
}

// The accumulation type of float and double is the type itself.
template <class T>
void matmul_acc(Rows<acc_t<T>> c, const MatmulArgs<T>& args) {
  matmul<T>(c, args);
}

PRISM_ON_CPU(matmul);
PRISM_ON_CPU(matmul_acc);

}  // namespace prism::cpu
