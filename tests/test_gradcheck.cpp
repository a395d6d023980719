// gradcheck passes, and would not if any tensor of any row were 1 % off.
#include <doctest/doctest.h>

#include "src/gradcheck.h"

using namespace prism;

TEST_CASE("gradcheck: every row passes") {
  const Tally tally = gradcheck({});
  CHECK(tally.failed == 0);
  CHECK(tally.passed > 60);
}
TEST_CASE("gradcheck: float agrees with double") { CHECK(gradcheck({.dtype = DType::f32}).failed == 0); }
TEST_CASE("gradcheck: an error of 1 % in any one tensor of any row is caught") {
  const Tally tally = gradcheck({.inject_error = 0.01});
  CHECK(tally.passed == 0);
  CHECK(tally.failed > 60);
}
