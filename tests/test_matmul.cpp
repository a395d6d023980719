// Dense products on the CPU against their definition.
#include <doctest/doctest.h>

#include <cmath>
#include <vector>

#include "kernels/matmul.h"
#include "tensor/parallel.h"
#include "tensor/rng.h"

using namespace prism;

namespace {

// A row-major matrix whose rows lie further apart than they are wide, with a mark in between.
template <class T>
struct Padded {
  int64_t rows, columns, stride = columns + 3;
  std::vector<T> values = std::vector<T>(static_cast<size_t>(rows * stride), T(77));

  void draw(uint64_t stream) {
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < columns; ++j)
        at(i, j) = static_cast<T>(random_normal(1, stream, static_cast<uint64_t>(i * columns + j)));
  }
  T& at(int64_t i, int64_t j) { return values[static_cast<size_t>(i * stride + j)]; }
  Rows<T> view() { return {values.data(), stride}; }
};

template <class T>
void check_product(int64_t m, int64_t n, int64_t k, bool a_transposed, bool b_transposed, bool accumulate) {
  CAPTURE(m);
  CAPTURE(n);
  CAPTURE(k);
  CAPTURE(a_transposed);
  CAPTURE(b_transposed);
  CAPTURE(accumulate);
  Padded<T> a{a_transposed ? k : m, a_transposed ? m : k}, b{b_transposed ? n : k, b_transposed ? k : n},
      c{m, n};
  a.draw(1), b.draw(2), c.draw(3);
  Padded<T> before = c;
  const MatmulArgs<T> args{a.view(), b.view(), m, n, k, a_transposed, b_transposed, accumulate};
  cpu::matmul<T>(c.view(), args);

  double worst = 0;
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      double sum = accumulate ? before.at(i, j) : 0, size = std::abs(sum);
      for (int64_t d = 0; d < k; ++d) {
        const double term =
            double(a_transposed ? a.at(d, i) : a.at(i, d)) * double(b_transposed ? b.at(j, d) : b.at(d, j));
        sum += term, size += std::abs(term);
      }
      worst = std::max(worst, std::abs(sum - double(c.at(i, j))) / (size + 1e-30));
    }
    for (int64_t j = n; j < c.stride; ++j) REQUIRE(c.at(i, j) == T(77));
  }
  CHECK(worst <= (sizeof(T) == 4 ? 1e-6 : 2e-15));

  for (const int threads : {1, 3}) {
    Padded<T> again = before;
    set_threads(threads);
    cpu::matmul<T>(again.view(), args);
    CHECK(again.values == c.values);
  }
}

}  // namespace

TEST_CASE(
    "matmul: every transpose at and around the strips, slices and tiles is its definition; the same bits for "
    "any number of threads") {
  const int threads = thread_count();
  set_threads(2);
  const struct {
    int64_t m, n, k;
  } sizes[] = {{1, 70, 33},    {5, 64, 8},    {6, 64, 16},    {7, 65, 1},    {13, 31, 40}, {64, 8, 130},
               {130, 67, 257}, {61, 530, 12}, {300, 129, 31}, {6, 600, 513}, {70, 70, 0}};
  for (const auto [m, n, k] : sizes)
    for (int choice = 0; choice < 8; ++choice) {
      check_product<float>(m, n, k, choice & 1, choice & 2, choice & 4);
      check_product<double>(m, n, k, choice & 1, choice & 2, choice & 4);
    }
  set_threads(threads);
}
