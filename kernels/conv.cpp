#include "kernels/conv.h"

#include "kernels/eigen.h"

namespace prism::cpu {

namespace {

// The convolution of one token, all channels at a time.
template <class T>
struct Convolution {
  const ConvArgs<T>& x;
  Matrix<T> taps;  // [W,channels]: row j multiplies x_{t-j}

  explicit Convolution(const ConvArgs<T>& args) : x(args) {
    taps.setOnes(x.W, x.channels);
    if (x.weight)
      taps = matrix(Rows<const T>{x.weight, x.W}, x.channels, x.W).transpose().colwise().reverse();
  }
  int64_t start(int64_t b, int64_t t) const { return x.start ? x.start[b * x.T_len + t] : 0; }
  // The number of taps that reach token t: its document's tokens, and the cache for the row's first document.
  int64_t reach(int64_t b, int64_t t) const {
    const int64_t first = start(b, t);
    return std::min(x.W, t - first + 1 + (first == 0 && x.cache_in ? x.W - 1 : 0));
  }
  auto input(int64_t b, int64_t t) const {
    return array(t >= 0 ? x.x[b * x.T_len + t] : x.cache_in + (b * (x.W - 1) + x.W - 1 + t) * x.channels,
                 x.channels);
  }
  auto tap(int64_t j) const { return taps.row(j).array(); }
  auto row(auto* data, int64_t b, int64_t t) const {
    return array(data + (b * x.T_len + t) * x.channels, x.channels);
  }

  void sum(RowArray<T>& s, int64_t b, int64_t t) const {
    s = input(b, t) * tap(0);
    for (int64_t j = 1, n = reach(b, t); j < n; ++j) s += input(b, t - j) * tap(j);
  }
  // Calls fn(b, begin, end) on tiles of kSumTile tokens of one row of the batch.
  template <class Fn>
  void each_tile(const Fn& fn) const {
    const int64_t row_tiles = sum_tiles(x.T_len);
    parallel_for(x.B * row_tiles, [&](int64_t i) {
      const int64_t begin = i % row_tiles * kSumTile;
      fn(i / row_tiles, begin, std::min(x.T_len, begin + kSumTile));
    });
  }
  void write_cache(int64_t b) const {
    Matrix<T> kept = Matrix<T>::Zero(x.W - 1, x.channels);
    const int64_t last = x.T_len - 1, taken = std::min(reach(b, last), x.W - 1);
    for (int64_t j = 0; j < taken; ++j) kept.row(x.W - 2 - j) = input(b, last - j);
    matrix(Rows<T>{x.cache_out + b * (x.W - 1) * x.channels, x.channels}, x.W - 1, x.channels) = kept;
  }
};

template <class X>
auto inverse_norm(const X& y) {
  using T = typename X::Scalar;
  return T(1) / std::sqrt(y.square().sum() + T(kL2NormEps));
}

}  // namespace

template <class T>
void conv_forward(const ConvArgs<T>& x) {
  const Convolution<T> conv(x);
  conv.each_tile([&](int64_t b, int64_t begin, int64_t end) {
    RowArray<T> s(x.channels);
    for (int64_t t = begin; t < end; ++t) {
      conv.sum(s, b, t);
      auto y = conv.row(x.y, b, t);
      y = s * sigmoid(s);
      for (int64_t c = 0; x.head > 0 && c < x.channels; c += x.head) {
        auto head = y.segment(c, x.head);
        head *= x.scale * inverse_norm(head);
      }
    }
  });
  for (int64_t b = 0; x.cache_out && b < x.B; ++b) conv.write_cache(b);
}

template <class T>
void conv_backward(const ConvArgs<T>& x, const ConvGrads<T>& g) {
  const Convolution<T> conv(x);
  conv.each_tile([&](int64_t b, int64_t begin, int64_t end) {
    RowArray<T> s(x.channels), sigma(x.channels), dy(x.channels);
    Matrix<T> dtaps = Matrix<T>::Zero(x.W, x.channels);
    for (int64_t t = begin; t < end; ++t) {
      conv.sum(s, b, t);
      sigma = sigmoid(s);
      dy = conv.row(g.dy, b, t);
      for (int64_t c = 0; x.head > 0 && c < x.channels; c += x.head) {
        // y = scale a / |a|: da = scale / |a| (dy - a <a, dy> / |a|^2)
        const auto a = s.segment(c, x.head) * sigma.segment(c, x.head);
        auto d = dy.segment(c, x.head);
        const T inverse = inverse_norm(a), along = (a * d).sum() * inverse * inverse;
        d = x.scale * inverse * (d - a * along);
      }
      auto ds = conv.row(g.ds, b, t);
      ds = dy * silu_slope(s, sigma);
      if (!g.dweight) continue;
      for (int64_t j = 0, n = conv.reach(b, t); j < n; ++j) dtaps.row(j).array() += ds * conv.input(b, t - j);
    }
    if (!g.dweight) return;
    const int64_t tile = b * sum_tiles(x.T_len) + begin / kSumTile;
    matrix(Rows<T>{g.partial + tile * x.channels * x.W, x.W}, x.channels, x.W) =
        dtaps.colwise().reverse().transpose();
  });
  conv.each_tile([&](int64_t b, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      auto dx = array(g.dx[b * x.T_len + t], x.channels);
      dx = conv.row(g.ds, b, t) * conv.tap(0);
      for (int64_t j = 1; j < x.W && t + j < x.T_len && conv.start(b, t + j) <= t; ++j)
        dx += conv.row(g.ds, b, t + j) * conv.tap(j);
    }
  });
  if (g.dweight) add_partials(g.dweight, g.partial, conv_partials(x.B, x.T_len), x.channels * x.W);
}

PRISM_ON_CPU(conv_forward);
PRISM_ON_CPU(conv_backward);

}  // namespace prism::cpu
