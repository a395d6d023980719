// loss.svg from log.jsonl.
#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <sstream>

#include "src/run_log.h"

namespace prism {

namespace {

struct Point {
  double x, y;
};
using Curve = std::vector<Point>;

// One axis: values [low, high] on pixels [from, to], a tick every `step` (1, 2 or 5 times a power of ten).
struct Axis {
  double low, high, step, from, to;

  Axis(double least, double most, int ticks, double from_pixel, double to_pixel)
      : from(from_pixel), to(to_pixel) {
    const double raw = std::max(most - least, 1e-3) / ticks,
                 power = std::pow(10, std::floor(std::log10(raw)));
    step = power * (raw <= power ? 1 : raw <= 2 * power ? 2 : raw <= 5 * power ? 5 : 10);
    low = std::floor(least / step) * step;
    high = std::max(std::ceil(most / step), low / step + 1) * step;
  }
  double operator()(double value) const { return from + (value - low) / (high - low) * (to - from); }
};

constexpr double kWidth = 720, kHeight = 400, kLeft = 56, kRight = 700, kTop = 48, kBottom = 352;

constexpr const char* kHead = R"(<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 400" role="img">
<title>Training and validation loss</title>
<style>
  text { font: 12px system-ui, sans-serif; fill: #57606a }
  .grid { stroke: #d8dee4 }
  .curve { fill: none; stroke-width: 1.8; stroke-linejoin: round }
  .training { stroke: #0969da } .validation { stroke: #bc4c00 } circle.validation { fill: #bc4c00 }
  @media (prefers-color-scheme: dark) {
    text { fill: #9198a1 }
    .grid { stroke: #30363d }
    .training { stroke: #58a6ff } .validation { stroke: #f0883e } circle.validation { fill: #f0883e }
  }
</style>
)";

void draw_curve(std::ostream& svg, const Curve& curve, const Axis& x, const Axis& y, const char* name) {
  svg << "<polyline class=\"curve " << name << "\" points=\"";
  for (const Point& p : curve) svg << x(p.x) << ',' << y(p.y) << ' ';
  svg << "\"/>\n";
}

void draw_legend(std::ostream& svg, double x, const char* name) {
  svg << "<line class=\"curve " << name << "\" x1=\"" << x << "\" x2=\"" << x + 22
      << "\" y1=\"24\" y2=\"24\"/>"
      << "<text x=\"" << x + 28 << "\" y=\"28\">" << name << "</text>\n";
}

std::string drawing(const Curve& training, const Curve& validation) {
  double least = INFINITY, most = -INFINITY, last = 1;
  for (const Curve* curve : {&training, &validation})
    for (const Point& p : *curve)
      least = std::min(least, p.y), most = std::max(most, p.y), last = std::max(last, p.x);
  if (least > most) least = 0, most = 1;
  const Axis x(0, last, 8, kLeft, kRight), y(least, most, 6, kBottom, kTop);

  std::ostringstream svg;
  svg << kHead;
  for (double v = y.low; v < y.high + y.step / 2; v += y.step)
    svg << "<line class=\"grid\" x1=\"" << kLeft << "\" x2=\"" << kRight << "\" y1=\"" << y(v) << "\" y2=\""
        << y(v) << "\"/><text text-anchor=\"end\" x=\"" << kLeft - 8 << "\" y=\"" << y(v) + 4 << "\">"
        << std::round(v / y.step) * y.step << "</text>\n";
  for (double v = x.low; v < x.high + x.step / 2; v += x.step)
    svg << "<text text-anchor=\"middle\" x=\"" << x(v) << "\" y=\"" << kBottom + 20 << "\">"
        << std::llround(v) << "</text>\n";
  svg << "<text text-anchor=\"middle\" x=\"" << (kLeft + kRight) / 2 << "\" y=\"" << kHeight - 10
      << "\">step</text><text x=\"" << kLeft << "\" y=\"28\">loss, nats a token</text>\n";
  draw_curve(svg, training, x, y, "training");
  draw_curve(svg, validation, x, y, "validation");
  for (const Point& p : validation)
    svg << "<circle class=\"validation\" cx=\"" << x(p.x) << "\" cy=\"" << y(p.y) << "\" r=\"2.5\"/>\n";
  draw_legend(svg, kWidth - 230, "training");
  draw_legend(svg, kWidth - 120, "validation");
  svg << "</svg>\n";
  return svg.str();
}

}  // namespace

void draw_losses(const std::string& log_path, const std::string& svg_path) {
  Curve training, validation;
  for (const nlohmann::ordered_json& line : read_log(log_path)) {
    const auto take = [&](const char* key, Curve& curve) {
      if (line.contains(key) && line[key].is_number()) curve.push_back({line["step"], line[key]});
    };
    take("loss", training);
    take("val_loss", validation);
  }
  const std::string svg = drawing(training, validation);
  replace_file(svg_path, [&](OutputFile& file) { file.write(svg); });
}

}  // namespace prism
