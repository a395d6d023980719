// What inspect says of the writes, where the answer is known: by an ablation, by hand, or from the engine.
#include <doctest/doctest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "src/host.h"
#include "src/inspect.h"
#include "src/model_files.h"
#include "tests/scratch.h"

using namespace prism;
using Json = nlohmann::ordered_json;

namespace {

constexpr double kRounding = 1e-9;  // double on both sides, a few hundred terms a sum

std::unique_ptr<Model> fixture(const std::string& name) {
  return load_model("tests/fixtures/" + name, Device::cpu, DType::f64, false);
}

std::vector<int32_t> ids(int64_t count) {
  std::vector<int32_t> out;
  for (int64_t i = 0; i < count; ++i) out.push_back(static_cast<int32_t>((i * i * 7 + i / 3) % 18) + 2);
  return out;
}

TokenStream stream_of(const std::vector<int32_t>& text) {
  TokenStream stream;
  stream.append(span_of(text, "memory"));
  return stream;
}

Json layers_of(const std::string& name, const InspectOptions& o = {.rows = 2, .seq = 20}) {
  const auto model = fixture(name);
  return inspect_writes(*model, stream_of(ids(41)), nullptr, o)["layers"];
}

double near(const Json& value) { return value.get<double>(); }

}  // namespace

TEST_CASE("inspect: with the gain at 1/2 each step leaves half of what it found") {
  for (const Json& layer : layers_of("prism-no-gain")) {
    const Json& writes = layer["writes"];
    REQUIRE(writes.size() == 3);
    CHECK(writes[0]["left"].is_null());  // the first write is v itself, no step
    for (size_t l = 1; l < 3; ++l) {
      CHECK(near(writes[l]["left"]) == doctest::Approx(std::pow(0.5, l)).epsilon(kRounding));
      CHECK(near(writes[l]["gain"]["mean"]) == doctest::Approx(0.5).epsilon(kRounding));
      CHECK(writes[l]["gain"]["counts"][10] ==
            40 * 2 * 7);  // n H V entries, all in the bar that begins at 1/2
    }
  }
  // Algorithm 1 takes its first step on v - u: GELU(z) is neither 1/2 nor absent.
  for (const Json& layer : layers_of("prism-loop-no-gain")) CHECK(layer["writes"][0]["left"].is_number());
}

TEST_CASE("inspect: shared keys lie on each other, base keys on k, and free ones on neither") {
  for (const Json& layer : layers_of("prism-shared-key")) {
    CHECK(near(layer["cosine"][1][2]) == doctest::Approx(1).epsilon(kRounding));
    CHECK(near(layer["overlap"][0][1]) < 0.99);
    CHECK(near(layer["effective_rank"]) < 2 + kRounding);
  }
  for (const Json& layer : layers_of("prism-base-key")) {
    for (size_t l = 0; l < 3; ++l)
      for (size_t m = 0; m < 3; ++m)
        CHECK(near(layer["cosine"][l][m]) == doctest::Approx(1).epsilon(kRounding));
    CHECK(near(layer["effective_rank"]) == doctest::Approx(1).epsilon(1e-6));  // of singular values near 0
  }
  for (const Json& layer : layers_of("prism")) {
    CHECK(near(layer["overlap"][1][2]) < 0.99);
    CHECK(near(layer["effective_rank"]) > 1.01);
  }
}

TEST_CASE("inspect: every mixer has its rows; a rank-1 model writes once, on one line") {
  for (const char* name :
       {"linear", "retnet", "mamba2", "deltanet", "gdn", "prism-rank-1", "prism-loop-rank-1", "mom"})
    for (const Json& layer : layers_of(name)) {
      CAPTURE(name);
      CHECK(layer["writes"].size() == 1);
      CHECK(near(layer["effective_rank"]) == doctest::Approx(1).epsilon(kRounding));
      CHECK(layer["decay"].is_null() == (layer["mixer"] == "linear" || layer["mixer"] == "deltanet"));
      CHECK(layer["anchor"]["fitted"].is_null() == (layer["mixer"] != "prism-loop"));
    }
}

