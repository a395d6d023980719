#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>

#include "src/commands.h"
#include "src/safetensors.h"

namespace prism {

namespace {

struct DiffOptions {
  std::string a, b;
  double tolerance = 0;
};

// "[3,0,17]" for an element's number in row-major order.
std::string place(const Shape& shape, int64_t element) {
  std::string text;
  for (int i = shape.rank() - 1; i >= 0; --i) {
    text = cat(element % shape[i], i + 1 < shape.rank() ? "," : "", text);
    element /= shape[i];
  }
  return "[" + text + "]";
}

// Prints a tensor's line and returns ||a - b|| / ||b||, or ||a - b|| where b is 0; NaN when either holds one.
double compare(const SafetensorsFile& a, const SafetensorsFile& b, const std::string& name) {
  const Shape shape = a.info(name).shape;
  const Buffer memory_a(Device::cpu, static_cast<size_t>(shape.numel()) * sizeof(double));
  const Buffer memory_b(Device::cpu, static_cast<size_t>(shape.numel()) * sizeof(double));
  const Tensor values_a{memory_a.data(), shape, DType::f64, Device::cpu};
  const Tensor values_b{memory_b.data(), shape, DType::f64, Device::cpu};
  a.read(name, values_a);
  b.read(name, values_b);
  const double *x = values_a.ptr<double>(), *ref = values_b.ptr<double>();

  // Long, since squares may leave the range of double, and a norm of infinity would hide every difference.
  long double difference = 0, norm = 0;
  double worst = 0;
  int64_t at = 0;
  for (int64_t i = 0; i < shape.numel(); ++i) {
    const double d = x[i] == ref[i] ? 0 : std::abs(x[i] - ref[i]);  // equal infinities do not differ
    difference += static_cast<long double>(d) * d;
    if (std::isfinite(ref[i])) norm += static_cast<long double>(ref[i]) * ref[i];
    if (d > worst || (std::isnan(d) && !std::isnan(worst))) worst = d, at = i;
  }
  const auto relative = static_cast<double>(std::sqrt(norm > 0 ? difference / norm : difference));
  std::printf("%-56s %10.3e", name.c_str(), relative);
  if (worst != 0) std::printf("  %s  %.9g  %.9g", place(shape, at).c_str(), x[at], ref[at]);
  std::printf("\n");
  return relative;
}

void diff(const DiffOptions& options) {
  const SafetensorsFile a(options.a), b(options.b);
  int compared = 0, above = 0, mismatched = 0;
  std::printf("%-56s %10s  worst element, A's and B's value of it\n", "tensor", "relative");
  for (const std::string& name : a.names()) {
    if (!b.contains(name)) {
      std::printf("%-56s only in %s\n", name.c_str(), options.a.c_str()), ++mismatched;
    } else if (a.info(name).shape != b.info(name).shape) {
      std::printf("%-56s %s\n", name.c_str(), cat(a.info(name).shape, " and ", b.info(name).shape).c_str());
      ++mismatched;
    } else {
      ++compared;
      if (!(compare(a, b, name) <= options.tolerance)) ++above;
    }
  }
  for (const std::string& name : b.names())
    if (!a.contains(name)) std::printf("%-56s only in %s\n", name.c_str(), options.b.c_str()), ++mismatched;
  std::printf("%d compared, %d above %g, %d in one file only or of two shapes\n", compared, above,
              options.tolerance, mismatched);
  if (above || mismatched) throw Exit{1};
}

}  // namespace

void add_diff(CLI::App& app) {
  const auto options = std::make_shared<DiffOptions>();
  CLI::App* command = app.add_subcommand("diff", "Compare the tensors of two safetensors files");
  command->add_option("A", options->a, "safetensors file")->required();
  command->add_option("B", options->b, "safetensors file to compare with, the reference")->required();
  command
      ->add_option("--tolerance", options->tolerance,
                   "largest ||a-b|| / ||b|| of a tensor (||a-b|| where b is 0) that counts as equal")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  command->footer(
      "Exits with 1 when a tensor differs by more, or is in one file only.\n"
      "Example: prism diff ours.safetensors theirs.safetensors --tolerance 1e-9");
  command->callback([options] { diff(*options); });
}

}  // namespace prism
