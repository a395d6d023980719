#include "src/trainer.h"

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <nlohmann/json.hpp>

namespace prism {

namespace {

constexpr int32_t kMostSkipped = 10;  // steps in a row without an update that end a run (SPEC section 9)
constexpr int64_t kReadEvery = 10;    // steps between looks at the scalars, which wait for a cuda device

volatile std::sig_atomic_t stop_signal = 0;

void request_stop(int signal) {
  stop_signal = signal;
  // A second signal ends the process at once.
  std::signal(SIGINT, SIG_DFL);
  std::signal(SIGTERM, SIG_DFL);
}

// While it lives SIGINT and SIGTERM are requests that the loop reads.
class StopSignals {
 public:
  StopSignals() {
    stop_signal = 0;
    struct sigaction action {};
    action.sa_handler = request_stop;
    action.sa_flags = SA_RESTART;
    sigaddset(&action.sa_mask, SIGINT);  // one at a time, when both come
    sigaddset(&action.sa_mask, SIGTERM);
    sigaction(SIGINT, &action, &interrupt_);
    sigaction(SIGTERM, &action, &terminate_);
  }
  StopSignals(const StopSignals&) = delete;
  ~StopSignals() {
    sigaction(SIGINT, &interrupt_, nullptr);
    sigaction(SIGTERM, &terminate_, nullptr);
  }

 private:
  struct sigaction interrupt_, terminate_;
};

// Rows [i B, (i + 1) B) of a step's batch, for each of its micro-batches.
std::vector<Batch> split(const Batch& step, int64_t parts) {
  std::vector<Batch> out;
  const int64_t n = step.B / parts * step.T;
  for (int64_t i = 0; i < parts; ++i) {
    const auto part = [&](const std::vector<int32_t>& x) {
      return std::vector<int32_t>(x.begin() + i * n, x.begin() + (i + 1) * n);
    };
    Batch& b = out.emplace_back(
        Batch{step.B / parts, step.T, part(step.tokens), part(step.targets), part(step.start), 0});
    b.scored = n - std::count(b.targets.begin(), b.targets.end(), -1);
  }
  return out;
}

// Tells data apart: FNV-1a of each stream's size and ids. Of a stream longer than 2^27 ids, which take a
// quarter of a second, so many are looked at, in slices from all over it.
std::string fingerprint(const std::vector<WeightedStream>& streams) {
  constexpr int64_t kIds = 1 << 16, kSlices = 1 << 11;
  uint64_t hash = 0xcbf29ce484222325ull;
  const auto add = [&hash](int64_t word) { hash = (hash ^ static_cast<uint64_t>(word)) * 0x100000001b3ull; };
  std::vector<int32_t> ids(kIds);
  for (const auto& [stream, weight] : streams) {
    add(stream.size());
    const int64_t slices = (stream.size() + kIds - 1) / kIds, looked_at = std::min(slices, kSlices);
    for (int64_t i = 0; i < looked_at; ++i) {
      const int64_t begin = slices * i / looked_at * kIds, count = std::min(kIds, stream.size() - begin);
      stream.copy(begin, count, INT32_MAX, ids.data());
      std::for_each_n(ids.begin(), count, add);
    }
  }
  char text[20];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(hash));
  return text;
}

AdamWSettings adamw_settings(const Recipe& r) {
  AdamWSettings a;
  a.beta1 = r.beta1, a.beta2 = r.beta2, a.weight_decay = r.weight_decay, a.clip = r.clip;
  return a;
}

}  // namespace

Trainer::Trainer(Model& model, const TrainState& state, const Sources& data, const std::string& out,
                 CheckpointWriter& writer, bool other_data)
    : model_(model),
      state_(state),
      out_(out),
      writer_(writer),
      tokenizer_(data.tokenizer),
      optimizer_(model.parameters(), adamw_settings(state.settings.recipe)),
      first_step_(state.step),
      clock_step_(state.step) {
  const Recipe& r = state.settings.recipe;
  make_engine();
  loader_ =
      std::make_unique<Loader>(data.train, loader_options(r.batch * r.accumulate, state.settings.seed, data));
  if (data.val.size() > r.seq) {
    val_loader_ = std::make_unique<Loader>(std::vector<WeightedStream>{{data.val, 1}},
                                           loader_options(r.batch, 0, data));
    val_begin_ = val_loader_->state();
  }
  place_loader(data, other_data);
  announce();
  if (state.step > 0) {
    last_saved_ = newest_checkpoint(out);
    read_moments(last_saved_, model);
    optimizer_.restore(state.taken, state.skipped, state.skipped_in_row);
  }
  log_.emplace(out + "/log.jsonl", state.step);
}

