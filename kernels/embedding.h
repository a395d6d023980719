// Token embedding: x[i] = table[tokens[i]], i < n.
#pragma once

#include "kernels/rows.h"

namespace prism {

PRISM_KERNEL(embedding_forward,
             (T * x /*[n,D]*/, const T* table /*[vocab,D]*/, const int32_t* tokens /*[n]*/, int64_t n,
              int64_t D),
             (x, table, tokens, n, D))

// dtable[tokens[i]] += dx[i]. `order` [n] lists the positions sorted by token, equal tokens in their order:
// each row of the table is then summed by one worker, in one order.
PRISM_KERNEL(embedding_backward,
             (acc_t<T> * dtable, const T* dx, const int32_t* tokens, const int32_t* order, int64_t n,
              int64_t D),
             (dtable, dx, tokens, order, n, D))

}  // namespace prism
