#include "kernels/attention.h"

#include "kernels/eigen.h"

namespace prism::cpu {

namespace {

constexpr int64_t kQueries = 64;  // of a tile

int64_t first_token(const int32_t* start, int64_t token) { return start ? start[token] : 0; }

// Queries [t0, t1) of one row and head against every key that any of them sees: `past` keys of the cache,
// then those of tokens [low, t1).
template <class T>
struct Tile {
  const AttentionArgs<T>& a;
  int64_t b, h, t0, t1, low, past;

  Tile(const AttentionArgs<T>& args, int64_t pair, int64_t from)
      : a(args), b(pair / a.H), h(pair % a.H), t0(from), t1(std::min(a.T_len, from + kQueries)) {
    low = first_token(a.start, b * a.T_len + t0);
    past = low == 0 && a.cache.keys ? a.cache.past[b] : 0;
  }
  int64_t queries() const { return t1 - t0; }
  int64_t keys() const { return past + t1 - low; }
  // The head's columns of tokens [from, t1).
  template <class X>
  auto of(Rows<X> x, int64_t from) const {
    return matrix(Rows<X>{x[b * a.T_len + from] + h * a.W, x.stride}, t1 - from, a.W);
  }
  auto of(const T* x, int64_t from) const { return of(Rows<const T>{x, a.H * a.W}, from); }
  auto cached(const T* x) const {
    const T* rows = x + b * a.cache.capacity * a.H * a.W + h * a.W;
    return matrix(Rows<const T>{rows, a.H * a.W}, past, a.W);
  }
  T* lse() const { return a.lse + (b * a.H + h) * a.T_len + t0; }
  // Calls fn(query, first key, number of keys): the keys a query sees stand together.
  template <class Fn>
  void each_query(const Fn& fn) const {
    for (int64_t i = 0; i < queries(); ++i) {
      const int64_t first = first_token(a.start, b * a.T_len + t0 + i);
      const int64_t begin = first == 0 ? 0 : past + first - low;
      fn(i, begin, past + t0 + i + 1 - low - begin);
    }
  }
  Matrix<T> scores() const {
    Matrix<T> s(queries(), keys());
    if (past > 0) s.leftCols(past).noalias() = of(a.q, t0) * cached(a.cache.keys).transpose();
    s.rightCols(t1 - low).noalias() = of(a.q, t0) * of(a.k, low).transpose();
    return s * static_cast<T>(a.scale());
  }
};

template <class T>
void append(const AttentionArgs<T>& a) {
  const int64_t columns = a.H * a.W;
  for (int64_t b = 0; b < a.B; ++b) {
    const int64_t first = first_token(a.start, (b + 1) * a.T_len - 1), n = a.T_len - first;
    const int64_t at = b * a.cache.capacity + (first == 0 ? a.cache.past[b] : 0);
    const auto copy = [&](T* to, Rows<const T> from) {
      matrix(Rows<T>{to + at * columns, columns}, n, columns) =
          matrix(Rows<const T>{from[b * a.T_len + first], from.stride}, n, columns);
    };
    copy(a.cache.keys, a.k), copy(a.cache.values, a.v);
  }
}

}  // namespace

template <class T>
void rotary(const RotaryArgs<T>& r) {
  const int64_t half = r.W / 2;
  parallel_tiles(r.B * r.T_len, 64, [&](int64_t begin, int64_t end) {
    RowArray<T> cosine(half), sine(half), turned(half);
    RowArray<double> turn(half);  // a position's
    for (int64_t i = 0; i < half; ++i)
      turn[i] = std::pow(kRotaryBase, -2 * static_cast<double>(i) / static_cast<double>(r.W));
    if (r.inverse) turn = -turn;
    for (int64_t token = begin; token < end; ++token) {
      const int64_t b = token / r.T_len, first = first_token(r.start, token);
      const int64_t position = token % r.T_len - first + (first == 0 && r.past ? r.past[b] : 0);
      for (int64_t i = 0; i < half; ++i) {
        const double angle = static_cast<double>(position) * turn[i];
        cosine[i] = static_cast<T>(std::cos(angle)), sine[i] = static_cast<T>(std::sin(angle));
      }
      for (int64_t head = 0; head < r.heads; ++head) {
        auto x = array(r.x[token] + head * r.W, half), y = array(r.x[token] + head * r.W + half, half);
        turned = x * cosine - y * sine;
        y = y * cosine + x * sine;
        x = turned;
      }
    }
  });
}

template <class T>
void attention_forward(const AttentionArgs<T>& a) {
  const int64_t tiles = (a.T_len + kQueries - 1) / kQueries;
  parallel_for(a.B * a.H * tiles, [&](int64_t i) {
    const Tile<T> tile(a, i / tiles, i % tiles * kQueries);
    Matrix<T> s = tile.scores(), p = Matrix<T>::Zero(s.rows(), s.cols());
    tile.each_query([&](int64_t t, int64_t begin, int64_t count) {
      const auto seen = s.row(t).segment(begin, count).array();
      const T most = seen.maxCoeff();
      auto weights = p.row(t).segment(begin, count).array();
      weights = (seen - most).exp();
      const T sum = weights.sum();
      weights /= sum;
      tile.lse()[t] = most + std::log(sum);
    });
    auto o = tile.of(Rows<T>{a.o, a.H * a.W}, tile.t0);
    o.noalias() = p.rightCols(tile.t1 - tile.low) * tile.of(a.v, tile.low);
    if (tile.past > 0) o.noalias() += p.leftCols(tile.past) * tile.cached(a.cache.values);
  });
  if (a.cache.keys) append(a);
}

template <class T>
void attention_backward(const AttentionArgs<T>& a, const AttentionGrads<T>& g) {
  parallel_for(a.B * a.H, [&](int64_t pair) {
    for (int64_t t0 = 0; t0 < a.T_len; t0 += kQueries) {
      const Tile<T> tile(a, pair, t0);
      tile.of(g.dk, t0).setZero(), tile.of(g.dv, t0).setZero();
      const auto q = tile.of(a.q, t0), d_o = tile.of(g.d_o, t0), o = tile.of(a.o, t0);
      const auto k = tile.of(a.k, tile.low), v = tile.of(a.v, tile.low);
      const Matrix<T> s = tile.scores(), dp = d_o * v.transpose();
      Matrix<T> p = Matrix<T>::Zero(s.rows(), s.cols()), ds = p;
      auto delta = matrix(Rows<T>{g.delta + pair * a.T_len + t0, 1}, tile.queries(), 1);
      delta = d_o.cwiseProduct(o).rowwise().sum();
      tile.each_query([&](int64_t t, int64_t begin, int64_t count) {
        const auto part = [&](auto& x) { return x.row(t).segment(begin, count).array(); };
        part(p) = (part(s) - tile.lse()[t]).exp();
        part(ds) = part(p) * (part(dp) - delta(t, 0)) * static_cast<T>(a.scale());
      });
      tile.of(g.dq, t0).noalias() = ds * k;
      tile.of(g.dk, tile.low).noalias() += ds.transpose() * q;
      tile.of(g.dv, tile.low).noalias() += p.transpose() * d_o;
    }
  });
}

#define INSTANTIATE(T)                                      \
  template void rotary(const RotaryArgs<T>&);               \
  template void attention_forward(const AttentionArgs<T>&); \
  template void attention_backward(const AttentionArgs<T>&, const AttentionGrads<T>&);
INSTANTIATE(float)
INSTANTIATE(double)

}  // namespace prism::cpu
