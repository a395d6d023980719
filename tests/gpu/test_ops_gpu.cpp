// Every op but the scan on the card against the CPU in double.
#include <array>
#include <numeric>

#include "kernels/adamw.h"
#include "kernels/conv.h"
#include "kernels/documents.h"
#include "kernels/elementwise.h"
#include "kernels/embedding.h"
#include "kernels/gates.h"
#include "kernels/loss.h"
#include "kernels/matmul.h"
#include "kernels/norm.h"
#include "kernels/route.h"
#include "kernels/solver.h"
#include "kernels/ttt.h"
#include "tests/gpu/memory.h"

using namespace prism;

namespace {

// The storage type of an op under test.
#define TYPE_OF(tag) typename decltype(tag)::type

using Sizes2 = std::array<int64_t, 2>;
using Sizes3 = std::array<int64_t, 3>;

// From [-minus, below - minus).
std::vector<int32_t> random_ints(int64_t n, int64_t below, int32_t minus = 0) {
  std::vector<int32_t> values(static_cast<size_t>(n));
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = static_cast<int32_t>(random_below(static_cast<uint64_t>(below), 3, 0, i)) - minus;
  return values;
}

// Documents of random length, some of one token, in B rows of T tokens.
std::vector<int32_t> random_starts(int64_t B, int64_t T) {
  std::vector<int32_t> segment(static_cast<size_t>(B * T)), start(segment.size());
  int32_t id = 0;
  for (size_t i = 0; i < segment.size(); ++i) segment[i] = id += random_below(5, 11, 0, i) == 0;
  document_starts(start.data(), segment.data(), B, T);
  return start;
}

}  // namespace

TEST_CASE("matmul: y = x W^T, dx += dy W and dW += dy^T x agree with the CPU") {
  for (const auto& [n, in, out] : {Sizes3{1, 1, 1}, {5, 7, 3}, {64, 96, 40}, {130, 257, 65}, {300, 768, 264}})
    compare_with_cpu("matmul", cat(n, "x", in, "x", out), [&](auto tag, Memory& m) {
      using T = TYPE_OF(tag);
      const Rows<const T> x = m.rows<T>("x", Use::in, n, in), W = m.rows<T>("W", Use::in, out, in);
      const Rows<const T> dy = m.rows<T>("dy", Use::in, n, out);
      matmul<T>(m.device(), m.rows<T>("y", Use::out, n, out), {x, W, n, out, in, false, true, false});
      matmul<T>(m.device(), m.rows<T>("dx", Use::inout, n, in), {dy, W, n, in, out, false, false, true});
      const Rows<acc_t<T>> dW{m.acc<T>("dW", Use::inout, out * (in + 4)), in + 4};
      matmul_acc<T>(m.device(), dW, {dy, x, out, in, n, true, false, true});
    });
}

TEST_CASE("embedding: rows are found, gradients of equal tokens are added, few or many") {
  for (const auto& [n, D, vocab] :
       {Sizes3{1, 1, 1}, {700, 264, 3}, {333, 40, 500}, {64, 768, 64}, {5000, 16, 2}})
    compare_with_cpu("embedding", cat(n, "x", D, " of ", vocab), [&](auto tag, Memory& m) {
      using T = TYPE_OF(tag);
      const auto tokens = random_ints(n, vocab);
      std::vector<int32_t> order(tokens.size());
      std::iota(order.begin(), order.end(), 0);
      std::stable_sort(order.begin(), order.end(), [&](int32_t i, int32_t j) {
        return tokens[static_cast<size_t>(i)] < tokens[static_cast<size_t>(j)];
      });
      const int32_t *ids = m.copy_of(tokens), *sorted = m.copy_of(order);
      const T *table = m.store<T>("table", Use::in, vocab * D), *dx = m.store<T>("dx", Use::in, n * D);
      embedding_forward<T>(m.device(), m.store<T>("x", Use::out, n * D), table, ids, n, D);
      embedding_backward<T>(m.device(), m.acc<T>("dtable", Use::inout, vocab * D), dx, ids, sorted, n, D);
    });
}

