// What a long job says while it runs, and numbers as people read them.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace prism {

// Lines on standard output. On a terminal the last one is live: the next one takes its place.
class Progress {
 public:
  ~Progress() { clear(); }
  // A live line, at most ten times a second; elsewhere than on a terminal it is not shown.
  void show(const std::string& line);
  // A line that stays.
  void keep(const std::string& line);
  bool terminal() const { return terminal_; }

 private:
  using Clock = std::chrono::steady_clock;
  void clear();
  const bool terminal_ = is_terminal();
  static bool is_terminal();
  bool live_ = false;
  Clock::time_point shown_{};
};

std::string duration(double seconds);  // "1h02m", "2m05s", "12s"
std::string grouped(int64_t number);   // "65,536"
std::string byte_count(size_t bytes);  // "27.4 MB"

}  // namespace prism
