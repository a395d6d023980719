#include "src/plot.h"

#include <algorithm>
#include <cmath>
#include <sstream>

#include "src/progress.h"

namespace prism {

namespace {

// One axis: its ticks, the first and last of them at the ends, on pixels [from, to].
struct Axis {
  std::vector<double> ticks;
  bool log;
  double from, to;

  double operator()(double value) const {
    const auto at = [&](double x) { return log ? std::log(x) : x; };
    const double low = at(ticks.front()), high = at(ticks.back());
    return from + (at(value) - low) / std::max(high - low, 1e-12) * (to - from);
  }
};

// About `count` ticks around [least, most], 1, 2 or 5 times a power of ten apart.
std::vector<double> even_ticks(double least, double most, int count) {
  const double raw = std::max(most - least, 1e-3) / count, power = std::pow(10, std::floor(std::log10(raw)));
  const double step = power * (raw <= power ? 1 : raw <= 2 * power ? 2 : raw <= 5 * power ? 5 : 10);
  const double first = std::floor(least / step), last = std::max(std::ceil(most / step), first + 1);
  std::vector<double> ticks;
  for (double i = first; i <= last; ++i) ticks.push_back(i * step);
  return ticks;
}
// 1, 2 and 5 times powers of ten around [least, most].
std::vector<double> log_ticks(double least, double most) {
  std::vector<double> ticks;
  for (double power = std::pow(10, std::floor(std::log10(least)));; power *= 10)
    for (const double tick : {power, 2 * power, 5 * power}) {
      if (tick <= least) ticks.clear();
      ticks.push_back(tick);
      if (tick >= most) return ticks;
    }
}

constexpr double kLeft = 76, kRight = 694, kBottom = 352, kHeight = 400, kLegend = 44, kLegendRow = 18;
constexpr size_t kAcross = 3;  // entries of the legend in a row

constexpr const char* kHead = R"(<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 400" role="img">
<style>
  text { font: 12px system-ui, sans-serif; fill: #57606a }
  .grid { stroke: #d8dee4 }
  .curve { fill: none; stroke: currentColor; stroke-width: 1.8; stroke-linejoin: round }
  circle { fill: currentColor }
  .c0 { color: #0969da } .c1 { color: #bc4c00 } .c2 { color: #1a7f37 } .c3 { color: #8250df }
  .c4 { color: #cf222e } .c5 { color: #9a6700 } .c6 { color: #1b7c83 } .c7 { color: #57606a }
  @media (prefers-color-scheme: dark) {
    text { fill: #9198a1 }
    .grid { stroke: #30363d }
    .c0 { color: #58a6ff } .c1 { color: #f0883e } .c2 { color: #3fb950 } .c3 { color: #bc8cff }
    .c4 { color: #ff7b72 } .c5 { color: #d29922 } .c6 { color: #39c5cf } .c7 { color: #9198a1 }
  }
</style>
)";

std::string label(double x) {
  if (std::abs(x) >= 1000) return grouped(std::llround(x));
  std::ostringstream text;
  text << std::round(x * 1e6) / 1e6;
  return text.str();
}
std::string text_at(double x, double y, const char* anchor, const std::string& text) {
  std::ostringstream svg;
  svg << "<text text-anchor=\"" << anchor << "\" x=\"" << x << "\" y=\"" << y << "\">" << text << "</text>\n";
  return svg.str();
}

}  // namespace

std::string svg_of(const Plot& plot) {
  double least = INFINITY, most = -INFINITY, last = 1;
  std::vector<double> xs;
  for (const Plot::Line& line : plot.lines)
    for (const Plot::Point& p : line.points) {
      least = std::min(least, p.y), most = std::max(most, p.y), last = std::max(last, p.x);
      xs.push_back(p.x);
    }
  if (least > most) least = plot.log ? 1 : 0, most = 1, xs = {1};
  std::sort(xs.begin(), xs.end());
  xs.erase(std::unique(xs.begin(), xs.end()), xs.end());
  const double top = kLegend + kLegendRow * std::ceil(static_cast<double>(plot.lines.size()) / kAcross);
  const Axis x{plot.log ? xs : even_ticks(0, last, 8), plot.log, kLeft, kRight};
  const Axis y{plot.log ? log_ticks(least, most) : even_ticks(least, most, 6), plot.log, kBottom, top};

  std::ostringstream svg;
  svg << kHead << "<title>" << plot.title << "</title>\n";
  for (double v : y.ticks)
    svg << "<line class=\"grid\" x1=\"" << kLeft << "\" x2=\"" << kRight << "\" y1=\"" << y(v) << "\" y2=\""
        << y(v) << "\"/>" << text_at(kLeft - 8, y(v) + 4, "end", label(v));
  for (double v : x.ticks) svg << text_at(x(v), kBottom + 20, "middle", label(v));
  svg << text_at((kLeft + kRight) / 2, kHeight - 10, "middle", plot.x_name)
      << text_at(kLeft, 20, "start", plot.y_name);
  for (size_t i = 0; i < plot.lines.size(); ++i) {
    const Plot::Line& line = plot.lines[i];
    svg << "<g class=\"c" << i % 8 << "\"><polyline class=\"curve\" points=\"";
    for (const Plot::Point& p : line.points) svg << x(p.x) << ',' << y(p.y) << ' ';
    svg << "\"/>\n";
    if (line.dots)
      for (const Plot::Point& p : line.points)
        svg << "<circle cx=\"" << x(p.x) << "\" cy=\"" << y(p.y) << "\" r=\"2.5\"/>\n";
    const double at = kLeft + static_cast<double>(i % kAcross) * (kRight - kLeft) / kAcross,
                 height = kLegend + kLegendRow * static_cast<double>(i / kAcross) - 6;
    svg << "<line class=\"curve\" x1=\"" << at << "\" x2=\"" << at + 18 << "\" y1=\"" << height << "\" y2=\""
        << height << "\"/>" << text_at(at + 23, height + 4, "start", line.name) << "</g>\n";
  }
  svg << "</svg>\n";
  return svg.str();
}

}  // namespace prism
