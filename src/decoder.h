// Decoding (SPEC section 7): the recurrent state is carried along, so a token costs the same time and memory
// at any position. Attention layers keep every key and value: memory and a token's time grow with the
// position.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
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
  std::optional<Graph> graph_;  // one token on cuda: recorded the second time, then replayed
  bool warm_ = false;
};

// How the next id is drawn. temperature 0: the likeliest; top_k 0 and top_p 1: off.
struct Sampling {
  double temperature = 1;
  int64_t top_k = 0;
  double top_p = 1;
  double repetition_penalty = 1;  // penalise() before each draw
  uint64_t seed = 0;
};
// Draw number `index` of the seed's stream. Throws when a logit is not finite.
int32_t sample(std::span<const double> logits, const Sampling& how, uint64_t index);
// Each id that was `seen`, once: a positive logit is divided by `penalty`, another one multiplied by it.
void penalise(std::span<double> logits, std::span<const int32_t> seen, double penalty);

// Cuts text that arrives in pieces before the first of several strings.
class Stops {
 public:
  explicit Stops(std::vector<std::string> strings) : strings_(std::move(strings)) {}
  // What may be shown so far: not what could still become a stop string, nor anything after one.
  std::string next(const std::string& piece);
  std::string finish() { return std::exchange(held_, ""); }  // what was held back
  bool met() const { return met_; }

 private:
  std::vector<std::string> strings_;
  std::string held_;
  bool met_ = false;
};

}  // namespace prism
