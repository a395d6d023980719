// The language model of SPEC sections 3 to 6, as a composition of ops. Start reading at forward() in
// model.cpp.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "autograd/ops.h"
#include "optim/parameters.h"
#include "src/config.h"

namespace prism {

// What one layer keeps of the past while decoding (SPEC section 7): O(1) in the number of tokens, but for
// attention's keys and values.
struct LayerState {
  // [B,H,V,K], accumulation type, H the scan's heads (Config::scan_heads); ttt-mlp: [B,H,P] (kernels/ttt.h)
  Tensor S;
  Tensor q, k, v, u;  // [B,W-1,channels] the last inputs of each convolution; absent where the layer has none
  KeyValues cache;    // attention layers have this alone
};

// The settings of the scan a mixer's name stands for (SPEC section 1).
bool erases(const std::string& mixer);
Decay decay_of(const std::string& mixer);

class Model;

// The states of all layers, starting at zero.
class DecodeState {
 public:
  DecodeState(const Model& model, int64_t B);
  LayerState& layer(int64_t i) { return layers_[static_cast<size_t>(i)]; }
  size_t bytes() const;
  void reset();
  // Row b of the batch only.
  void reset_row(int64_t b);
  // Before each pass: makes room for its T tokens a row, of which row b's last document begins at
  // start[b T + T - 1]; no start: every row goes on with its document. True when memory has moved for it.
  bool open(int64_t T, std::span<const int32_t> start = {});

 private:
  void grow(int64_t capacity);

  Buffer memory_;
  std::vector<Buffer> caches_;
  std::vector<LayerState> layers_;
  std::vector<int32_t> lengths_;  // [B] tokens of each row's running document
  Tensor past_;                   // the same on the device; absent without attention layers
  int64_t capacity_ = 0;          // of the caches
};

// One forward pass's input, on the model's device.
struct Inputs {
  Sequences seq;
  Tensor tokens;  // [B T] i32
  Tensor order;   // [B T] i32, positions sorted by token; needed for a reverse pass only
};

// What one mixer computes on its way from xn to the scan.
struct MixerValues {
  Var u = nullptr;      // [n,D] the anchor, or absent
  SolverInputs solver;  // what makes the writes
  ScanInputs scan;
};

class Model {
 public:
  // Names and shapes only, without memory for the weights.
  explicit Model(const Config& config);
  // Weights are zero until initialise() or a checkpoint fills them.
  Model(const Config& config, Device device, DType dtype, bool training);

  // Tokens to the final norm's output xn [n,D]; logits = xn head^T. With `state` the pass goes on from it and
  // updates it. `layers` receives each layer's output when given (recording tapes only).
  Var forward(Tape& tape, const Inputs& in, DecodeState* state = nullptr,
              std::vector<Var>* layers = nullptr) const;
  // One token of one stream by the fused kernels of kernels/decode.h, which a graph may record: logits
  // [vocab] after `token` [1] i32. `work` has step_bytes() bytes. can_step(): on cuda, for the mixers of SPEC
  // sections 3 and 4 with the output gate and no ablations, unless --kernels simple.
  bool can_step() const;
  size_t step_bytes() const;
  void step(Tensor token, DecodeState& state, Tensor logits, char* work) const;
  // The [vocab,D] matrix of the logits: lm_head, or the embedding when tied.
  Var head(Tape& tape) const;

  const Config& config() const { return config_; }
  Parameters& parameters() { return parameters_; }
  const Parameters& parameters() const { return parameters_; }
  Device device() const { return parameters_.device(); }
  DType dtype() const { return parameters_.dtype(); }
  // Chunk size of the scan; any value gives the same function. On the CPU narrow heads are faster in short
  // chunks.
  int64_t chunk = 64;
  // When set, a forward pass calls it in each layer that has a scan, while the values are in memory.
  std::function<void(int64_t layer, const MixerValues&)> watch;

 private:
  // Where a layer's weights stand.
  struct Layer {
    std::string mixer;
    Slot attn_norm, in, conv_q, conv_k, conv_v, A_log, dt_bias, o_norm, out;
    Slot solver_conv, solver_down, key_up, gain_up, gate_bias, residual_up, scale;
    Slot decay_up, W1, b1, W2, b2, memory_norm, memory_bias;
    Slot mlp_norm, gate_up, down;
  };
  template <class T>
  struct Step;  // src/model_step.cpp
  void declare_gdn(Layer& layer, const std::string& prefix);
  void declare_loop(Layer& layer, const std::string& prefix);
  void declare_attention(Layer& layer, const std::string& prefix);
  void declare_memory(Layer& layer, const std::string& prefix);
  void declare_feed_forward(Layer& layer, const std::string& prefix);
  Parameter matrix(const std::string& name, int64_t rows, int64_t columns) const;

  Var mix_gdn(Tape& tape, const Layer& layer, Var xn, const Sequences& seq, LayerState* state,
              Tensor into) const;
  Var mix_loop(Tape& tape, const Layer& layer, Var xn, const Sequences& seq, LayerState* state,
               Tensor into) const;
  Var mix_attention(Tape& tape, const Layer& layer, Var xn, const Sequences& seq, LayerState* state,
                    Tensor into) const;
  Var memory(Tape& tape, const Layer& layer, Var q, Var k, Var v, Var beta, const Sequences& seq,
             const LayerState& past) const;
  struct Writes {
    Var w = nullptr, kappa = nullptr, u = nullptr;
    SolverInputs made_from;
  };
  Writes solve(Tape& tape, const Layer& layer, Var xn, Var v, Var k, Var beta, const Sequences& seq,
               LayerState* state) const;
  // o_proj of the normed and gated o.
  Var output(Tape& tape, const Layer& layer, Var o, Columns gate, Tensor into) const;
  Var write_keys(Tape& tape, const Layer& layer, Var down, Var k) const;
  void show(Tape& tape, const Layer& layer, const MixerValues& values) const;
  Var weight(Tape& tape, Slot slot) const;
  // Steps [from, from + count) of a weight [steps, out, R].
  Var weight(Tape& tape, Slot slot, int64_t from, int64_t count) const;

  Config config_;
  int64_t D_, H_, K_, V_, L_;
  int64_t gate_;  // width of the output gate: H V, or 0 without one
  Slot embeddings_, final_norm_, head_;
  std::vector<Layer> layers_;
  Parameters parameters_;
};

}  // namespace prism
