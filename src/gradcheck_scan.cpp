// The scan by itself: the token recurrence against finite differences, the chunked form against the
// recurrence for every setting, length and width.
#include "src/gradcheck.h"
#include "src/scan_case.h"

namespace prism {

namespace {

void check_recurrence(Row& row) {
  for (ScanCase c : scan_settings()) {
    if (c.decay == ScanDecay::mixed) continue;  // a difference cannot step around g = -inf
    c.B = 1, c.T = 7, c.K = 3, c.V = 5;
    ScanData<double> data(c);
    cpu::scan_recurrence_forward(data.args());
    cpu::scan_recurrence_backward(data.args(), data.grads());
    std::vector<Differentiated> inputs;
    const auto add = [&](const char* name, std::vector<double>& x, const std::vector<double>& gradient) {
      if (!x.empty()) inputs.push_back({name, x, gradient});
    };
    add("q", data.q, data.dq), add("k", data.k, data.dk), add("kappa", data.kappa, data.dkappa);
    add("w", data.w, data.dw), add("beta", data.beta, data.dbeta), add("g", data.g, data.dg);
    add("initial_state", data.initial_state, data.dinitial_state);
    std::vector<std::string> outputs = {"o"};
    if (c.states) outputs.push_back("final_state");
    compare_with_differences(
        row, std::move(inputs), outputs,
        [&] {
          cpu::scan_recurrence_forward(data.args());
          std::vector<double> sums(outputs.size());
          for (size_t i = 0; i < data.o.size(); ++i) sums[0] += data.o[i] * data.d_o[i];
          for (size_t i = 0; i < data.dfinal_state.size(); ++i)
            sums[1] += data.final_state[i] * data.dfinal_state[i];
          return sums;
        },
        64);
  }
}

// On the inputs as T holds them.
template <class T>
void check_chunks(Row& row, Device device, const ScanCase& c, double tolerance) {
  ScanData<T> chunked(c);
  ScanData<double> exact(chunked);
  DeviceScan<T>(device, chunked).run();
  cpu::scan_recurrence_forward(exact.args());
  cpu::scan_recurrence_backward(exact.args(), exact.grads());
  chunked.compare(exact, [&](const char* name, auto& x, auto& reference) {
    if (!reference.empty()) row.compare(name, converted<double>(x), reference, tolerance);
  });
}

struct Sweep {
  std::string name;
  std::vector<ScanCase> cases;
};

// `aligned`: widths are multiples of 8 and chunks have 64 tokens, as the card's kernels want them.
std::vector<Sweep> sweeps(bool aligned) {
  const std::vector<int64_t> chunks = aligned ? std::vector<int64_t>{64} : std::vector<int64_t>{1, 16, 64};
  Sweep settings{"scan in chunks, every setting", {}}, lengths{"scan in chunks, every length", {}},
      widths{"scan in chunks, every width", {}};
  for (ScanCase c : scan_settings())
    for (int64_t C : chunks) {
      c.C = C, c.T = 67, c.K = aligned ? 24 : 5, c.V = aligned ? 40 : 7;
      settings.cases.push_back(c);
    }
  for (int64_t T : {1, 2, 15, 16, 17, 63, 64, 65, 131})
    for (int64_t C : chunks)
      for (int64_t L : {1, 2, 3, 4})
        for (bool documents : {false, true}) {
          ScanCase c;
          c.T = T, c.C = C, c.L = L, c.documents = documents, c.decay = ScanDecay::mixed;
          c.K = aligned ? 64 : 17, c.V = aligned ? 32 : 33, c.seed = static_cast<uint64_t>(100 * T + C);
          lengths.cases.push_back(c);
        }
  const auto some = aligned ? std::vector<int64_t>{16, 24, 40, 64, 72, 96, 128, 136, 200, 256}
                            : std::vector<int64_t>{1, 3, 8, 16, 33, 64};
  for (int64_t K : some)
    for (int64_t V : some) {
      ScanCase c;
      c.B = 1, c.T = 70, c.K = K, c.V = V, c.L = 1 + (K + V) / 8 % 4, c.documents = true;
      c.C = aligned ? 64 : 16;
      c.seed = static_cast<uint64_t>(1000 * K + V);
      widths.cases.push_back(c);
    }
  return {settings, lengths, widths};
}

}  // namespace

void check_scan(Table& table) {
  const Device device = table.options.device;
  const DType dtype = table.options.dtype;
  if (dtype == DType::f64) table.row("scan, token by token", "finite differences", check_recurrence);
  for (const Sweep& sweep : sweeps(device == Device::cuda)) {
    const auto sweep_in = [&]<class T>(Tag<T>, double tolerance) {
      table.row(cat(sweep.name, ", ", dtype_of<T>), "recurrence in f64, same inputs", [=](Row& row) {
        for (const ScanCase& c : sweep.cases) check_chunks<T>(row, device, c, tolerance);
      });
    };
    if (dtype == DType::f64)
      sweep_in(Tag<double>{}, 1e-11);  // reassociation: a few hundred roundings of 1e-16
    if (dtype == DType::bf16)
      sweep_in(Tag<bf16>{}, 2e-2);
    else
      sweep_in(Tag<float>{}, 5e-6);
  }
}

}  // namespace prism
