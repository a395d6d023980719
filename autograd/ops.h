// The differentiable functions a model is made of. Each checks its arguments, allocates its output, runs its
// kernel and records the reverse call. Shapes: n = B T positions, row-major, [n, ...] and [B,T,...] are the
// same memory.
#pragma once

#include "autograd/tape.h"
#include "kernels/solver.h"

namespace prism {

// What the sequence ops of a forward pass share.
struct Sequences {
  int64_t B = 0, T = 0;
  Tensor start;  // [B,T] i32 (kernels/documents.h), or absent: one document a row
  int64_t n() const { return B * T; }
};

// table [vocab,D], tokens [n] i32, order [n] i32 (positions sorted by token) -> [n,D]
Var embedding(Tape& tape, Var table, Tensor tokens, Tensor order);

// sum = x + y (y absent: x), xn = RMSNorm(sum) weight, over rows of the weight's length: x's rows, or each of
// their heads. x and y are used up: nothing else may read their
// gradients.
struct Normed {
  Var sum, xn;
};
Normed add_norm(Tape& tape, Var x, Var y, Var weight, double eps);

// x [n,in], weight [out,in] -> x weight^T [n,out], in the memory `into` when that is given.
Var linear(Tape& tape, Var x, Var weight, Tensor into = {});
// The same for several maps of one x, whose results other ops take by Columns: rows are padded to a multiple
// of kRowAlign columns, which nobody reads, so that each begins on a memory sector (16 bf16 are 32 bytes).
inline constexpr int64_t kRowAlign = 16;
Var fused_linear(Tape& tape, Var x, Var weight);

// The up half of low-rank maps: columns z [n, steps R], weight [steps, out, R] or [out, R] -> temporary [n,
// steps out], step l from its R columns.
Var low_rank_up(Tape& tape, Columns z, Var weight);

// SiLU of the causal depthwise convolution of x with weight [channels,1,W] (absent: SiLU(x)) -> [n,channels].
// head > 0: each head's `head` channels are l2-normed and scaled. caches: [B,W-1,channels], in may be out.
struct Cache {
  Tensor in, out;
};
Var short_conv(Tape& tape, Columns x, Var weight, const Sequences& seq, int64_t head, double scale,
               Cache cache);

// beta = sigmoid(b) [n,H] and g [n,H], the log decay: none, RetNet's fixed one, or learned from a, A_log,
// dt_bias.
enum class Decay { none, fixed, learned };
struct Gates {
  Var beta = nullptr, g = nullptr;
};
Gates gates(Tape& tape, Decay decay, Columns b, Columns a, Var A_log, Var dt_bias);

// The write values w [n, L H V] of SPEC sections 4 and 5, a temporary.
struct SolverInputs {
  Columns v;                                 // [n, H V]
  Var beta = nullptr;                        // [n,H]
  Columns y;                                 // [n, steps H V] or absent
  Columns gate;                              // [n, (L-1) H] or absent when L = 1
  Var gate_bias = nullptr, scale = nullptr;  // [(L-1) H], or absent
  Columns anchor;                            // [n, H V] or absent
  int64_t L = 1;
  GainKind gain = GainKind::sigmoid;
  bool first_is_step = false, retain = true;
};
Var solver(Tape& tape, const SolverInputs& in);

// x [n, heads width] -> each head's columns times scale over their l2 norm, [n, heads width], a temporary.
Var l2norm(Tape& tape, Columns x, int64_t width, double scale = 1);
// The parts side by side: [n, sum of widths], a temporary. A part may be named more than once if it is whole.
Var concatenate(Tape& tape, const std::vector<Columns>& parts);

// kernels/scan.h. q, k [n, H K]; kappa [n, (L-1) H K] or absent; w [n, L H V]; beta, g [n,H] or absent -> o
// [n, H V].
struct ScanInputs {
  Var q = nullptr, k = nullptr, kappa = nullptr, w = nullptr, beta = nullptr, g = nullptr;
  Tensor initial_state, final_state;  // [B,H,V,K], or absent
  int64_t H = 0, K = 0, V = 0, L = 1, C = 64;
};
Var scan(Tape& tape, const ScanInputs& in, const Sequences& seq);

// Mixture of memories (kernels/route.h): the router's x [n,M] -> weight [n,M+1], and in place beta and g, [n,
// (M+1) H], become 0 for the memories not chosen. No op but gates may have read them.
Var route(Tape& tape, Columns x, const Gates& gates, int64_t active);
// o [n, N columns], weight [n,N] -> y [n,columns], what the N memories answer by their weights
Var mix(Tape& tape, Var o, Var weight);

// kernels/gla.h: q, k, y [n, H K], w [n, H V] -> o [n, H V]. A head's state is [V,K].
struct GlaInputs {
  Var q = nullptr, k = nullptr, w = nullptr, y = nullptr;
  Tensor initial_state, final_state;  // [B,H,V,K], or absent
  int64_t H = 0, K = 0, V = 0;
};
Var gla(Tape& tape, const GlaInputs& in, const Sequences& seq);

// kernels/attention.h: qkv [n, q | k | v of H W columns each] -> o [n, H W]. q and k are turned by their
// positions in place: no other op may read qkv, nor may it be a temporary.
struct KeyValues {
  Tensor keys, values;  // [B,capacity,H,W], or absent
  Tensor past;          // [B] i32
};
Var attention(Tape& tape, Var qkv, int64_t H, const Sequences& seq, const KeyValues& cache);

// kernels/ttt.h: the serial solver. q, k, v [n, H K], beta [n,H]; W1 [H,M,K], b1 [H,M], W2 [H,K,M], b2,
// norm_weight, norm_bias [H,K] -> o [n, H K].
struct TttInputs {
  Var q = nullptr, k = nullptr, v = nullptr, beta = nullptr;
  Var W1 = nullptr, b1 = nullptr, W2 = nullptr, b2 = nullptr, norm_weight = nullptr, norm_bias = nullptr;
  Tensor initial_state, final_state;  // [B,H,P], or absent
  double rate = 1, eps = 1e-6;
};
Var ttt(Tape& tape, const TttInputs& in, const Sequences& seq);

// RMSNorm over each head's V of o, times weight [V], times SiLU(gate) -> temporary [n, H V]
Var gated_norm(Tape& tape, Var o, Columns gate, Var weight, double eps);

// x = gate | up [n, 2 F] -> SiLU(gate) up, a temporary [n,F]
Var swiglu(Tape& tape, Var x);

// Cross entropy of x weight^T against targets [n] i32 (-1: not scored), in slices of rows, so that the logits
// of only one slice exist: row_loss [n] is written. Recording, the gradients of x and weight are computed at
// once, for the loss sum(row_loss) *scale.
void lm_loss(Tape& tape, Var x, Var weight, Tensor targets, Tensor scale, Tensor row_loss);

}  // namespace prism