TEST_CASE("add_norm: forward and backward, without a residual and with one in place") {
  for (const auto& [n, D] : {Sizes2{1, 1}, {3, 40}, {131, 64}, {300, 768}, {130, 1000}, {9, 4104}})
    for (const bool residual : {false, true})
      compare_with_cpu("add_norm", cat(n, "x", D, residual ? " residual" : ""), [&](auto tag, Memory& m) {
        using T = TYPE_OF(tag);
        AddNormArgs<T> a;
        T* const x = m.store<T>("x", residual ? Use::inout : Use::in, n * D);
        a.x = x, a.weight = m.acc<T>("weight", Use::in, D), a.eps = acc_t<T>(1e-6), a.n = n, a.D = D;
        if (residual) a.y = m.store<T>("y", Use::in, n * D), a.sum = x;
        a.xn = m.store<T>("xn", Use::out, n * D), a.rstd = m.acc<T>("rstd", Use::out, n);
        add_norm_forward<T>(m.device(), a);

        AddNormGrads<T> g;
        g.dsum = m.store<T>("dsum", residual ? Use::inout : Use::out, n * D);
        g.dsum_in = residual ? g.dsum : nullptr, g.dweight = m.acc<T>("dweight", Use::inout, D);
        g.partial = m.acc<T>("partial", Use::scratch, sum_tiles(n) * D);
        g.dxn = m.store<T>("dxn", Use::in, n * D), g.sum = m.store<T>("sum", Use::in, n * D);
        g.rstd = m.acc<T>("given rstd", Use::in, n, 0.5, 2), g.weight = a.weight, g.n = n, g.D = D;
        g.xn = residual ? m.store<T>("xn again", Use::out, n * D) : nullptr;
        add_norm_backward<T>(m.device(), g);
      });
}

TEST_CASE("gated_norm: forward and backward") {
  for (const auto& [n, H, V] :
       {Sizes3{1, 1, 2}, {131, 3, 16}, {5, 2, 24}, {260, 4, 256}, {7, 1, 1032}, {3, 1, 3000}})
    compare_with_cpu("gated_norm", cat(n, "x", H, "x", V), [&](auto tag, Memory& m) {
      using T = TYPE_OF(tag);
      GatedNormArgs<T> a;
      a.y = m.store<T>("y", Use::out, n * H * V), a.o = m.store<T>("o", Use::in, n * H * V);
      a.gate = m.rows<T>("gate", Use::in, n, H * V, -4, 4), a.weight = m.acc<T>("weight", Use::in, V);
      a.eps = acc_t<T>(1e-6), a.n = n, a.H = H, a.V = V;
      gated_norm_forward<T>(m.device(), a);

      GatedNormGrads<T> g;
      g.d_o = m.store<T>("d_o", Use::out, n * H * V), g.dgate = m.rows<T>("dgate", Use::out, n, H * V);
      g.dweight = m.acc<T>("dweight", Use::inout, V);
      g.partial = m.acc<T>("partial", Use::scratch, sum_tiles(n) * V);
      g.dy = m.store<T>("dy", Use::in, n * H * V);
      gated_norm_backward<T>(m.device(), a, g);
    });
}

