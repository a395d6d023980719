// What the ops share: tensors and columns as kernel arguments.
#pragma once

#include "autograd/tape.h"
#include "kernels/rows.h"

namespace prism {

template <class T>
T* ptr(Var x) {
  return x ? x->value.ptr<T>() : nullptr;
}

// A tensor as rows of its innermost extent, all columns or some.
template <class T>
Rows<T> rows(Tensor x) {
  return {x.ptr<T>(), x.shape[-1]};
}
template <class T>
Rows<T> rows(Tensor x, const Columns& c) {
  if (!x) return {};
  const bool own = x.shape[-1] == c.width;  // scratch of the width of the columns alone
  return {x.ptr<T>() + (own ? 0 : c.begin), x.shape[-1]};
}
template <class T>
Rows<const T> values(const Columns& c) {
  if (!c) return {};
  return rows<T>(c.of->value, c);
}

// Notes that an op with a gradient reads these columns.
inline void take(const Columns& c) {
  if (!c) return;
  PRISM_CHECK(c.begin >= 0 && c.begin + c.width <= c.of->value.shape[-1], "columns: [", c.begin, ", ",
              c.begin + c.width, ") of ", c.of->value.shape);
  if (!c.whole()) c.of->columns_used += c.width;
}

inline int64_t n_of(const Columns& c) { return c.of->value.rows(); }

inline void check_shape(const char* what, Var x, const Shape& expected) {
  PRISM_CHECK(x->value.shape == expected, what, ": expected ", expected, ", got ", x->value.shape);
}

}  // namespace prism
