// Scalar functions that more than one kernel needs: the decay (SPEC section 3) and a solver step's gain
// (section 4).
#pragma once

#include "kernels/rows.cuh"
#include "kernels/solver.h"

namespace prism::cuda {

__device__ inline float softplus(float x) { return x > 20.f ? x : log1pf(expf(x)); }
__device__ inline float learned_log_decay(float A_log, float x) { return -expf(A_log) * softplus(x); }
__device__ inline float fixed_log_decay(int64_t h) { return log1pf(-exp2f(-5.f - static_cast<float>(h))); }

__device__ inline float normal_cdf(float x) { return 0.5f * (1.f + erff(x * 0.70710678f)); }

// delta of one step, where p = 1/2 comes as the y of a linear gain.
__device__ inline float step_forward(GainKind kind, float y, float r, float r2) {
  switch (kind) {
    case GainKind::sigmoid: return sigmoid(y) * r;
    case GainKind::gelu: return y * normal_cdf(y * r2) * r;
    case GainKind::loop: return y * r * normal_cdf(y * r);
    case GainKind::loop_linear: return y * r;
  }
  return 0.f;
}

}  // namespace prism::cuda
