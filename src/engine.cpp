#include "src/engine.h"

#include <algorithm>
#include <numeric>

#include "kernels/loss.h"
#include "kernels/matmul.h"
#include "src/host.h"

namespace prism {

namespace {

enum Kind : int64_t { kTokens, kTargets, kOrder, kStart, kKinds };

// Positions sorted by token, equal tokens in their order: a counting sort.
std::vector<int32_t> sorted_by_token(const std::vector<int32_t>& tokens, int64_t vocab) {
  std::vector<int32_t> next(static_cast<size_t>(vocab) + 1), order(tokens.size());
  for (int32_t id : tokens) ++next[static_cast<size_t>(id) + 1];
  std::partial_sum(next.begin(), next.end(), next.begin());
  for (size_t i = 0; i < tokens.size(); ++i)
    order[static_cast<size_t>(next[static_cast<size_t>(tokens[i])]++)] = static_cast<int32_t>(i);
  return order;
}

// x [n,D] times head^T [vocab,D], in memory of its own.
std::vector<double> logits_of(Tensor x, Tensor head) {
  const int64_t n = x.rows(), D = x.shape[-1], vocab = head.shape[0];
  const Buffer memory(x.device, static_cast<size_t>(n * vocab * size_of(x.dtype)));
  const Tensor logits{memory.data(), {n, vocab}, x.dtype, x.device};
  dispatch(x.dtype, [&]<class T>(Tag<T>) {
    matmul<T>(
        x.device, {logits.ptr<T>(), vocab},
        {.a = {x.ptr<T>(), D}, .b = {head.ptr<T>(), D}, .m = n, .n = vocab, .k = D, .b_transposed = true});
  });
  return to_host(logits);
}

}  // namespace

Engine::Engine(Model& model, int64_t B, int64_t T, int64_t accumulate)
    : model_(model), B_(B), T_(T), accumulate_(accumulate) {
  const DType acc = acc_of(model.dtype());
  const int64_t ints = kKinds * accumulate * B * T * 4 + 256;
  inputs_ = Buffer(model.device(), static_cast<size_t>(ints + 256 + B * T * size_of(acc)));
  scale_ = {inputs_.data() + ints / 256 * 256, {}, acc, model.device()};
  row_loss_ = {inputs_.data() + ints / 256 * 256 + 256, {B * T}, acc, model.device()};
  arena_ = std::make_unique<Arena>(model.device(), measure(model, B, T, model.parameters().training()));
}

size_t Engine::measure(const Model& model, int64_t B, int64_t T, bool training) {
  Arena arena = Arena::measuring(model.device());
  const Tensor ints{arena.low(DType::i32, {}).data, {B * T}, DType::i32, model.device()};
  const Tensor numbers{ints.data, {B * T}, acc_of(model.dtype()), model.device()};
  Tape tape(arena, model.dtype(), training);
  const Inputs in{{B, T, ints}, ints, ints};
  if (training)  // what a later evaluation needs is less
    micro_step(tape, model, in, ints, numbers, numbers, nullptr);
  else
    score(tape, model, in, nullptr, ints, ints, numbers);
  return arena.peak();
}

Tensor Engine::ints(int64_t kind, int64_t micro) const {
  return {
      inputs_.data() + (kind * accumulate_ + micro) * B_ * T_ * 4, {B_ * T_}, DType::i32, model_.device()};
}

Inputs Engine::inputs(int64_t micro) const {
  return {{B_, T_, ints(kStart, micro)}, ints(kTokens, micro), ints(kOrder, micro)};
}

void Engine::copy_batch(const Batch& batch, int64_t micro, bool sorted) {
  PRISM_CHECK(batch.B == B_ && batch.T == T_, "engine: expected a batch of ", B_, " x ", T_, ", got ",
              batch.B, " x ", batch.T);
  const int64_t vocab = model_.config().vocab_size;
  for (int32_t id : batch.tokens)
    PRISM_CHECK(id >= 0 && id < vocab, "tokens: expected ids below vocab_size ", vocab, ", got ", id);
  const auto copy = [&](Kind kind, const std::vector<int32_t>& from) {
    copy_in(model_.device(), ints(kind, micro).data, from.data(), from.size() * 4);
  };
  copy(kTokens, batch.tokens), copy(kTargets, batch.targets), copy(kStart, batch.start);
  if (sorted) copy(kOrder, sorted_by_token(batch.tokens, vocab));
}

void Engine::load(std::span<const Batch> batches) {
  PRISM_CHECK(static_cast<int64_t>(batches.size()) == accumulate_, "engine: expected ", accumulate_,
              " micro-batches, got ", batches.size());
  int64_t scored = 0;
  for (int64_t i = 0; i < accumulate_; ++i) {
    copy_batch(batches[static_cast<size_t>(i)], i, true);
    scored += batches[static_cast<size_t>(i)].scored;
  }
  dispatch_acc(scale_.dtype, [&]<class A>(Tag<A>) {
    const A scale = scored > 0 ? 1 / A(scored) : A(0);
    copy_in(model_.device(), scale_.data, &scale, sizeof scale);
  });
}

void Engine::micro_step(Tape& tape, const Model& model, const Inputs& in, Tensor targets, Tensor scale,
                        Tensor row_loss, Activations* activations) {
  std::vector<Var> layers;
  const Var xn = model.forward(tape, in, nullptr, activations ? &layers : nullptr);
  const Var head = model.head(tape);
  lm_loss(tape, xn, head, targets, scale, row_loss);
  if (activations) {
    for (Var layer : layers) activations->layers.push_back(to_host(layer->value));
    activations->logits = logits_of(xn->value, head->value);
  }
  tape.backward();
}

// The final norm's rows that are scored, with their losses: the others' logits are not worth computing.
Var Engine::score(Tape& tape, const Model& model, const Inputs& in, DecodeState* state, Tensor rows,
                  Tensor targets, Tensor row_loss) {
  const Var x = embedding(tape, model.forward(tape, in, state), rows, {});
  lm_loss(tape, x, model.head(tape), targets, {}, row_loss);
  return x;
}

void Engine::gradients(Tensor loss, Activations* activations) {
  const Device device = model_.device();
  fill_bytes(device, model_.parameters().grads().data, 0, model_.parameters().grads().bytes());
  fill_bytes(device, loss.data, 0, loss.bytes());
  for (int64_t i = 0; i < accumulate_; ++i) {
    arena_->reset();
    Tape tape(*arena_, model_.dtype(), true);
    micro_step(tape, model_, inputs(i), ints(kTargets, i), scale_, row_loss_, activations);
    dispatch_acc(loss.dtype, [&]<class A>(Tag<A>) {
      sum_into<A>(device, loss.ptr<A>(), row_loss_.ptr<A>(), scale_.ptr<A>(), B_ * T_);
    });
  }
}

void Engine::train_step(Optimizer& optimizer) {
  const auto step = [&] {
    gradients(optimizer.loss());
    optimizer.step();
  };
  // The first step lets kernels and libraries set themselves up, which a recording must not.
  if (model_.device() == Device::cpu || !use_graph || steps_run_++ == 0) return step();
  if (!graph_) graph_.record(model_.device(), step);
  graph_.launch();
}

std::vector<double> Engine::evaluate(const Batch& batch, DecodeState* state, std::vector<bool>* likeliest) {
  copy_batch(batch, 0, false);
  std::vector<int32_t> rows, targets;
  for (size_t i = 0; i < batch.targets.size(); ++i)
    if (batch.targets[i] >= 0) rows.push_back(static_cast<int32_t>(i)), targets.push_back(batch.targets[i]);
  if (rows.empty()) rows.push_back(0), targets.push_back(-1);  // not every product takes no rows
  const int64_t n = static_cast<int64_t>(rows.size());
  const Tensor on_rows = ints(kOrder, 0).slice(0, n), on_targets = ints(kTargets, 0).slice(0, n);
  copy_in(model_.device(), on_rows.data, rows.data(), rows.size() * 4);
  copy_in(model_.device(), on_targets.data, targets.data(), targets.size() * 4);
  if (state) state->open(T_, batch.start);
  arena_->reset();
  Tape tape(*arena_, model_.dtype(), false);
  const Var x = score(tape, model_, inputs(0), state, on_rows, on_targets, row_loss_.slice(0, n));
  const std::vector<double> found = to_host(row_loss_.slice(0, n));
  std::vector<double> losses(batch.targets.size());
  for (size_t i = 0; i < rows.size(); ++i) losses[static_cast<size_t>(rows[i])] = found[i];
  if (!likeliest) return losses;
  likeliest->assign(losses.size(), false);
  const std::vector<double> logits = logits_of(x->value, model_.head(tape)->value);
  const auto vocab = static_cast<int64_t>(model_.config().vocab_size);
  for (int64_t i = 0; i < n; ++i) {
    const auto row = logits.begin() + i * vocab;
    const size_t at = static_cast<size_t>(i);
    (*likeliest)[static_cast<size_t>(rows[at])] = std::max_element(row, row + vocab) - row == targets[at];
  }
  return losses;
}

}  // namespace prism
