// bench: what it refuses and what it writes. Its numbers are measured, not tested.
#include <doctest/doctest.h>

#include <nlohmann/json.hpp>

#include "src/bench.h"
#include "src/files.h"
#include "tests/temporary.h"

using namespace prism;

TEST_CASE("bench: a wrong size or preset is named before anything runs") {
  BenchOptions options;
  options.scans = {"1:64:2:8:8"};
  CHECK_THROWS_WITH_AS(bench(options), "--scan: expected B:T:H:K:V:rank, got 1:64:2:8:8", UsageError);
  options.scans = {}, options.attentions = {"1:64:2"};
  CHECK_THROWS_WITH_AS(bench(options), "--attention: expected B:T:H:width, got 1:64:2", UsageError);
  options.attentions = {};
  options.presets = {"tiniest"};
  CHECK_THROWS_WITH_AS(bench(options), doctest::Contains("--preset: expected one of tiny"), Error);
}

TEST_CASE(
    "bench --lengths: a point for each model and length as JSON and SVG; no longer rows where one is slow") {
  const TemporaryDirectory dir;
  BenchOptions o;
  const std::string small = "tiny:hidden_size=32:num_hidden_layers=1:num_heads=2:head_dim=8";
  o.presets = {small, small + ":mixers=ttt-mlp:expand_v=1"};
  o.lengths = {64, 128}, o.tokens = 128, o.steps = 1;
  o.json_file = dir / "lengths.json", o.svg_file = dir / "lengths.svg";
  const auto result = [&] {
    bench(o);
    return nlohmann::json::parse(read_text(o.json_file, 1 << 20));
  };
  nlohmann::json json = result();
  CHECK(json["tokens"] == 128);
  REQUIRE(json["models"].size() == 2);
  for (const auto& model : json["models"]) {
    REQUIRE(model["points"].size() == 2);
    for (size_t i = 0; i < 2; ++i) {
      const auto& point = model["points"][i];
      CHECK(point["seq"] == o.lengths[i]);
      CHECK(point["rows"] == 128 / o.lengths[i]);
      for (const char* key : {"params", "steps", "ms", "tokens_per_s", "GiB"}) CHECK(point[key] > 0);
    }
  }
  CHECK(json["models"][1]["config"]["mixers"] == "ttt-mlp");
  REQUIRE(json["prism_over_ttt"].size() == 2);
  CHECK(json["prism_over_ttt"][1]["ratio"] > 0);
  const std::string svg = read_text(o.svg_file, 1 << 20);
  CHECK(svg.find(">" + o.presets[1] + "<") != std::string::npos);
  CHECK(svg.find("nan") == std::string::npos);

  o.max_seconds = 1e-9;
  json = result();
  CHECK(json["models"][0]["points"][0]["steps"] == 1);
  CHECK(json["models"][0]["points"][1]["skipped"].get<std::string>().find("too slow") == 0);
  CHECK(json["prism_over_ttt"].size() == 1);

  o.lengths = {64, 96};
  CHECK_THROWS_WITH_AS(bench(o), "--lengths: expected divisors of the 128 tokens of a step, got 96",
                       UsageError);
}
