#include "autograd/ops.h"

#include "autograd/op_helpers.h"
#include "kernels/conv.h"
#include "kernels/elementwise.h"
#include "kernels/embedding.h"
#include "kernels/gates.h"
#include "kernels/matmul.h"
#include "kernels/norm.h"

namespace prism {

Var embedding(Tape& tape, Var table, Tensor tokens, Tensor order) {
  const int64_t n = tokens.numel(), D = table->value.shape[-1];
  const Var x = tape.make({n, D});
  tape.run([&]<class T>(Tag<T>) {
    embedding_forward<T>(tape.device(), ptr<T>(x), ptr<T>(table), tokens.ptr<int32_t>(), n, D);
  });
  x->constant = table->constant;
  tape.on_reverse([=, &tape] {
    if (table->constant) return;
    const Tensor dx = tape.grad(x);
    tape.run([&]<class T>(Tag<T>) {
      embedding_backward<T>(tape.device(), table->grad.ptr<acc_t<T>>(), dx.ptr<T>(), tokens.ptr<int32_t>(),
                            order.ptr<int32_t>(), n, D);
    });
  });
  return x;
}

Normed add_norm(Tape& tape, Var x, Var y, Var weight, double eps) {
  const int64_t D = weight->value.numel(), n = x->value.numel() / D;
  PRISM_CHECK(x->value.shape[-1] % D == 0, "add_norm: weight has ", D, " numbers, expected a divisor of x's ",
              x->value.shape[-1], " columns");
  if (y) check_shape("add_norm: y", y, x->value.shape);
  // Without a reverse pass the sum may take x's place.
  const Var sum = !y || !tape.recording() ? x : tape.make(x->value.shape);
  const Var rstd = tape.make(tape.acc(), {n});
  const auto normalise = [=, &tape](Var from, Var add, Tensor xn) {
    tape.run([&]<class T>(Tag<T>) {
      AddNormArgs<T> a;
      a.sum = ptr<T>(sum), a.xn = xn.ptr<T>(), a.rstd = ptr<acc_t<T>>(rstd);
      a.x = ptr<T>(from), a.y = ptr<T>(add), a.weight = ptr<acc_t<T>>(weight);
      a.eps = static_cast<acc_t<T>>(eps), a.n = n, a.D = D;
      add_norm_forward<T>(tape.device(), a);
    });
  };
  const Var xn = tape.temporary(x->value.shape, [=, first = true](Tensor out) mutable {
    first ? normalise(x, y, out) : normalise(sum, nullptr, out);
    first = false;
  });
  xn->rewrites = true;
  tape.on_reverse([=, &tape] {
    const Tensor dxn = tape.grad(xn), again = tape.rewrite_target(xn);
    const Tensor before = sum->grad;
    const Tensor dsum = before ? before : tape.grad_target(sum);
    Tape::Scratch scratch(tape);
    const Tensor partial = tape.scratch(tape.acc(), {sum_tiles(n), D});
    tape.run([&]<class T>(Tag<T>) {
      AddNormGrads<T> g;
      g.dsum = dsum.ptr<T>(), g.xn = again.ptr<T>(), g.dsum_in = before.ptr<T>(), g.dxn = dxn.ptr<T>();
      g.dweight = weight->grad.ptr<acc_t<T>>(), g.partial = partial.ptr<acc_t<T>>();
      g.sum = ptr<T>(sum), g.rstd = ptr<acc_t<T>>(rstd), g.weight = ptr<acc_t<T>>(weight);
      g.n = n, g.D = D;
      add_norm_backward<T>(tape.device(), g);
    });
    tape.rewritten(xn);
    // d(x + y) is the gradient of both. They share its memory: y's producers read it before the next norm
    // down adds to it.
    x->grad = dsum;
    if (y) y->grad = dsum;
  });
  return {sum, xn};
}

namespace {

// y = x weight^T, with its reverse. y may have more columns than weight has rows.
void multiply(Tape& tape, Var x, Var weight, Var y) {
  const int64_t n = x->value.rows(), in = x->value.shape[-1], out = weight->value.shape[0];
  y->constant = x->constant && weight->constant;
  tape.run([&]<class T>(Tag<T>) {
    const Rows<const T> a = rows<T>(x->value), b = rows<T>(weight->value);
    matmul<T>(tape.device(), rows<T>(y->value),
              {.a = a, .b = b, .m = n, .n = out, .k = in, .b_transposed = true});
  });
  tape.on_reverse([=, &tape] {
    if (y->constant) return;
    const bool accumulate = static_cast<bool>(x->grad);
    const Tensor dy = tape.grad(y);
    const Tensor dx = x->constant ? Tensor{} : accumulate ? x->grad : tape.grad_target(x);
    if (dx)
      tape.run([&]<class T>(Tag<T>) {
        const Rows<const T> a = rows<T>(dy), b = rows<T>(weight->value);
        matmul<T>(tape.device(), rows<T>(dx),
                  {.a = a, .b = b, .m = n, .n = in, .k = out, .accumulate = accumulate});
      });
    if (weight->constant) return;
    tape.with_value(x, [=, &tape] {
      tape.run([&]<class T>(Tag<T>) {
        const Rows<const T> a = rows<T>(dy), b = rows<T>(x->value);
        matmul_acc<T>(tape.device(), rows<acc_t<T>>(weight->grad),
                      {.a = a, .b = b, .m = out, .n = in, .k = n, .a_transposed = true, .accumulate = true});
      });
    });
  });
}

}  // namespace

Var linear(Tape& tape, Var x, Var weight, Tensor into) {
  const int64_t n = x->value.rows(), in = x->value.shape[-1], out = weight->value.shape[0];
  check_shape("linear: weight", weight, {out, in});
  const Var y = into ? tape.constant(into) : tape.make({n, out});
  multiply(tape, x, weight, y);
  return y;
}

Var fused_linear(Tape& tape, Var x, Var weight) {
  const int64_t out = weight->value.shape[0], padding = (kRowAlign - out % kRowAlign) % kRowAlign;
  const Var y = tape.make({x->value.rows(), out + padding});
  y->columns_used = padding;  // nobody reads it: its gradient need not be cleared
  multiply(tape, x, weight, y);
  return y;
}
Var low_rank_up(Tape& tape, Columns z, Var weight) {
  const int64_t n = n_of(z), R = weight->value.shape[-1];
  const int64_t steps = weight->value.shape.rank() == 3 ? weight->value.shape[0] : 1,
                out = weight->value.rows() / steps;
  PRISM_CHECK(z.width == steps * R, "low_rank_up: expected ", steps * R, " columns, got ", z.width);
  take(z);
  const Var y = tape.temporary({n, steps * out}, [=, &tape](Tensor to) {
    tape.run([&]<class T>(Tag<T>) {
      for (int64_t l = 0; l < steps; ++l) {
        const Rows<const T> z_l{values<T>(z)[0] + l * R, values<T>(z).stride},
            w_l{ptr<T>(weight) + l * out * R, R};
        matmul<T>(tape.device(), {to.ptr<T>() + l * out, steps * out},
                  {.a = z_l, .b = w_l, .m = n, .n = out, .k = R, .b_transposed = true});
      }
    });
  });
  tape.on_reverse([=, &tape] {
    const Tensor dy = tape.grad(y), dz = tape.grad_target(z);
    tape.run([&]<class T>(Tag<T>) {
      for (int64_t l = 0; l < steps; ++l) {
        const Rows<const T> dy_l{dy.ptr<T>() + l * out, steps * out}, w_l{ptr<T>(weight) + l * out * R, R},
            z_l{values<T>(z)[0] + l * R, values<T>(z).stride};
        if (!weight->constant)
          matmul_acc<T>(
              tape.device(), {weight->grad.ptr<acc_t<T>>() + l * out * R, R},
              {.a = dy_l, .b = z_l, .m = out, .n = R, .k = n, .a_transposed = true, .accumulate = true});
        if (dz)
          matmul<T>(tape.device(), {rows<T>(dz, z)[0] + l * R, rows<T>(dz, z).stride},
                    {.a = dy_l, .b = w_l, .m = n, .n = R, .k = out});
      }
    });
    tape.settle(z, dz);
  });
  return y;
}

Var short_conv(Tape& tape, Columns x, Var weight, const Sequences& seq, int64_t head, double scale,
               Cache cache) {
  const int64_t W = weight ? weight->value.shape[-1] : 1;
  PRISM_CHECK(n_of(x) == seq.n(), "short_conv: expected ", seq.n(), " rows, got ", n_of(x));
  if (weight) check_shape("short_conv: weight", weight, {x.width, 1, W});
  take(x);
  const Var y = tape.make({seq.n(), x.width});
  const auto args = [=]<class T>(Tag<T>) {
    ConvArgs<T> a;
    a.x = values<T>(x), a.weight = ptr<acc_t<T>>(weight), a.cache_in = cache.in.ptr<T>(),
    a.start = seq.start.ptr<int32_t>();
    a.B = seq.B, a.T_len = seq.T, a.channels = x.width, a.W = W, a.head = head,
    a.scale = static_cast<acc_t<T>>(scale);
    return a;
  };
  tape.run([&]<class T>(Tag<T> tag) {
    ConvArgs<T> a = args(tag);
    a.y = ptr<T>(y), a.cache_out = W > 1 ? cache.out.ptr<T>() : nullptr;
    conv_forward<T>(tape.device(), a);
  });
  tape.on_reverse([=, &tape] {
    const Tensor dy = tape.grad(y);
    tape.value(x.of);
    const Tensor dx = tape.grad_target(x);
    Tape::Scratch scratch(tape);
    const Tensor ds = tape.scratch(tape.dtype(), {seq.n(), x.width});
    const Tensor partial = tape.scratch(tape.acc(), {conv_partials(seq.B, seq.T), x.width, W});
    tape.run([&]<class T>(Tag<T> tag) {
      ConvGrads<T> g;
      g.dx = rows<T>(dx, x), g.ds = ds.ptr<T>(), g.dy = dy.ptr<T>();
      g.dweight = weight ? weight->grad.ptr<acc_t<T>>() : nullptr, g.partial = partial.ptr<acc_t<T>>();
      conv_backward<T>(tape.device(), args(tag), g);
    });
    tape.settle(x, dx);
  });
  return y;
}

Gates gates(Tape& tape, Decay decay, Columns b, Columns a, Var A_log, Var dt_bias) {
  const int64_t n = n_of(b), H = b.width;
  take(b), take(a);
  Gates out;
  out.beta = tape.make(tape.acc(), {n, H});
  if (decay != Decay::none) out.g = tape.make(tape.acc(), {n, H});
  const auto args = [=]<class T>(Tag<T>) {
    GatesArgs<T> x;
    x.beta = ptr<acc_t<T>>(out.beta), x.g = ptr<acc_t<T>>(out.g), x.b = values<T>(b), x.a = values<T>(a);
    x.A_log = ptr<acc_t<T>>(A_log), x.dt_bias = ptr<acc_t<T>>(dt_bias), x.n = n, x.H = H;
    return x;
  };
  tape.run([&]<class T>(Tag<T> tag) { gates_forward<T>(tape.device(), args(tag)); });
  tape.on_reverse([=, &tape] {
    const Tensor dbeta = tape.grad(out.beta), dg = a ? tape.grad(out.g) : Tensor{};
    const Tensor db = tape.grad_target(b), da = tape.grad_target(a);
    Tape::Scratch scratch(tape);
    const Tensor partial = tape.scratch(tape.acc(), {sum_tiles(n), 2, H});
    tape.run([&]<class T>(Tag<T> tag) {
      using A = acc_t<T>;
      GatesGrads<T> g;
      g.db = rows<T>(db, b), g.da = rows<T>(da, a), g.dbeta = dbeta.ptr<A>(), g.dg = dg.ptr<A>();
      if (a) g.dA_log = A_log->grad.ptr<A>(), g.ddt_bias = dt_bias->grad.ptr<A>();
      g.partial = partial.ptr<A>();
      gates_backward<T>(tape.device(), args(tag), g);
    });
    tape.settle(b, db), tape.settle(a, da);
  });
  return out;
}

Var gated_norm(Tape& tape, Var o, Columns gate, Var weight, double eps) {
  const int64_t n = o->value.rows(), V = weight->value.shape[0], H = gate.width / V;
  check_shape("gated_norm: o", o, {n, gate.width});
  take(gate);
  const auto args = [=]<class T>(Tag<T>) {
    GatedNormArgs<T> a;
    a.o = ptr<T>(o), a.gate = values<T>(gate), a.weight = ptr<acc_t<T>>(weight);
    a.eps = static_cast<acc_t<T>>(eps), a.n = n, a.H = H, a.V = V;
    return a;
  };
  const Var y = tape.temporary({n, H * V}, [=, &tape](Tensor out) {
    tape.run([&]<class T>(Tag<T> tag) {
      GatedNormArgs<T> a = args(tag);
      a.y = out.ptr<T>();
      gated_norm_forward<T>(tape.device(), a);
    });
  });
  y->rewrites = true;
  tape.on_reverse([=, &tape] {
    const Tensor dy = tape.grad(y), d_o = tape.grad_target(o), dgate = tape.grad_target(gate);
    const Tensor again = tape.rewrite_target(y);
    Tape::Scratch scratch(tape);
    const Tensor partial = tape.scratch(tape.acc(), {sum_tiles(n), V});
    tape.run([&]<class T>(Tag<T> tag) {
      GatedNormArgs<T> a = args(tag);
      a.y = again.ptr<T>();
      GatedNormGrads<T> g;
      g.d_o = d_o.ptr<T>(), g.dgate = rows<T>(dgate, gate), g.dweight = weight->grad.ptr<acc_t<T>>();
      g.partial = partial.ptr<acc_t<T>>(), g.dy = dy.ptr<T>();
      gated_norm_backward<T>(tape.device(), a, g);
    });
    tape.settle(o, d_o), tape.settle(gate, dgate);
    tape.rewritten(y);
  });
  return y;
}

Var swiglu(Tape& tape, Var x) {
  const int64_t n = x->value.rows(), F = x->value.shape[-1] / 2;
  const Var y = tape.temporary({n, F}, [=, &tape](Tensor out) {
    tape.run([&]<class T>(Tag<T>) { swiglu_forward<T>(tape.device(), out.ptr<T>(), ptr<T>(x), n, F); });
  });
  y->rewrites = true;
  tape.on_reverse([=, &tape] {
    const Tensor dy = tape.grad(y), dx = tape.grad_target(x), again = tape.rewrite_target(y);
    tape.run([&]<class T>(Tag<T>) {
      swiglu_backward<T>(tape.device(), dx.ptr<T>(), again.ptr<T>(), dy.ptr<T>(), ptr<T>(x), n, F);
    });
    tape.settle(x, dx);
    tape.rewritten(y);
  });
  return y;
}

}  // namespace prism
