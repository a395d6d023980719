#include "src/decoder.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "kernels/eigen.h"
#include "kernels/matmul.h"
#include "src/host.h"
#include "tensor/rng.h"

namespace prism {

Decoder::Decoder(const Model& model, int64_t longest)
    : model_(model),
      longest_(longest),
      state_(model, 1),
      inputs_(model.device(), static_cast<size_t>(longest) * 4),
      logits_(model.device(), static_cast<size_t>(model.config().vocab_size * size_of(model.dtype()))) {
  Arena measured = Arena::measuring(model.device());
  Tape tape(measured, model.dtype(), false);
  model.forward(tape, {{1, longest, {}}, {inputs_.data(), {longest}, DType::i32, model.device()}, {}},
                &state_);
  arena_ = std::make_unique<Arena>(model.device(), measured.peak());
  if (model.can_step()) step_ = Buffer(model.device(), model.step_bytes());
}

void Decoder::pass(std::span<const int32_t> ids, bool last) {
  copy_in(model_.device(), inputs_.data(), ids.data(), ids.size_bytes());
  if (state_.open(static_cast<int64_t>(ids.size()))) graph_.reset();
  if (ids.size() > 1 || model_.device() == Device::cpu || !std::exchange(warm_, true))
    return run(static_cast<int64_t>(ids.size()), last);
  if (!graph_) graph_.emplace().record(model_.device(), [&] { run(1, true); });
  graph_->launch();
}

void Decoder::run(int64_t T, bool last) {
  const int64_t D = model_.config().hidden_size, vocab = model_.config().vocab_size;
  if (T == 1 && model_.can_step())
    return model_.step({inputs_.data(), {1}, DType::i32, model_.device()}, state_,
                       {logits_.data(), {vocab}, model_.dtype(), model_.device()}, step_.data());
  arena_->reset();
  Tape tape(*arena_, model_.dtype(), false);
  const Inputs in{{1, T, {}}, {inputs_.data(), {T}, DType::i32, model_.device()}, {}};
  const Var xn = model_.forward(tape, in, &state_);
  if (!last) return;
  const Var head = model_.head(tape);
  tape.run([&]<class T_>(Tag<T_>) {
    matmul<T_>(model_.device(), {reinterpret_cast<T_*>(logits_.data()), vocab},
               {.a = {xn->value.ptr<T_>() + (T - 1) * D, D},
                .b = {head->value.ptr<T_>(), D},
                .m = 1,
                .n = vocab,
                .k = D,
                .b_transposed = true});
  });
}

std::vector<double> Decoder::feed(std::span<const int32_t> ids) {
  PRISM_CHECK(!ids.empty(), "decoder: expected at least one id");
  const int64_t vocab = model_.config().vocab_size;
  for (int32_t id : ids)
    PRISM_CHECK(id >= 0 && id < vocab, "decoder: expected ids below vocab_size ", vocab, ", got ", id);
  while (!ids.empty()) {
    const size_t count = std::min(ids.size(), static_cast<size_t>(longest_));
    pass(ids.first(count), count == ids.size());
    ids = ids.subspan(count);
  }
  return to_host({logits_.data(), {vocab}, model_.dtype(), model_.device()});
}

int32_t sample(std::span<const double> logits, const Sampling& how, uint64_t index) {
  for (size_t i = 0; i < logits.size(); ++i)
    PRISM_CHECK(std::isfinite(logits[i]), "sample: expected finite logits, got ", logits[i], " for id ", i);
  const auto n = static_cast<int64_t>(logits.size());
  const int32_t best = static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
  if (how.temperature <= 0) return best;
  std::vector<double> weight(logits.size());
  array(weight.data(), n) =
      ((array(logits.data(), n) - logits[static_cast<size_t>(best)]) / how.temperature).exp();
  const auto weight_of = [&](int32_t id) { return weight[static_cast<size_t>(id)]; };
  const auto likelier = [&](int32_t a, int32_t b) {
    return weight_of(a) > weight_of(b) || (weight_of(a) == weight_of(b) && a < b);
  };
  // Only as many ids as may be drawn are put in order.
  std::vector<int32_t> ids(logits.size());
  std::iota(ids.begin(), ids.end(), 0);
  if (how.top_k > 0 && how.top_k < n) {
    std::nth_element(ids.begin(), ids.begin() + how.top_k, ids.end(), likelier);
    ids.resize(static_cast<size_t>(how.top_k));
  }
  double total = 0;
  for (const int32_t id : ids) total += weight_of(id);
  if (how.top_p < 1) {  // the fewest of the likeliest ids that hold top_p of the probability
    const auto less_likely = [&](int32_t a, int32_t b) { return likelier(b, a); };
    std::make_heap(ids.begin(), ids.end(), less_likely);
    auto rest = ids.end();
    double kept = 0;
    do {
      std::pop_heap(ids.begin(), rest--, less_likely);
      kept += weight_of(*rest);
    } while (rest != ids.begin() && kept < how.top_p * total);
    ids.erase(ids.begin(), rest);
    total = kept;
  }
  double left = random_uniform(how.seed, 0x67656e, index) * total;
  for (const int32_t id : ids)
    if ((left -= weight_of(id)) < 0) return id;
  return best;  // what rounding left over
}

void penalise(std::span<double> logits, std::span<const int32_t> seen, double penalty) {
  std::vector<bool> done(logits.size());
  for (int32_t id : seen) {
    const size_t i = static_cast<size_t>(id);
    if (!done[i]) logits[i] *= logits[i] > 0 ? 1 / penalty : penalty;
    done[i] = true;
  }
}

std::string Stops::next(const std::string& piece) {
  if (met_) return "";
  held_ += piece;
  size_t stop = held_.size(), safe = stop;  // where the first stop string begins; where one may have begun
  for (const std::string& string : strings_) {
    stop = std::min(stop, held_.find(string));
    size_t at = held_.size() - std::min(held_.size(), string.size() - 1);
    while (!string.starts_with(std::string_view(held_).substr(at))) ++at;
    safe = std::min(safe, at);
  }
  met_ = stop < held_.size();
  const std::string text = held_.substr(0, met_ ? stop : safe);
  held_ = met_ ? "" : held_.substr(safe);
  return text;
}

}  // namespace prism
