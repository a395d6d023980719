#include "src/bench.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>

#include "kernels/matmul.h"
#include "kernels/scan.h"
#include "src/decoder.h"
#include "src/engine.h"
#include "src/files.h"
#include "src/host.h"
#include "tensor/rng.h"

namespace prism {

namespace {

using Json = nlohmann::ordered_json;

double milliseconds_of(Device device, const std::function<void()>& work) {
  void* from = mark(device);
  work();
  return milliseconds(device, from, mark(device));
}

// The shortest of a few runs after a first one that does not count: what others do on the machine only adds.
double best(Device device, int64_t runs, const std::function<void()>& work) {
  work();
  double shortest = 1e300;
  for (int64_t i = 0; i < runs; ++i) shortest = std::min(shortest, milliseconds_of(device, work));
  return shortest;
}

// Memory of n numbers, uniform in [low, high): a drawn stretch, repeated.
Buffer numbers(Device device, DType dtype, int64_t n, double low, double high) {
  constexpr int64_t stretch = 1 << 16;
  std::vector<double> drawn(static_cast<size_t>(std::min(n, stretch)));
  for (size_t i = 0; i < drawn.size(); ++i) drawn[i] = low + (high - low) * random_uniform(1, 0, i);
  Buffer memory(device, static_cast<size_t>(n * size_of(dtype)));
  for (int64_t at = 0; at < n; at += stretch) {
    const int64_t count = std::min(stretch, n - at);
    drawn.resize(static_cast<size_t>(count));
    from_host({memory.data() + at * size_of(dtype), {count}, dtype, device}, drawn);
  }
  return memory;
}

// FLOP/s of a product of two n x n matrices.
double product_rate(Device device, DType dtype, int64_t n) {
  const Buffer a = numbers(device, dtype, n * n, -1, 1), b = numbers(device, dtype, n * n, -1, 1),
               c = numbers(device, dtype, n * n, 0, 1);
  double ms = 0;
  dispatch(dtype, [&]<class T>(Tag<T>) {
    const auto view = [&](const Buffer& m) { return Rows<T>{reinterpret_cast<T*>(m.data()), n}; };
    ms = best(device, 5,
              [&] { matmul<T>(device, view(c), {.a = view(a), .b = view(b), .m = n, .n = n, .k = n}); });
  });
  return 2.0 * static_cast<double>(n) * static_cast<double>(n) * static_cast<double>(n) / ms * 1e3;
}

// The better of two sizes: the rate every share below is of.
double gemm_rate(Device device, DType dtype) {
  const bool cuda = device == Device::cuda;
  return std::max(product_rate(device, dtype, cuda ? 4096 : 1024),
                  product_rate(device, dtype, cuda ? 8192 : 2048));
}

// --- a training step

double scan_flops(int64_t H, int64_t K, int64_t V, int64_t L) {  // a token and layer, forward and reverse
  return 6.0 * static_cast<double>(K * V * (3 + L) * H);
}

int64_t rank_of(const Config& c, int64_t layer) { return c.mixer(layer).starts_with("prism") ? c.rank : 1; }

double model_flops(const Model& model) {  // a token
  const Config& c = model.config();
  double flops = 0;
  for (const Parameter& p : model.parameters().list())
    if (p.decays && (c.tie_word_embeddings || p.name != "model.embeddings.weight"))
      flops += 6.0 * static_cast<double>(p.shape.numel());
  for (int64_t i = 0; i < c.num_hidden_layers; ++i)
    flops += scan_flops(c.num_heads, c.head_dim, c.value_dim(), rank_of(c, i));
  return flops;
}

// The least a kernel's calls in one step of n tokens must move and compute; absent: not worth counting.
struct Cost {
  double bytes = 0, flops = 0;
};
std::map<std::string, Cost> step_costs(const Model& model, int64_t tokens) {
  const Config& c = model.config();
  const auto real = [](int64_t x) { return static_cast<double>(x); };
  const double n = real(tokens), layers = real(c.num_hidden_layers), D = real(c.hidden_size);
  const double HK = real(c.num_heads * c.head_dim), HV = real(c.num_heads * c.value_dim()),
               F = real(c.feed_forward());
  const double L = real(rank_of(c, 0)), channels = 2 * HK + HV + (L > 1 ? D : 0);
  const double scan = n * layers * scan_flops(c.num_heads, c.head_dim, c.value_dim(), rank_of(c, 0));
  const double products = n * model_flops(model) - scan, size = real(model.parameters().size());
  const double b = n * layers * real(size_of(model.dtype()));  // bytes of one column in all layers
  const double in = 2 * HK + (L - 1) * HK + L * HV;            // columns the scan reads
  return {{"matmul", {0, products * 2 / 3}},
          {"matmul_acc", {0, products / 3}},
          {"conv_forward", {b * 2 * channels, 0}},
          {"conv_backward", {b * 3 * channels, 0}},
          {"add_norm_forward", {b * 12 * D, 0}},
          {"add_norm_backward", {b * 8 * D, 0}},
          {"gated_norm_forward", {b * 6 * HV, 0}},
          {"gated_norm_backward", {b * 5 * HV, 0}},
          {"swiglu_forward", {b * 6 * F, 0}},
          {"swiglu_backward", {b * 5 * F, 0}},
          {"solver_forward", {b * 4 * L * HV, 0}},
          {"solver_backward", {b * 3 * L * HV, 0}},
          {"l2norm_forward", {b * 4 * (L - 1) * HK, 0}},
          {"l2norm_backward", {b * 3 * (L - 1) * HK, 0}},
          {"scan_forward", {b * (in + HV), scan / 3}},
          {"scan_backward", {b * (2 * in + HV), scan * 2 / 3}},
          {"cross_entropy", {n * real(size_of(model.dtype()) * 2 * c.vocab_size), 0}},
          {"adamw", {size * 28, 0}}};
}

// The kernels of one step by name, as kernel_hook meets them.
struct Profile {
  struct Call {
    const char* kernel;
    void *from, *to;
  };
  static inline std::vector<Call> calls;
  static void hook(const char* kernel, Device device, bool before) {
    if (before)
      calls.push_back({kernel, mark(device), nullptr});
    else
      calls.back().to = mark(device);
  }
};

Json print_profile(const Model& model, int64_t tokens, const std::function<void()>& step) {
  struct Sum {
    int calls = 0;
    double ms = 0;
  };
  Profile::calls.clear();
  kernel_hook = Profile::hook;
  const double all = milliseconds_of(model.device(), step);
  kernel_hook = nullptr;
  std::map<std::string, Sum> sums;
  for (const Profile::Call& call : Profile::calls) {
    Sum& sum = sums[call.kernel];
    ++sum.calls, sum.ms += milliseconds(model.device(), call.from, call.to);
  }
  std::vector<std::pair<std::string, Sum>> sorted(sums.begin(), sums.end());
  std::sort(sorted.begin(), sorted.end(),
            [](const auto& x, const auto& y) { return x.second.ms > y.second.ms; });
  const std::map<std::string, Cost> costs = step_costs(model, tokens);
  Json rows;
  double rest = all;
  for (const auto& [kernel, sum] : sorted) {
    const auto at = costs.find(kernel);
    const Cost cost = at == costs.end() ? Cost{} : at->second;
    std::printf("    %-22s %5d calls %9.2f ms %5.1f %%", kernel.c_str(), sum.calls, sum.ms,
                100 * sum.ms / all);
    if (cost.bytes > 0) std::printf(" %9.1f GB/s", cost.bytes / sum.ms * 1e-6);
    if (cost.flops > 0) std::printf(" %9.1f GFLOP/s", cost.flops / sum.ms * 1e-6);
    std::printf("\n");
    rows.push_back({{"kernel", kernel},
                    {"calls", sum.calls},
                    {"ms", sum.ms},
                    {"bytes", cost.bytes},
                    {"flops", cost.flops}});
    rest -= sum.ms;
  }
  std::printf("    %-22s             %9.2f ms %5.1f %%\n", "between kernels", rest, 100 * rest / all);
  return rows;
}

Json bench_training(const BenchOptions& o, const std::string& name) {
  Model model(find_preset(name).config, o.device, o.dtype, true);
  model.parameters().initialise(1);
  Optimizer optimizer(model.parameters(), {});
  optimizer.set_lr(1e-4);
  Batch batch;
  batch.B = o.batch, batch.T = o.seq, batch.scored = o.batch * o.seq;
  for (int64_t i = 0; i < batch.scored; ++i) {
    const auto id = [&](uint64_t stream) {
      return static_cast<int32_t>(random_below(static_cast<uint64_t>(model.config().vocab_size), 1, stream,
                                               static_cast<uint64_t>(i)));
    };
    batch.tokens.push_back(id(0)), batch.targets.push_back(id(1)), batch.start.push_back(0);
  }
  Engine engine(model, batch.B, batch.T);
  engine.load({&batch, 1});
  const auto step = [&] { engine.train_step(optimizer); };
  step();
  const double ms = best(o.device, o.steps, step), gemm = gemm_rate(o.device, o.dtype);  // back to back
  const double tokens = static_cast<double>(batch.scored), rate = model_flops(model) * tokens / ms * 1e3;
  const double GiB =
      static_cast<double>(engine.arena_bytes() + engine.input_bytes() + model.parameters().bytes()) /
      (1 << 30);
  std::printf("%-12s %3lld x %-6lld %9.1f ms %10.0f tokens/s %9.1f GFLOP/s %6.1f %% of GEMM %7.2f GiB\n",
              name.c_str(), static_cast<long long>(batch.B), static_cast<long long>(batch.T), ms,
              tokens / ms * 1e3, rate * 1e-9, 100 * rate / gemm, GiB);
  engine.use_graph = false;
  const Json kernels = print_profile(model, batch.scored, step);
  return {{"preset", name},
          {"batch", batch.B},
          {"seq", batch.T},
          {"ms", ms},
          {"tokens_per_s", tokens / ms * 1e3},
          {"flops_per_s", rate},
          {"gemm_flops_per_s", gemm},
          {"share", rate / gemm},
          {"GiB", GiB},
          {"kernels", kernels}};
}

// --- the scan alone

struct ScanShape {
  int64_t B, T, H, K, V, L;
};
struct ScanTimes {
  double forward, both;  // milliseconds
};

template <class T>
ScanTimes time_scan(Device device, const ScanShape& s) {
  using A = acc_t<T>;
  const int64_t n = s.B * s.T * s.H, states = s.B * s.H * ((s.T + 63) / 64) * s.V * s.K;
  const double key = std::sqrt(3 / static_cast<double>(s.K));  // length 1 on average
  std::vector<Buffer> buffers;
  const auto take = [&]<class X>(X*& pointer, int64_t count, double low, double high) {
    buffers.push_back(numbers(device, dtype_of<std::remove_const_t<X>>, count, low, high));
    pointer = reinterpret_cast<X*>(buffers.back().data());
  };
  ScanArgs<T> a;
  a.B = s.B, a.T_len = s.T, a.H = s.H, a.K = s.K, a.V = s.V, a.L = s.L;
  ScanGrads<T> d;
  take(a.o, n * s.V, 0, 1), take(a.q, n * s.K, -key, key), take(a.k, n * s.K, -key, key);
  take(a.w, n * s.L * s.V, -1, 1), take(a.beta, n, 0, 1), take(a.g, n, -0.1, 0);
  take(d.dq, n * s.K, 0, 1), take(d.dk, n * s.K, 0, 1), take(d.dw, n * s.L * s.V, 0, 1);
  take(d.dbeta, n, 0, 1), take(d.dg, n, 0, 1), take(d.d_o, n * s.V, -1, 1);
  if (s.L > 1) {
    take(a.kappa, n * (s.L - 1) * s.K, -key, key);
    take(d.dkappa, n * (s.L - 1) * s.K, 0, 1);
  }
  A* chunk_states = nullptr;
  take(chunk_states, states, 0, 1);
  const Buffer workspace(
      device, std::max(scan_workspace_bytes(device, a, false), scan_workspace_bytes(device, a, true)));
  a.workspace = workspace.data();
  ScanArgs<T> reverse = a;
  reverse.states = chunk_states;
  const auto forward = [&] { scan_forward(device, a); };
  return {best(device, 5, forward), best(device, 5, [&] { forward(), scan_backward(device, reverse, d); })};
}

ScanTimes time_scan(const BenchOptions& o, const ScanShape& s) {
  ScanTimes times{};
  dispatch(o.dtype, [&]<class T>(Tag<T>) {
    if constexpr (on_cpu<T> || on_cuda<T>) times = time_scan<T>(o.device, s);
  });
  return times;
}

Json bench_scan(const BenchOptions& o, double gemm) {
  const bool cuda = o.device == Device::cuda;
  const auto shape = [&](int64_t B, int64_t T, int64_t L) {
    return cuda ? ScanShape{B, T, 4, 128, 256, L} : ScanShape{B, T, 4, 64, 128, L};
  };
  std::vector<ScanShape> shapes = {shape(cuda ? 32 : 1, 2048, 1), shape(cuda ? 32 : 1, 2048, 3)};
  shapes.push_back(shape(1, cuda ? 65536 : 16384, 1));
  Json rows;
  for (const ScanShape& s : shapes) {
    const ScanTimes t = time_scan(o, s);
    const double flops = scan_flops(s.H, s.K, s.V, s.L) * static_cast<double>(s.B * s.T);
    const auto rate = [&](double part, double ms) { return part * flops / ms * 1e3; };
    std::printf(
        "scan B %lld T %-6lld H %lld K %lld V %lld rank %lld: forward %8.2f ms %5.1f %%, forward + reverse "
        "%8.2f ms %5.1f %% of GEMM\n",
        static_cast<long long>(s.B), static_cast<long long>(s.T), static_cast<long long>(s.H),
        static_cast<long long>(s.K), static_cast<long long>(s.V), static_cast<long long>(s.L), t.forward,
        100 * rate(1.0 / 3, t.forward) / gemm, t.both, 100 * rate(1, t.both) / gemm);
    rows.push_back({{"B", s.B},
                    {"T", s.T},
                    {"H", s.H},
                    {"K", s.K},
                    {"V", s.V},
                    {"rank", s.L},
                    {"forward_ms", t.forward},
                    {"both_ms", t.both},
                    {"share_forward", rate(1.0 / 3, t.forward) / gemm},
                    {"share", rate(1, t.both) / gemm}});
  }
  return rows;
}

// --- one stream

Json bench_generation(const BenchOptions& o, const std::string& name) {
  Model model(find_preset(name).config, o.device, o.dtype, false);
  model.parameters().initialise(1);
  Decoder decoder(model);
  const int32_t id = 1;
  constexpr int64_t tokens = 64;
  const double ms = best(o.device, 3, [&] {
    for (int64_t i = 0; i < tokens; ++i) decoder.feed({&id, 1});
  });
  const double rate = static_cast<double>(tokens) / ms * 1e3;
  std::printf("generation, one stream, %-12s %8.0f tokens/s\n", name.c_str(), rate);
  return {{"preset", name}, {"tokens_per_s", rate}};
}

}  // namespace

void bench(const BenchOptions& options) {
  BenchOptions o = options;
  const bool cuda = o.device == Device::cuda;
  if (o.presets.empty())
    o.presets = cuda ? std::vector<std::string>{"gdn-119m", "prism-124m"}
                     : std::vector<std::string>{"tiny", "gdn-15m", "prism-15m"};
  if (o.batch == 0) o.batch = cuda ? 32 : 4;
  if (o.seq == 0) o.seq = cuda ? 2048 : 512;
  if (o.steps == 0) o.steps = cuda ? 10 : 5;
  for (const std::string& name : o.presets) find_preset(name);
  const double gemm = gemm_rate(o.device, o.dtype);
  Json all = {{"device", describe(o.device)}, {"dtype", name_of(o.dtype)}, {"gemm_flops_per_s", gemm}};
  std::printf("%s, %s: dense products %.1f GFLOP/s\n", describe(o.device).c_str(), name_of(o.dtype),
              gemm * 1e-9);
  for (const std::string& name : o.presets) all["training"].push_back(bench_training(o, name));
  all["scan"] = bench_scan(o, gemm);
  for (const std::string& name : o.presets) all["generation"].push_back(bench_generation(o, name));
  if (!o.json.empty()) replace_file(o.json, [&](OutputFile& file) { file.write(all.dump(1) + "\n"); });
}

}  // namespace prism
