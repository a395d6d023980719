#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>

#include "data/loader.h"
#include "tensor/rng.h"

using namespace prism;

namespace {

// A stream of `size` ids below `vocab` (bos 0 among them, at random places but always first), in spans of
// awkward lengths.
TokenStream random_stream(int64_t size, int64_t vocab, uint64_t seed) {
  TokenStream stream;
  for (int64_t begin = 0, n; begin < size; begin += n) {
    n = std::min<int64_t>(size - begin, 1 + static_cast<int64_t>(random_below(97, seed, 1, uint64_t(begin))));
    std::vector<int32_t> ids;
    for (int64_t i = begin; i < begin + n; ++i)
      ids.push_back(i == 0 ? 0 : static_cast<int32_t>(random_below(uint64_t(vocab), seed, 2, uint64_t(i))));
    stream.append(span_of(ids, "memory"));
  }
  return stream;
}

std::vector<int32_t> all_ids(const TokenStream& stream) {
  std::vector<int32_t> ids(static_cast<size_t>(stream.size()));
  stream.copy(0, stream.size(), INT32_MAX, ids.data());
  return ids;
}

std::vector<int32_t> sorted(std::vector<int32_t> ids) {
  std::sort(ids.begin(), ids.end());
  return ids;
}

bool same(const Batch& a, const Batch& b) {
  return a.tokens == b.tokens && a.targets == b.targets && a.start == b.start && a.scored == b.scored;
}

LoaderOptions options(int64_t B, int64_t T, int64_t vocab) {
  LoaderOptions o;
  o.B = B, o.T = T, o.vocab = vocab, o.bos = 0, o.seed = 3;
  return o;
}

}  // namespace

TEST_CASE("loader: an epoch serves every token once, to 1, 2, 3 and 7 ranks, whatever the lengths") {
  for (const int64_t size : {9, 10, 16, 17, 100, 1023, 1024, 1025})
    for (const int64_t T : {1, 2, 7, 8})
      for (const int64_t world : {1, 2, 3, 7}) {
        CAPTURE(size);
        CAPTURE(T);
        CAPTURE(world);
        const TokenStream stream = random_stream(size, 50, 1);
        const std::vector<int32_t> ids = all_ids(stream);
        std::vector<int32_t> inputs, targets;
        int64_t scored = 0;
        for (int64_t rank = 0; rank < world; ++rank) {
          LoaderOptions o = options(3, T, 50);
          o.rank = rank, o.world = world;
          Loader loader({{stream}}, o);
          for (int64_t step = 0; step < loader.steps_per_epoch(); ++step) {
            CHECK(loader.state().epoch == 0);
            const Batch batch = loader.next();
            REQUIRE(batch.tokens.size() == static_cast<size_t>(3 * T));
            scored += batch.scored;
            for (size_t i = 0; i < batch.tokens.size(); ++i)
              if (batch.targets[i] >= 0) {
                inputs.push_back(batch.tokens[i]);
                targets.push_back(batch.targets[i]);
              }
          }
          CHECK(loader.state().epoch == 1);
          CHECK(loader.state().window == 0);
        }
        CHECK(scored == size - 1);
        CHECK(sorted(targets) == sorted({ids.begin() + 1, ids.end()}));
        CHECK(sorted(inputs) == sorted({ids.begin(), ids.end() - 1}));
      }
}

TEST_CASE("loader: the ranks' batches stacked are the single rank's batch of B x world rows") {
  const TokenStream stream = random_stream(1000, 50, 2);
  Loader whole({{stream}}, options(6, 8, 50));
  std::vector<std::unique_ptr<Loader>> ranks;
  for (int64_t rank = 0; rank < 3; ++rank) {
    LoaderOptions o = options(2, 8, 50);
    o.rank = rank, o.world = 3;
    ranks.push_back(std::make_unique<Loader>(std::vector<WeightedStream>{{stream}}, o));
  }
  for (int step = 0; step < 50; ++step) {  // more than two epochs
    Batch stacked;
    for (auto& rank : ranks) {
      const Batch part = rank->next();
      stacked.tokens.insert(stacked.tokens.end(), part.tokens.begin(), part.tokens.end());
      stacked.targets.insert(stacked.targets.end(), part.targets.begin(), part.targets.end());
      stacked.start.insert(stacked.start.end(), part.start.begin(), part.start.end());
      stacked.scored += part.scored;
    }
    CHECK(same(stacked, whole.next()));
  }
}

TEST_CASE("loader: windows follow the stream, targets are the next ids, the end is padded") {
  TokenStream stream;
  stream.append(span_of({0, 1, 2, 3}, "a"));
  stream.append(span_of({4, 5, 0, 7, 8, 9}, "b"));
  LoaderOptions o = options(2, 4, 10);
  o.shuffle = false;
  Loader loader({{stream}}, o);
  CHECK(loader.steps_per_epoch() == 2);
  Batch batch = loader.next();
  CHECK(batch.tokens == std::vector<int32_t>{0, 1, 2, 3, 4, 5, 0, 7});
  CHECK(batch.targets == std::vector<int32_t>{1, 2, 3, 4, 5, 0, 7, 8});
  CHECK(batch.start == std::vector<int32_t>{0, 0, 0, 0, 0, 0, 2, 2});
  batch = loader.next();
  CHECK(batch.tokens == std::vector<int32_t>{8, 9, 0, 0, 0, 0, 0, 0});
  CHECK(batch.targets == std::vector<int32_t>{9, -1, -1, -1, -1, -1, -1, -1});
  CHECK(batch.start == std::vector<int32_t>{0, 0, 2, 2, 0, 0, 0, 0});
  CHECK(batch.scored == 1);
  CHECK(loader.next().tokens[0] == 0);  // the next epoch
  o.bos = -1;
  Loader whole_rows({{stream}}, o);
  CHECK(whole_rows.next().start == std::vector<int32_t>(8, 0));
}

