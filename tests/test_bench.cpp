// bench: what it refuses. Its numbers are measured, not tested.
#include <doctest/doctest.h>

#include "src/bench.h"
#include "tensor/check.h"

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