LoaderOptions Trainer::loader_options(int64_t B, uint64_t seed, const Sources& data) const {
  const Config& config = model_.config();
  LoaderOptions o;
  o.B = B, o.T = state_.settings.recipe.seq, o.seed = seed, o.vocab = config.vocab_size;
  if (!state_.settings.no_document_reset)
    o.bos = data.tokenizer ? data.tokenizer->bos() : static_cast<int32_t>(config.bos_token_id);
  return o;
}

void Trainer::place_loader(const Sources& data, bool other_data) {
  const std::string now = fingerprint(data.train);
  const bool same = now == state_.fingerprint;
  if (state_.step > 0) {
    PRISM_CHECK(same || other_data,
                "--data: expected the data that the run was saved with, got other content; ",
                "--allow-change data goes on with it");
    LoaderState at = same ? state_.loader : loader_->state();
    if (!same) at.epoch = state_.loader.epoch + 1;
    at.seed = state_.settings.seed;
    loader_->restore(at);
  }
  state_.fingerprint = now;
}

void Trainer::make_engine() {
  const Recipe& r = state_.settings.recipe;
  const size_t step = Engine::measure(model_, r.batch, r.seq, true);
  const size_t free = memory_info(model_.device()).free;
  PRISM_CHECK(step <= free, "memory: ", byte_count(step), " needed for a micro-batch of ", r.batch, " x ",
              r.seq, ", ", byte_count(free), " free on ", model_.device(),
              "; a smaller --batch (with a larger --accumulate) or --seq lowers it");
  engine_ = std::make_unique<Engine>(model_, r.batch, r.seq, r.accumulate);
}

void Trainer::announce() {
  const Recipe& r = state_.settings.recipe;
  const Parameters& p = model_.parameters();
  const size_t step = engine_->arena_bytes() + engine_->input_bytes();
  int64_t trained = 0;
  for (const Parameter& weight : p.list()) trained += weight.frozen ? 0 : weight.shape.numel();
  if (trained < p.count())
    progress_.keep(cat(grouped(trained), " parameters are trained, the others frozen"));
  progress_.keep(cat(grouped(p.count()), " parameters on ", model_.device(), " in ", model_.dtype(),
                     ", memory ", byte_count(p.bytes() + step), " (", byte_count(step), " of it for ",
                     r.batch, " x ", r.seq, " positions)"));
  progress_.keep(cat(grouped(r.batch * r.seq * r.accumulate), " tokens a step (", r.batch, " x ", r.seq,
                     " x ", r.accumulate, "), ", grouped(loader_->state().tokens), " in the data, ",
                     grouped(r.steps), " steps"));
  if (!val_loader_) progress_.keep("no validation: its data is shorter than one window");
}

void Trainer::train_step() {
  const Recipe& r = state_.settings.recipe;
  optimizer_.set_lr(learning_rate(r.schedule, state_.step, r.steps, r.lr, r.min_lr, r.warmup));
  engine_->load(split(loader_->next(), r.accumulate));
  engine_->train_step(optimizer_);
  ++state_.step;
}

void Trainer::check_finite(const StepScalars<double>& scalars) const {
  PRISM_CHECK(scalars.skipped_in_row < kMostSkipped, "step ", state_.step,
              ": expected a finite loss and gradient, ", "got loss ", scalars.loss, ", norm ", scalars.norm,
              " and ", scalars.skipped_in_row,
              " steps in a row without an update; the last good checkpoint is ",
              last_saved_.empty() ? "none" : last_saved_);
}

void Trainer::for_each_validation_batch(const std::function<void(const Batch&)>& fn) {
  if (!val_loader_) return;
  const Recipe& r = state_.settings.recipe;
  val_loader_->restore(val_begin_);
  const int64_t batch = r.batch * r.seq, most = (state_.settings.eval_tokens + batch - 1) / batch;
  for (int64_t i = 0; i < std::min(most, val_loader_->steps_per_epoch()); ++i) fn(val_loader_->next());
}

