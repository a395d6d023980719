// One token by the fused kernels: what forward() computes, for one stream on cuda.
#include "kernels/decode.h"
#include "kernels/embedding.h"
#include "src/model.h"

namespace prism {

namespace {

// What lies between the launches, in numbers of the storage type; each begins on 16 bytes.
struct Widths {
  int64_t D, F, HV, in, down;
  int64_t total() const { return 4 * D + in + down + HV + F; }
};

template <class T>
struct Work {
  T *x, *sum, *y, *xn, *in, *down, *o, *h;

  Work(char* at, const Widths& w) {
    const auto take = [&](int64_t count) {
      T* const here = reinterpret_cast<T*>(at);
      at += count * static_cast<int64_t>(sizeof(T));
      return here;
    };
    x = take(w.D), sum = take(w.D), y = take(w.D), xn = take(w.D);
    in = take(w.in), down = take(w.down), o = take(w.HV), h = take(w.F);
  }
};

Widths widths_of(const Config& c) {
  const int64_t HK = c.num_heads * c.head_dim, HV = c.num_heads * c.value_dim(), R = c.solver_dim;
  const auto whole = [](int64_t width) { return (width + 7) / 8 * 8; };
  return {c.hidden_size, c.feed_forward(), HV, whole(2 * HK + 2 * HV + 2 * c.num_heads),
          whole((c.rank - 1) * (2 * R + c.num_heads) + R)};
}

}  // namespace

bool Model::can_step() const {
  const bool aligned = D_ % 8 == 0 && V_ % 8 == 0 && config_.feed_forward() % 8 == 0;
  const bool small = K_ <= 256 && config_.conv_size <= 8;
  const bool solver = L_ == 1 || config_.solver_dim % 8 == 0;
  bool fused = device() == Device::cuda && kernel_choice == KernelChoice::fast && aligned && small && solver;
  for (const Layer& layer : layers_)
    for (const char* other : {"prism-loop", "attention", "ttt-mlp", "mom", "gla"})
      fused = fused && layer.mixer != other;
  return fused && config_.use_gate && config_.ablations.empty();
}

size_t Model::step_bytes() const {
  return static_cast<size_t>(widths_of(config_).total() * size_of(dtype()));
}

template <class T>
struct Model::Step {
  const Model& model;
  const Parameters& parameters;
  Work<T> work;

