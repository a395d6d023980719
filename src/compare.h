// The one error measure: ||x - ref|| / ||ref||, absolute where ref is 0. NaN and infinity never pass.
#pragma once

#include <cmath>
#include <limits>
#include <span>

namespace prism {

template <class X, class Y>
double relative_error(std::span<const X> x, std::span<const Y> ref) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double d = static_cast<double>(x[i]) - static_cast<double>(ref[i]);
    difference += d * d, norm += static_cast<double>(ref[i]) * static_cast<double>(ref[i]);
  }
  const double error = std::sqrt(norm > 0 ? difference / norm : difference);
  return x.size() == ref.size() && std::isfinite(error) ? error : std::numeric_limits<double>::infinity();
}

}  // namespace prism