TEST_CASE("conv: forward and backward for every width, head, document and cache, also in place") {
  struct Case {
    int64_t B, T, channels, W, head;
    bool documents, cache, weight;
  };
  for (const Case& c : {Case{1, 1, 8, 4, 0, false, true, true},
                        {2, 2, 64, 4, 16, true, true, true},
                        {2, 31, 32, 4, 32, true, false, true},
                        {1, 32, 256, 4, 128, false, true, true},
                        {3, 33, 384, 4, 128, true, true, true},
                        {1, 129, 512, 4, 256, true, true, true},
                        {2, 300, 264, 4, 8, true, true, true},
                        {1, 70, 96, 4, 24, true, true, true},
                        {2, 40, 20, 4, 10, true, true, true},
                        {2, 37, 48, 3, 16, true, true, true},
                        {2, 140, 40, 7, 0, true, true, true},
                        {2, 140, 64, 1, 0, true, false, true},
                        {1, 200, 128, 1, 64, false, false, false},
                        {2, 259, 1000, 4, 0, false, true, true}})
    compare_with_cpu(
        "conv", cat(c.B, "x", c.T, "x", c.channels, " W ", c.W, " head ", c.head), [&](auto tag, Memory& m) {
          using T = TYPE_OF(tag);
          const int64_t n = c.B * c.T, kept = c.B * (c.W - 1) * c.channels;
          ConvArgs<T> a;
          a.y = m.store<T>("y", Use::out, n * c.channels);
          a.x = m.rows<T>("x", Use::in, n, c.channels);
          if (c.weight) a.weight = m.acc<T>("weight", Use::in, c.channels * c.W);
          if (c.cache) a.cache_in = m.store<T>("cache_in", Use::in, kept);
          if (c.cache) a.cache_out = m.store<T>("cache_out", Use::out, kept);
          if (c.documents) a.start = m.copy_of(random_starts(c.B, c.T));
          a.B = c.B, a.T_len = c.T, a.channels = c.channels, a.W = c.W, a.head = c.head;
          a.scale = acc_t<T>(0.25);
          conv_forward<T>(m.device(), a);
          if (c.cache) {
            auto in_place = a;
            in_place.y = m.store<T>("second y", Use::out, n * c.channels);
            in_place.cache_in = in_place.cache_out = m.store<T>("cache", Use::inout, kept);
            conv_forward<T>(m.device(), in_place);
          }

          ConvGrads<T> g;
          g.dx = m.rows<T>("dx", Use::out, n, c.channels);
          g.dy = m.store<T>("dy", Use::in, n * c.channels);
          g.ds = m.store<T>("ds", Use::scratch, n * c.channels);
          if (c.weight) g.dweight = m.acc<T>("dweight", Use::inout, c.channels * c.W);
          g.partial = m.acc<T>("partial", Use::scratch, conv_partials(c.B, c.T) * c.channels * c.W);
          conv_backward<T>(m.device(), a, g);
        });
}

TEST_CASE("gates: forward and backward with learned decay, fixed decay and none") {
  for (const int64_t n : {1, 127, 300})
    for (const int decay : {0, 1, 2})
      compare_with_cpu("gates", cat(n, " decay ", decay), [&](auto tag, Memory& m) {
        using T = TYPE_OF(tag);
        const int64_t H = 5;
        GatesArgs<T> a;
        a.beta = m.acc<T>("beta", Use::out, n * H), a.b = m.rows<T>("b", Use::in, n, H, -6, 6);
        a.n = n, a.H = H;
        if (decay > 0) a.g = m.acc<T>("g", Use::out, n * H);
        if (decay > 1) a.a = m.rows<T>("a", Use::in, n, H, -30, 30);
        if (decay > 1) a.A_log = m.acc<T>("A_log", Use::in, H), a.dt_bias = m.acc<T>("dt_bias", Use::in, H);
        gates_forward<T>(m.device(), a);

        GatesGrads<T> g;
        g.db = m.rows<T>("db", Use::out, n, H), g.dbeta = m.acc<T>("dbeta", Use::in, n * H);
        g.dg = m.acc<T>("dg", Use::in, n * H);
        g.partial = m.acc<T>("partial", Use::scratch, sum_tiles(n) * 2 * H);
        if (decay > 1) {
          g.da = m.rows<T>("da", Use::out, n, H);
          g.dA_log = m.acc<T>("dA_log", Use::inout, H), g.ddt_bias = m.acc<T>("ddt_bias", Use::inout, H);
        }
        gates_backward<T>(m.device(), a, g);
      });
}