  template <class X>
  const X* weight(Slot slot) const {
    return slot ? parameters.value(slot).template ptr<X>() : nullptr;
  }
  // RMSNorm of the stream; the sum with what the last product added becomes the stream.
  cuda::StepVector<T> normed(Slot norm, bool first) {
    cuda::StepVector<T> v;
    v.kind = cuda::StepVector<T>::norm, v.width = model.D_, v.weight = weight<float>(norm);
    v.eps = static_cast<float>(model.config_.norm_eps), v.x = work.x;
    if (first) return v;
    v.y = work.y, v.sum = work.sum;
    std::swap(work.x, work.sum);
    return v;
  }
  cuda::StepProduct<T> product(Slot matrix, const cuda::StepVector<T>& x, T* out, int64_t rows) const {
    return {x, weight<T>(matrix), out, rows};
  }
  void mixer(const Layer& layer, LayerState& past, bool first);
  void feed_forward(const Layer& layer);
};

template <class T>
void Model::Step<T>::mixer(const Layer& layer, LayerState& past, bool first) {
  const int64_t HK = model.H_ * model.K_, HV = model.H_ * model.V_, W = model.config_.conv_size;
  cuda::StepMix<T> m;
  m.H = model.H_, m.K = model.K_, m.V = model.V_, m.W = W;
  m.decay = decay_of(layer.mixer) != Decay::none, m.erase = erases(layer.mixer);
  m.o = work.o, m.S = past.S.ptr<float>();
  m.q = work.in, m.k = m.q + HK, m.v = m.k + HK;
  const T* const gate = m.v + HV;
  m.a = layer.A_log ? gate + HV : nullptr, m.b = gate + HV + (layer.A_log ? model.H_ : 0);
  m.cache_q = past.q.ptr<T>(), m.cache_k = past.k.ptr<T>(), m.cache_v = past.v.ptr<T>();
  m.taps_q = weight<float>(layer.conv_q), m.taps_k = weight<float>(layer.conv_k);
  m.taps_v = weight<float>(layer.conv_v);
  m.A_log = weight<float>(layer.A_log), m.dt_bias = weight<float>(layer.dt_bias);

  cuda::StepVector<T> xn = normed(layer.attn_norm, first);
  cuda::StepProduct<T> down;
  if (layer.key_up) {
    m.L = model.L_, m.R = model.config_.solver_dim, m.down = work.down;
    m.key_up = weight<T>(layer.key_up), m.gain_up = weight<T>(layer.gain_up);
    m.residual_up = weight<T>(layer.residual_up);
    m.gate_bias = weight<float>(layer.gate_bias), m.scale = weight<float>(layer.scale);
    m.gain = model.config_.solver_gain == SolverGain::gelu ? GainKind::gelu : GainKind::sigmoid;
    m.key_norm = model.config_.solver_key_norm;
    cuda::StepVector<T> anchor = xn;
    anchor.kind = cuda::StepVector<T>::anchor, anchor.sum = nullptr;
    anchor.taps = weight<float>(layer.solver_conv), anchor.cache = past.u.ptr<T>(), anchor.W = W;
    xn.xn = work.xn;
    const int64_t steps = m.L - 1;
    down = product(layer.solver_down, anchor, work.down, steps * (2 * m.R + m.H) + (m.residual_up ? m.R : 0));
  }
  cuda::step_product(product(layer.in, xn, work.in, m.b + m.H - m.q), down);
  cuda::step_mix(m);

  cuda::StepVector<T> normed_o;
  normed_o.kind = cuda::StepVector<T>::gated_norm, normed_o.width = HV, normed_o.V = m.V;
  normed_o.x = work.o, normed_o.y = gate, normed_o.weight = weight<float>(layer.o_norm);
  normed_o.eps = xn.eps;
  cuda::StepCaches<T> caches;
  caches.W = W;
  if (W > 1)
    caches = {{past.q.ptr<T>(), past.k.ptr<T>(), past.v.ptr<T>(), past.u.ptr<T>()},
              {m.q, m.k, m.v, work.xn},
              {HK, HK, HV, model.D_},
              W};
  cuda::step_product(product(layer.out, normed_o, work.y, model.D_), {}, caches);
}

template <class T>
void Model::Step<T>::feed_forward(const Layer& layer) {
  const int64_t F = model.config_.feed_forward();
  cuda::StepProduct<T> gate_up = product(layer.gate_up, normed(layer.mlp_norm, false), work.h, F);
  gate_up.swiglu = true;
  cuda::step_product(gate_up);
  cuda::StepVector<T> h;
  h.x = work.h, h.width = F;
  cuda::step_product(product(layer.down, h, work.y, model.D_));
}

void Model::step(Tensor token, DecodeState& state, Tensor logits, char* work) const {
  if constexpr (kWithCuda)
    dispatch(dtype(), [&]<class T>(Tag<T>) {
      if constexpr (on_cuda<T>) {
        Step<T> step{*this, parameters_, {work, widths_of(config_)}};
        cuda::embedding_forward<T>(step.work.x, step.template weight<T>(embeddings_), token.ptr<int32_t>(), 1,
                                   D_);
        for (size_t i = 0; i < layers_.size(); ++i) {
          step.mixer(layers_[i], state.layer(static_cast<int64_t>(i)), i == 0);
          step.feed_forward(layers_[i]);
        }
        cuda::step_product(step.product(head_ ? head_ : embeddings_, step.normed(final_norm_, false),
                                        logits.ptr<T>(), config_.vocab_size));
      }
    });
}

}  // namespace prism
