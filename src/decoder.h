// Decoding (SPEC section 7): the recurrent state is carried along, so a token costs the same time and memory
// at any position.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "src/model.h"

namespace prism {

class Decoder {
 public:
  // `longest`: ids one pass may take; longer input goes in several passes. The model must outlive the
  // decoder.
  explicit Decoder(const Model& model, int64_t longest = 256);

  // Logits [vocab] after the last of `ids`, which go on from what was fed before. Any way to cut a sequence
  // into calls gives the same logits.
  std::vector<double> feed(std::span<const int32_t> ids);
  void reset() { state_.reset(); }
  size_t bytes() const {
    return state_.bytes() + arena_->capacity() + inputs_.bytes() + logits_.bytes() + step_.bytes();
  }

 private:
  void pass(std::span<const int32_t> ids, bool last);
  // The work of a pass over the first T ids in inputs_.
  void run(int64_t T, bool last);

  const Model& model_;
  int64_t longest_;
  DecodeState state_;
  Buffer inputs_, logits_, step_;
  std::unique_ptr<Arena> arena_;
  Graph graph_;  // one token on cuda: recorded the second time, then replayed
  bool warm_ = false;
};

// How the next id is drawn. temperature 0: the likeliest; top_k 0 and top_p 1: off.
struct Sampling {
  double temperature = 1;
  int64_t top_k = 0;
  double top_p = 1;
  uint64_t seed = 0;
};
// Draw number `index` of the seed's stream.
int32_t sample(std::span<const double> logits, const Sampling& how, uint64_t index);

}  // namespace prism
