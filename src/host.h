// Device tensors as numbers on the host.
#pragma once

#include <vector>

#include "tensor/tensor.h"

namespace prism {

inline std::vector<double> to_host(Tensor x) {
  std::vector<double> out(static_cast<size_t>(x.numel()));
  dispatch(x.dtype, [&]<class T>(Tag<T>) {
    std::vector<T> raw(out.size());
    copy_out(x.device, raw.data(), x.data, x.bytes());
    for (size_t i = 0; i < raw.size(); ++i) out[i] = static_cast<double>(static_cast<acc_t<T>>(raw[i]));
  });
  return out;
}

}  // namespace prism
