// Device tensors as numbers on the host, and back.
#pragma once

#include <vector>

#include "tensor/tensor.h"

namespace prism {

template <class To, class From>
std::vector<To> converted(const std::vector<From>& from) {
  std::vector<To> to(from.size());
  for (size_t i = 0; i < from.size(); ++i)
    to[i] = To(static_cast<acc_t<To>>(static_cast<acc_t<From>>(from[i])));
  return to;
}

inline std::vector<double> to_host(Tensor x) {
  std::vector<double> out;
  dispatch(x.dtype, [&]<class T>(Tag<T>) {
    std::vector<T> raw(static_cast<size_t>(x.numel()));
    copy_out(x.device, raw.data(), x.data, x.bytes());
    out = converted<double>(raw);
  });
  return out;
}

// Rounds the values to x's type.
inline void from_host(Tensor x, const std::vector<double>& values) {
  dispatch(x.dtype, [&]<class T>(Tag<T>) {
    const std::vector<T> raw = converted<T>(values);
    copy_in(x.device, x.data, raw.data(), x.bytes());
  });
}

}  // namespace prism
