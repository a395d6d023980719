// AdamW with clipping against PyTorch's, what a bad step does, and the schedules (SPEC section 9).
#include "optim/optimizer.h"

#include <doctest/doctest.h>

#include <cmath>
#include <cstring>

#include "src/compare.h"
#include "src/safetensors.h"

using namespace prism;

namespace {

// The weights of the fixture: a matrix, which decays, and a bias, which does not.
Parameters matrix_and_bias(DType dtype) {
  Parameters p;
  p.add_matrix({{"matrix", {5, 3}, {Init::normal, 1}}});
  p.add_vector({"bias", {7}, {Init::normal, 1}});
  p.allocate(Device::cpu, dtype, true);
  return p;
}

std::vector<double> read(const SafetensorsFile& file, const std::string& name) {
  std::vector<double> out(static_cast<size_t>(file.info(name).shape.numel()));
  file.read(name, {out.data(), file.info(name).shape, DType::f64, Device::cpu});
  return out;
}

template <class T>
void copy(const double* from, Tensor to) {
  for (int64_t i = 0; i < to.numel(); ++i) to.ptr<T>()[i] = static_cast<T>(from[i]);
}

template <class T>
void follow_pytorch(DType dtype, double tolerance) {
  const SafetensorsFile file("tests/fixtures/adamw.safetensors");
  Parameters p = matrix_and_bias(dtype);
  for (const Parameter& x : p.list()) copy<T>(read(file, "initial." + x.name).data(), p.master(x));
  Optimizer optimizer(p, {});
  const std::vector<double> norms = read(file, "norm"), lrs = read(file, "lr");
  int clipped_steps = 0;
  for (size_t step = 0; step < norms.size(); ++step) {
    CAPTURE(step);
    for (const Parameter& x : p.list()) {
      const std::vector<double> grads = read(file, "grad." + x.name);
      copy<T>(grads.data() + static_cast<int64_t>(step) * x.shape.numel(), p.grad(x));
    }
    optimizer.set_lr(lrs[step]);
    optimizer.step();
    const StepScalars<double> scalars = optimizer.read();
    CHECK(scalars.norm == doctest::Approx(norms[step]).epsilon(tolerance));
    CHECK(scalars.taken == static_cast<int>(step) + 1);
    clipped_steps += scalars.clip_scale < 1;
    for (const Parameter& x : p.list()) {
      CAPTURE(x.name);
      const auto n = static_cast<size_t>(x.shape.numel());
      const std::vector<double> expected = read(file, x.name), clipped = read(file, "clipped." + x.name);
      std::vector<double> grad(n);
      for (size_t i = 0; i < n; ++i)
        grad[i] = scalars.clip_scale * static_cast<double>(p.grad(x).ptr<T>()[i]);
      CHECK(relative_error(std::span<const double>(grad), std::span(clipped).subspan(step * n, n)) <=
            tolerance);
      CHECK(relative_error(std::span<const T>(p.master(x).ptr<T>(), n),
                           std::span(expected).subspan(step * n, n)) <= tolerance);
    }
  }
  CHECK(clipped_steps > 0);
  CHECK(clipped_steps < static_cast<int>(norms.size()));
}

}  // namespace

TEST_CASE("AdamW and clipping follow torch.optim.AdamW and clip_grad_norm_ for ten steps") {
  follow_pytorch<double>(DType::f64, 1e-13);  // the same operations, in another order
  follow_pytorch<float>(DType::f32, 2e-6);    // ten steps of rounding at 6e-8
}

TEST_CASE("a gradient or loss that is not finite changes no weight and no moment, and is counted") {
  Parameters p = matrix_and_bias(DType::f32);
  p.initialise(1);
  Optimizer optimizer(p, {});
  optimizer.set_lr(0.1);
  float* grad = p.grads().ptr<float>();
  const auto bytes = [&](Tensor t) { return std::string(static_cast<char*>(t.data), t.bytes()); };
  const auto state = [&] { return bytes(p.masters()) + bytes(p.moments1()) + bytes(p.moments2()); };
  grad[0] = 1;
  optimizer.step();
  const std::string good = state();
  int skipped = 0;
  for (const float bad : {NAN, INFINITY, -INFINITY, 1e30f}) {  // the square of the last one overflows
    grad[2] = bad;
    optimizer.step();
    CHECK(state() == good);
    CHECK(optimizer.read().skipped_in_row == ++skipped);
  }
  grad[2] = 0;
  *optimizer.loss().ptr<float>() = NAN;
  optimizer.step();
  CHECK(state() == good);
  CHECK(optimizer.read().skipped == 5);
  *optimizer.loss().ptr<float>() = 2;
  optimizer.step();
  CHECK(state() != good);
  CHECK(optimizer.read().taken == 2);
  CHECK(optimizer.read().skipped_in_row == 0);
  CHECK(optimizer.read().skipped == 5);
}

TEST_CASE(
    "schedules: warm-up, then cosine and linear fall to min_lr, constant stays, wsd falls in its last "
    "tenth") {
  const auto lr = [](const char* schedule, int64_t s) {
    return learning_rate(schedule, s, 101, 1.0, 0.1, 10);
  };
  for (const char* schedule : {"cosine", "constant", "linear", "wsd"}) {
    CAPTURE(schedule);
    for (int64_t s = 0; s < 10; ++s)
      CHECK(lr(schedule, s) == doctest::Approx(0.1 * static_cast<double>(s + 1)));
    CHECK(lr(schedule, 10) == 1);
    CHECK(lr(schedule, 100) == doctest::Approx(std::strcmp(schedule, "constant") ? 0.1 : 1));
    for (int64_t s = 10; s < 100; ++s) CHECK(lr(schedule, s + 1) <= lr(schedule, s));
  }
  CHECK(lr("cosine", 55) == doctest::Approx(0.55));  // half way from step 10 to 100
  CHECK(lr("linear", 55) == doctest::Approx(0.55));
  CHECK(lr("cosine", 33) > lr("linear", 33));
  CHECK(lr("wsd", 90) == 1);
  CHECK(lr("wsd", 95) == doctest::Approx(0.55));
  CHECK(learning_rate("cosine", 0, 1, 1.0, 0.1, 0) == 1);  // one step, no warm-up
  CHECK_THROWS_AS(check_schedule("step"), UsageError);
}
