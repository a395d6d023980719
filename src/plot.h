// Line charts as SVG, for light and dark pages.
#pragma once

#include <string>
#include <vector>

namespace prism {

struct Plot {
  struct Point {
    double x, y;
  };
  struct Line {
    std::string name;
    std::vector<Point> points = {};
    bool dots = false;  // on the points
  };
  std::string title, x_name, y_name;
  std::vector<Line> lines;
  bool log = false;  // both axes; all numbers are then above 0
};
std::string svg_of(const Plot& plot);

}  // namespace prism
