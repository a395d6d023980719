// Appendix D in numbers: the same scan with exact and with noisy decays, or writes, and how far apart the
// states are.
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "kernels/scan.h"
#include "src/compare.h"
#include "src/files.h"
#include "src/probe.h"
#include "tensor/rng.h"

namespace prism {

namespace {

constexpr int64_t kHeads = 64, kWidth = 16;  // heads are so many independent runs; K = V
constexpr double kNoise = 1e-3;

// Standard normal numbers of one of the streams below.
enum Stream : uint64_t { kKeys, kWrites, kDecayNoise, kWriteNoise };
std::vector<double> normals(Stream stream, int64_t from, int64_t count) {
  std::vector<double> x(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i)
    x[static_cast<size_t>(i)] = random_normal(0, stream, static_cast<uint64_t>(from + i));
  return x;
}

// Unit keys and normal writes, the same for every state; a noisy alpha may exceed 1.
class Scan {
 public:
  Scan(double alpha, bool erases) : alpha_(alpha), beta_(erases ? 1 : 0) {}
  // The state after tokens [from, from + T), from the one before them.
  void advance(std::vector<double>& S, int64_t from, int64_t T, double decay_noise,
               double write_noise) const {
    const int64_t rows = T * kHeads, before = from * kHeads;
    std::vector<double> k = normals(kKeys, before * kWidth, rows * kWidth);
    std::vector<double> w = normals(kWrites, before * kWidth, rows * kWidth);
    std::vector<double> g = normals(kDecayNoise, before, rows);
    const std::vector<double> xi = normals(kWriteNoise, before, rows);
    const std::vector<double> beta(static_cast<size_t>(rows), beta_);
    for (size_t i = 0; i < g.size(); ++i) {
      g[i] = std::log(alpha_ * (1 + decay_noise * g[i]));
      double square = 0;
      for (size_t j = i * kWidth; j < (i + 1) * kWidth; ++j) square += k[j] * k[j];
      for (size_t j = i * kWidth; j < (i + 1) * kWidth; ++j)
        k[j] /= std::sqrt(square), w[j] *= 1 + write_noise * xi[i];
    }
    std::vector<double> o(w.size());
    ScanArgs<double> a;
    a.o = o.data(), a.q = a.k = k.data(), a.w = w.data(), a.g = g.data();
    if (beta_ > 0) a.beta = beta.data();
    a.initial_state = a.final_state = S.data();
    a.B = 1, a.T_len = T, a.H = kHeads, a.K = a.V = kWidth;
    cpu::scan_recurrence_forward(a);
  }

 private:
  double alpha_, beta_;
};

}  // namespace

std::vector<ErrorGrowth> error_growth() {
  std::vector<ErrorGrowth> rows;
  for (const bool erases : {false, true})
    for (const double alpha : {0.9, 0.99, 0.999}) {
      const Scan scan(alpha, erases);
      std::vector<double> exact(kHeads * kWidth * kWidth), decay = exact, writes = exact;
      for (int64_t done = 0, T = 1; T <= 4096; done = T, T *= 4) {
        scan.advance(exact, done, T - done, 0, 0);
        scan.advance(decay, done, T - done, kNoise, 0);
        scan.advance(writes, done, T - done, 0, kNoise);
        const std::span<const double> reference(exact);
        rows.push_back({alpha, erases, T, relative_error(std::span<const double>(decay), reference) / kNoise,
                        relative_error(std::span<const double>(writes), reference) / kNoise});
      }
    }
  return rows;
}

void probe_error_growth(const std::string& json) {
  std::printf(
      "relative error of the state over the relative noise (%g a token), %lld runs\n%-8s %-6s %8s %16s "
      "%16s\n",
      kNoise, static_cast<long long>(kHeads), "alpha", "erases", "T", "noisy decay", "noisy writes");
  std::string lines;
  for (const ErrorGrowth& r : error_growth()) {
    std::printf("%-8g %-6s %8lld %16.2f %16.2f\n", r.alpha, r.erases ? "yes" : "no",
                static_cast<long long>(r.T), r.decay, r.writes);
    lines +=
        nlohmann::ordered_json{{"task", "error-growth"}, {"alpha", r.alpha}, {"erases", r.erases}, {"T", r.T},
                               {"noise", kNoise},        {"decay", r.decay}, {"writes", r.writes}}
            .dump() +
        "\n";
  }
  if (!json.empty()) replace_file(json, [&](OutputFile& file) { file.write(lines); });
}

}  // namespace prism
