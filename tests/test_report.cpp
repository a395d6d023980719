// What a run shows: n-gram models, the picture of the losses, numbers as people read them.
#include <doctest/doctest.h>

#include <cmath>
#include <fstream>
#include <regex>

#include "src/ngram.h"
#include "src/progress.h"
#include "src/run_log.h"
#include "tests/temporary.h"

using namespace prism;

namespace {

Batch row(const std::vector<int32_t>& ids) {
  Batch b;
  b.B = 1, b.T = static_cast<int64_t>(ids.size()) - 1, b.scored = b.T;
  b.tokens.assign(ids.begin(), ids.end() - 1);
  b.targets.assign(ids.begin() + 1, ids.end());
  b.start.assign(b.tokens.size(), 0);
  return b;
}

Ngrams counted(const std::vector<int32_t>& ids, int64_t vocab, int32_t bos) {
  TokenStream stream;
  stream.append(span_of(ids, "memory"));
  return Ngrams({{stream, 1}}, vocab, bos);
}

// -log p of the row's last id, for n = 1, 2, 3.
std::array<double, 3> last_loss(const Ngrams& ngrams, const std::vector<int32_t>& ids) {
  Batch b = row(ids);
  std::fill(b.targets.begin(), b.targets.end() - 1, -1);
  std::array<double, 3> loss{};
  ngrams.add_losses(b, loss);
  return loss;
}

}  // namespace

TEST_CASE("n-grams: Witten-Bell's interpolation, worked by hand") {
  // a = 0, b = 1, c = 2 of 4: "a b a b a c". Unigrams a 3, b 2, c 1; after a: b 2, c 1; after b: a 2;
  // after b a: b 1, c 1.
  const Ngrams ngrams = counted({0, 1, 0, 1, 0, 2}, 4, -1);
  const auto loss = last_loss(ngrams, {1, 0, 1});  // b after b a
  const double p1 = (2 + 3 * 0.25) / (6 + 3), p2 = (2 + 2 * p1) / (3 + 2), p3 = (1 + 2 * p2) / (2 + 2);
  CHECK(loss[0] == doctest::Approx(-std::log(p1)));
  CHECK(loss[1] == doctest::Approx(-std::log(p2)));
  CHECK(loss[2] == doctest::Approx(-std::log(p3)));
  // Never seen after c, nor anywhere: what is left of the unigram's share, at every order.
  const auto unseen = last_loss(ngrams, {0, 2, 3});
  for (double x : unseen) CHECK(x == doctest::Approx(-std::log(3 * 0.25 / 9)));
}

TEST_CASE("n-grams: probabilities of all tokens sum to 1 in every context, seen or not") {
  std::vector<int32_t> text;
  for (int i = 0; i < 300; ++i) text.push_back((i * i + i / 7) % 11);
  const Ngrams ngrams = counted(text, 12, -1);
  for (const auto& context : {std::vector<int32_t>{0, 1}, {1, 0}, {11, 11}, {3, 11}, {11, 3}}) {
    std::array<double, 3> sum{};
    for (int32_t w = 0; w < 12; ++w) {
      const auto loss = last_loss(ngrams, {context[0], context[1], w});
      for (size_t n = 0; n < 3; ++n) sum[n] += std::exp(-loss[n]);
    }
    for (double total : sum) CHECK(total == doctest::Approx(1).epsilon(1e-12));
  }
}

TEST_CASE("n-grams: no context crosses a document, in counting or in scoring") {
  // With bos = 9 the pair (1, 2) of "1 | bos 2" and the triple (1, 9, 2) are not contexts of 2.
  const Ngrams documents = counted({9, 0, 1, 9, 2, 9, 0, 1, 9, 2}, 10, 9);
  Batch b = row({0, 1, 9, 2});
  std::fill(b.targets.begin(), b.targets.end() - 1, -1);
  std::array<double, 3> inside{}, across{};
  documents.add_losses(b, across);
  b.start = {0, 0, 2};
  documents.add_losses(b, inside);
  CHECK(inside[2] == inside[1]);  // bos is all that is known
  CHECK(across[2] == across[1]);  // the triple was never counted
  CHECK(last_loss(counted({9, 0, 1, 9, 2, 9, 0, 1, 9, 2}, 10, -1), {0, 1, 9, 2})[2] < across[2]);
}

TEST_CASE("the picture of a log has both curves, every point inside the axes, and survives odd logs") {
  const TemporaryDirectory dir;
  const auto draw = [&](const std::string& log) {
    std::ofstream(dir / "log.jsonl") << log;
    draw_losses(dir / "log.jsonl", dir / "loss.svg");
    return read_text(dir / "loss.svg", 1 << 20);
  };
  std::string log;
  for (int step = 10; step <= 500; step += 10)
    log += "{\"step\": " + std::to_string(step) + ", \"loss\": " + std::to_string(1.3 + 40.0 / step) +
           (step % 100 ? "}\n" : ", \"val_loss\": 1.5}\n");
  const std::string svg = draw(log);
  const std::regex curve("<g class=\"c[01]\"><polyline class=\"curve\" points=\"([^\"]*)\"");
  std::vector<int> counts;
  for (std::sregex_iterator at(svg.begin(), svg.end(), curve), end; at != end; ++at) {
    std::istringstream points((*at)[1]);
    int count = 0;
    char comma;
    for (double x, y; points >> x >> comma >> y; ++count) {
      CHECK(x >= 76);
      CHECK(x <= 694);
      CHECK(y >= 62);
      CHECK(y <= 352);
    }
    counts.push_back(count);
  }
  CHECK(counts == std::vector<int>{50, 5});
  for (const char* odd :
       {"", "nonsense\n", "{\"step\": 1, \"loss\": null}\n", "{\"step\": 1, \"loss\": 2}\n"})
    CHECK(draw(odd).find("nan") == std::string::npos);
}

TEST_CASE("numbers as people read them") {
  CHECK(duration(0.4) == "0s");
  CHECK(duration(59.6) == "1m00s");
  CHECK(duration(3599) == "59m59s");
  CHECK(duration(93784) == "26h03m");
  CHECK(grouped(0) == "0");
  CHECK(grouped(999) == "999");
  CHECK(grouped(65536) == "65,536");
  CHECK(grouped(-1234567) == "-1,234,567");
  CHECK(byte_count(27'400'000) == "27.4 MB");
  CHECK(byte_count(1'500'000'000) == "1.50 GB");
}