TEST_CASE("loader: resumed twice at any step, also with other batch sizes, it serves the uninterrupted run") {
  for (const bool mixed : {false, true}) {
    std::vector<WeightedStream> streams = {{random_stream(333, 50, 3), 0.7}};
    if (mixed) streams.push_back({random_stream(101, 50, 4), 0.3});
    constexpr int kSteps = 30;
    std::vector<Batch> batches;
    std::vector<LoaderState> states;
    Loader loader(streams, options(4, 5, 50));
    for (int i = 0; i < kSteps; ++i) states.push_back(loader.state()), batches.push_back(loader.next());
    for (int first = 0; first < kSteps; ++first)
      for (const int second : {first, (first + kSteps) / 2, kSteps - 1}) {
        LoaderOptions o = options(4, 5, 50);
        o.seed = 99;  // the state's seed counts
        Loader once(streams, o);
        once.restore(states[static_cast<size_t>(first)]);
        for (int i = first; i < second; ++i) REQUIRE(same(once.next(), batches[static_cast<size_t>(i)]));
        Loader twice(streams, o);
        twice.restore(once.state());
        for (int i = second; i < kSteps; ++i) REQUIRE(same(twice.next(), batches[static_cast<size_t>(i)]));
      }
    Loader single(streams, options(1, 5, 50));
    single.restore(states[2]);
    for (int64_t row = 0; row < 4; ++row) {
      const Batch one = single.next();
      CHECK(std::equal(one.tokens.begin(), one.tokens.end(), batches[2].tokens.begin() + row * 5));
    }
  }
  const TokenStream other = random_stream(334, 50, 3);
  Loader loader({{other}}, options(4, 5, 50));
  CHECK_THROWS_WITH_AS(loader.restore({3, 0, 0, 333}),
                       "loader: its state was saved over data of 333 tokens, got 334", Error);
}

TEST_CASE("loader: seeds and epochs shuffle differently, and the order is far from sorted") {
  std::vector<int32_t> ids(1001);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i);
  TokenStream stream;
  stream.append(span_of(ids, "memory"));
  const auto order = [&](uint64_t seed, int epoch) {
    LoaderOptions o = options(1000, 1, 1001);
    o.seed = seed;
    Loader loader({{stream}}, o);
    for (int i = 0; i < epoch; ++i) loader.next(), loader.next();
    return loader.next().tokens;
  };
  const auto base = order(0, 0);
  CHECK(base == order(0, 0));
  CHECK(base != order(1, 0));
  CHECK(base != order(0, 1));
  // Ascending neighbours in a random permutation: 500 of 999, standard deviation 9.1; six of them.
  for (const auto& o : {base, order(1, 0), order(0, 1)}) {
    int ascending = 0, kept = 0;
    for (size_t i = 1; i < o.size(); ++i) ascending += o[i] > o[i - 1], kept += o[i] == o[i - 1] + 1;
    CHECK(std::abs(ascending - 500) < 55);
    CHECK(kept < 12);  // expected 1
  }
}

TEST_CASE(
    "loader: mixed streams keep their shares at every moment and each is served in full before it repeats") {
  // Ids tell the stream: 100 s + something.
  std::vector<WeightedStream> streams;
  for (const double weight : {5.0, 3.0, 2.0}) {
    std::vector<int32_t> ids;
    for (int32_t i = 0; i < 41; ++i) ids.push_back(static_cast<int32_t>(streams.size()) * 100 + i);
    streams.push_back({{}, weight});
    streams.back().stream.append(span_of(ids, "memory"));
  }
  Loader loader(streams, options(1, 4, 300));
  std::array<int, 3> served{};
  std::array<std::map<int32_t, int>, 3> windows;
  for (int n = 1; n <= 400; ++n) {
    const int32_t first = loader.next().tokens[0];
    const auto s = static_cast<size_t>(first / 100);
    ++windows[s][first];
    ++served[s];
    for (size_t k = 0; k < 3; ++k)
      CHECK(std::abs(served[k] - n * streams[k].weight / 10) <= 2);  // two roundings, nested
    for (const auto& [window, times] : windows[s]) CHECK(std::abs(times - served[s] / 11.0) < 1.01);
  }
}

TEST_CASE("loader: data that does not fit is refused in one line that says where") {
  const TokenStream stream = random_stream(100, 50, 5);
  CHECK_THROWS_WITH_AS(Loader({{random_stream(8, 50, 5)}}, options(1, 8, 50)),
                       "memory: 8 tokens, expected at least one window of 8 + 1", Error);
  CHECK_THROWS_WITH_AS(Loader({{TokenStream()}}, options(1, 8, 50)),
                       "data: 0 tokens, expected at least one window of 8 + 1", Error);
  CHECK_THROWS_WITH_AS(Loader(std::vector<WeightedStream>{}, options(1, 8, 50)), "loader: no data", Error);
  CHECK_THROWS_WITH_AS(Loader(std::vector<WeightedStream>{{stream, 1}, {stream, -2}}, options(1, 8, 50)),
                       "memory: expected a weight above 0, got -2", Error);
  TokenStream foreign;
  foreign.append(span_of({1, 2, 3}, "a.bin"));
  foreign.append(span_of({1, 2, 50, 3}, "b.bin").slice(1, 4));
  CHECK_THROWS_WITH_AS(Loader({{foreign}}, options(1, 2, 50)),
                       "b.bin: token 2: expected an id below the vocabulary's 50, got 50", Error);
}
