// Batches from token streams: windows of T ids, shuffled, each served once an epoch, to any number of ranks.
#pragma once

#include <cstdint>
#include <future>
#include <vector>

#include "data/shards.h"

namespace prism {

// B rows of T positions: ids of a stream, and as targets the ids that follow them there.
struct Batch {
  int64_t B = 0, T = 0;
  std::vector<int32_t> tokens;   // [B,T]; 0 where a window ends early or a row has none
  std::vector<int32_t> targets;  // [B,T]; -1, not scored: there, and at the last id of a stream
  std::vector<int32_t> start;    // [B,T] first position of t's document in its row (kernels/documents.h)
  int64_t scored = 0;            // targets that are not -1
};

struct WeightedStream {
  TokenStream stream;
  double weight = 1;
};

struct LoaderOptions {
  int64_t B = 1, T = 1;
  uint64_t seed = 0;
  int64_t vocab = 0;    // ids must be below it
  int32_t bos = -1;     // opens a document; -1: rows are one document each
  bool shuffle = true;  // false: the windows in order, as evaluation wants them
  int64_t rank = 0, world = 1;
};

// Where a loader stands. Restoring it resumes exactly, also with another B or world.
struct LoaderState {
  uint64_t seed = 0;
  int64_t epoch = 0, window = 0;  // windows of the epoch served so far, to all ranks together
  int64_t tokens = 0;             // of all streams: tells other data apart
  bool operator==(const LoaderState&) const = default;
};

// Window i of a stream s has the inputs s[iT, iT + T) and the targets one id later; the last one may be
// shorter. So every id is an input once an epoch, and every id but a stream's first a target once. A step
// serves `world` x B windows, rank r rows [r B, (r + 1) B) of them, so that 2 ranks with B 4 see what one
// with B 8 sees.
//
// One stream: each epoch is a new permutation of its windows; its last step is filled up with rows of no
// targets. Several: one endless epoch in which each stream has its share of the windows at every moment, and
// is permuted anew whenever it has been served in full.
class Loader {
 public:
  // Throws when a stream has fewer than T + 1 ids, or one that is not below the vocabulary (the first 128 M
  // ids of each file are looked at here, all of them when they are served).
  Loader(std::vector<WeightedStream> streams, const LoaderOptions& options);
  Loader(const Loader&) = delete;

  // This rank's part of the next step; the one after it is prepared by a thread meanwhile.
  Batch next();
  int64_t steps_per_epoch() const;  // that serve as many windows as the streams have together

  LoaderState state() const { return state_; }
  // Goes back to a state; throws when it was saved over other data.
  void restore(const LoaderState& state);

 private:
  int64_t windows(size_t stream) const;
  void fill_row(const LoaderState& at, int64_t index, Batch& batch, int64_t row) const;
  void prepare(const LoaderState& at);

  std::vector<WeightedStream> streams_;
  LoaderOptions options_;
  int64_t tokens_ = 0, windows_ = 0;  // of all streams
  LoaderState state_;
  std::future<Batch> ahead_;
};

}  // namespace prism
