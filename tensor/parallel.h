// Loops over independent pieces of work. Either the pieces are fixed by the problem or the result does not
// depend on them, so results have the same bits for any number of threads. Builds without OpenMP run the same
// loops in order.
#pragma once

#include <algorithm>
#include <cstdint>
#ifdef _OPENMP
#include <omp.h>
#endif

namespace prism {

inline void set_threads([[maybe_unused]] int threads) {
#ifdef _OPENMP
  omp_set_num_threads(threads);
#endif
}

inline int thread_count() {
#ifdef _OPENMP
  return omp_get_max_threads();
#else
  return 1;
#endif
}

// Calls fn(i) for i in [0, n); the calls must not depend on each other and must not throw.
template <class Fn>
void parallel_for(int64_t n, const Fn& fn) {
#ifdef _OPENMP
#pragma omp parallel for schedule(dynamic, 1) if (n > 1)
#endif
  for (int64_t i = 0; i < n; ++i) fn(i);
}

// Calls fn(begin, end) on consecutive tiles of at most `tile` indices of [0, n).
template <class Fn>
void parallel_tiles(int64_t n, int64_t tile, const Fn& fn) {
  parallel_for((n + tile - 1) / tile, [&](int64_t i) { fn(i * tile, std::min(n, (i + 1) * tile)); });
}

}  // namespace prism
