#include "src/bench.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "kernels/attention.h"
#include "kernels/matmul.h"
#include "kernels/scan.h"
#include "src/bench_steps.h"
#include "src/decoder.h"
#include "src/host.h"
#include "src/progress.h"
#include "tensor/rng.h"

namespace prism {

namespace {

using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;
const Clock::time_point kStarted = Clock::now();  // of the process, all but a few milliseconds

double real(int64_t x) { return static_cast<double>(x); }

double median(Device device, int64_t runs, const std::function<void()>& work) {
  work();
  std::vector<double> times;
  for (int64_t i = 0; i < runs; ++i) times.push_back(milliseconds_of(device, work));
  return median_of(std::move(times));
}

// Memory of n numbers, uniform in [low, high): a drawn stretch, repeated.
Buffer numbers(Device device, DType dtype, int64_t n, double low, double high) {
  constexpr int64_t stretch = 1 << 16;
  std::vector<double> drawn(static_cast<size_t>(std::min(n, stretch)));
  for (size_t i = 0; i < drawn.size(); ++i) drawn[i] = low + (high - low) * random_uniform(1, 0, i);
  Buffer memory(device, static_cast<size_t>(n * size_of(dtype)));
  for (int64_t at = 0; at < n; at += stretch) {
    drawn.resize(static_cast<size_t>(std::min(stretch, n - at)));
    from_host({memory.data() + at * size_of(dtype), {std::min(stretch, n - at)}, dtype, device}, drawn);
  }
  return memory;
}

// The arguments of a kernel timed alone.
struct Operands {
  Device device;
  std::vector<Buffer> buffers = {};
  template <class X>
  void take(X*& pointer, int64_t count, double low, double high) {
    if (count == 0) return;
    buffers.push_back(numbers(device, dtype_of<std::remove_const_t<X>>, count, low, high));
    pointer = reinterpret_cast<X*>(buffers.back().data());
  }
};

class Bench {
 public:
  explicit Bench(const BenchOptions& options) : o_(options), cuda_(options.device == Device::cuda) {}

  void train(const std::string& preset);
  void scan(const std::string& sizes);
  void attention(const std::string& sizes);
  void linearity();
  void generate(const std::string& preset, int64_t tokens);
  void header() {
    measure_products();
    row({{"device", describe(o_.device)}, {"dtype", name_of(o_.dtype)}, {"GEMM_GFLOP/s", products_ * 1e-9}});
  }

 private:
  void row(const Json& row);
  void measure_products();
  void profile(const Model& model, const Batch& batch, const std::function<void()>& step);
  struct Times {
    double forward, both;  // milliseconds
  };
  Times time_scan(int64_t B, int64_t T, int64_t H, int64_t K, int64_t V, int64_t L) const;
  template <class T>
  Times time_scan(ScanArgs<T> args) const;
  template <class T>
  Times time_attention(AttentionArgs<T> args) const;

