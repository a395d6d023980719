#include "src/ngram.h"

#include <algorithm>
#include <cmath>

namespace prism {

Ngrams::Table::Table(std::vector<uint64_t> all) : grams(std::move(all)) {
  std::sort(grams.begin(), grams.end());
  size_t distinct = 0;
  for (size_t i = 0; i < grams.size(); ++i)
    if (i == 0 || grams[i] != grams[distinct - 1]) {
      grams[distinct++] = grams[i];
      before.push_back(static_cast<int64_t>(i));
    }
  before.push_back(static_cast<int64_t>(grams.size()));
  grams.resize(distinct);
}

Ngrams::Ngrams(const std::vector<WeightedStream>& text, int64_t vocab, int32_t bos)
    : vocab_(static_cast<uint64_t>(vocab)) {
  constexpr int64_t kSlice = 1 << 16;
  std::array<std::vector<uint64_t>, 3> grams;
  std::vector<int32_t> ids(kSlice);
  for (const auto& [stream, weight] : text) {
    std::array<uint64_t, 2> past{};  // the token before, and the one before that
    size_t known = 0;                // how many of them are of this document
    for (int64_t begin = 0; begin < stream.size(); begin += kSlice) {
      const int64_t count = std::min(kSlice, stream.size() - begin);
      stream.copy(begin, count, vocab, ids.data());
      for (int64_t i = 0; i < count; ++i) {
        const auto w = static_cast<uint64_t>(ids[static_cast<size_t>(i)]);
        grams[0].push_back(w);
        if (known > 0) grams[1].push_back(past[0] * vocab_ + w);
        if (known > 1) grams[2].push_back((past[1] * vocab_ + past[0]) * vocab_ + w);
        // What follows bos knows bos alone; bos itself is predicted from the document it ends.
        known = ids[static_cast<size_t>(i)] == bos ? 1 : std::min<size_t>(known + 1, 2);
        past = {w, past[0]};
      }
    }
  }
  for (std::vector<uint64_t>& all : grams) tables_.emplace_back(std::move(all));
}

double Ngrams::Table::probability(uint64_t context, uint64_t w, uint64_t vocab, double shorter) const {
  const auto find = [&](uint64_t gram) {
    return std::lower_bound(grams.begin(), grams.end(), gram) - grams.begin();
  };
  const auto count = [&](ptrdiff_t first, ptrdiff_t last) {
    return before[static_cast<size_t>(last)] - before[static_cast<size_t>(first)];
  };
  const auto first = find(context * vocab), last = find((context + 1) * vocab);
  if (first == last) return shorter;
  const uint64_t gram = context * vocab + w;
  const auto different = static_cast<double>(last - first);
  return (static_cast<double>(count(find(gram), find(gram + 1))) + different * shorter) /
         (static_cast<double>(count(first, last)) + different);
}

void Ngrams::add_losses(const Batch& batch, std::array<double, 3>& loss) const {
  for (size_t at = 0; at < batch.targets.size(); ++at) {
    if (batch.targets[at] < 0) continue;
    const auto w = static_cast<uint64_t>(batch.targets[at]);
    const auto past = [&](size_t n) { return static_cast<uint64_t>(batch.tokens[at - n]); };
    const auto t = static_cast<int64_t>(at) % batch.T;
    double p = tables_[0].probability(0, w, vocab_, 1 / static_cast<double>(vocab_));
    loss[0] -= std::log(p);
    p = tables_[1].probability(past(0), w, vocab_, p);
    loss[1] -= std::log(p);
    if (t > batch.start[at]) p = tables_[2].probability(past(1) * vocab_ + past(0), w, vocab_, p);
    loss[2] -= std::log(p);
  }
}

}  // namespace prism
