#include "kernels/embedding.h"

#include "kernels/eigen.h"

namespace prism::cpu {

template <class T>
void embedding_forward(T* x, const T* table, const int32_t* tokens, int64_t n, int64_t D) {
  parallel_tiles(n, 256, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) array(x + i * D, D) = array(table + tokens[i] * D, D);
  });
}

template <class T>
void embedding_backward(acc_t<T>* dtable, const T* dx, const int32_t* tokens, const int32_t* order, int64_t n,
                        int64_t D) {
  // A tile owns the tokens that open in it: a run of equal tokens that began in an earlier tile belongs to
  // that one.
  parallel_tiles(n, 256, [&](int64_t begin, int64_t end) {
    int64_t i = begin;
    while (i < end && i > 0 && tokens[order[i]] == tokens[order[i - 1]]) ++i;
    if (i == end) return;
    while (i < end || (i < n && i > begin && tokens[order[i]] == tokens[order[i - 1]])) {
      array(dtable + tokens[order[i]] * D, D) += array(dx + order[i] * D, D);
      ++i;
    }
  });
}

PRISM_ON_CPU(embedding_forward);
PRISM_ON_CPU(embedding_backward);

}  // namespace prism::cpu