void Trainer::validate() {
  double loss = 0;
  int64_t scored = 0;
  for_each_validation_batch([&](const Batch& batch) {
    for (double x : engine_->evaluate(batch)) loss += x;
    scored += batch.scored;
  });
  if (scored > 0) state_.val_loss = loss / static_cast<double>(scored);
}

void Trainer::report(const StepScalars<double>& scalars, double seconds, bool logged, bool evaluated) {
  const Recipe& r = state_.settings.recipe;
  const double steps_per_second = static_cast<double>(state_.step - clock_step_) / std::max(seconds, 1e-9);
  const double tokens_per_second = steps_per_second * static_cast<double>(r.batch * r.seq * r.accumulate);
  const double left = static_cast<double>(r.steps - state_.step) / steps_per_second;
  char line[200];
  int n = std::snprintf(
      line, sizeof line, "step %5lld/%lld  loss %.4f  lr %.2e  norm %.3f  %s tokens/s  %s left",
      static_cast<long long>(state_.step), static_cast<long long>(r.steps), scalars.loss, scalars.lr,
      scalars.norm, grouped(std::llround(tokens_per_second)).c_str(), duration(left).c_str());
  if (evaluated || (!logged && !std::isnan(state_.val_loss)))
    n += std::snprintf(line + n, sizeof line - static_cast<size_t>(n), "  validation %.4f", state_.val_loss);
  if (scalars.skipped > 0)
    std::snprintf(line + n, sizeof line - static_cast<size_t>(n), "  skipped %d", scalars.skipped);
  // A terminal keeps the lines with validation; a few steps in, everyone is told how long it will take.
  const bool kept = evaluated || (!progress_.terminal() && (logged || state_.step == first_step_ + 3));
  if (kept)
    progress_.keep(line);
  else
    progress_.show(line);
  if (!logged) return;
  nlohmann::ordered_json object = {{"step", state_.step},
                                   {"loss", scalars.loss},
                                   {"lr", scalars.lr},
                                   {"grad_norm", scalars.norm},
                                   {"tokens_per_second", std::round(tokens_per_second)},
                                   {"seconds_left", std::round(left)},
                                   {"skipped", scalars.skipped}};
  if (evaluated) object["val_loss"] = state_.val_loss;
  log_->write(object);
}

void Trainer::save(const StepScalars<double>& scalars) {
  state_.taken = scalars.taken, state_.skipped = scalars.skipped,
  state_.skipped_in_row = scalars.skipped_in_row;
  state_.loss = scalars.loss;
  state_.loader = loader_->state();
  std::vector<CheckpointFile> files = model_files(model_, tokenizer_);
  for (CheckpointFile& file : state_files(model_, state_)) files.push_back(std::move(file));
  writer_.save(state_.step, files, state_.settings.keep);
  last_saved_ = newest_checkpoint(out_);
  draw_losses(out_ + "/log.jsonl", out_ + "/loss.svg");
}

int Trainer::run(int64_t stop_after) {
  const StopSignals signals;
  const TrainSettings& s = state_.settings;
  const int64_t steps = s.recipe.steps, tenth = std::max<int64_t>(steps / 10, 1);
  while (state_.step < steps) {
    train_step();
    const int64_t step = state_.step;
    const int signal = stop_signal;
    const bool last = step == steps, stops = signal || step == stop_after;
    const auto due = [&](int64_t every) { return last || step % (every > 0 ? every : tenth) == 0; };
    const bool saves = due(s.save_every) || stops, evaluates = due(s.eval_every) && val_loader_;
    const bool logs = due(s.log_every) || evaluates || step == 1;
    if (model_.device() == Device::cuda && !saves && !logs && step % kReadEvery != 0) continue;

    const StepScalars<double> scalars = optimizer_.read();
    check_finite(scalars);
    const double seconds = std::chrono::duration<double>(Clock::now() - clock_).count();
    if (evaluates) validate();
    report(scalars, seconds, logs, evaluates);
    // In a run of bad steps a scheduled save would only take the place of a checkpoint known to be good.
    if (stops || last || (saves && scalars.skipped_in_row == 0)) save(scalars);
    if (evaluates || saves) clock_ = Clock::now(), clock_step_ = step;
    if (stops && !last) {
      progress_.keep(cat("stopped after step ", step, "; prism train --out ", out_, " --resume goes on"));
      return signal ? 128 + signal : 0;
    }
  }
  return 0;
}

}  // namespace prism
