#include "kernels/conv.h"

#include <vector>

#include "kernels/eigen.h"

namespace prism::cpu {

namespace {

// One row of the batch and one group of channels (a head, or up to 64 channels without a norm): the unit of
// work.
template <class T>
struct Group {
  const ConvArgs<T>& x;
  int64_t b, channel, width;
  Matrix<T> taps;  // [W,width]: taps row j multiplies x_{t-j}

  Group(const ConvArgs<T>& args, int64_t index) : x(args) {
    const int64_t size = group_width(args), groups = (args.channels + size - 1) / size;
    b = index / groups;
    channel = index % groups * size;
    width = std::min(size, args.channels - channel);
    taps.setOnes(x.W, width);
    if (x.weight)
      for (int64_t j = 0; j < x.W; ++j)
        for (int64_t c = 0; c < width; ++c) taps(j, c) = x.weight[(channel + c) * x.W + x.W - 1 - j];
  }
  static int64_t group_width(const ConvArgs<T>& x) {
    return x.head > 0 ? x.head : std::min<int64_t>(64, x.channels);
  }
  static int64_t count(const ConvArgs<T>& x) {
    return x.B * ((x.channels + group_width(x) - 1) / group_width(x));
  }

  int64_t start(int64_t t) const { return x.start ? x.start[b * x.T_len + t] : 0; }
  // The number of taps that reach token t: its document's tokens, and the cache for the row's first document.
  int64_t reach(int64_t t) const {
    const int64_t first = start(t);
    return std::min(x.W, t - first + 1 + (first == 0 && x.cache_in ? x.W - 1 : 0));
  }
  auto input(int64_t t) const {
    const T* row = t >= 0 ? x.x[b * x.T_len + t] : x.cache_in + (b * (x.W - 1) + x.W - 1 + t) * x.channels;
    return array(row + channel, width);
  }
  auto tap(int64_t j) const { return array(taps.data() + j * width, width); }

  void convolve(RowArray<T>& s, int64_t t) const {
    s = input(t) * tap(0);
    for (int64_t j = 1, n = reach(t); j < n; ++j) s += input(t - j) * tap(j);
  }
  T inverse_norm(const RowArray<T>& y) const { return T(1) / std::sqrt(y.square().sum() + T(kL2NormEps)); }
};

template <class T>
void write_cache(const Group<T>& group) {
  const ConvArgs<T>& x = group.x;
  Matrix<T> kept = Matrix<T>::Zero(x.W - 1, group.width);
  const int64_t last = x.T_len - 1, reach = std::min(group.reach(last), x.W - 1);
  for (int64_t j = 0; j < reach; ++j) kept.row(x.W - 2 - j) = group.input(last - j);
  for (int64_t j = 0; j < x.W - 1; ++j)
    array(x.cache_out + (group.b * (x.W - 1) + j) * x.channels + group.channel, group.width) = kept.row(j);
}

}  // namespace

template <class T>
void conv_forward(const ConvArgs<T>& x) {
  parallel_for(Group<T>::count(x), [&](int64_t index) {
    const Group<T> group(x, index);
    RowArray<T> s(group.width), y(group.width);
    for (int64_t t = 0; t < x.T_len; ++t) {
      group.convolve(s, t);
      y = s * sigmoid(s);
      if (x.head > 0) y *= x.scale * group.inverse_norm(y);
      array(x.y + (group.b * x.T_len + t) * x.channels + group.channel, group.width) = y;
    }
    if (x.cache_out) write_cache(group);
  });
}

template <class T>
void conv_backward(const ConvArgs<T>& x, const ConvGrads<T>& g) {
  const int64_t row_tiles = sum_tiles(x.T_len);
  parallel_for(Group<T>::count(x), [&](int64_t index) {
    const Group<T> group(x, index);
    const auto row = [&](auto* data, int64_t t) {
      return array(data + (group.b * x.T_len + t) * x.channels + group.channel, group.width);
    };
    RowArray<T> s(group.width), sigma(group.width), y(group.width), dy(group.width);
    Matrix<T> dtaps(x.W, group.width);
    for (int64_t t = 0; t < x.T_len; ++t) {
      group.convolve(s, t);
      sigma = sigmoid(s);
      dy = row(g.dy, t);
      if (x.head > 0) {  // y = scale a / |a|: da = scale / |a| (dy - a <a, dy> / |a|^2)
        y = s * sigma;
        const T inverse = group.inverse_norm(y);
        dy = x.scale * inverse * (dy - y * ((y * dy).sum() * inverse * inverse));
      }
      row(g.ds, t) = dy * silu_slope(s, sigma);
      if (g.dweight) {
        if (t % kSumTile == 0) dtaps.setZero();
        const auto ds = row(g.ds, t);
        for (int64_t j = 0, n = group.reach(t); j < n; ++j) dtaps.row(j).array() += ds * group.input(t - j);
        if (t % kSumTile == kSumTile - 1 || t == x.T_len - 1)
          for (int64_t c = 0; c < group.width; ++c)
            for (int64_t j = 0; j < x.W; ++j)
              g.partial[((group.b * row_tiles + t / kSumTile) * x.channels + group.channel + c) * x.W + x.W -
                        1 - j] = dtaps(j, c);
      }
    }
    for (int64_t t = 0; t < x.T_len; ++t) {
      s = row(g.ds, t) * group.tap(0);
      for (int64_t j = 1; j < x.W && t + j < x.T_len && group.start(t + j) <= t; ++j)
        s += row(g.ds, t + j) * group.tap(j);
      array(g.dx[group.b * x.T_len + t] + group.channel, group.width) = s;
    }
  });
  if (g.dweight) add_partials(g.dweight, g.partial, conv_partials(x.B, x.T_len), x.channels * x.W);
}

template void conv_forward(const ConvArgs<float>&);
template void conv_forward(const ConvArgs<double>&);
template void conv_backward(const ConvArgs<float>&, const ConvGrads<float>&);
template void conv_backward(const ConvArgs<double>&, const ConvGrads<double>&);

}  // namespace prism::cpu
