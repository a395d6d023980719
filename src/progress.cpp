#include "src/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace prism {

bool Progress::is_terminal() { return ::isatty(STDOUT_FILENO); }

void Progress::show(const std::string& line) {
  const auto now = Clock::now();
  if (!terminal_ || now - shown_ < std::chrono::milliseconds(100)) return;
  shown_ = now, live_ = true;
  winsize window{};
  ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &window);
  const int width = window.ws_col > 1 ? window.ws_col - 1 : 79;  // a wrapped line could not be taken back
  std::printf("\r%.*s\033[K", width, line.c_str());
  std::fflush(stdout);
}

void Progress::keep(const std::string& line) {
  clear();
  std::printf("%s\n", line.c_str());
  std::fflush(stdout);
}

void Progress::clear() {
  if (live_) std::printf("\r\033[K");
  live_ = false;
}

std::string duration(double seconds) {
  const auto s = static_cast<long long>(std::min(std::round(seconds), 1e15));
  char text[40];
  if (s >= 3600)
    std::snprintf(text, sizeof text, "%lldh%02lldm", s / 3600, s / 60 % 60);
  else if (s >= 60)
    std::snprintf(text, sizeof text, "%lldm%02llds", s / 60, s % 60);
  else
    std::snprintf(text, sizeof text, "%llds", s);
  return text;
}

std::string grouped(int64_t number) {
  std::string digits = std::to_string(number);
  for (auto at = static_cast<int64_t>(digits.size()) - 3; at > (number < 0); at -= 3)
    digits.insert(static_cast<size_t>(at), ",");
  return digits;
}

std::string byte_count(size_t bytes) {
  const double mega = static_cast<double>(bytes) * 1e-6;
  char text[40];
  std::snprintf(text, sizeof text, mega < 1000 ? "%.1f MB" : "%.2f GB", mega < 1000 ? mega : mega * 1e-3);
  return text;
}

}  // namespace prism
