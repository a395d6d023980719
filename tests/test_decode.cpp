// Decoding, documents and the family: properties of whole models that fixtures cannot show.
#include <doctest/doctest.h>

#include <algorithm>

#include "src/compare.h"
#include "src/decoder.h"
#include "src/engine.h"
#include "src/evaluate.h"
#include "src/host.h"
#include "tensor/rng.h"

using namespace prism;

namespace {

Config small(const std::vector<std::string>& mixers, int64_t rank) {
  Config c;
  c.vocab_size = 29, c.hidden_size = 24, c.num_hidden_layers = 2, c.num_heads = 2, c.head_dim = 6,
  c.intermediate_size = 20;
  c.tie_word_embeddings = true, c.rank = rank, c.solver_dim = 4, c.mixers = mixers, c.bos_token_id = 1,
  c.eos_token_id = 2;
  if (mixers[0] == "ttt-mlp") c.expand_v = 1;
  return c;
}

std::vector<int32_t> random_ids(int64_t n, int64_t vocab, uint64_t seed) {
  std::vector<int32_t> ids(static_cast<size_t>(n));
  for (size_t i = 0; i < ids.size(); ++i)
    ids[i] = static_cast<int32_t>(random_below(static_cast<uint64_t>(vocab), seed, 7, i));
  return ids;
}

Batch batch_of(const std::vector<int32_t>& ids, int64_t B, const std::vector<int32_t>& start) {
  const int64_t T = static_cast<int64_t>(ids.size()) / B;
  return {B, T, ids, ids, start, B * T};
}

// Logits, loss gradients of a training pass.
struct Pass {
  std::vector<double> logits, grads;
};
Pass run(const Config& config, const Batch& batch) {
  Model model(config, Device::cpu, DType::f64, true);
  model.parameters().initialise(3);
  Engine engine(model, batch.B, batch.T);
  Activations activations;
  double loss;
  engine.load({&batch, 1});
  engine.gradients({&loss, {}, DType::f64, Device::cpu}, &activations);
  return {activations.logits, to_host(model.parameters().grads())};
}

const std::vector<std::vector<std::string>> kMixers = {{"linear"},     {"retnet"},    {"mamba2"},
                                                       {"deltanet"},   {"gdn"},       {"prism"},
                                                       {"prism-loop"}, {"attention"}, {"prism", "attention"},
                                                       {"ttt-mlp"},    {"mom"},       {"gla"}};

}  // namespace

TEST_CASE("prism of rank 1 and gdn give bit-identical logits and gradients") {
  const Batch batch = batch_of(random_ids(2 * 70, 29, 1), 2, std::vector<int32_t>(140, 0));
  const Pass prism = run(small({"prism"}, 1), batch), gdn = run(small({"gdn"}, 1), batch);
  CHECK(prism.logits == gdn.logits);
  CHECK(prism.grads == gdn.grads);
}

TEST_CASE(
    "prefill then stepping gives the whole-sequence logits within 1e-12 for every split point and mixer") {
  const int64_t T = 70;  // over the chunk border at 64
  for (const auto& mixers : kMixers) {
    CAPTURE(mixers[0]);
    Model model(small(mixers, 3), Device::cpu, DType::f64, false);
    model.parameters().initialise(5);
    const std::vector<int32_t> ids = random_ids(T, 29, 2);
    Decoder whole(model), split(model);
    const std::vector<double> expected = whole.feed(ids);
    for (int64_t at = 1; at < T; ++at) {
      CAPTURE(at);
      split.reset();
      split.feed({ids.data(), static_cast<size_t>(at)});
      std::vector<double> logits;
      for (int64_t t = at; t < T; ++t) logits = split.feed({ids.data() + t, 1});
      CHECK(relative_error(std::span<const double>(logits), std::span<const double>(expected)) <= 1e-12);
    }
  }
}

TEST_CASE("changing one document leaves its neighbours' logits equal bit for bit, in every mixer") {
  const int64_t T = 100;
  std::vector<int32_t> start(static_cast<size_t>(T));
  for (int32_t t = 0; t < T; ++t) start[static_cast<size_t>(t)] = t < 30 ? 0 : t < 75 ? 30 : 75;
  for (const auto& mixers : kMixers) {
    CAPTURE(mixers[0]);
    std::vector<int32_t> ids = random_ids(T, 29, 4);
    const Pass before = run(small(mixers, 3), batch_of(ids, 1, start));
    for (int64_t t = 30; t < 75; ++t) ids[static_cast<size_t>(t)] = (ids[static_cast<size_t>(t)] + 5) % 29;
    const Pass after = run(small(mixers, 3), batch_of(ids, 1, start));
    CHECK(std::equal(before.logits.begin(), before.logits.begin() + 30 * 29, after.logits.begin()));
    CHECK(std::equal(before.logits.begin() + 75 * 29, before.logits.end(), after.logits.begin() + 75 * 29));
    CHECK(before.logits != after.logits);
  }
}