TEST_CASE("solver: every gain, rank, residual and switch, forward and backward") {
  struct Case {
    GainKind gain;
    int64_t n, L, H, V;
    bool first_is_step, retain, anchor, y, bias, scale;
  };
  using enum GainKind;
  for (const Case& c : {Case{sigmoid, 3, 1, 2, 16, false, true, false, true, true, false},
                        {sigmoid, 131, 2, 3, 64, false, true, false, true, true, false},
                        {sigmoid, 200, 3, 4, 256, false, true, true, true, true, true},
                        {sigmoid, 40, 4, 2, 24, false, true, true, true, true, false},
                        {sigmoid, 20, 6, 1, 600, false, true, true, true, false, true},
                        {sigmoid, 33, 3, 2, 40, false, false, true, true, true, false},
                        {sigmoid, 33, 3, 2, 40, false, true, false, false, true, false},
                        {gelu, 50, 2, 2, 128, false, true, true, true, true, false},
                        {gelu, 50, 4, 1, 40, false, true, false, true, true, true},
                        {gelu, 30, 3, 2, 32, false, false, true, true, true, false},
                        {gelu, 30, 3, 2, 32, false, true, true, false, true, false},
                        {loop, 60, 1, 2, 32, true, true, true, true, false, false},
                        {loop, 140, 3, 2, 64, true, true, true, true, false, false},
                        {loop, 40, 2, 3, 48, true, true, true, false, false, false},
                        {loop, 30, 5, 1, 20, true, false, true, true, false, false},
                        {loop_linear, 90, 2, 2, 64, true, true, true, true, false, false}})
    compare_with_cpu(
        "solver", cat("gain ", static_cast<int>(c.gain), " ", c.n, " L ", c.L, " H ", c.H, " V ", c.V),
        [&](auto tag, Memory& m) {
          using T = TYPE_OF(tag);
          const int64_t n = c.n, HV = c.H * c.V, gates = (c.L - 1) * c.H;
          SolverArgs<T> a;
          a.n = n, a.L = c.L, a.H = c.H, a.V = c.V, a.gain = c.gain;
          a.first_is_step = c.first_is_step, a.retain = c.retain;
          a.w = m.store<T>("w", Use::out, n * c.L * HV), a.v = m.rows<T>("v", Use::in, n, HV, -2, 2);
          a.beta = m.acc<T>("beta", Use::in, n * c.H, 0, 1);
          a.gate = m.rows<T>("gate", Use::in, n, gates, -3, 3);
          if (c.y && a.steps() > 0) a.y = m.rows<T>("gain", Use::in, n, a.steps() * HV, -2, 2);
          if (c.bias) a.gate_bias = m.acc<T>("gate_bias", Use::in, gates);
          if (c.scale) a.scale = m.acc<T>("scale", Use::in, gates);
          if (c.anchor) a.anchor = m.rows<T>("anchor", Use::in, n, HV);
          solver_forward<T>(m.device(), a);

          SolverGrads<T> g;
          g.dv = m.rows<T>("dv", Use::out, n, HV), g.dbeta = m.acc<T>("dbeta", Use::out, n * c.H);
          if (a.y) g.dy = m.rows<T>("dgain", Use::out, n, a.steps() * HV);
          g.dgate = m.rows<T>("dgate", Use::out, n, gates);
          if (c.bias) g.dgate_bias = m.acc<T>("dgate_bias", Use::inout, gates);
          if (c.scale) g.dscale = m.acc<T>("dscale", Use::inout, gates);
          g.partial = m.acc<T>("partial", Use::scratch, sum_tiles(n) * 2 * gates);
          if (c.anchor) g.danchor = m.rows<T>("danchor", Use::out, n, HV);
          g.dw = m.store<T>("dw", Use::in, n * c.L * HV);
          solver_backward<T>(m.device(), a, g);
        });
}

TEST_CASE("l2norm: forward and backward") {
  for (const auto& [n, heads, width] : {Sizes3{1, 1, 2}, {37, 3, 16}, {50, 8, 128}, {9, 2, 1500}})
    compare_with_cpu("l2norm", cat(n, "x", heads, "x", width), [&](auto tag, Memory& m) {
      using T = TYPE_OF(tag);
      const int64_t columns = heads * width;
      const auto x = m.rows<T>("x", Use::in, n, columns), dy = m.rows<T>("dy", Use::in, n, columns);
      l2norm_forward<T>(m.device(), m.rows<T>("y", Use::out, n, columns), x, acc_t<T>(0.5), n, heads, width);
      l2norm_backward<T>(m.device(), m.rows<T>("dx", Use::out, n, columns), dy, x, acc_t<T>(0.5), n, heads,
                         width);
    });
}