  BenchOptions o_;
  bool cuda_;
  double products_ = 0;  // FLOP/s of square products: the best seen, of which every share is
  std::string columns_;  // of the table being printed
};

void Bench::row(const Json& row) {
  if (o_.json) {
    std::printf("%s\n", row.dump().c_str());
    return;
  }
  std::string columns, values;
  for (const auto& [name, value] : row.items()) {
    const std::string text = value.is_string()           ? value.get<std::string>()
                             : value.is_number_integer() ? std::to_string(value.get<int64_t>())
                                                         : cat(std::round(value.get<double>() * 1e3) / 1e3);
    const size_t width = std::max<size_t>(name.size(), value.is_string() ? 22 : 10);
    const std::string gap(width - std::min(width, text.size()), ' '), fill(width - name.size(), ' ');
    columns += "  " + (value.is_string() ? name + fill : fill + name);
    values += "  " + (value.is_string() ? text + gap : gap + text);
  }
  if (columns != columns_) std::printf("\n%s\n", columns.c_str());
  columns_ = columns;
  std::printf("%s\n", values.c_str());
  std::fflush(stdout);
}

void Bench::measure_products() {
  for (const int64_t n : cuda_ ? std::vector<int64_t>{4096, 8192} : std::vector<int64_t>{1024, 2048}) {
    const Buffer a = numbers(o_.device, o_.dtype, n * n, -1, 1),
                 b = numbers(o_.device, o_.dtype, n * n, -1, 1),
                 c = numbers(o_.device, o_.dtype, n * n, 0, 1);
    dispatch(o_.dtype, [&]<class T>(Tag<T>) {
      const auto view = [&](const Buffer& m) { return Rows<T>{reinterpret_cast<T*>(m.data()), n}; };
      const double ms = median(o_.device, 5, [&] {
        matmul<T>(o_.device, view(c), {.a = view(a), .b = view(b), .m = n, .n = n, .k = n});
      });
      products_ = std::max(products_, 2 * real(n) * real(n) * real(n) / ms * 1e3);
    });
  }
}

// --- a training step

double scan_flops(int64_t H, int64_t K, int64_t V, int64_t L) {  // a token and layer, forward and reverse
  return 6 * real(K * V * (3 + L) * H);
}
double attention_flops(int64_t columns, int64_t T) {  // the same; on average a token sees half of its row
  return 6 * real(columns * T);
}
int64_t rank_of(const Config& c, int64_t layer) { return c.mixer(layer).starts_with("prism") ? c.rank : 1; }

// The scan, or the serial solver's five products with a vector and two outer products.
double write_flops(const Config& c, int64_t layer) {
  if (c.mixer(layer) == "ttt-mlp") return 6 * 7 * 4 * real(c.head_dim * c.head_dim * c.num_heads);
  return scan_flops(c.scan_heads(layer), c.head_dim, c.value_dim(), rank_of(c, layer));
}

int64_t attention_layers(const Config& c) {
  int64_t count = 0;
  for (int64_t i = 0; i < c.num_hidden_layers; ++i) count += c.mixer(i) == "attention";
  return count;
}

double model_flops(const Model& model, int64_t T) {  // a token
  const Config& c = model.config();
  double flops = 0;
  for (const Parameter& p : model.parameters().list())
    if (p.decays && (c.tie_word_embeddings || p.name != "model.embeddings.weight"))
      flops += 6 * real(p.shape.numel());
  for (int64_t i = 0; i < c.num_hidden_layers; ++i)
    flops += c.mixer(i) == "attention" ? attention_flops(c.hidden_size, T) : write_flops(c, i);
  return flops;
}

// The least that a kernel's calls in one step of n tokens move and compute; of kernels not here, little.
struct Cost {
  double bytes = 0, flops = 0;
};
std::map<std::string, Cost> step_costs(const Model& model, int64_t tokens, int64_t T) {
  const Config& c = model.config();
  const double n = real(tokens), D = real(c.hidden_size), F = real(c.feed_forward());
  const double HK = real(c.num_heads * c.head_dim), HV = real(c.num_heads * c.value_dim());
  const double L = real(rank_of(c, 0)), channels = 2 * HK + HV + (L > 1 ? D : 0);
  const double attending = real(attention_layers(c)), scanning = real(c.num_hidden_layers) - attending;
  const double scan = n * scanning * write_flops(c, 0);
  const double attention = n * attending * attention_flops(c.hidden_size, T);
  const double products = n * model_flops(model, T) - scan - attention;
  const double bytes = real(size_of(model.dtype()));
  // One column in every layer; in those of each kind.
  const double b = n * real(c.num_hidden_layers) * bytes, s = n * scanning * bytes, t = n * attending * bytes;
  const double in = (1 + L) * HK + L * HV;  // columns the scan reads
  return {{"matmul", {0, products * 2 / 3}},
          {"matmul_acc", {0, products / 3}},
          {"conv_forward", {s * 2 * channels, 0}},
          {"conv_backward", {s * 3 * channels, 0}},
          {"add_norm_forward", {b * (L > 1 ? 10 : 8) * D, 0}},
          {"add_norm_backward", {b * (L > 1 ? 9 : 10) * D, 0}},
          {"gated_norm_forward", {s * 3 * HV, 0}},
          {"gated_norm_backward", {s * 6 * HV, 0}},
          {"swiglu_forward", {b * 3 * F, 0}},
          {"swiglu_backward", {b * 6 * F, 0}},
          {"solver_forward", {s * 4 * L * HV, 0}},
          {"solver_backward", {s * 3 * L * HV, 0}},
          {"l2norm_forward", {s * 4 * (L - 1) * HK, 0}},
          {"l2norm_backward", {s * 3 * (L - 1) * HK, 0}},
          {"scan_forward", {s * (in + HV), scan / 3}},
          {"scan_backward", {s * (2 * in + HV), scan * 2 / 3}},
          {"ttt_forward", {s * 4 * HK, scan / 3}},
          {"ttt_backward", {s * 7 * HK, scan * 2 / 3}},
          {"rotary", {t * 8 * D, 0}},
          {"attention_forward", {t * 4 * D, attention / 3}},
          {"attention_backward", {t * 8 * D, attention * 2 / 3}},
          {"cross_entropy", {n * bytes * 2 * real(c.vocab_size), 0}},
          {"adamw", {real(model.parameters().size()) * 28, 0}}};
}

// One call of a kernel in the profiled step, as kernel_hook meets them.
struct Call {
  const char* kernel;
  void *from, *to;
};
std::vector<Call> profiled;

void Bench::profile(const Model& model, const Batch& batch, const std::function<void()>& step) {
  profiled.clear();
  kernel_hook = [](const char* kernel, Device device, bool before) {
    if (before)
      profiled.push_back({kernel, mark(device), nullptr});
    else
      profiled.back().to = mark(device);
  };
  const double all = milliseconds_of(o_.device, step);
  kernel_hook = nullptr;
  std::map<std::string, std::pair<double, int>> sums;  // milliseconds, calls
  double between = all;
  for (const Call& call : profiled) {
    const double ms = milliseconds(o_.device, call.from, call.to);
    auto& sum = sums[call.kernel];
    sum.first += ms, ++sum.second, between -= ms;
  }
  std::vector<std::pair<std::pair<double, int>, std::string>> sorted;
  for (const auto& [kernel, sum] : sums) sorted.push_back({sum, kernel});
  std::sort(sorted.rbegin(), sorted.rend());
  std::map<std::string, Cost> costs = step_costs(model, batch.scored, batch.T);
  for (const auto& [sum, kernel] : sorted) {
    const auto& [ms, count] = sum;
    row({{"kernel", kernel},
         {"calls", count},
         {"ms", ms},
         {"share_of_step", ms / all},
         {"GB/s", costs[kernel].bytes / ms * 1e-6},
         {"GFLOP/s", costs[kernel].flops / ms * 1e-6}});
  }
  row({{"kernel", "between kernels"},
       {"calls", 0},
       {"ms", between},
       {"share_of_step", between / all},
       {"GB/s", 0.0},
       {"GFLOP/s", 0.0}});
}

void Bench::train(const std::string& preset) {
  TrainingSteps training(preset_config(preset), o_.device, o_.dtype,
                         o_.batch ? o_.batch
                         : cuda_  ? 32
                                  : 4,
                         o_.seq  ? o_.seq
                         : cuda_ ? 2048
                                 : 512);
  const Model& model = training.model;
  const Batch& batch = training.batch;
  const auto step = [&] { training.step(); };
  step();
  synchronize(o_.device);
  const double first = std::chrono::duration<double>(Clock::now() - kStarted).count();
  step();
  const double ms = median(o_.device, o_.steps ? o_.steps : cuda_ ? 8 : 5, step);
  measure_products();
  const double rate = model_flops(model, batch.T) * real(batch.scored) / ms * 1e3;
  if (o_.profile) {
    training.engine->use_graph = false;
    profile(model, batch, step);
  }
  row({{"preset", preset},
       {"batch", batch.B},
       {"seq", batch.T},
       {"params", model.parameters().count()},
       {"ms", ms},
       {"tokens_per_s", std::round(real(batch.scored) / ms * 1e3)},
       {"GFLOP/s", rate * 1e-9},
       {"share_of_GEMM", rate / products_},
       {"GiB", static_cast<double>(training.bytes()) / (1 << 30)},
       {"first_step_s", first}});
}

// --- the scan and attention alone

template <class T>
Bench::Times Bench::time_scan(ScanArgs<T> a) const {
  const int64_t n = a.B * a.T_len * a.H;
  const double key = std::sqrt(3 / real(a.K));  // length 1 on average
  Operands operands{o_.device};
  const auto take = [&](auto*& pointer, int64_t count, double low, double high) {
    operands.take(pointer, count, low, high);
  };
  ScanGrads<T> d;
  take(a.o, n * a.V, 0, 1), take(a.q, n * a.K, -key, key), take(a.k, n * a.K, -key, key);
  take(a.kappa, n * (a.L - 1) * a.K, -key, key), take(a.w, n * a.L * a.V, -1, 1);
  take(a.beta, n, 0, 1), take(a.g, n, -0.1, 0);
  take(d.dq, n * a.K, 0, 1), take(d.dk, n * a.K, 0, 1), take(d.dkappa, n * (a.L - 1) * a.K, 0, 1);
  take(d.dw, n * a.L * a.V, 0, 1), take(d.dbeta, n, 0, 1), take(d.dg, n, 0, 1), take(d.d_o, n * a.V, -1, 1);
  const Buffer workspace(o_.device, std::max(scan_workspace_bytes(o_.device, a, false),
                                             scan_workspace_bytes(o_.device, a, true)));
  a.workspace = workspace.data();
  ScanArgs<T> reverse = a;
  take(reverse.states, a.B * a.H * a.chunks() * a.V * a.K, 0, 1);
  const auto forward = [&] { scan_forward(o_.device, a); };
  return {median(o_.device, 5, forward),
          median(o_.device, 5, [&] { forward(), scan_backward(o_.device, reverse, d); })};
}

Bench::Times Bench::time_scan(int64_t B, int64_t T, int64_t H, int64_t K, int64_t V, int64_t L) const {
  Times times{};
  dispatch(o_.dtype, [&]<class X>(Tag<X>) {
    if constexpr (on_cpu<X> || on_cuda<X>) {
      ScanArgs<X> a;
      a.B = B, a.T_len = T, a.H = H, a.K = K, a.V = V, a.L = L;
      times = time_scan(a);
    }
  });
  return times;
}

void Bench::scan(const std::string& sizes) {
  long long B = 0, T = 0, H = 0, K = 0, V = 0, L = 0;
  int end = 0;
  const int read =
      std::sscanf(sizes.c_str(), "%lld:%lld:%lld:%lld:%lld:%lld%n", &B, &T, &H, &K, &V, &L, &end);
  if (read != 6 || sizes.c_str()[end] || std::min({B, T, H, K, V, L}) < 1)
    throw UsageError(cat("--scan: expected B:T:H:K:V:rank, got ", sizes));
  if (products_ == 0) header();
  const Times t = time_scan(B, T, H, K, V, L);
  const double flops = scan_flops(H, K, V, L) * real(B * T);
  row({{"scan", sizes},
       {"forward_ms", t.forward},
       {"forward_backward_ms", t.both},
       {"forward_share_of_GEMM", flops / 3 / t.forward * 1e3 / products_},
       {"share_of_GEMM", flops / t.both * 1e3 / products_}});
}

template <class T>
Bench::Times Bench::time_attention(AttentionArgs<T> a) const {
  const int64_t n = a.B * a.T_len, columns = a.H * a.W;
  Operands operands{o_.device};
  const auto fused = [&](auto& q, auto& k, auto& v) {  // one matrix
    operands.take(q.data, n * 3 * columns, -1, 1);
    q.stride = 3 * columns;
    k = {q.data + columns, q.stride}, v = {q.data + 2 * columns, q.stride};
  };
  AttentionGrads<T> d;
  fused(a.q, a.k, a.v), fused(d.dq, d.dk, d.dv);
  operands.take(a.o, n * columns, 0, 1), operands.take(d.d_o, n * columns, -1, 1);
  operands.take(a.lse, n * a.H, 0, 1), operands.take(d.delta, n * a.H, 0, 1);
  const auto forward = [&] { attention_forward(o_.device, a); };
  return {median(o_.device, 5, forward),
          median(o_.device, 5, [&] { forward(), attention_backward(o_.device, a, d); })};
}

void Bench::attention(const std::string& sizes) {
  long long B = 0, T = 0, H = 0, W = 0;
  int end = 0;
  if (std::sscanf(sizes.c_str(), "%lld:%lld:%lld:%lld%n", &B, &T, &H, &W, &end) != 4 || sizes.c_str()[end] ||
      std::min({B, T, H, W}) < 1)
    throw UsageError(cat("--attention: expected B:T:H:width, got ", sizes));
  if (products_ == 0) header();
  Times t{};
  dispatch(o_.dtype, [&]<class X>(Tag<X>) {
    if constexpr (on_cpu<X> || on_cuda<X>) {
      AttentionArgs<X> a;
      a.B = B, a.T_len = T, a.H = H, a.W = W;
      t = time_attention(a);
    }
  });
  const double flops = attention_flops(H * W, T) * real(B * T);
  row({{"attention", sizes},
       {"forward_ms", t.forward},
       {"forward_backward_ms", t.both},
       {"forward_GFLOP/s", flops / 3 / t.forward * 1e-6},
       {"GFLOP/s", flops / t.both * 1e-6}});
}

// The time of one long row over that of as many tokens in eight rows.
void Bench::linearity() {
  const Times one = time_scan(1, 16384, 4, 64, 128, 1), eight = time_scan(8, 2048, 4, 64, 128, 1);
  row({{"linearity", "1 x 16384 / 8 x 2048"},
       {"forward", one.forward / eight.forward},
       {"forward_backward", one.both / eight.both}});
}

// --- one stream

void Bench::generate(const std::string& preset, int64_t tokens) {
  Model model(preset_config(preset), o_.device, o_.dtype, false);
  model.parameters().initialise(1);
  Decoder decoder(model);
  const int32_t id = 1;
  for (int64_t i = 0; i < 8; ++i) decoder.feed({&id, 1});
  const double ms = milliseconds_of(o_.device, [&] {
    for (int64_t i = 0; i < tokens; ++i) decoder.feed({&id, 1});
  });
  row({{"preset", preset}, {"generate", tokens}, {"tokens_per_s", std::round(real(tokens) / ms * 1e3)}});
}

}  // namespace

TrainingSteps::TrainingSteps(const Config& config, Device device, DType dtype, int64_t B, int64_t T)
    : model(config, device, dtype, true), optimizer(model.parameters(), {}) {
  model.parameters().initialise(1);
  optimizer.set_lr(1e-4);
  batch.B = B, batch.T = T, batch.scored = B * T;
  const auto vocab = static_cast<uint64_t>(config.vocab_size);
  for (uint64_t i = 0; i < static_cast<uint64_t>(batch.scored); ++i) {
    batch.tokens.push_back(static_cast<int32_t>(random_below(vocab, 1, 0, i)));
    batch.targets.push_back(static_cast<int32_t>(random_below(vocab, 1, 1, i)));
    batch.start.push_back(0);
  }
  const size_t needed = Engine::measure(model, B, T, true), free = memory_info(device).free;
  PRISM_CHECK(needed <= free, "memory: ", byte_count(needed), " needed, ", byte_count(free), " free");
  engine = std::make_unique<Engine>(model, B, T);
  engine->load({&batch, 1});
}

Config preset_config(const std::string& text) {
  std::vector<std::string> parts;
  std::istringstream split(text);
  for (std::string part; std::getline(split, part, ':');) parts.push_back(part);
  const Preset& preset = find_preset(parts.empty() ? "" : parts[0]);
  return with_settings(preset.config, {parts.begin() + 1, parts.end()});
}

double milliseconds_of(Device device, const std::function<void()>& work) {
  void* from = mark(device);
  work();
  return milliseconds(device, from, mark(device));
}

double median_of(std::vector<double> times) {
  const auto middle = times.begin() + static_cast<int64_t>(times.size()) / 2;
  std::nth_element(times.begin(), middle, times.end());
  return *middle;
}

void bench(const BenchOptions& options) {
  if (!options.lengths.empty()) return bench_lengths(options);
  BenchOptions o = options;
  const bool cuda = o.device == Device::cuda,
             all = o.presets.empty() && o.scans.empty() && o.attentions.empty() && o.generate == 0;
  if (all) {
    o.presets = cuda ? std::vector<std::string>{"gdn-119m", "prism-124m"}
                     : std::vector<std::string>{"tiny", "gdn-15m", "prism-15m"};
    o.scans =
        cuda ? std::vector<std::string>{"32:2048:4:128:256:1", "32:2048:4:128:256:3", "1:65536:4:128:256:1"}
             : std::vector<std::string>{"1:2048:4:64:128:1", "1:2048:4:64:128:3"};
    o.attentions = {cuda ? "32:2048:12:64" : "1:1024:4:64"};
    o.profile = true;
  }
  for (const std::string& name : o.presets) preset_config(name);
  Bench bench(o);
  if (all) bench.header();
  for (const std::string& preset : o.presets)
    if (o.generate == 0) bench.train(preset);
  for (const std::string& sizes : o.scans) bench.scan(sizes);
  for (const std::string& sizes : o.attentions) bench.attention(sizes);
  if (all) bench.linearity();
  for (const std::string& preset : o.presets)
    if (all || o.generate > 0) bench.generate(preset, o.generate ? o.generate : 64);
}

}  // namespace prism
