// The ops around the scan: the solver's writes and directions, the scan itself, memories, attention, the
// loss.
#include "autograd/op_helpers.h"
#include "autograd/ops.h"
#include "kernels/attention.h"
#include "kernels/elementwise.h"
#include "kernels/gla.h"
#include "kernels/loss.h"
#include "kernels/matmul.h"
#include "kernels/route.h"
#include "kernels/scan.h"
#include "kernels/ttt.h"

namespace prism {

Var solver(Tape& tape, const SolverInputs& in) {
  const int64_t n = n_of(in.v), H = in.beta->value.shape[-1], V = in.v.width / H;
  const int64_t steps = in.first_is_step ? in.L : in.L - 1, gate_width = (in.L - 1) * H;
  PRISM_CHECK(!in.y || in.y.width == steps * H * V, "solver: y has ", in.y.width,
              " columns, expected steps H V = ", steps * H * V);
  PRISM_CHECK(in.gate.width == gate_width, "solver: gate has ", in.gate.width,
              " columns, expected (L-1) H = ", gate_width);
  take(in.v), take(in.y), take(in.gate), take(in.anchor);
  const auto args = [=]<class T>(Tag<T>) {
    using A = acc_t<T>;
    SolverArgs<T> a;
    a.v = values<T>(in.v), a.beta = ptr<A>(in.beta), a.y = values<T>(in.y), a.gate = values<T>(in.gate);
    a.gate_bias = ptr<A>(in.gate_bias), a.scale = ptr<A>(in.scale), a.anchor = values<T>(in.anchor);
    a.n = n, a.L = in.L, a.H = H, a.V = V, a.gain = in.gain, a.first_is_step = in.first_is_step,
    a.retain = in.retain;
    return a;
  };
  const Var w = tape.temporary({n, in.L * H * V}, [=, &tape](Tensor out) {
    for (const Columns& c : {in.v, in.y, in.anchor})
      if (c) tape.value(c.of);
    tape.run([&]<class T>(Tag<T> tag) {
      SolverArgs<T> a = args(tag);
      a.w = out.ptr<T>();
      solver_forward<T>(tape.device(), a);
    });
  });
  tape.on_reverse([=, &tape] {
    const Tensor dw = tape.grad(w), dv = tape.grad_target(in.v), dbeta = tape.grad_target(in.beta);
    if (in.y) tape.value(in.y.of);
    const Tensor dy = tape.grad_target(in.y), dgate = tape.grad_target(in.gate),
                 danchor = tape.grad_target(in.anchor);
    Tape::Scratch scratch(tape);
    const Tensor partial = tape.scratch(tape.acc(), {sum_tiles(n), 2, std::max<int64_t>(gate_width, 1)});
    tape.run([&]<class T>(Tag<T> tag) {
      using A = acc_t<T>;
      SolverGrads<T> g;
      g.dv = rows<T>(dv, in.v), g.dbeta = dbeta.ptr<A>(), g.dy = rows<T>(dy, in.y),
      g.dgate = rows<T>(dgate, in.gate);
      if (in.gate_bias) g.dgate_bias = in.gate_bias->grad.ptr<A>();
      if (in.scale) g.dscale = in.scale->grad.ptr<A>();
      g.partial = partial.ptr<A>(), g.danchor = rows<T>(danchor, in.anchor), g.dw = dw.ptr<T>();
      solver_backward<T>(tape.device(), args(tag), g);
    });
    tape.settle(in.v, dv), tape.settle(in.beta, dbeta), tape.settle(in.y, dy);
    tape.settle(in.gate, dgate), tape.settle(in.anchor, danchor);
  });
  return w;
}

Var l2norm(Tape& tape, Columns x, int64_t width, double scale) {
  const int64_t n = n_of(x), heads = x.width / width;
  take(x);
  const Var y = tape.temporary({n, x.width}, [=, &tape](Tensor out) {
    tape.value(x.of);
    tape.run([&]<class T>(Tag<T>) {
      l2norm_forward<T>(tape.device(), rows<T>(out), values<T>(x), static_cast<acc_t<T>>(scale), n, heads,
                        width);
    });
  });
  tape.on_reverse([=, &tape] {
    const Tensor dy = tape.grad(y);
    tape.value(x.of);
    const Tensor dx = tape.grad_target(x);
    tape.run([&]<class T>(Tag<T>) {
      l2norm_backward<T>(tape.device(), rows<T>(dx, x), rows<T>(dy), values<T>(x),
                         static_cast<acc_t<T>>(scale), n, heads, width);
    });
    tape.settle(x, dx);
  });
  return y;
}

Var concatenate(Tape& tape, const std::vector<Columns>& parts) {
  int64_t width = 0;
  for (const Columns& part : parts) take(part), width += part.width;
  const int64_t n = n_of(parts.at(0));
  const Var y = tape.temporary({n, width}, [=, &tape](Tensor out) {
    int64_t at = 0;
    for (const Columns& part : parts) {
      tape.value(part.of);
      tape.run([&]<class T>(Tag<T>) {
        copy_rows<T>(tape.device(), {out.ptr<T>() + at, width}, values<T>(part), n, part.width);
      });
      at += part.width;
    }
  });
  tape.on_reverse([=, &tape] {
    const Tensor dy = tape.grad(y);
    int64_t at = 0;
    for (const Columns& part : parts) {
      const Tensor target = tape.grad_target(part);
      tape.run([&]<class T>(Tag<T>) {
        if (target)
          copy_rows<T>(tape.device(), rows<T>(target, part), {dy.ptr<T>() + at, width}, n, part.width);
      });
      tape.settle(part, target);
      at += part.width;
    }
  });
  return y;
}

Var scan(Tape& tape, const ScanInputs& in, const Sequences& seq) {
  const int64_t n = seq.n(), N = (seq.T + in.C - 1) / in.C;
  check_shape("scan: q", in.q, {n, in.H * in.K});
  check_shape("scan: k", in.k, {n, in.H * in.K});
  check_shape("scan: w", in.w, {n, in.L * in.H * in.V});
  if (in.L > 1) check_shape("scan: kappa", in.kappa, {n, (in.L - 1) * in.H * in.K});
  const auto args = [=]<class T>(Tag<T>) {
    using A = acc_t<T>;
    ScanArgs<T> a;
    a.q = ptr<T>(in.q), a.k = ptr<T>(in.k), a.kappa = ptr<T>(in.kappa), a.w = ptr<T>(in.w);
    a.beta = ptr<A>(in.beta), a.g = ptr<A>(in.g), a.initial_state = in.initial_state.ptr<A>();
    a.start = seq.start.ptr<int32_t>();
    a.B = seq.B, a.T_len = seq.T, a.H = in.H, a.K = in.K, a.V = in.V, a.L = in.L, a.C = in.C;
    return a;
  };
  const auto workspace = [=, &tape](bool backward) {
    size_t bytes = 0;
    dispatch(tape.dtype(), [&]<class T>(Tag<T> tag) {
      bytes = scan_workspace_bytes<T>(tape.device(), args(tag), backward);
    });
    return bytes ? tape.scratch(DType::i32, {static_cast<int64_t>(bytes + 3) / 4}) : Tensor{};
  };
  const Var o = tape.make({n, in.H * in.V});
  {
    Tape::Scratch scratch(tape);
    const Tensor space = workspace(false);
    tape.run([&]<class T>(Tag<T> tag) {
      ScanArgs<T> a = args(tag);
      a.o = ptr<T>(o), a.final_state = in.final_state.ptr<acc_t<T>>(), a.workspace = space.data;
      scan_forward<T>(tape.device(), a);
    });
  }
  tape.on_reverse([=, &tape] {
    const Tensor d_o = tape.grad(o);
    for (Var x : {in.q, in.k, in.kappa, in.w})
      if (x) tape.value(x);
    const Tensor dq = tape.grad_target(in.q), dk = tape.grad_target(in.k),
                 dkappa = tape.grad_target(in.kappa);
    const Tensor dw = tape.grad_target(in.w), dbeta = tape.grad_target(in.beta), dg = tape.grad_target(in.g);
    Tape::Scratch scratch(tape);
    const Tensor states = tape.scratch(tape.acc(), {seq.B * in.H, N, in.V, in.K}), space = workspace(true);
    tape.run([&]<class T>(Tag<T> tag) {
      using A = acc_t<T>;
      ScanArgs<T> a = args(tag);
      a.states = states.ptr<A>(), a.workspace = space.data;
      ScanGrads<T> g;
      g.dq = dq.ptr<T>(), g.dk = dk.ptr<T>(), g.dkappa = dkappa.ptr<T>(), g.dw = dw.ptr<T>();
      g.dbeta = dbeta.ptr<A>(), g.dg = dg.ptr<A>(), g.d_o = d_o.ptr<T>();
      scan_backward<T>(tape.device(), a, g);
    });
    tape.settle(in.q, dq), tape.settle(in.k, dk), tape.settle(in.kappa, dkappa);
    tape.settle(in.w, dw), tape.settle(in.beta, dbeta), tape.settle(in.g, dg);
  });
  return o;
}

Var route(Tape& tape, Columns x, const Gates& gates, int64_t active) {
  const int64_t n = n_of(x), M = x.width, H = gates.beta->value.shape[-1] / (M + 1);
  for (Var gate : {gates.beta, gates.g}) check_shape("route: beta, g", gate, {n, (M + 1) * H});
  take(x);
  const Var weight = tape.make(tape.acc(), {n, M + 1});
  const auto args = [=]<class T>(Tag<T>) {
    using A = acc_t<T>;
    RouteArgs<T> a;
    a.weight = ptr<A>(weight), a.beta = ptr<A>(gates.beta), a.g = ptr<A>(gates.g), a.x = values<T>(x);
    a.n = n, a.M = M, a.H = H, a.active = active;
    return a;
  };
  tape.run([&]<class T>(Tag<T> tag) { route_forward<T>(tape.device(), args(tag)); });
  tape.on_reverse([=, &tape] {
    const Tensor dweight = tape.grad(weight), dbeta = tape.grad(gates.beta), dg = tape.grad(gates.g);
    const Tensor dx = tape.grad_target(x);
    tape.run([&]<class T>(Tag<T> tag) {
      using A = acc_t<T>;
      route_backward<T>(tape.device(), args(tag),
                        {rows<T>(dx, x), dbeta.ptr<A>(), dg.ptr<A>(), dweight.ptr<A>()});
    });
    tape.settle(x, dx);
  });
  return weight;
}

Var mix(Tape& tape, Var o, Var weight) {
  const int64_t n = o->value.rows(), N = weight->value.shape[-1], columns = o->value.shape[-1] / N;
  check_shape("mix: o", o, {n, N * columns});
  const Var y = tape.make({n, columns});
  const auto args = [=]<class T>(Tag<T>) {
    return MixArgs<T>{ptr<T>(y), ptr<T>(o), ptr<acc_t<T>>(weight), n, N, columns};
  };
  tape.run([&]<class T>(Tag<T> tag) { mix_forward<T>(tape.device(), args(tag)); });
  tape.on_reverse([=, &tape] {
    const Tensor dy = tape.grad(y), d_o = tape.grad_target(o), dweight = tape.grad_target(weight);
    tape.run([&]<class T>(Tag<T> tag) {
      mix_backward<T>(tape.device(), args(tag), {d_o.ptr<T>(), dweight.ptr<acc_t<T>>(), dy.ptr<T>()});
    });
    tape.settle(o, d_o), tape.settle(weight, dweight);
  });
  return y;
}

Var gla(Tape& tape, const GlaInputs& in, const Sequences& seq) {
  const int64_t n = seq.n();
  for (Var x : {in.q, in.k, in.y}) check_shape("gla: q, k, y", x, {n, in.H * in.K});
  check_shape("gla: w", in.w, {n, in.H * in.V});
  const auto args = [=, &tape]<class T>(Tag<T>, Tensor alpha) {
    using A = acc_t<T>;
    GlaArgs<T> a;
    a.q = ptr<T>(in.q), a.k = ptr<T>(in.k), a.y = ptr<T>(in.y), a.w = ptr<T>(in.w);
    a.initial_state = in.initial_state.ptr<A>(), a.start = seq.start.ptr<int32_t>();
    a.alpha = alpha.ptr<A>(), a.B = seq.B, a.T_len = seq.T, a.H = in.H, a.K = in.K, a.V = in.V;
    return a;
  };
  const Var o = tape.make({n, in.H * in.V});
  {
    Tape::Scratch scratch(tape);
    const Tensor alpha = tape.scratch(tape.acc(), {n, in.H * in.K});
    tape.run([&]<class T>(Tag<T> tag) {
      GlaArgs<T> a = args(tag, alpha);
      a.o = ptr<T>(o), a.final_state = in.final_state.ptr<acc_t<T>>();
      gla_forward<T>(tape.device(), a);
    });
  }
  tape.on_reverse([=, &tape] {
    const Tensor d_o = tape.grad(o);
    for (Var x : {in.q, in.k, in.w, in.y}) tape.value(x);
    const Tensor dq = tape.grad_target(in.q), dk = tape.grad_target(in.k), dy = tape.grad_target(in.y),
                 dw = tape.grad_target(in.w);
    Tape::Scratch scratch(tape);
    Tensor sums[3];  // alpha, and dq, dk before rounding
    for (Tensor& sum : sums) sum = tape.scratch(tape.acc(), {n, in.H * in.K});
    tape.run([&]<class T>(Tag<T> tag) {
      using A = acc_t<T>;
      gla_backward<T>(tape.device(), args(tag, sums[0]),
                      {dq.ptr<T>(), dk.ptr<T>(), dy.ptr<T>(), dw.ptr<T>(), sums[1].ptr<A>(), sums[2].ptr<A>(),
                       d_o.ptr<T>()});
    });
    tape.settle(in.q, dq), tape.settle(in.k, dk), tape.settle(in.y, dy), tape.settle(in.w, dw);
  });
  return o;
}

Var attention(Tape& tape, Var qkv, int64_t H, const Sequences& seq, const KeyValues& cache) {
  const int64_t n = seq.n(), columns = qkv->value.shape[-1] / 3, W = columns / H;
  check_shape("attention: qkv", qkv, {n, 3 * H * W});
  PRISM_CHECK(W % 2 == 0, "attention: expected heads of even width, got ", W);
  const auto turn = [=, &tape](Tensor x, bool inverse) {  // the columns q | k
    tape.run([&]<class T>(Tag<T>) {
      const int32_t *start = seq.start.ptr<int32_t>(), *past = cache.past.ptr<int32_t>();
      rotary<T>(tape.device(), {rows<T>(x), start, past, seq.B, seq.T, 2 * H, W, inverse});
    });
  };
  const Var o = tape.make({n, columns}), lse = tape.make(tape.acc(), {seq.B, H, seq.T});
  const auto args = [=]<class T>(Tag<T>) {
    AttentionArgs<T> a;
    a.o = ptr<T>(o), a.lse = ptr<acc_t<T>>(lse), a.start = seq.start.ptr<int32_t>();
    a.q = values<T>({qkv, 0, columns}), a.k = values<T>({qkv, columns, columns});
    a.v = values<T>({qkv, 2 * columns, columns});
    a.B = seq.B, a.T_len = seq.T, a.H = H, a.W = W;
    if (cache.keys)
      a.cache = {cache.keys.ptr<T>(), cache.values.ptr<T>(), cache.past.ptr<int32_t>(), cache.keys.shape[1]};
    return a;
  };
  turn(qkv->value, false);
  tape.run([&]<class T>(Tag<T> tag) { attention_forward<T>(tape.device(), args(tag)); });
  o->constant = qkv->constant;
  tape.on_reverse([=, &tape] {
    if (qkv->constant) return;
    const Tensor d_o = tape.grad(o), dqkv = tape.grad_target(qkv);
    Tape::Scratch scratch(tape);
    const Tensor delta = tape.scratch(tape.acc(), {seq.B, H, seq.T});
    tape.run([&]<class T>(Tag<T> tag) {
      AttentionGrads<T> g;
      g.dq = rows<T>(dqkv, {qkv, 0, columns}), g.dk = rows<T>(dqkv, {qkv, columns, columns});
      g.dv = rows<T>(dqkv, {qkv, 2 * columns, columns}), g.delta = delta.ptr<acc_t<T>>();
      g.d_o = d_o.ptr<T>();
      attention_backward<T>(tape.device(), args(tag), g);
    });
    turn(dqkv, true);
  });
  return o;
}

Var ttt(Tape& tape, const TttInputs& in, const Sequences& seq) {
  const int64_t n = seq.n(), H = in.W1->value.shape[0], M = in.W1->value.shape[1], K = in.W1->value.shape[2];
  for (Var x : {in.q, in.k, in.v}) check_shape("ttt: q, k, v", x, {n, H * K});
  check_shape("ttt: W2", in.W2, {H, K, M});
  const auto args = [=]<class T>(Tag<T>) {
    using A = acc_t<T>;
    TttArgs<T> a;
    a.q = ptr<T>(in.q), a.k = ptr<T>(in.k), a.v = ptr<T>(in.v), a.beta = ptr<A>(in.beta);
    a.W1 = ptr<A>(in.W1), a.b1 = ptr<A>(in.b1), a.W2 = ptr<A>(in.W2), a.b2 = ptr<A>(in.b2);
    a.norm_weight = ptr<A>(in.norm_weight), a.norm_bias = ptr<A>(in.norm_bias);
    a.initial_state = in.initial_state.ptr<A>(), a.start = seq.start.ptr<int32_t>();
    a.B = seq.B, a.T_len = seq.T, a.H = H, a.K = K, a.M = M;
    a.rate = static_cast<A>(in.rate), a.eps = static_cast<A>(in.eps);
    return a;
  };
  const Var o = tape.make({n, H * K});
  tape.run([&]<class T>(Tag<T> tag) {
    TttArgs<T> a = args(tag);
    a.o = ptr<T>(o), a.final_state = in.final_state.ptr<acc_t<T>>();
    ttt_forward<T>(tape.device(), a);
  });
  tape.on_reverse([=, &tape] {
    const Tensor d_o = tape.grad(o);
    for (Var x : {in.q, in.k, in.v}) tape.value(x);
    const Tensor dq = tape.grad_target(in.q), dk = tape.grad_target(in.k), dv = tape.grad_target(in.v);
    const Tensor dbeta = tape.grad_target(in.beta);
    Tape::Scratch scratch(tape);
    const TttArgs<float> sizes{.H = H, .K = K, .M = M};
    const Tensor record = tape.scratch(tape.acc(), {seq.B * H, seq.T, sizes.R()});
    const Tensor partial = tape.scratch(tape.acc(), {seq.B, H, sizes.P() + 2 * K});
    const Tensor last_state = tape.scratch(tape.acc(), {seq.B, H, sizes.P()});
    tape.run([&]<class T>(Tag<T> tag) {
      using A = acc_t<T>;
      TttArgs<T> a = args(tag);
      a.record = record.ptr<A>();
      TttGrads<T> g;
      g.dq = dq.ptr<T>(), g.dk = dk.ptr<T>(), g.dv = dv.ptr<T>(), g.dbeta = dbeta.ptr<A>();
      g.dW1 = in.W1->grad.ptr<A>(), g.db1 = in.b1->grad.ptr<A>();
      g.dW2 = in.W2->grad.ptr<A>(), g.db2 = in.b2->grad.ptr<A>();
      g.dnorm_weight = in.norm_weight->grad.ptr<A>(), g.dnorm_bias = in.norm_bias->grad.ptr<A>();
      g.partial = partial.ptr<A>(), g.last_state = last_state.ptr<A>(), g.d_o = d_o.ptr<T>();
      ttt_backward<T>(tape.device(), a, g);
    });
    tape.settle(in.q, dq), tape.settle(in.k, dk), tape.settle(in.v, dv), tape.settle(in.beta, dbeta);
  });
  return o;
}

void lm_loss(Tape& tape, Var x, Var weight, Tensor targets, Tensor scale, Tensor row_loss) {
  const int64_t n = x->value.rows(), D = x->value.shape[-1], vocab = weight->value.shape[0];
  check_shape("lm_loss: weight", weight, {vocab, D});
  // A slice's logits stay in the processor's cache; the card wants products large enough to fill it.
  const int64_t elements = tape.device() == Device::cpu ? int64_t{1} << 20 : int64_t{1} << 27;
  const int64_t slice = std::min(n, std::max<int64_t>(elements / vocab / 64 * 64, 64));
  const bool reverse = tape.recording();
  const Var dx = reverse ? tape.make({n, D}) : nullptr;
  Tape::Scratch scratch(tape);
  const Tensor logits = tape.scratch(tape.dtype(), {slice, vocab});
  for (int64_t i = 0; i < n; i += slice) {
    const int64_t m = std::min(slice, n - i);
    tape.run([&]<class T>(Tag<T>) {
      using A = acc_t<T>;
      const Rows<const T> x_rows{ptr<T>(x) + i * D, D}, w_rows{ptr<T>(weight), D};
      const Rows<T> l{logits.ptr<T>(), vocab};
      matmul<T>(tape.device(), l,
                {.a = x_rows, .b = w_rows, .m = m, .n = vocab, .k = D, .b_transposed = true});
      cross_entropy<T>(tape.device(), l.data, row_loss.ptr<A>() + i, targets.ptr<int32_t>() + i,
                       reverse ? scale.ptr<A>() : nullptr, m, vocab);
      if (!reverse) return;
      matmul<T>(tape.device(), {ptr<T>(dx) + i * D, D}, {.a = l, .b = w_rows, .m = m, .n = D, .k = vocab});
      if (!weight->constant)
        matmul_acc<T>(
            tape.device(), rows<A>(weight->grad),
            {.a = l, .b = x_rows, .m = vocab, .n = D, .k = m, .a_transposed = true, .accumulate = true});
    });
  }
  if (reverse) x->grad = dx->value;
}

}  // namespace prism
