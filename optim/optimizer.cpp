#include "optim/optimizer.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numbers>

namespace prism {

namespace {

// fn(StepScalars<A>{}) for the type the masters have.
template <class Fn>
void with_scalars(const Parameters& parameters, const Fn& fn) {
  if (acc_of(parameters.dtype()) == DType::f64)
    fn(StepScalars<double>{});
  else
    fn(StepScalars<float>{});
}

}  // namespace

Optimizer::Optimizer(Parameters& parameters, const AdamWSettings& settings)
    : parameters_(parameters),
      settings_(settings),
      scalars_(parameters.device(), sizeof(StepScalars<double>)),
      partial_(parameters.device(),
               static_cast<size_t>(grad_norm_partials(parameters.size())) * sizeof(double)) {
  fill_bytes(parameters.device(), scalars_.data(), 0, scalars_.bytes());
}

void Optimizer::step() {
  const Parameters& p = parameters_;
  dispatch_acc(acc_of(p.dtype()), [&]<class A>(Tag<A>) {
    auto* scalars = reinterpret_cast<StepScalars<A>*>(scalars_.data());
    const A beta1 = A(settings_.beta1), beta2 = A(settings_.beta2);
    for (const Parameters::Range& r : p.ranges(true))
      fill_bytes(p.device(), p.grads().ptr<A>() + r.begin, 0,
                 static_cast<size_t>(r.end - r.begin) * sizeof(A));
    grad_norm<A>(p.device(), scalars, reinterpret_cast<A*>(partial_.data()), p.grads().ptr<A>(), p.size(),
                 A(settings_.clip), beta1, beta2);
    const auto update = [&](int64_t begin, int64_t end, double weight_decay) {
      AdamWArgs<A> a;
      a.theta = p.masters().ptr<A>() + begin;
      a.m = p.moments1().ptr<A>() + begin, a.v = p.moments2().ptr<A>() + begin;
      a.copy = p.copies() ? p.copies().ptr<bf16>() + begin : nullptr;
      a.grad = p.grads().ptr<A>() + begin, a.scalars = scalars, a.n = end - begin;
      a.beta1 = beta1, a.beta2 = beta2, a.eps = A(settings_.eps), a.weight_decay = A(weight_decay);
      adamw<A>(p.device(), a);
    };
    for (const Parameters::Range& r : p.ranges(false))
      update(r.begin, r.end, r.decays ? settings_.weight_decay : 0);
  });
}

Tensor Optimizer::loss() const {
  size_t offset = 0;
  with_scalars(parameters_, [&]<class S>(S) { offset = offsetof(S, loss); });
  return {scalars_.data() + offset, {}, acc_of(parameters_.dtype()), parameters_.device()};
}

void Optimizer::set_lr(double lr) {
  with_scalars(parameters_, [&]<class S>(S) {
    const auto value = static_cast<decltype(S::lr)>(lr);
    copy_in(parameters_.device(), scalars_.data() + offsetof(S, lr), &value, sizeof value);
  });
}

StepScalars<double> Optimizer::read() const {
  StepScalars<double> out{};
  with_scalars(parameters_, [&]<class S>(S host) {
    copy_out(parameters_.device(), &host, scalars_.data(), sizeof host);
    out = {double(host.lr),          double(host.loss),        double(host.norm), double(host.clip_scale),
           double(host.correction1), double(host.correction2), host.taken,        host.skipped,
           host.skipped_in_row};
  });
  return out;
}

void Optimizer::restore(int32_t taken, int32_t skipped, int32_t skipped_in_row) {
  with_scalars(parameters_, [&]<class S>(S host) {
    host.taken = taken, host.skipped = skipped, host.skipped_in_row = skipped_in_row;
    copy_in(parameters_.device(), scalars_.data(), &host, sizeof host);
  });
}

void check_schedule(const std::string& schedule) {
  for (const char* known : {"cosine", "constant", "linear", "wsd"})
    if (schedule == known) return;
  throw UsageError(cat("--schedule: expected cosine, constant, linear or wsd, got ", schedule));
}

double learning_rate(const std::string& schedule, int64_t s, int64_t steps, double lr, double min_lr,
                     int64_t warmup) {
  if (s < warmup) return lr * static_cast<double>(s + 1) / static_cast<double>(warmup);
  if (schedule == "constant") return lr;
  const int64_t from = schedule == "wsd" ? std::max(warmup, steps - (steps + 9) / 10) : warmup;
  // 0 at the first step after `from`, 1 at the last step.
  const double x = std::clamp(
      static_cast<double>(s - from) / static_cast<double>(std::max<int64_t>(steps - 1 - from, 1)), 0.0, 1.0);
  return min_lr + (lr - min_lr) * (schedule == "cosine" ? 0.5 * (1 + std::cos(std::numbers::pi * x)) : 1 - x);
}

}  // namespace prism