TEST_CASE("ttt: forward and backward, full and narrow heads, documents, a state, also in place") {
  struct Case {
    int64_t B, T, H, K, M;
    bool documents, state;
  };
  for (const Case& c : {Case{4, 1, 4, 64, 256, false, true},
                        {2, 20, 3, 64, 256, true, true},
                        {3, 64, 2, 64, 256, false, false},
                        {2, 20, 2, 40, 160, true, false},
                        {1, 31, 1, 16, 64, true, true},
                        {1, 7, 1, 64, 256, true, true},
                        {2, 9, 2, 5, 11, true, true}}) {
    if (kSmall && c.B * c.T > 18) continue;
    compare_with_cpu("ttt", cat(c.B, "x", c.T, "x", c.H, " K ", c.K, " M ", c.M), [&](auto tag, Memory& m) {
      using T = TYPE_OF(tag);
      const int64_t n = c.B * c.T * c.H * c.K, MK = c.H * c.M * c.K, M = c.H * c.M, K = c.H * c.K;
      const double unit = 1 / std::sqrt(static_cast<double>(c.K));
      TttArgs<T> a;
      a.B = c.B, a.T_len = c.T, a.H = c.H, a.K = c.K, a.M = c.M;
      a.rate = acc_t<T>(2 / static_cast<double>(c.K)), a.eps = acc_t<T>(0.01);
      a.o = m.store<T>("o", Use::out, n), a.q = m.store<T>("q", Use::in, n, -unit, unit);
      a.k = m.store<T>("k", Use::in, n, -unit, unit), a.v = m.store<T>("v", Use::in, n);
      a.beta = m.acc<T>("beta", Use::in, c.B * c.T * c.H, 0, 1);
      a.W1 = m.acc<T>("W1", Use::in, MK), a.b1 = m.acc<T>("b1", Use::in, M);
      a.W2 = m.acc<T>("W2", Use::in, MK, -unit, unit), a.b2 = m.acc<T>("b2", Use::in, K);
      a.norm_weight = m.acc<T>("norm_weight", Use::in, K, 0.5, 1.5);
      a.norm_bias = m.acc<T>("norm_bias", Use::in, K);
      if (c.documents) a.start = m.copy_of(random_starts(c.B, c.T));
      if (c.state) {
        a.initial_state = m.acc<T>("state", Use::in, c.B * c.H * a.P());
        a.final_state = m.acc<T>("final", Use::out, c.B * c.H * a.P());
      }
      ttt_forward<T>(m.device(), a);
      if (c.state) {
        auto in_place = a;
        in_place.o = m.store<T>("second o", Use::out, n);
        in_place.initial_state = in_place.final_state = m.acc<T>("moved", Use::inout, c.B * c.H * a.P());
        ttt_forward<T>(m.device(), in_place);
      }

      TttGrads<T> g;
      a.record = m.acc<T>("record", Use::scratch, c.B * c.H * c.T * a.R());
      g.dq = m.store<T>("dq", Use::out, n), g.dk = m.store<T>("dk", Use::out, n);
      g.dv = m.store<T>("dv", Use::out, n), g.dbeta = m.acc<T>("dbeta", Use::out, c.B * c.T * c.H);
      g.dW1 = m.acc<T>("dW1", Use::inout, MK), g.db1 = m.acc<T>("db1", Use::inout, M);
      g.dW2 = m.acc<T>("dW2", Use::inout, MK), g.db2 = m.acc<T>("db2", Use::inout, K);
      g.dnorm_weight = m.acc<T>("dnorm_weight", Use::inout, K);
      g.dnorm_bias = m.acc<T>("dnorm_bias", Use::inout, K);
      g.partial = m.acc<T>("partial", Use::scratch, c.B * c.H * (a.P() + 2 * c.K));
      g.last_state = m.acc<T>("last_state", Use::scratch, c.B * c.H * a.P());
      g.d_o = m.store<T>("d_o", Use::in, n);
      ttt_backward<T>(m.device(), a, g);
    });
  }
}

