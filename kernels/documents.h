// Documents within a row. SPEC section 1 names them by segment [B,T]: a document is a maximal run of equal
// ids. Kernels take `start` [B,T] instead, the position of the first token of t's document, since that also
// tells apart a document whose id comes back:
//   tokens j <= t share a document        <=>  j >= start[t]
//   t's document was running before c0    <=>  start[t] < max(c0, 1)   (the row's first document starts from
//   S0)
#pragma once

#include <cstdint>

namespace prism {

inline void document_starts(int32_t* start, const int32_t* segment, int64_t B, int64_t T) {
  for (int64_t b = 0; b < B; ++b)
    for (int64_t t = 0; t < T; ++t) {
      const bool opens = t == 0 || segment[b * T + t] != segment[b * T + t - 1];
      start[b * T + t] = opens ? static_cast<int32_t>(t) : start[b * T + t - 1];
    }
}

}  // namespace prism
