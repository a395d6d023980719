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

// Documents begin at each `bos` (-1: the stream is one document). B rows at a time, in slices of T ids;
// report(done, all) counts ids.
Score evaluate(Model& model, const TokenStream& stream, int32_t bos, int64_t B, int64_t T,
               const std::function<void(int64_t, int64_t)>& report = {});

}  // namespace prism