TEST_CASE(
    "route and mix: forward and backward, one memory of one, some, all, and of equal values the first") {
  struct Case {
    int64_t n, M, H, active, columns;
  };
  std::vector<Case> cases = {{1, 1, 1, 1, 2}, {131, 4, 2, 2, 40}};
  if (!kSmall) cases.insert(cases.end(), {{300, 4, 4, 1, 1000}, {67, 8, 3, 8, 24}, {40, 64, 2, 5, 256}});
  for (const Case& c : cases)
    compare_with_cpu("route", cat(c.n, " M ", c.M, " active ", c.active), [&](auto tag, Memory& m) {
      using T = TYPE_OF(tag);
      const int64_t N = c.M + 1, gates = c.n * N * c.H;
      RouteArgs<T> a;
      a.n = c.n, a.M = c.M, a.H = c.H, a.active = c.active;
      a.weight = m.acc<T>("weight", Use::out, c.n * N), a.beta = m.acc<T>("beta", Use::inout, gates);
      a.g = m.acc<T>("g", Use::inout, gates), a.x = m.rows<T>("x", Use::in, c.n, c.M, -3, 3);
      if (c.M == 4 && c.active == 2) a.x = {m.copy_of(std::vector<T>(4, T(1.f))), 0};
      route_forward<T>(m.device(), a);
      RouteGrads<T> g;
      g.dx = m.rows<T>("dx", Use::out, c.n, c.M), g.dbeta = m.acc<T>("dbeta", Use::inout, gates);
      g.dg = m.acc<T>("dg", Use::inout, gates), g.dweight = m.acc<T>("dweight", Use::in, c.n * N);
      route_backward<T>(m.device(), a, g);

      MixArgs<T> x;
      x.n = c.n, x.N = N, x.columns = c.columns, x.y = m.store<T>("y", Use::out, c.n * c.columns);
      x.o = m.store<T>("o", Use::in, c.n * N * c.columns);
      x.weight = m.acc<T>("mix weight", Use::in, c.n * N);
      mix_forward<T>(m.device(), x);
      MixGrads<T> dx;
      dx.d_o = m.store<T>("d_o", Use::out, c.n * N * c.columns);
      dx.dweight = m.acc<T>("mix dweight", Use::out, c.n * N);
      dx.dy = m.store<T>("dy", Use::in, c.n * c.columns);
      mix_backward<T>(m.device(), x, dx);
    });
}

TEST_CASE("swiglu, add_rows, copy_rows and cast") {
  for (const auto& [n, F] : {Sizes2{1, 1}, {5, 24}, {130, 257}, {67, 2048}})
    compare_with_cpu("elementwise", cat(n, "x", F), [&](auto tag, Memory& m) {
      using T = TYPE_OF(tag);
      const T *x = m.store<T>("x", Use::in, n * 2 * F, -4, 4), *dy = m.store<T>("dy", Use::in, n * F);
      swiglu_forward<T>(m.device(), m.store<T>("y", Use::out, n * F), x, n, F);
      T* const again = n % 2 ? m.store<T>("y again", Use::out, n * F) : nullptr;
      swiglu_backward<T>(m.device(), m.store<T>("dx", Use::out, n * 2 * F), again, dy, x, n, F);
      const auto rows = m.rows<T>("rows", Use::in, n, F);
      add_rows<T>(m.device(), m.rows<T>("sum", Use::inout, n, F), rows, n, F);
      copy_rows<T>(m.device(), m.rows<T>("copy", Use::out, n, F), rows, n, F);
      const auto* masters = m.acc<T>("masters", Use::in, n * F);
      cast<T>(m.device(), m.store<T>("cast", Use::out, n * F), masters, n * F);
    });
}

