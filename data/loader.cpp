#include "data/loader.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

#include "tensor/rng.h"

namespace prism {
namespace {

constexpr int64_t kCheckedAtOpen = int64_t{128} << 20;

// Element i of a permutation of [0, n) that (seed, stream) selects: a four-round Feistel network over the
// smallest even number of bits that holds n, walked until it lands below n. No table, any element at once.
int64_t permuted(int64_t i, int64_t n, uint64_t seed, uint64_t stream) {
  const int bits = static_cast<int>(std::bit_width(static_cast<uint64_t>(n - 1)));
  const int half = std::max(1, (bits + 1) / 2);
  const uint64_t mask = (uint64_t{1} << half) - 1;
  auto x = static_cast<uint64_t>(i);
  do {
    uint64_t left = x >> half, right = x & mask;
    for (uint64_t round = 0; round < 4; ++round) {
      const uint64_t mixed = random_bits(seed, stream, round << 32 ^ right) & mask;
      left = std::exchange(right, left ^ mixed);
    }
    x = left << half | right;
  } while (x >= static_cast<uint64_t>(n));
  return static_cast<int64_t>(x);
}

}  // namespace

Loader::Loader(std::vector<WeightedStream> streams, const LoaderOptions& options)
    : streams_(std::move(streams)), options_(options) {
  PRISM_CHECK(options_.B >= 1 && options_.T >= 1, "loader: expected B and T of at least 1, got ", options_.B,
              " and ", options_.T);
  PRISM_CHECK(options_.rank >= 0 && options_.rank < options_.world, "loader: expected a rank below the ",
              options_.world, " ranks, got ", options_.rank);
  PRISM_CHECK(!streams_.empty(), "loader: no data");
  double weights = 0;
  for (size_t s = 0; s < streams_.size(); ++s) {
    const auto& [stream, weight] = streams_[s];
    const std::string file = stream.size() > 0 ? stream.spans()[0].file : "data";
    PRISM_CHECK(stream.size() > options_.T, file, ": ", stream.size(),
                " tokens, expected at least one window of ", options_.T, " + 1");
    PRISM_CHECK(std::isfinite(weight) && weight > 0, file, ": expected a weight above 0, got ", weight);
    stream.check_ids(options_.vocab, kCheckedAtOpen);
    weights += weight, tokens_ += stream.size(), windows_ += windows(s);
  }
  for (WeightedStream& s : streams_) s.weight /= weights;
  restore({options_.seed, 0, 0, tokens_});
}

int64_t Loader::windows(size_t stream) const {
  return (streams_[stream].stream.size() + options_.T - 1) / options_.T;
}

int64_t Loader::steps_per_epoch() const {
  const int64_t step = options_.world * options_.B;
  return (windows_ + step - 1) / step;
}

// Fills a row with the window that stands at `index` of an epoch. Of several streams the first has floor(n w)
// of the first n windows, w its share; the others divide the rest in the same way.
void Loader::fill_row(const LoaderState& at, int64_t index, Batch& batch, int64_t row) const {
  size_t s = 0;
  for (double left = 1; s + 1 < streams_.size(); left -= streams_[s++].weight) {
    const auto had = [&](int64_t n) {
      return static_cast<int64_t>(std::floor(static_cast<double>(n) * (streams_[s].weight / left)));
    };
    const bool here = had(index + 1) > had(index);
    index = here ? had(index) : index - had(index);
    if (here) break;
  }
  const int64_t n = windows(s), T = options_.T;
  const int64_t epoch = streams_.size() > 1 ? index / n : at.epoch;
  // One number names the stream and its epoch; the seed's other uses have small stream numbers.
  const uint64_t order = (uint64_t{s} + 1) << 48 | static_cast<uint64_t>(epoch);
  const int64_t begin = (options_.shuffle ? permuted(index % n, n, at.seed, order) : index % n) * T;

  const TokenStream& stream = streams_[s].stream;
  const int64_t inputs = std::min(T, stream.size() - begin), scored = std::min(T, stream.size() - begin - 1);
  int32_t *tokens = &batch.tokens[static_cast<size_t>(row * T)],
          *start = &batch.start[static_cast<size_t>(row * T)];
  stream.copy(begin, inputs, options_.vocab, tokens);
  stream.copy(begin + 1, scored, options_.vocab, &batch.targets[static_cast<size_t>(row * T)]);
  batch.scored += scored;
  if (options_.bos < 0) return;
  for (int64_t t = 1; t < inputs; ++t)
    start[t] = tokens[t] == options_.bos ? static_cast<int32_t>(t) : start[t - 1];
  std::fill(start + inputs, start + T, static_cast<int32_t>(inputs));
}

void Loader::prepare(const LoaderState& at) {
  state_ = at;
  ahead_ = std::async(std::launch::async, [this, at] {
    const auto [B, T] = std::pair(options_.B, options_.T);
    const std::vector<int32_t> zeros(static_cast<size_t>(B * T), 0), none(zeros.size(), -1);
    Batch batch{B, T, zeros, none, zeros, 0};
    for (int64_t row = 0; row < B; ++row) {
      const int64_t index = at.window + options_.rank * B + row;
      if (streams_.size() > 1 || index < windows_) fill_row(at, index, batch, row);
    }
    return batch;
  });
}

Batch Loader::next() {
  Batch batch = ahead_.get();
  LoaderState after = state_;
  after.window += options_.world * options_.B;
  if (streams_.size() == 1 && after.window >= windows_) ++after.epoch, after.window = 0;
  prepare(after);
  return batch;
}

void Loader::restore(const LoaderState& state) {
  PRISM_CHECK(state.tokens == tokens_, "loader: its state was saved over data of ", state.tokens,
              " tokens, got ", tokens_);
  prepare(state);
}

}  // namespace prism
