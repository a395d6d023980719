#include "src/evaluate.h"

#include <cmath>

namespace prism {

namespace {

// Ids [begin, end) of the stream, whole documents, that one row of the batch reads from left to right.
struct Lane {
  int64_t begin, end;
};

// Cuts the stream at document borders into at most B lanes of about equal length.
std::vector<Lane> lanes_of(const TokenStream& stream, int32_t bos, int64_t B) {
  std::vector<Lane> lanes;
  int64_t begin = 0;
  for (int64_t lane = 1; begin < stream.size(); ++lane) {
    const int64_t goal = std::max(begin + 1, stream.size() * lane / B);
    const int64_t end =
        lane >= B || bos < 0 ? stream.size() : stream.find(bos, std::min(goal, stream.size()));
    lanes.push_back({begin, end});
    begin = end;
  }
  return lanes;
}

// The next T ids of a lane as row b. Padding after its end is not scored.
void fill_row(Batch& batch, int64_t b, const TokenStream& stream, const Lane& lane, int32_t bos,
              int64_t vocab, const Marks* marks, Score& score) {
  const int64_t n = std::min(batch.T, lane.end - lane.begin), next = lane.begin + n < lane.end ? 1 : 0;
  std::vector<int32_t> ids(static_cast<size_t>(std::max<int64_t>(n + next, 0)));
  if (!ids.empty()) stream.copy(lane.begin, n + next, vocab, ids.data());
  const size_t row = static_cast<size_t>(b * batch.T);
  int32_t start = 0;
  for (int64_t t = 0; t < n; ++t) {
    const size_t i = static_cast<size_t>(t);
    if (ids[i] == bos) start = static_cast<int32_t>(t), ++score.documents;
    batch.tokens[row + i] = ids[i];
    batch.start[row + i] = start;
    if (i + 1 < ids.size() && ids[i + 1] != bos &&
        (!marks || marks->wanted[static_cast<size_t>(lane.begin) + i + 1]))
      batch.targets[row + i] = ids[i + 1], ++batch.scored;
  }
  for (int64_t t = n; t < batch.T; ++t) batch.start[row + static_cast<size_t>(t)] = start;
}

}  // namespace

double Score::perplexity() const { return std::exp(mean()); }

Score evaluate(Model& model, const TokenStream& stream, int32_t bos, int64_t B, int64_t T,
               const std::function<void(int64_t, int64_t)>& report, Marks* marks) {
  PRISM_CHECK(stream.size() > 1, "eval: expected at least 2 ids, got ", stream.size());
  std::vector<Lane> lanes = lanes_of(stream, bos, B);
  B = static_cast<int64_t>(lanes.size());
  int64_t longest = 0;
  for (const Lane& lane : lanes) longest = std::max(longest, lane.end - lane.begin);
  T = std::min(T, longest);
  Engine engine(model, B, T);
  DecodeState state(model, B);
  Score score;
  if (bos < 0) score.documents = 1;
  std::vector<bool> likeliest;
  if (marks)
    marks->loss.assign(marks->wanted.size(), 0), marks->likeliest.assign(marks->wanted.size(), false);
  int64_t done = 0;
  while (done < stream.size()) {
    const size_t n = static_cast<size_t>(B * T);
    Batch batch{B, T, std::vector<int32_t>(n, 0), std::vector<int32_t>(n, -1), std::vector<int32_t>(n, 0), 0};
    for (int64_t b = 0; b < B; ++b) {
      const Lane& lane = lanes[static_cast<size_t>(b)];
      fill_row(batch, b, stream, lane, bos, model.config().vocab_size, marks, score);
      // A row whose first token opens a document goes on from nothing; one that has ended keeps nothing.
      if (lane.begin >= lane.end || batch.tokens[static_cast<size_t>(b * T)] == bos) state.reset_row(b);
    }
    const std::vector<double> losses = engine.evaluate(batch, &state, marks ? &likeliest : nullptr);
    for (size_t i = 0; i < n; ++i) {
      score.loss += losses[i];
      if (!marks || batch.targets[i] < 0) continue;
      const size_t id = static_cast<size_t>(lanes[i / T].begin) + i % T + 1;
      marks->loss[id] = losses[i], marks->likeliest[id] = likeliest[i];
    }
    for (Lane& lane : lanes) {
      const int64_t taken = std::min(T, lane.end - lane.begin);
      lane.begin += taken, done += taken;
    }
    score.scored += batch.scored;
    if (report) report(done, stream.size());
  }
  return score;
}

}  // namespace prism