TEST_CASE("cross_entropy: loss and gradient, unscored rows, short and long vocabularies; sum_into") {
  for (const auto& [n, vocab] : {Sizes2{1, 1}, {40, 257}, {33, 256}, {9, 4104}, {5, 32000}, {3, 70000}})
    for (const bool with_gradient : {false, true})
      compare_with_cpu("cross_entropy", cat(n, "x", vocab), [&](auto tag, Memory& m) {
        using T = TYPE_OF(tag);
        const int32_t* targets = m.copy_of(random_ints(n, vocab + 1, 1));
        T* const logits = m.store<T>("logits", Use::inout, n * vocab, -8, 8);
        auto* const loss = m.acc<T>("row_loss", Use::out, n);
        const auto* scale = m.acc<T>("scale", Use::in, 1, 0.1, 0.2);
        cross_entropy<T>(m.device(), logits, loss, targets, with_gradient ? scale : nullptr, n, vocab);
        sum_into<acc_t<T>>(m.device(), m.acc<T>("total", Use::inout, 1), loss,
                           with_gradient ? scale : nullptr, n);
      });
}

TEST_CASE("grad_norm and adamw: three steps, one of them skipped, clipped and not") {
  for (const int64_t n : {1, 1000, 65536 * 3 + 5, 65536 * 2})
    for (const double clip : {0.0, 1.0})
      compare_with_cpu<float>("adamw", cat(n, " clip ", clip), [&](auto tag, Memory& m) {
        using T = TYPE_OF(tag);
        AdamWArgs<T> a;
        StepScalars<T>* const scalars = m.copy_of(std::vector<StepScalars<T>>(1));
        T* const partial = m.store<T>("partial", Use::scratch, grad_norm_partials(n));
        a.theta = m.store<T>("theta", Use::inout, n), a.m = m.store<T>("m", Use::inout, n);
        a.v = m.store<T>("v", Use::inout, n, 0.01, 1), a.grad = m.store<T>("grad", Use::in, n);
        a.scalars = scalars, a.n = n, a.beta1 = T(0.9f), a.beta2 = T(0.95f), a.eps = T(1e-8f);
        a.weight_decay = T(0.1f);
        std::vector<double> seen;
        for (const double loss : {2.0, std::numeric_limits<double>::quiet_NaN(), 1.0}) {
          StepScalars<T> s;
          copy_out(m.device(), &s, scalars, sizeof s);
          s.lr = T(0.01f), s.loss = T(loss);
          copy_in(m.device(), scalars, &s, sizeof s);
          grad_norm<T>(m.device(), scalars, partial, a.grad, n, T(clip), a.beta1, a.beta2);
          adamw<T>(m.device(), a);
          copy_out(m.device(), &s, scalars, sizeof s);
          for (const T x : {s.norm, s.clip_scale, s.correction1, s.correction2})
            seen.push_back(static_cast<double>(x));
          for (const int32_t x : {s.taken, s.skipped, s.skipped_in_row}) seen.push_back(x);
        }
        m.record("scalars", seen);
      });
}

TEST_CASE("adamw writes the compute copy as its rounded masters") {
  for (const int64_t n : {4096, 4099}) {
    Memory m(Device::cuda, DType::f32, 0, 0);
    StepScalars<float> s{};
    s.lr = 0.1f, s.clip_scale = 1, s.correction1 = 0.1f, s.correction2 = 0.05f;
    std::vector<float> theta(static_cast<size_t>(n));
    std::vector<bf16> copied(theta.size());
    AdamWArgs<float> a;
    a.theta = m.store<float>("theta", Use::inout, n), a.m = m.store<float>("m", Use::inout, n);
    a.v = m.store<float>("v", Use::inout, n, 0.01, 1), a.grad = m.store<float>("grad", Use::in, n);
    a.copy = m.copy_of(copied), a.scalars = m.copy_of(std::vector{s}), a.n = n;
    a.beta1 = 0.9f, a.beta2 = 0.95f, a.eps = 1e-8f, a.weight_decay = 0.1f;
    adamw<float>(Device::cuda, a);
    copy_out(Device::cuda, theta.data(), a.theta, theta.size() * sizeof(float));
    copy_out(Device::cuda, copied.data(), a.copy, copied.size() * sizeof(bf16));
    bool equal = true;
    for (size_t i = 0; i < theta.size(); ++i) equal = equal && copied[i].bits == bf16(theta[i]).bits;
    CHECK(equal);
  }
}

TEST_CASE("the largest errors seen, for the record") {
  for (const auto& [name, error] : worst_errors()) MESSAGE(name, ": ", error);
  CHECK(!worst_errors().empty());
}