TEST_CASE("inspect: the state's norm is the engine's, write norms add up on a first token") {
  for (const char* name : {"linear", "retnet", "mamba2", "deltanet", "gdn", "prism", "prism-loop"}) {
    CAPTURE(name);
    const auto model = fixture(name);
    const std::vector<int32_t> text = ids(14);
    const Json seen = inspect_writes(*model, stream_of(text), nullptr, {.rows = 1, .seq = 13, .token = 0});
    DecodeState state(*model, 1);
    Batch batch{
        1, 13, {text.begin(), text.end() - 1}, {text.begin() + 1, text.end()}, std::vector<int32_t>(13), 13};
    Engine(*model, 1, 13).evaluate(batch, &state);
    for (int64_t i = 0; i < model->config().num_hidden_layers; ++i) {
      const std::vector<double> S = to_host(state.layer(i).S);
      const size_t heads = 2, size = S.size() / heads;
      double mean = 0;
      for (size_t h = 0; h < heads; ++h) {
        double square = 0;
        for (size_t j = 0; j < size; ++j) square += S[h * size + j] * S[h * size + j];
        mean += std::sqrt(square) / heads;
      }
      const Json& layer = seen["layers"][static_cast<size_t>(i)];
      CHECK(layer["state"]["age"].back() == 13);
      CHECK(near(layer["state"]["norm"].back()) == doctest::Approx(mean).epsilon(kRounding));
      // Into an empty state: what one unit key brings in is there, and nothing was recalled.
      const Json& head = seen["token"]["layers"][static_cast<size_t>(i)]["heads"][0];
      CHECK(head["recalled"] == 0);
      CHECK(head["state_before"] == 0);
      if (head["writes"].size() > 1) continue;
      CHECK(near(head["returned"]) == doctest::Approx(1).epsilon(kRounding));
      CHECK(near(head["state_after"]) ==
            doctest::Approx(near(head["writes"][0]["norm"])).epsilon(1e-4));  // |k| < 1
    }
  }
}

TEST_CASE("inspect: the anchor's correlation is Pearson's, of the projection with what the state recalls") {
  const auto model = fixture("prism-residual-anchor");
  const std::vector<int32_t> text = ids(4);
  const Json seen = inspect_writes(*model, stream_of(text), nullptr, {.rows = 1, .seq = 3});
  // By hand from the pass itself: of the three tokens two have something to recall.
  std::vector<std::vector<double>> anchors, keys;
  std::vector<std::vector<double>> states;
  model->watch = [&](int64_t layer, const MixerValues& values) {
    if (layer > 0) return;
    const Columns& a = values.solver.anchor;
    const std::vector<double> all = to_host(a.of->value);
    const int64_t width = a.of->value.shape[-1];
    for (int64_t t = 0; t < 3; ++t)
      anchors.emplace_back(all.begin() + t * width + a.begin, all.begin() + t * width + a.begin + a.width);
    const std::vector<double> k = to_host(values.scan.k->value);
    for (int64_t t = 0; t < 3; ++t) keys.emplace_back(k.begin() + t * 10, k.begin() + (t + 1) * 10);
  };
  const Batch batch{
      1, 3, {text.begin(), text.end() - 1}, {text.begin() + 1, text.end()}, std::vector<int32_t>(3), 3};
  Engine(*model, 1, 3).evaluate(batch);
  model->watch = nullptr;
  double both = 0, a2 = 0, b2 = 0;
  for (int64_t T = 1; T <= 2; ++T) {
    DecodeState state(*model, 1);
    const Batch prefix{
        1, T, {text.begin(), text.begin() + T}, std::vector<int32_t>(T, -1), std::vector<int32_t>(T), 0};
    Engine(*model, 1, T).evaluate(prefix, &state);
    states.push_back(to_host(state.layer(0).S));
  }
  for (size_t h = 0; h < 2; ++h)
    for (size_t v = 0; v < 7; ++v) {
      double b[2] = {};
      for (size_t t = 0; t < 2; ++t)
        for (size_t c = 0; c < 5; ++c) b[t] += states[t][(h * 7 + v) * 5 + c] * keys[t + 1][h * 5 + c];
      // Around the mean of two, each is half their difference.
      const double da = (anchors[2][h * 7 + v] - anchors[1][h * 7 + v]) / 2, db = (b[1] - b[0]) / 2;
      both += 2 * da * db, a2 += 2 * da * da, b2 += 2 * db * db;
    }
  CHECK(near(seen["layers"][0]["anchor"]["own"]) ==
        doctest::Approx(both / std::sqrt(a2 * b2)).epsilon(kRounding));
  CHECK(seen["layers"][0]["anchor"]["fitted"].is_null());  // two tokens fit anything
}

TEST_CASE("inspect: documents begin with an empty state; a position outside the windows is an error") {
  const auto model = fixture("prism");
  std::vector<int32_t> text = ids(21);
  text[8] = static_cast<int32_t>(model->config().bos_token_id);
  const Json seen = inspect_writes(*model, stream_of(text), nullptr, {.rows = 1, .seq = 20, .token = 8});
  CHECK(seen["token"]["layers"][0]["heads"][1]["recalled"] == 0);
  CHECK(seen["layers"][0]["state"]["age"].back() == 12);
  CHECK_THROWS_WITH_AS(inspect_writes(*model, stream_of(text), nullptr, {.rows = 1, .seq = 20, .token = 20}),
                       "--token: expected a position below 20 (rows x seq), got 20", Error);
}
