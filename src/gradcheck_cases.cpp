// Each op of autograd/ops.h as a trial: its inputs, the call, its outputs.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "src/gradcheck_ops.h"
#include "src/host.h"
#include "tensor/rng.h"

namespace prism {

namespace {

constexpr int64_t kWidth = 4;   // of the convolutions
constexpr double kEps = 1e-6;   // of the norms
constexpr int64_t kUnread = 8;  // columns of a matrix that no op reads; their gradient is 0

std::vector<int32_t> ids(int64_t n, int64_t below) {
  std::vector<int32_t> ids(static_cast<size_t>(n));
  for (size_t i = 0; i < ids.size(); ++i)
    ids[i] = static_cast<int32_t>(random_below(static_cast<uint64_t>(below), 12, 0, i));
  return ids;
}

void check_embedding(Trial& t, const Sizes& s) {
  const int64_t vocab = 7;
  const std::vector<int32_t> tokens = ids(s.n(), vocab);
  std::vector<int32_t> order(tokens.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t i, int32_t j) { return tokens[i] < tokens[j]; });
  t.output("x", embedding(t.tape, t.matrix("table", {vocab, s.K}), t.ints(tokens), t.ints(order)));
}

void check_add_norm(Trial& t, const Sizes& s, bool addend, bool sum_read) {
  const Var x = t.activation("x", {s.n(), s.K}), y = addend ? t.activation("y", {s.n(), s.K}) : nullptr;
  const Normed out = add_norm(t.tape, x, y, t.vector("weight", {s.K}, 0.3, 1), kEps);
  if (sum_read) t.output("sum", out.sum);
  t.output("xn", out.xn);
}

// Two products of one input: the second one's reverse pass writes its gradient, the first one's adds to it.
void check_linear(Trial& t, const Sizes& s) {
  const Var x = t.activation("x", {s.n(), s.K});
  const double scale = 1 / std::sqrt(static_cast<double>(s.K));
  t.output("y_1", linear(t.tape, x, t.matrix("weight_1", {s.V, s.K}, scale)));
  const Tensor into = t.tape.make({s.n(), s.H * s.V})->value;
  t.output("y_2", linear(t.tape, x, t.matrix("weight_2", {s.H * s.V, s.K}, scale), into));
}

void check_low_rank_up(Trial& t, const Sizes& s) {
  const int64_t R = s.K, steps = s.L;
  const Var z = t.activation("z", {s.n(), (steps + 1) * R + kUnread});
  const double scale = 1 / std::sqrt(static_cast<double>(R));
  t.output("y", low_rank_up(t.tape, {z, 0, steps * R}, t.matrix("weight", {steps, s.V, R}, scale)));
  t.output("anchor", low_rank_up(t.tape, {z, steps * R, R}, t.matrix("weight_anchor", {s.V, R}, scale)));
}

void check_short_conv(Trial& t, const Sizes& s, bool weight, bool norm, bool cache) {
  const int64_t channels = s.H * s.K;
  const Var x = t.activation("x", {s.n(), channels + kUnread});
  Cache past;
  if (cache)
    past = {t.constant(t.tape.dtype(), {s.B, kWidth - 1, channels}),
            t.tape.make({s.B, kWidth - 1, channels})->value};
  const Var w = weight ? t.vector("weight", {channels, 1, kWidth}, 0.5) : nullptr;
  // The op takes W to be the weight's last extent.
  t.output("y",
           short_conv(t.tape, {x, 0, channels}, w, t.sequences(s), norm ? s.K : 0, norm ? 0.5 : 1, past));
}

void check_gates(Trial& t, const Sizes& s, Decay decay) {
  const Var in = t.activation("in", {s.n(), 2 * s.H + kUnread});
  const bool learned = decay == Decay::learned;
  const Gates out =
      gates(t.tape, decay, {in, s.H, s.H}, learned ? Columns(in, 0, s.H) : Columns(),
            learned ? t.vector("A_log", {s.H}) : nullptr, learned ? t.vector("dt_bias", {s.H}) : nullptr);
  t.output("beta", out.beta);
  if (out.g) t.output("g", out.g);
}

struct Solver {
  const char* name;
  GainKind gain;
  bool gains = true, retain = true, anchor = false, scale = false;
};
constexpr Solver kSolvers[] = {
    {"sigmoid", GainKind::sigmoid},
    {"sigmoid, anchor", GainKind::sigmoid, true, true, true},
    {"sigmoid, no_retain", GainKind::sigmoid, true, false},
    {"sigmoid, scale", GainKind::sigmoid, true, true, false, true},
    {"no_gain", GainKind::sigmoid, false},
    {"gelu", GainKind::gelu},
    {"gelu, anchor, no_retain", GainKind::gelu, true, false, true},
    {"loop", GainKind::loop, true, true, true},
    {"loop, no_gain", GainKind::loop, false, true, true},
    {"loop, no_gelu", GainKind::loop_linear, true, true, true},
};

void check_solver(Trial& t, const Sizes& s, const Solver& c, int64_t L) {
  SolverInputs in;
  in.L = L, in.gain = c.gain, in.retain = c.retain;
  in.first_is_step = c.gain == GainKind::loop || c.gain == GainKind::loop_linear;
  const int64_t HV = s.H * s.V, gates = (L - 1) * s.H, steps = in.first_is_step ? L : L - 1;
  in.v = t.activation("v", {s.n(), HV});
  in.beta = t.scalars("beta", {s.n(), s.H}, 0, 1);
  if (steps > 0) {
    const Var down = t.activation("down", {s.n(), steps * HV + gates + kUnread});
    if (c.gains) in.y = {down, 0, steps * HV};
    if (gates > 0) in.gate = {down, steps * HV, gates};
  }
  if (gates > 0 && !in.first_is_step) in.gate_bias = t.vector("gate_bias", {gates});
  if (c.scale) in.scale = t.vector("scale", {gates});
  if (c.anchor) in.anchor = t.activation("anchor", {s.n(), HV});
  t.output("w", solver(t.tape, in));
}

// One key twice, beside a part of another matrix.
void check_concatenate(Trial& t, const Sizes& s) {
  const Var k = t.activation("k", {s.n(), s.K}), z = t.activation("z", {s.n(), s.V + kUnread});
  t.output("kappa", concatenate(t.tape, {k, k, {z, 0, s.V}}));
}

void check_scan(Trial& t, const Sizes& s, bool erase, bool decay, int64_t L) {
  // Keys of norm 1 at most, so that an erasure never grows the state.
  const double longest = 1 / std::sqrt(static_cast<double>(s.K));
  ScanInputs in;
  in.H = s.H, in.K = s.K, in.V = s.V, in.L = L, in.C = s.T > 64 && t.tape.device() == Device::cpu ? 16 : 64;
  in.q = t.activation("q", {s.n(), s.H * s.K}, longest);
  const auto unit = [&](const char* name, int64_t heads) {
    return l2norm(t.tape, t.activation(name, {s.n(), heads * s.K}), s.K);
  };
  in.k = unit("k", s.H);
  if (L > 1) in.kappa = unit("kappa", (L - 1) * s.H);
  in.w = t.activation("w", {s.n(), L * s.H * s.V});
  if (erase) in.beta = t.scalars("beta", {s.n(), s.H}, 0, 1);
  if (decay) in.g = t.scalars("g", {s.n(), s.H}, -0.5, 0);
  in.initial_state = t.constant(t.tape.acc(), {s.B, s.H, s.V, s.K});
  in.final_state = t.tape.make(t.tape.acc(), {s.B, s.H, s.V, s.K})->value;
  t.output("o", scan(t.tape, in, t.sequences(s)));
}

// The gates are outputs too: those of memories that were not chosen have lost their gradient.
void check_route(Trial& t, const Sizes& s) {
  const int64_t M = 4, N = M + 1;
  const Gates gates{t.scalars("beta", {s.n(), N * s.H}, 0, 1), t.scalars("g", {s.n(), N * s.H}, -0.5, 0)};
  const Var router = t.activation("x", {s.n(), M + kUnread});
  t.output("weight", route(t.tape, {router, 0, M}, gates, 2));
  t.output("beta", gates.beta), t.output("g", gates.g);
}

void check_mix(Trial& t, const Sizes& s) {
  const Var o = t.activation("o", {s.n(), s.L * s.H * s.V});
  t.output("y", mix(t.tape, o, t.scalars("weight", {s.n(), s.L}, 0, 1)));
}

void check_gla(Trial& t, const Sizes& s) {
  GlaInputs in;
  in.H = s.H, in.K = s.K, in.V = s.V;
  const double longest = 1 / std::sqrt(static_cast<double>(s.K));
  in.q = t.activation("q", {s.n(), s.H * s.K}, longest),
  in.k = t.activation("k", {s.n(), s.H * s.K}, longest);
  in.w = t.activation("w", {s.n(), s.H * s.V});
  in.y = t.activation("y", {s.n(), s.H * s.K}, 4);  // decays from 0.5 to 1
  in.initial_state = t.constant(t.tape.acc(), {s.B, s.H, s.V, s.K});
  in.final_state = t.tape.make(t.tape.acc(), {s.B, s.H, s.V, s.K})->value;
  t.output("o", gla(t.tape, in, t.sequences(s)));
}

void check_attention(Trial& t, const Sizes& s) {
  const int64_t width = s.K + s.K % 2;
  const Var qkv = t.activation("qkv", {s.n(), 3 * s.H * width});
  t.output("o", attention(t.tape, qkv, s.H, t.sequences(s), {}));
}

void check_ttt(Trial& t, const Sizes& s) {
  const int64_t K = std::min<int64_t>(s.K, 64), M = 4 * K;  // 64: what fits on chip
  TttInputs in;
  const auto unit = [&](const char* name) { return l2norm(t.tape, t.activation(name, {s.n(), s.H * K}), K); };
  in.q = unit("q"), in.k = unit("k"), in.v = t.activation("v", {s.n(), s.H * K});
  in.beta = t.scalars("beta", {s.n(), s.H}, 0, 1);
  in.W1 = t.vector("W1", {s.H, M, K}), in.b1 = t.vector("b1", {s.H, M}, 0.3);
  in.W2 = t.vector("W2", {s.H, K, M}, 1 / std::sqrt(static_cast<double>(M)));
  in.b2 = t.vector("b2", {s.H, K}, 0.3);
  in.norm_weight = t.vector("norm_weight", {s.H, K}, 0.3, 1);
  in.norm_bias = t.vector("norm_bias", {s.H, K}, 0.3);
  in.initial_state = t.constant(t.tape.acc(), {s.B, s.H, 2 * M * K + M + K});
  in.final_state = t.tape.make(t.tape.acc(), {s.B, s.H, 2 * M * K + M + K})->value;
  in.rate = 0.2 / static_cast<double>(K), in.eps = 0.1;
  t.output("o", ttt(t.tape, in, t.sequences(s)));
}

void check_gated_norm(Trial& t, const Sizes& s) {
  const int64_t HV = s.H * s.V;
  const Var o = t.activation("o", {s.n(), HV}), gate = t.activation("gate", {s.n(), HV + kUnread});
  t.output("y", gated_norm(t.tape, o, {gate, 0, HV}, t.vector("weight", {s.V}, 0.3, 1), kEps));
}

void check_lm_loss(Trial& t, const Sizes& s) {
  // On the CPU many rows of many logits are more than one slice.
  const int64_t vocab = s.T > 128 ? 9000 : 16;
  std::vector<int32_t> targets = ids(s.n(), vocab + 1);
  for (int32_t& target : targets) --target;  // -1 among them
  const Tensor scale = t.tape.make(t.tape.acc(), {})->value,
               row_loss = t.tape.make(t.tape.acc(), {s.n()})->value;
  const Tensor gradient = t.tape.make(t.tape.acc(), {s.n()})->value;
  if (!t.tape.arena().measures()) {
    from_host(scale, {0.1});
    from_host(gradient, std::vector<double>(static_cast<size_t>(s.n()), to_host(scale)[0]));
  }
  const Var x = t.activation("x", {s.n(), s.K});
  const Var weight = t.matrix("weight", {vocab, s.K}, 1 / std::sqrt(static_cast<double>(s.K)));
  lm_loss(t.tape, x, weight, t.ints(targets), scale, row_loss);
  t.output("row_loss", row_loss, gradient);
}

}  // namespace

