#include "kernels/loss.h"

#include "kernels/eigen.h"

namespace prism::cpu {

template <class T>
void cross_entropy(T* logits, acc_t<T>* row_loss, const int32_t* targets, const acc_t<T>* scale, int64_t n,
                   int64_t vocab) {
  parallel_tiles(n, 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      auto row = array(logits + i * vocab, vocab);
      const int32_t target = targets[i];
      if (target < 0) {
        row_loss[i] = 0;
        if (scale) row.setZero();
        continue;
      }
      const T highest = row.maxCoeff(), chosen = row[target] - highest;
      const T total = (row - highest).exp().sum();
      row_loss[i] = std::log(total) - chosen;
      if (!scale) continue;
      row = (row - highest).exp() * (*scale / total);
      row[target] -= *scale;
    }
  });
}

template <class T>
void sum_into(T* total, const T* x, const T* scale, int64_t n) {
  T sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += x[i];
  *total += scale ? *scale * sum : sum;
}

PRISM_ON_CPU(cross_entropy);
PRISM_ON_CPU(sum_into);

}  // namespace prism::cpu
