// The L residual-fitting steps that make a token's writes (SPEC sections 4 and 5), elementwise over a head's
// V values:
//
//   prism        delta_1 = v                               w_1 = beta_1 v
//                r_2 = v - anchor                          (no anchor: r_2 = v)
//                delta_l = p_l r_l,  r_{l+1} = r_l - delta_l,   w_l = beta_l delta_l,   l = 2..L
//                p_l = sigmoid(y_l)                        or y_l Phi(y_l r_2): the GELU absorbed in the
//                preconditioner
//   prism-loop   r_1 = v - anchor                          delta_l = GELU(y_l r_l), l = 1..L, else the same
//
// beta_1 is the gate the scan erases with; beta_l = sigmoid(gate_l + gate_bias_l) for l >= 2. Directions are
// apart: kappa_l = l2norm(z_l) per head.
#pragma once

#include "kernels/rows.h"

namespace prism {

enum class GainKind {
  sigmoid,      // p = sigmoid(y),        delta = p r
  gelu,         // p = y Phi(y r_2),      delta = p r
  loop,         // p = y,                 delta = GELU(p r)
  loop_linear,  // p = y,                 delta = p r         (no_gelu)
};

template <class T>
struct SolverArgs {
  using A = acc_t<T>;
  // outputs
  T* w = nullptr;  // [n,L,H,V]; null in the reverse pass
  // inputs
  Rows<const T> v;               // [n,H V]
  const A* beta = nullptr;       // [n,H] beta_1
  Rows<const T> y;               // [n,steps H V] gain pre-activations; absent with no_gain: p = 1/2
  Rows<const T> gate;            // [n,(L-1) H], step-major
  const A* gate_bias = nullptr;  // [L-1,H] or null: 0
  const A* scale = nullptr;      // [L-1,H] multiplies w_l, l >= 2, or null: 1
  Rows<const T> anchor;          // [n,H V] or absent: 0
  // sizes
  int64_t n = 0, L = 1, H = 0, V = 0;
  GainKind gain = GainKind::sigmoid;
  bool first_is_step =
      false;  // prism-loop: delta_1 comes from a step (steps = L); prism: delta_1 = v (steps = L - 1)
  bool retain = true;  // false (no_retain): r_l = r_2 for every step

  PRISM_HD int64_t steps() const { return first_is_step ? L : L - 1; }
};

template <class T>
struct SolverGrads {
  using A = acc_t<T>;
  Rows<T> dv;               // [n,H V]
  A* dbeta = nullptr;       // [n,H]
  Rows<T> dy;               // [n,steps H V]; absent where y is
  Rows<T> dgate;            // [n,(L-1) H]
  A* dgate_bias = nullptr;  // [L-1,H], accumulated (+=)
  A* dscale = nullptr;      // [L-1,H], accumulated (+=)
  A* partial = nullptr;     // [sum_tiles(n),2,L-1,H] scratch
  Rows<T> danchor;          // [n,H V]
  const T* dw = nullptr;    // [n,L,H,V]
};

PRISM_KERNEL(solver_forward, (const SolverArgs<T>& args), (args))
PRISM_KERNEL(solver_backward, (const SolverArgs<T>& args, const SolverGrads<T>& grads), (args, grads))

// y_i = scale x_i / sqrt(sum x_i^2 + 1e-6) over each of the `heads` pieces of `width` numbers of a row, and
// the reverse.
PRISM_KERNEL(l2norm_forward,
             (Rows<T> y, Rows<const T> x, acc_t<T> scale, int64_t n, int64_t heads, int64_t width),
             (y, x, scale, n, heads, width))
PRISM_KERNEL(l2norm_backward,
             (Rows<T> dx, Rows<const T> dy, Rows<const T> x, acc_t<T> scale, int64_t n, int64_t heads,
              int64_t width),
             (dx, dy, x, scale, n, heads, width))

}  // namespace prism
