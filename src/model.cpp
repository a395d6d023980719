// The forward pass from top to bottom, then the mixers, then which weights there are. autograd/ops.h says
// what each op computes; the reverse pass is theirs.
#include "src/model.h"

#include <algorithm>
#include <cmath>

namespace prism {

namespace {

constexpr double kResidualLayers = 2;  // additions to the residual stream a layer makes
constexpr double kInnerRate = 0.1;     // ttt-mlp: eta = kInnerRate / K beta
constexpr int64_t kDecayRank = 16;     // gla: of its low-rank map
constexpr int64_t kMemoryWidth = 4;    // ttt-mlp: M / K

bool learned_decay(const std::string& mixer) {
  return mixer != "linear" && mixer != "retnet" && mixer != "deltanet" && mixer != "ttt-mlp" &&
         mixer != "gla";
}

Cache both(Tensor cache) { return {cache, cache}; }

}  // namespace

bool erases(const std::string& mixer) {
  return mixer != "linear" && mixer != "retnet" && mixer != "mamba2" && mixer != "gla";
}

Decay decay_of(const std::string& mixer) {
  return learned_decay(mixer) ? Decay::learned : mixer == "retnet" ? Decay::fixed : Decay::none;
}

Var Model::weight(Tape& tape, Slot slot) const {
  return slot ? tape.parameter(parameters_.value(slot), tape.recording() ? parameters_.grad(slot) : Tensor{})
              : nullptr;
}

Var Model::weight(Tape& tape, Slot slot, int64_t from, int64_t count) const {
  const Var whole = weight(tape, slot);
  const Tensor grad = whole->grad ? whole->grad.slice(from, count) : Tensor{};
  return tape.parameter(whole->value.slice(from, count), grad);
}

Var Model::head(Tape& tape) const { return weight(tape, head_ ? head_ : embeddings_); }

Var Model::forward(Tape& tape, const Inputs& in, DecodeState* state, std::vector<Var>* outputs) const {
  const Shape stream{in.seq.n(), D_};
  Var x = embedding(tape, weight(tape, embeddings_), in.tokens, in.order);
  // What a mixer or feed-forward adds to the stream is read once, by the next norm: one buffer serves all
  // layers.
  const Tensor addend = tape.make(stream)->value;
  Var y = nullptr;
  for (size_t i = 0; i < layers_.size(); ++i) {
    const Layer& layer = layers_[i];
    LayerState* past = state ? &state->layer(static_cast<int64_t>(i)) : nullptr;
    {
      const Tape::Scope scope(tape);
      const Normed n = add_norm(tape, x, y, weight(tape, layer.attn_norm), config_.norm_eps);
      if (outputs && i > 0) outputs->push_back(n.sum);
      x = n.sum;
      const auto mix = layer.mixer == "prism-loop"  ? &Model::mix_loop
                       : layer.mixer == "attention" ? &Model::mix_attention
                                                    : &Model::mix_gdn;
      y = (this->*mix)(tape, layer, n.xn, in.seq, past, addend);
    }
    {
      const Tape::Scope scope(tape);
      const Normed n = add_norm(tape, x, y, weight(tape, layer.mlp_norm), config_.norm_eps);
      x = n.sum;
      y = linear(tape, swiglu(tape, linear(tape, n.xn, weight(tape, layer.gate_up))),
                 weight(tape, layer.down), addend);
    }
  }
  const Normed n = add_norm(tape, x, y, weight(tape, final_norm_), config_.norm_eps);
  if (outputs) outputs->push_back(n.sum);
  return n.xn;
}

// linear, retnet, mamba2, deltanet, gdn and prism: SPEC sections 3 and 4; ttt-mlp, mom and gla:
// sections 10 to 12.
Var Model::mix_gdn(Tape& tape, const Layer& layer, Var xn, const Sequences& seq, LayerState* state,
                   Tensor into) const {
  const int64_t HK = H_ * K_, HV = H_ * V_;
  const LayerState past = state ? *state : LayerState{};
  const int64_t M = layer.mixer == "mom" ? config_.memories : 0, H = (M + 1) * H_;  // heads of the scan
  // One product for everything that reads xn: q | k | v | g | a | b | router | decay.
  const Var in = fused_linear(tape, xn, weight(tape, layer.in));
  int64_t at = 0;
  const auto next = [&](int64_t width) { return Columns(in, std::exchange(at, at + width), width); };
  const Columns q_in = next(HK), k_in = next(HK), v_in = next(HV), gate = next(gate_);
  const Columns a = learned_decay(layer.mixer) ? next(H) : Columns(), b = next(H), router = next(M);

  // A memory of its own answers unit queries as it learns from unit keys.
  const double scale = layer.W1 ? 1 : 1 / std::sqrt(static_cast<double>(K_));
  const auto each_memory = [&](Var x) {
    return M ? concatenate(tape, std::vector<Columns>(static_cast<size_t>(M + 1), x)) : x;
  };
  const Var q = each_memory(short_conv(tape, q_in, weight(tape, layer.conv_q), seq, K_, scale, both(past.q)));
  const Var k = each_memory(short_conv(tape, k_in, weight(tape, layer.conv_k), seq, K_, 1, both(past.k)));
  const Var v = each_memory(short_conv(tape, v_in, weight(tape, layer.conv_v), seq, 0, 1, both(past.v)));
  const Gates g =
      gates(tape, decay_of(layer.mixer), b, a, weight(tape, layer.A_log), weight(tape, layer.dt_bias));
  if (layer.W1) return output(tape, layer, memory(tape, layer, q, k, v, g.beta, seq, past), gate, into);
  const Var shares = M ? route(tape, router, g, config_.memories_active) : nullptr;
  const Writes writes = solve(tape, layer, xn, v, k, g.beta, seq, state);

  ScanInputs s;
  s.q = q, s.k = k, s.kappa = writes.kappa, s.w = writes.w, s.beta = erases(layer.mixer) ? g.beta : nullptr,
  s.g = g.g;
  s.initial_state = s.final_state = past.S;
  s.H = H, s.K = K_, s.V = V_, s.L = layer.key_up ? L_ : 1, s.C = chunk;
  if (layer.decay_up) {
    const Var y = low_rank_up(tape, next(kDecayRank), weight(tape, layer.decay_up));
    return output(tape, layer, gla(tape, {q, k, writes.w, y, past.S, past.S, H, K_, V_}, seq), gate, into);
  }
  show(tape, layer, {writes.u, writes.made_from, s});
  const Var o = scan(tape, s, seq);
  return output(tape, layer, M ? mix(tape, o, shares) : o, gate, into);
}

Var Model::output(Tape& tape, const Layer& layer, Var o, Columns gate, Tensor into) const {
  const Var o_norm = weight(tape, layer.o_norm);
  const Var normed = gate_ ? gated_norm(tape, o, gate, o_norm, config_.norm_eps)
                           : add_norm(tape, o, nullptr, o_norm, config_.norm_eps).xn;
  return linear(tape, normed, weight(tape, layer.out), into);
}

// ttt-mlp's answer in place of the scan's.
Var Model::memory(Tape& tape, const Layer& layer, Var q, Var k, Var v, Var beta, const Sequences& seq,
                  const LayerState& past) const {
  TttInputs in;
  in.q = q, in.k = k, in.v = v, in.beta = beta;
  in.W1 = weight(tape, layer.W1), in.b1 = weight(tape, layer.b1);
  in.W2 = weight(tape, layer.W2), in.b2 = weight(tape, layer.b2);
  in.norm_weight = weight(tape, layer.memory_norm), in.norm_bias = weight(tape, layer.memory_bias);
  in.initial_state = in.final_state = past.S;
  in.rate = kInnerRate / static_cast<double>(K_), in.eps = config_.norm_eps;
  return ttt(tape, in, seq);
}

// The closed-form solver (SPEC section 4): w_1 = beta v, and for prism the writes 2..L with their directions.
Model::Writes Model::solve(Tape& tape, const Layer& layer, Var xn, Var v, Var k, Var beta,
                           const Sequences& seq, LayerState* state) const {
  SolverInputs s;
  s.v = v, s.beta = beta;
  if (!layer.key_up) return {solver(tape, s), nullptr, nullptr, s};

  const int64_t steps = L_ - 1, R = config_.solver_dim;
  const Var conv = config_.ablated("no_anchor") ? nullptr : weight(tape, layer.solver_conv);
  const Var u = short_conv(tape, xn, conv, seq, 0, 1, both(state ? state->u : Tensor{}));
  // One product for everything that reads the anchor u: key_down | gain_down | gate | residual_down.
  const Var down = fused_linear(tape, u, weight(tape, layer.solver_down));
  s.L = L_;
  s.gain = config_.solver_gain == SolverGain::gelu ? GainKind::gelu : GainKind::sigmoid;
  s.retain = !config_.ablated("no_retain");
  if (!config_.ablated("no_gain"))
    s.y = low_rank_up(tape, {down, steps * R, steps * R}, weight(tape, layer.gain_up));
  s.gate = {down, 2 * steps * R, steps * H_};
  s.gate_bias = weight(tape, layer.gate_bias), s.scale = weight(tape, layer.scale);
  if (config_.solver_residual == SolverResidual::anchor)
    s.anchor = low_rank_up(tape, {down, 2 * steps * R + steps * H_, R}, weight(tape, layer.residual_up));
  return {solver(tape, s), write_keys(tape, layer, down, k), u, s};
}

// kappa_2 | .. | kappa_L. The ablations put k, or kappa_2, in their place.
Var Model::write_keys(Tape& tape, const Layer& layer, Var down, Var k) const {
  const int64_t steps = L_ - 1, R = config_.solver_dim;
  const bool base = config_.ablated("base_key"), first_base = config_.ablated("first_base_key");
  const bool shared = config_.ablated("shared_key");
  const int64_t from = first_base ? 1 : 0, count = base ? 0 : shared ? 1 : steps - from;
  std::vector<Columns> keys(static_cast<size_t>(base ? steps : from), k);
  if (count > 0) {
    Var kappa = low_rank_up(tape, {down, from * R, count * R}, weight(tape, layer.key_up, from, count));
    if (config_.solver_key_norm) kappa = l2norm(tape, kappa, K_);
    keys.resize(static_cast<size_t>(shared ? steps : from + 1), kappa);
  }
  return keys.size() == 1 ? keys[0].of : concatenate(tape, keys);
}

void Model::show(Tape& tape, const Layer& layer, const MixerValues& values) const {
  if (watch && !tape.arena().measures()) watch(&layer - layers_.data(), values);
}

// prism-loop: Algorithm 1 (SPEC section 5).
Var Model::mix_loop(Tape& tape, const Layer& layer, Var xn, const Sequences& seq, LayerState* state,
                    Tensor into) const {
  const int64_t HK = H_ * K_, HV = H_ * V_;
  const LayerState past = state ? *state : LayerState{};
  const Var conv = config_.ablated("no_anchor") ? nullptr : weight(tape, layer.solver_conv);
  const Var u = short_conv(tape, xn, conv, seq, 0, 1, both(past.u));
  // q | v | g | a | key | gain | gate, all from u.
  const Var in = fused_linear(tape, u, weight(tape, layer.in));
  int64_t at = 0;
  const auto next = [&](int64_t width) { return Columns(in, std::exchange(at, at + width), width); };
  const Columns q_in = next(HK), v = next(HV), gate = next(gate_), a = next(H_);
  const Columns key_1 = next(HK), keys = next((L_ - 1) * HK), gain = next(L_ * HV);
  const Columns beta_1 = next(H_), betas = next((L_ - 1) * H_);

  const Gates g =
      gates(tape, Decay::learned, beta_1, a, weight(tape, layer.A_log), weight(tape, layer.dt_bias));
  SolverInputs s;
  s.v = v, s.beta = g.beta, s.anchor = u, s.L = L_, s.first_is_step = true;
  if (L_ > 1) s.gate = betas;
  if (!config_.ablated("no_gain")) s.y = gain;
  s.gain = config_.ablated("no_gelu") ? GainKind::loop_linear : GainKind::loop;

  ScanInputs c;
  c.q = l2norm(tape, q_in, K_, 1 / std::sqrt(static_cast<double>(K_)));
  c.k = l2norm(tape, key_1, K_);
  if (L_ > 1) c.kappa = l2norm(tape, keys, K_);
  c.w = solver(tape, s), c.beta = g.beta, c.g = g.g;
  c.initial_state = c.final_state = past.S;
  c.H = H_, c.K = K_, c.V = V_, c.L = L_, c.C = chunk;
  show(tape, layer, {u, s, c});
  return output(tape, layer, scan(tape, c, seq), gate, into);
}

// Softmax attention with rotary positions (SPEC section 6).
Var Model::mix_attention(Tape& tape, const Layer& layer, Var xn, const Sequences& seq, LayerState* state,
                         Tensor into) const {
  const Var qkv = linear(tape, xn, weight(tape, layer.in));
  const Var o = attention(tape, qkv, config_.attention_head_count(), seq, state ? state->cache : KeyValues{});
  return linear(tape, o, weight(tape, layer.out), into);
}

Model::Model(const Config& config, Device device, DType dtype, bool training) : Model(config) {
  parameters_.allocate(device, dtype, training);
  if (device == Device::cpu && K_ <= 64) chunk = 32;
}

Model::Model(const Config& config)
    : config_(config),
      D_(config.hidden_size),
      H_(config.num_heads),
      K_(config.head_dim),
      V_(config.value_dim()),
      L_(config.rank),
      gate_(config.use_gate ? H_ * V_ : 0) {
  embeddings_ = parameters_.add_matrix({matrix("model.embeddings.weight", config.vocab_size, D_)});
  const Init ones{Init::constant, 1};
  for (int64_t i = 0; i < config.num_hidden_layers; ++i) {
    Layer layer;
    layer.mixer = config.mixer(i);
    const std::string prefix = cat("model.layers.", i, ".");
    layer.attn_norm = parameters_.add_vector({prefix + "attn_norm.weight", {D_}, ones});
    if (layer.mixer == "prism-loop")
      declare_loop(layer, prefix + "attn.");
    else if (layer.mixer == "attention")
      declare_attention(layer, prefix + "attn.");
    else
      declare_gdn(layer, prefix + "attn.");
    layer.mlp_norm = parameters_.add_vector({prefix + "mlp_norm.weight", {D_}, ones});
    declare_feed_forward(layer, prefix + "mlp.");
    layers_.push_back(layer);
  }
  final_norm_ = parameters_.add_vector({"model.norm.weight", {D_}, ones});
  if (!config.tie_word_embeddings)
    head_ = parameters_.add_matrix({matrix("lm_head.weight", config.vocab_size, D_)});
}

Parameter Model::matrix(const std::string& name, int64_t rows, int64_t columns) const {
  const bool to_stream = name.ends_with("o_proj.weight") || name.ends_with("down_proj.weight");
  const double depth = kResidualLayers * static_cast<double>(config_.num_hidden_layers);
  const double std = to_stream ? 0.02 / std::sqrt(depth) : config_.initializer_range;
  return {name, {rows, columns}, {Init::normal, std}};
}

void Model::declare_gdn(Layer& layer, const std::string& p) {
  const int64_t HK = H_ * K_, HV = H_ * V_, W = config_.conv_size, R = config_.solver_dim, steps = L_ - 1;
  const Init taps{Init::uniform, 1 / std::sqrt(static_cast<double>(W))};
  const auto conv = [&](const char* name, int64_t channels) {
    return parameters_.add_vector({p + name, {channels, 1, W}, taps});
  };
  const bool decay = learned_decay(layer.mixer);
  const int64_t M = layer.mixer == "mom" ? config_.memories : 0, H = (M + 1) * H_;
  std::vector<Parameter> in = {matrix(p + "q_proj.weight", HK, D_), matrix(p + "k_proj.weight", HK, D_),
                               matrix(p + "v_proj.weight", HV, D_)};
  if (gate_) in.push_back(matrix(p + "g_proj.weight", gate_, D_));
  if (decay) in.push_back(matrix(p + "a_proj.weight", H, D_));
  in.push_back(matrix(p + "b_proj.weight", H, D_));
  if (M) in.push_back(matrix(p + "router.weight", M, D_));
  if (layer.mixer == "gla") in.push_back(matrix(p + "gk_proj.0.weight", kDecayRank, D_));
  layer.in = parameters_.add_matrix(in, true);
  if (layer.mixer == "gla")
    layer.decay_up = parameters_.add_matrix({matrix(p + "gk_proj.1.weight", HK, kDecayRank)});
  layer.conv_q = conv("q_conv1d.weight", HK);
  layer.conv_k = conv("k_conv1d.weight", HK);
  layer.conv_v = conv("v_conv1d.weight", HV);
  if (decay) {
    layer.A_log = parameters_.add_vector({p + "A_log", {H}, {Init::decay_rate}});
    layer.dt_bias = parameters_.add_vector({p + "dt_bias", {H}, {Init::time_step}});
  }
  layer.o_norm = parameters_.add_vector({p + "o_norm.weight", {V_}, {Init::constant, 1}});
  layer.out = parameters_.add_matrix({matrix(p + "o_proj.weight", D_, HV)});
  if (layer.mixer == "ttt-mlp") return declare_memory(layer, p + "memory.");
  if (layer.mixer != "prism" || steps == 0) return;

  layer.solver_conv = conv("solver.conv.weight", D_);
  std::vector<Parameter> down = {matrix(p + "solver.key_down.weight", steps * R, D_),
                                 matrix(p + "solver.gain_down.weight", steps * R, D_),
                                 matrix(p + "solver.gate.weight", steps * H_, D_)};
  const Init normal{Init::normal, config_.initializer_range};
  if (config_.solver_residual == SolverResidual::anchor) {
    down.push_back(matrix(p + "solver.residual_down.weight", R, D_));
    layer.residual_up = parameters_.add_matrix({{p + "solver.residual_up.weight", {HV, R}, normal}});
  }
  layer.solver_down = parameters_.add_matrix(down, true);
  layer.key_up = parameters_.add_matrix({{p + "solver.key_up.weight", {steps, HK, R}, normal}});
  layer.gain_up = parameters_.add_matrix({{p + "solver.gain_up.weight", {steps, HV, R}, normal}});
  layer.gate_bias = parameters_.add_vector(
      {p + "solver.gate.bias", {steps * H_}, {Init::constant, config_.solver_gate_init}});
  if (config_.solver_scale)
    layer.scale = parameters_.add_vector({p + "solver.scale", {steps, H_}, {Init::constant, 0}});
}

// The weights a document's memory begins with, and its layer norm. Unit keys give hidden units of variance 1.
void Model::declare_memory(Layer& layer, const std::string& p) {
  const int64_t M = kMemoryWidth * K_;
  const auto add = [&](const char* name, const Shape& shape, Init init) {
    return parameters_.add_vector({p + name, shape, init});
  };
  const Init zero{Init::constant, 0};
  layer.W1 = add("up.weight", {H_, M, K_}, {Init::normal, 1});
  layer.b1 = add("up.bias", {H_, M}, zero);
  layer.W2 = add("down.weight", {H_, K_, M}, {Init::normal, 1 / std::sqrt(static_cast<double>(M))});
  layer.b2 = add("down.bias", {H_, K_}, zero);
  layer.memory_norm = add("norm.weight", {H_, K_}, {Init::constant, 1});
  layer.memory_bias = add("norm.bias", {H_, K_}, zero);
}

void Model::declare_loop(Layer& layer, const std::string& p) {
  const int64_t HK = H_ * K_, HV = H_ * V_, W = config_.conv_size;
  const Init normal{Init::normal, config_.initializer_range};
  std::vector<Parameter> in = {matrix(p + "q_proj.weight", HK, D_), matrix(p + "v_proj.weight", HV, D_)};
  if (gate_) in.push_back(matrix(p + "g_proj.weight", gate_, D_));
  for (const Parameter& piece : {matrix(p + "a_proj.weight", H_, D_),
                                 {p + "solver.key.weight", {L_, HK, D_}, normal},
                                 {p + "solver.gain.weight", {L_, HV, D_}, normal},
                                 matrix(p + "solver.gate.weight", L_ * H_, D_)})
    in.push_back(piece);
  layer.in = parameters_.add_matrix(in, true);
  layer.solver_conv = parameters_.add_vector(
      {p + "solver.conv.weight", {D_, 1, W}, {Init::uniform, 1 / std::sqrt(static_cast<double>(W))}});
  layer.A_log = parameters_.add_vector({p + "A_log", {H_}, {Init::decay_rate}});
  layer.dt_bias = parameters_.add_vector({p + "dt_bias", {H_}, {Init::time_step}});
  layer.o_norm = parameters_.add_vector({p + "o_norm.weight", {V_}, {Init::constant, 1}});
  layer.out = parameters_.add_matrix({matrix(p + "o_proj.weight", D_, HV)});
}

void Model::declare_attention(Layer& layer, const std::string& p) {
  layer.in = parameters_.add_matrix({matrix(p + "q_proj.weight", D_, D_), matrix(p + "k_proj.weight", D_, D_),
                                     matrix(p + "v_proj.weight", D_, D_)});
  layer.out = parameters_.add_matrix({matrix(p + "o_proj.weight", D_, D_)});
}

void Model::declare_feed_forward(Layer& layer, const std::string& p) {
  const int64_t F = config_.feed_forward();
  layer.gate_up =
      parameters_.add_matrix({matrix(p + "gate_proj.weight", F, D_), matrix(p + "up_proj.weight", F, D_)});
  layer.down = parameters_.add_matrix({matrix(p + "down_proj.weight", D_, F)});
}

DecodeState::DecodeState(const Model& model, int64_t B) : lengths_(static_cast<size_t>(B)) {
  const Config& c = model.config();
  const int64_t H = c.num_heads, K = c.head_dim, V = c.value_dim(), W = c.conv_size, D = c.hidden_size;
  // Two passes over the same list: how much memory, then where.
  for (const bool place : {false, true}) {
    size_t at = 0;
    const auto take = [&](DType dtype, const Shape& shape) {
      const Tensor t{place ? memory_.data() + at : nullptr, shape, dtype, model.device()};
      at += (t.bytes() + 255) / 256 * 256;
      return t;
    };
    layers_.clear(), past_ = {};
    for (int64_t i = 0; i < c.num_hidden_layers; ++i) {
      LayerState s;
      const std::string& mixer = c.mixer(i);
      if (mixer == "attention") {
        if (!past_) past_ = take(DType::i32, {B});
        s.cache.past = past_;
        s.cache.keys = s.cache.values = {nullptr, {B, 0, D}, model.dtype(), model.device()};
        layers_.push_back(s);
        continue;
      }
      const int64_t M = kMemoryWidth * K;
      s.S = take(acc_of(model.dtype()),
                 mixer == "ttt-mlp" ? Shape{B, H, 2 * M * K + M + K} : Shape{B, c.scan_heads(i), V, K});
      if (W > 1 && mixer != "prism-loop") {
        s.q = take(model.dtype(), {B, W - 1, H * K});
        s.k = take(model.dtype(), {B, W - 1, H * K});
        s.v = take(model.dtype(), {B, W - 1, H * V});
      }
      if (W > 1 && (mixer == "prism-loop" || (mixer == "prism" && c.rank > 1)))
        s.u = take(model.dtype(), {B, W - 1, D});
      layers_.push_back(s);
    }
    if (!place) memory_ = Buffer(model.device(), at);
  }
  reset();
}

size_t DecodeState::bytes() const {
  size_t sum = memory_.bytes();
  for (const Buffer& cache : caches_) sum += cache.bytes();
  return sum;
}

void DecodeState::reset() {
  fill_bytes(memory_.device(), memory_.data(), 0, memory_.bytes());
  std::fill(lengths_.begin(), lengths_.end(), 0);
}

void DecodeState::reset_row(int64_t b) {
  lengths_[static_cast<size_t>(b)] = 0;
  for (const LayerState& layer : layers_)
    for (const Tensor& t : {layer.S, layer.q, layer.k, layer.v, layer.u})
      if (t) fill_bytes(memory_.device(), t.slice(b, 1).data, 0, t.slice(b, 1).bytes());
}

bool DecodeState::open(int64_t T, std::span<const int32_t> start) {
  if (!past_) return false;
  const int64_t needed = T + *std::max_element(lengths_.begin(), lengths_.end());
  const bool moves = needed > capacity_;
  if (moves) grow(std::max(needed, 2 * capacity_));
  copy_in(past_.device, past_.data, lengths_.data(), past_.bytes());
  for (size_t b = 0; b < lengths_.size(); ++b) {
    const int32_t first = start.empty() ? 0 : start[(b + 1) * static_cast<size_t>(T) - 1];
    lengths_[b] = static_cast<int32_t>(T) - first + (first == 0 ? lengths_[b] : 0);
  }
  return moves;
}

void DecodeState::grow(int64_t capacity) {
  std::vector<Buffer> grown;
  for (LayerState& layer : layers_)
    for (Tensor* cache : {&layer.cache.keys, &layer.cache.values}) {
      if (!layer.cache.past) continue;
      const Tensor old = *cache;
      cache->shape = {old.shape[0], capacity, old.shape[2]};
      cache->data = grown.emplace_back(old.device, cache->bytes()).data();
      for (int64_t b = 0; b < old.shape[0] && old; ++b)
        copy_within(old.device, cache->slice(b, 1).data, old.slice(b, 1).data, old.slice(b, 1).bytes());
    }
  caches_ = std::move(grown), capacity_ = capacity;
}

}  // namespace prism