TEST_CASE(
    "changing one document leaves its neighbours' activation gradients equal bit for bit, in every mixer") {
  // Documents of disjoint ids and an embedding that is not tied: a row of its gradient is a sum of the
  // activation gradients at one document's positions.
  const int64_t T = 100, D = 24;
  std::vector<int32_t> start(static_cast<size_t>(T)), ids = random_ids(T, 9, 8);
  for (int32_t t = 0; t < T; ++t) {
    const int32_t document = t < 30 ? 0 : t < 75 ? 1 : 2;
    start[static_cast<size_t>(t)] = document == 0 ? 0 : document == 1 ? 30 : 75;
    ids[static_cast<size_t>(t)] += 9 * document;
  }
  for (const auto& mixers : kMixers) {
    CAPTURE(mixers[0]);
    Config config = small(mixers, 3);
    config.tie_word_embeddings = false;
    const std::vector<double> before = run(config, batch_of(ids, 1, start)).grads;
    std::vector<int32_t> other = ids;
    for (int64_t t = 30; t < 75; ++t)
      other[static_cast<size_t>(t)] = 9 + (other[static_cast<size_t>(t)] + 4) % 9;
    const std::vector<double> after = run(config, batch_of(other, 1, start)).grads;
    // The embedding comes first in the flat buffer.
    CHECK(std::equal(before.begin(), before.begin() + 9 * D, after.begin()));
    CHECK(std::equal(before.begin() + 18 * D, before.begin() + 27 * D, after.begin() + 18 * D));
    CHECK(!std::equal(before.begin() + 9 * D, before.begin() + 18 * D, after.begin() + 9 * D));
  }
}

TEST_CASE("a document scores the same alone, among others, and for any batch and slice size") {
  // Attention's cache runs through the slices too: documents end in them, go on, and outgrow it.
  Model model(small({"prism", "attention"}, 3), Device::cpu, DType::f64, false);
  model.parameters().initialise(6);
  std::vector<int32_t> ids;
  double apart = 0;
  for (uint64_t d = 0; d < 7; ++d) {
    std::vector<int32_t> document = random_ids(5 + static_cast<int64_t>(d) * 23, 27, 10 + d);
    for (int32_t& id : document) id += 2;
    document.insert(document.begin(), 1);
    TokenStream alone;
    alone.append(span_of(document, "document"));
    apart += evaluate(model, alone, 1, 1, 1000).loss;
    ids.insert(ids.end(), document.begin(), document.end());
  }
  TokenStream stream;
  stream.append(span_of(ids, "documents"));
  const int64_t shapes[][2] = {{1, 16}, {1, 1000}, {3, 7}, {4, 64}, {16, 33}};
  for (const auto [B, T] : shapes) {
    CAPTURE(cat(B, " x ", T));
    const Score score = evaluate(model, stream, 1, B, T);
    CHECK(score.documents == 7);
    CHECK(score.scored == static_cast<int64_t>(ids.size()) - 7);
    CHECK(score.loss == doctest::Approx(apart).epsilon(1e-12));
  }
}

TEST_CASE("a decoder's memory does not depend on how much it has read") {
  Model model(small({"prism"}, 3), Device::cpu, DType::f32, false);
  model.parameters().initialise(1);
  Decoder decoder(model, 32);
  const size_t before = decoder.bytes();
  decoder.feed(random_ids(3000, 29, 9));
  CHECK(decoder.bytes() == before);
}

TEST_CASE("training's memory a token does not grow with T") {
  const Config config = small({"prism"}, 3);
  Model model(config, Device::cpu, DType::f32, true);
  const double at_512 = static_cast<double>(Engine::measure(model, 1, 512, true)) / 512;
  const double at_8192 = static_cast<double>(Engine::measure(model, 1, 8192, true)) / 8192;
  CHECK(at_8192 <= at_512);
}

TEST_CASE("sampling: temperature 0 takes the likeliest, top-k and top-p cut the tail, draws repeat") {
  const std::vector<double> logits = {0, 3, 1, 2.9, -1};
  CHECK(sample(logits, {.temperature = 0}, 0) == 1);
  std::vector<int> seen(5);
  for (uint64_t i = 0; i < 2000; ++i) {
    ++seen[static_cast<size_t>(sample(logits, {.seed = 1}, i))];
    CHECK(sample(logits, {.top_k = 1, .seed = 1}, i) == 1);
    const int32_t nucleus = sample(logits, {.top_p = 0.8, .seed = 1}, i);
    CHECK((nucleus == 1 || nucleus == 3));
  }
  // softmax(logits) = .466, .422 for ids 1 and 3, .023 for id 0: three standard deviations of 2000 draws
  CHECK(std::abs(seen[1] - 932) < 67);
  CHECK(std::abs(seen[3] - 843) < 67);
  CHECK(std::abs(seen[0] - 46) < 21);
  CHECK(sample(logits, {.seed = 1}, 5) == sample(logits, {.seed = 1}, 5));
}
