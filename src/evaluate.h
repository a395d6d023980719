// Scoring text: the recurrent state runs through each document, however long; its first id is context only,
// every other id is scored once. Batch and slice sizes change the speed, not the result.
#pragma once

#include <functional>

#include "src/engine.h"

namespace prism {

struct Score {
  double loss = 0;     // sum of -log p over the scored ids, in nats
  int64_t scored = 0;  // ids
  int64_t documents = 0;

  double mean() const { return loss / static_cast<double>(scored); }
  double perplexity() const;
};

// What is asked and found of each id of a stream.
struct Marks {
  std::vector<bool> wanted;     // is it to be scored?
  std::vector<double> loss;     // its -log p, 0 where it is not scored
  std::vector<bool> likeliest;  // of the whole vocabulary, at its place
};

// Documents begin at each `bos` (-1: the stream is one document). B rows at a time, in slices of T ids;
// report(done, all) counts ids. With `marks` only the ids that it wants are scored, each into it.
Score evaluate(Model& model, const TokenStream& stream, int32_t bos, int64_t B, int64_t T,
               const std::function<void(int64_t, int64_t)>& report = {}, Marks* marks = nullptr);

}  // namespace prism
