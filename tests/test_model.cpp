// The whole model against its PyTorch float64 twin: loss, logits and every gradient, for every mixer, solver
// choice and ablation (tests/reference/ writes the fixtures).
#include <doctest/doctest.h>

#include <filesystem>

#include "src/compare.h"
#include "src/engine.h"
#include "src/safetensors.h"

using namespace prism;

namespace {

std::vector<double> read_f64(const SafetensorsFile& file, const std::string& name) {
  const Shape shape = file.info(name).shape;
  std::vector<double> out(static_cast<size_t>(shape.numel()));
  file.read(name, {out.data(), shape, DType::f64, Device::cpu});
  return out;
}

std::vector<std::string> fixtures() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator("tests/fixtures"))
    if (entry.is_directory()) names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace

TEST_CASE(
    "loss, logits and every gradient equal the PyTorch twin's within 1e-9 for every mixer, solver choice and "
    "ablation") {
  REQUIRE(fixtures().size() >= 20);
  for (const std::string& name : fixtures()) {
    CAPTURE(name);
    const std::string dir = "tests/fixtures/" + name;
    Model model(read_config(dir + "/config.json"), Device::cpu, DType::f64, true);
    const SafetensorsFile weights(dir + "/model.safetensors"), expected(dir + "/expected.safetensors");
    for (const Parameter& p : model.parameters().list()) weights.read(p.name, model.parameters().master(p));
    CHECK(weights.names().size() == model.parameters().list().size());

    const Shape logits_shape = expected.info("logits").shape;
    Batch batch;
    batch.B = logits_shape[0], batch.T = logits_shape[1];
    std::vector<int32_t> stream(static_cast<size_t>(batch.B * batch.T + 1));
    expected.read("tokens", {stream.data(), {batch.B * batch.T + 1}, DType::i32, Device::cpu});
    batch.tokens.assign(stream.begin(), stream.end() - 1);
    batch.targets.assign(stream.begin() + 1, stream.end());
    batch.scored = batch.B * batch.T;
    const auto separator = expected.metadata().find("separator");
    const int32_t opens = separator == expected.metadata().end() ? -1 : std::stoi(separator->second);
    for (int64_t b = 0; b < batch.B; ++b)
      for (int32_t t = 0, start = 0; t < batch.T; ++t) {
        if (batch.tokens[static_cast<size_t>(b * batch.T + t)] == opens) start = t;
        batch.start.push_back(start);
      }

    Engine engine(model, batch.B, batch.T);
    double loss = 0;
    Activations activations;
    engine.load({&batch, 1});
    engine.gradients({&loss, {}, DType::f64, Device::cpu}, &activations);
    const auto compare = [&](const std::string& tensor, std::span<const double> x) {
      CAPTURE(tensor);
      const std::vector<double> ref = read_f64(expected, tensor);
      CHECK(relative_error(x, std::span<const double>(ref)) <=
            1e-9);  // float64 on both sides: 1e-12 or so is seen
    };
    compare("loss", {&loss, 1});
    compare("logits", activations.logits);
    for (const Parameter& p : model.parameters().list()) {
      const Tensor grad = model.parameters().grad(p);
      compare("grad." + p.name, {grad.ptr<double>(), static_cast<size_t>(grad.numel())});
    }
  }
}
