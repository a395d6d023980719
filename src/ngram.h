// Byte and token n-gram models, the yardstick of a small language model.
#pragma once

#include <array>

#include "data/loader.h"

namespace prism {

// Unigram, bigram and trigram counts of a text, interpolated after Witten and Bell. With h the n - 1 tokens
// before w, N(h) how often h comes and D(h) how many different tokens follow it:
//   p_n(w | h) = (count(h w) + D(h) p_{n-1}(w | h')) / (N(h) + D(h)),    p_0 = 1 / vocab
// Contexts do not cross documents; 8 to 16 bytes a token.
class Ngrams {
 public:
  // Documents open at each `bos`; -1: all is one.
  Ngrams(const std::vector<WeightedStream>& text, int64_t vocab, int32_t bos);
  // Adds -log p of every scored target of the batch, for n = 1, 2, 3, to `loss`. A row's first tokens have
  // what stands before them in the row, as the model does.
  void add_losses(const Batch& batch, std::array<double, 3>& loss) const;

 private:
  // Distinct n-grams, sorted, each as one number in base `vocab`, and how many tokens come before each.
  struct Table {
    std::vector<uint64_t> grams;
    std::vector<int64_t> before;
    explicit Table(std::vector<uint64_t> all);
    // p_n of w, given p_{n-1}.
    double probability(uint64_t context, uint64_t w, uint64_t vocab, double shorter) const;
  };
  uint64_t vocab_;
  std::vector<Table> tables_;
};

}  // namespace prism
