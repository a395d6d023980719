// One token of one stream through a layer in five launches (SPEC section 7), on cuda: what generating text
// needs. A product with a single row is bound by reading its weight, and a launch by waiting for the one
// before it, so each launch is one product, and every block forms the product's vector for itself from what
// the launch before wrote. The ops one by one compute the same, and are what this is compared with.
//
//   x += y, xn = RMSNorm(x)     [q k v g a b] = in xn      down = solver_down SiLU(conv(xn)) step_product
//   conv, norms, gates, solver, S, o: a block for a head and a slice of its values               step_mix
//   y = out (RMSNorm_V(o) SiLU(g))     the convolutions' caches move on                          step_product
//   x += y, h = SiLU(gate RMSNorm(x)) up RMSNorm(x)                                              step_product
//   y = down h                                                                                   step_product
#pragma once

#include "kernels/solver.h"

namespace prism::cuda {

// How a product's vector comes about, rounded to T wherever the ops round.
template <class T>
struct StepVector {
  enum Kind { plain, norm, anchor, gated_norm };
  Kind kind = plain;
  int64_t width = 0;
  const T* x = nullptr;           // plain: the vector; norm and anchor: the stream; gated_norm: o [H,V]
  const T* y = nullptr;           // norm and anchor: added to the stream, or null; gated_norm: gate [H,V]
  T* sum = nullptr;               // norm: where x + y is kept; not x itself
  T* xn = nullptr;                // norm: where the vector is kept, or null
  const float* weight = nullptr;  // of the norm, [width] or [V]
  float eps = 0;
  int64_t V = 0;                // gated_norm: a head's values
  const float* taps = nullptr;  // anchor = SiLU(conv(RMSNorm(x + y))): [width,W]
  const T* cache = nullptr;     // [W-1,width], oldest first
  int64_t W = 1;
};

// out = weight x; with swiglu, of the rows' two halves: SiLU(gate) up.
template <class T>
struct StepProduct {
  StepVector<T> x;
  const T* weight = nullptr;  // [rows,width], or [2 rows,width]; width a multiple of 8, 16-byte aligned
  T* out = nullptr;           // [rows]
  int64_t rows = 0;
  bool swiglu = false;
};

// Convolution caches that take in a token's input: [W-1,channels], oldest first.
template <class T>
struct StepCaches {
  static constexpr int kMost = 4;
  T* cache[kMost] = {};
  const T* input[kMost] = {};
  int64_t channels[kMost] = {}, W = 1;
};

// One product, or two that do not wait for each other; then the caches.
template <class T>
void step_product(const StepProduct<T>& a, const StepProduct<T>& b = {}, const StepCaches<T>& caches = {});

// From the projections of one token to o, S moving on (SPEC sections 1, 3 and 4).
template <class T>
struct StepMix {
  T* o = nullptr;      // [H,V]
  float* S = nullptr;  // [H,V,K]
  // projections, before convolution and activation
  const T *q = nullptr, *k = nullptr, *v = nullptr;  // [H,K], [H,K], [H,V]
  const T *a = nullptr, *b = nullptr;                // [H]; a null: retnet's decay where there is one
  const T *cache_q = nullptr, *cache_k = nullptr, *cache_v = nullptr;   // [W-1,channels]
  const float *taps_q = nullptr, *taps_k = nullptr, *taps_v = nullptr;  // [channels,W]
  const float *A_log = nullptr, *dt_bias = nullptr;                     // [H]
  bool decay = true, erase = true;
  // the solver: key_down | gain_down | gate | residual_down of the anchor, step-major
  const T* down = nullptr;                             // [2 (L-1) R + (L-1) H (+ R)]
  const T *key_up = nullptr, *gain_up = nullptr;       // [L-1,H,K,R], [L-1,H,V,R]
  const T* residual_up = nullptr;                      // [H,V,R] or null: r_2 = v
  const float *gate_bias = nullptr, *scale = nullptr;  // [L-1,H]; scale may be null
  GainKind gain = GainKind::sigmoid;
  bool key_norm = true;
  int64_t H = 0, K = 0, V = 0, L = 1, R = 0, W = 1;  // K at most 256, R a multiple of 8
};
template <class T>
void step_mix(const StepMix<T>& mix);

}  // namespace prism::cuda
