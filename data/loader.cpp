#include "data/loader.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>
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

Loader::Loader(TokenStream stream, const LoaderOptions& options)
    : Loader(std::vector<WeightedStream>{{std::move(stream), 1}}, options) {}

Loader::Loader(std::vector<WeightedStream> streams, const LoaderOptions& options)
    : streams_(std::move(streams)), options_(options) {
  PRISM_CHECK(options_.B >= 1 && options_.T >= 1, "loader: expected B and T of at least 1, got ", options_.B,
              " and ", options_.T);
  PRISM_CHECK(options_.rank >= 0 && options_.rank < options_.world, "loader: expected a rank below the ",
              options_.world, " ranks, got ", options_.rank);
  PRISM_CHECK(!streams_.empty(), "loader: no data");
  double total = 0;
  for (const auto& [stream, weight] : streams_) {
    PRISM_CHECK(stream.size() > options_.T, stream.size() ? stream.spans()[0].file : "data", ": ",
                stream.size(), " tokens, expected at least one window of ", options_.T, " + 1");
    PRISM_CHECK(std::isfinite(weight) && weight > 0, stream.spans()[0].file,
                ": expected a weight above 0, got ", weight);
    stream.check_ids(options_.vocab, kCheckedAtOpen);
    total += weight;
  }
  for (WeightedStream& s : streams_) s.weight /= total;
  restore({options_.seed, 0, 0, tokens()});
}

Loader::~Loader() = default;

int64_t Loader::tokens() const {
  return std::accumulate(streams_.begin(), streams_.end(), int64_t{0},
                         [](int64_t sum, const WeightedStream& s) { return sum + s.stream.size(); });
}

int64_t Loader::windows(size_t stream) const {
  return (streams_[stream].stream.size() + options_.T - 1) / options_.T;
}

int64_t Loader::steps_per_epoch() const {
  int64_t all = 0;
  for (size_t s = 0; s < streams_.size(); ++s) all += windows(s);
  const int64_t step = options_.world * options_.B;
  return (all + step - 1) / step;
}

// The window that stands at `index` of an epoch. Of several streams the first takes floor(n w) of the first n
// windows, w its share; the others share the rest in the same way.
Loader::Place Loader::place(const LoaderState& at, int64_t index) const {
  size_t s = 0;
  double left = 1;
  for (; s + 1 < streams_.size(); ++s) {
    const double share = streams_[s].weight / left;
    const auto taken = [&](int64_t n) {
      return static_cast<int64_t>(std::floor(static_cast<double>(n) * share));
    };
    const int64_t before = taken(index);
    if (taken(index + 1) > before) {
      index = before;
      break;
    }
    index -= before;
    left -= streams_[s].weight;
  }
  const int64_t n = windows(s);
  int64_t epoch = at.epoch;
  if (streams_.size() > 1) epoch = index / n, index %= n;
  // One number names the stream and its epoch; the seed's other uses have small stream numbers.
  const uint64_t order = (uint64_t{s} + 1) << 48 | static_cast<uint64_t>(epoch);
  return {s, options_.shuffle ? permuted(index, n, at.seed, order) : index};
}

void Loader::fill_row(Batch& batch, int64_t row, const Place& place) const {
  const int64_t T = options_.T, begin = place.window * T;
  const TokenStream& stream = streams_[place.stream].stream;
  const int64_t here = std::min(T, stream.size() - begin);        // inputs
  const int64_t scored = std::min(T, stream.size() - begin - 1);  // targets
  int32_t* tokens = &batch.tokens[static_cast<size_t>(row * T)];
  int32_t* start = &batch.start[static_cast<size_t>(row * T)];
  stream.copy(begin, here, options_.vocab, tokens);
  stream.copy(begin + 1, scored, options_.vocab, &batch.targets[static_cast<size_t>(row * T)]);
  batch.scored += scored;
  if (options_.bos < 0) return;
  for (int64_t t = 1; t < here; ++t)
    start[t] = tokens[t] == options_.bos ? static_cast<int32_t>(t) : start[t - 1];
  std::fill(start + here, start + T, static_cast<int32_t>(here));
}

Batch Loader::make(const LoaderState& at) const {
  const auto n = static_cast<size_t>(options_.B * options_.T);
  Batch batch{options_.B,
              options_.T,
              std::vector<int32_t>(n, 0),
              std::vector<int32_t>(n, -1),
              std::vector<int32_t>(n, 0),
              0};
  const int64_t end = streams_.size() == 1 ? windows(0) : INT64_MAX;
  for (int64_t row = 0; row < options_.B; ++row) {
    const int64_t index = at.window + options_.rank * options_.B + row;
    if (index < end) fill_row(batch, row, place(at, index));
  }
  return batch;
}

LoaderState Loader::after(LoaderState at) const {
  at.window += options_.world * options_.B;
  if (streams_.size() == 1 && at.window >= windows(0)) ++at.epoch, at.window = 0;
  return at;
}

Batch Loader::next() {
  Batch batch = ahead_.get();
  state_ = after(state_);
  ahead_ = std::async(std::launch::async, [this, at = state_] { return make(at); });
  return batch;
}

void Loader::restore(const LoaderState& state) {
  PRISM_CHECK(state.tokens == tokens(), "loader: its state was saved over data of ", state.tokens,
              " tokens, got ", tokens());
  if (ahead_.valid()) ahead_.wait();
  state_ = state;
  ahead_ = std::async(std::launch::async, [this, at = state_] { return make(at); });
}

}  // namespace prism