std::vector<OpCase> op_cases() {
  const auto with = [](auto fn, auto... settings) {
    return [=](Trial& t, const Sizes& s) { fn(t, s, settings...); };
  };
  std::vector<OpCase> cases = {
      {"embedding", check_embedding},
      {"add_norm", with(check_add_norm, true, true)},
      {"add_norm, sum not read", with(check_add_norm, true, false)},
      {"add_norm, no addend", with(check_add_norm, false, true)},
      {"linear", check_linear},
      {"low_rank_up", check_low_rank_up},
      {"short_conv", with(check_short_conv, true, false, false)},
      {"short_conv, l2 norm", with(check_short_conv, true, true, false)},
      {"short_conv, no weight", with(check_short_conv, false, false, false)},
      {"short_conv, cache", with(check_short_conv, true, true, true)},
      {"gates, no decay", with(check_gates, Decay::none)},
      {"gates, fixed decay", with(check_gates, Decay::fixed)},
      {"gates, learned decay", with(check_gates, Decay::learned)},
      {"solver, rank 1", [](Trial& t, const Sizes& s) { check_solver(t, s, kSolvers[0], 1); }},
  };
  for (const Solver& c : kSolvers)
    cases.push_back({cat("solver, ", c.name), [c](Trial& t, const Sizes& s) { check_solver(t, s, c, s.L); }});
  const std::vector<OpCase> rest = {
      {"l2norm",
       [](Trial& t, const Sizes& s) {
         const Var x = t.activation("x", {s.n(), s.H * s.K + kUnread});
         t.output("y", l2norm(t.tape, {x, 0, s.H * s.K}, s.K, 0.5));
       }},
      {"concatenate", check_concatenate},
      {"scan, rank L", [](Trial& t, const Sizes& s) { check_scan(t, s, true, true, s.L); }},
      {"scan, rank 1", with(check_scan, true, true, int64_t{1})},
      {"scan, no decay", with(check_scan, true, false, int64_t{1})},
      {"scan, no erasure", with(check_scan, false, true, int64_t{1})},
      {"scan, neither", with(check_scan, false, false, int64_t{1})},
      {"route", check_route},
      {"mix", check_mix},
      {"gla", check_gla},
      {"attention", check_attention},
      {"ttt", check_ttt},
      {"gated_norm", check_gated_norm},
      {"swiglu",
       [](Trial& t, const Sizes& s) {
         t.output("y", swiglu(t.tape, t.activation("x", {s.n(), 2 * s.K})));
       }},
      {"lm_loss", check_lm_loss},
  };
  cases.insert(cases.end(), rest.begin(), rest.end());
  return cases;
}

}  // namespace prism
