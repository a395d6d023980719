// Probes: sequences made on the fly, whose answers follow from what stands before them. One row is one
// document of T ids; a target of -1 is not scored. The sets of ids are disjoint: control ids, A and B (keys
// and values, or operands and results) and noise, which fills every other position.
//
// The nine of the paper's appendix H. Its text leaves open what is said here; sizes are the authors' (their
// released generator lets noise take control ids and operands, these do not). A "burst" stands at a random
// place, the question at the end of the row.
//   mqar               2 keys with their values in the first half; each key asked once in the second half
//   poly-recall        a burst of 2 keys with their values; one key is asked
//   variable-tracking  8 assignments (variable, value) to 3 variables; the last value of one is asked
//   local-xor          burst a b OP; yes if just one of a, b is odd
//   parity             burst of 3 bits and OP; yes if their sum is odd
//   modulo-add         burst a b OP; (a + b) mod 16
//   palindrome         burst a b c d OP; yes if a = d and b = c; half of the rows are, the others differ in
//                      one pair
//   silence-gate       burst ON or OFF, key, value; the key is asked: its value after ON, null after OFF
//   mux                burst LEFT or RIGHT, x, y, OP; x after LEFT, y after RIGHT
// Recall that does not saturate:
//   recall:PAIRS:T     mqar with PAIRS of 128 keys in T ids
//   needle:T           one key with its value at a random depth of T ids of noise; asked at the end
#pragma once

#include <string>
#include <vector>

#include "data/loader.h"

namespace prism {

// Which ids are what: 16 control ids, A and B of `set` ids each, 16 of noise.
enum ProbeId : int32_t { kNull, kQuery, kOp, kOn, kOff, kNo, kYes, kLeft, kRight, kControls = 16 };
struct ProbeVocabulary {
  int32_t set;
  int32_t a(int64_t i) const { return kControls + static_cast<int32_t>(i); }
  int32_t b(int64_t i) const { return a(set + i); }
  int32_t noise(int64_t i) const { return b(set + i); }
  int64_t size() const { return noise(kControls); }
};

struct ProbeRow;
struct ProbeTask {
  std::string name;
  void (*fill)(ProbeRow&, const ProbeTask&);
  int64_t T;
  int64_t width = 16;    // D of the models that take it
  int64_t steps = 2000;  // that they are trained for
  int64_t pairs = 2;
  ProbeVocabulary ids = {16};
};

// The tasks of a name: one of the above; `all` for the nine; `recall` and `needle` for four sizes each.
// Throws a UsageError that names them.
std::vector<ProbeTask> find_probe_tasks(const std::string& name);

// Draws of one seed that share no row.
enum class ProbeSplit { train, stop, test };
// Rows [first, first + B) of a split: a row depends on (task, seed, split, its number) alone.
Batch draw_probe(const ProbeTask& task, uint64_t seed, ProbeSplit split, int64_t first, int64_t B);

}  // namespace prism
