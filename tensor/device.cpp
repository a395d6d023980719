// The host's side of tensor/device.h.
#include "tensor/device.h"

#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>

namespace prism {

namespace cpu {

MemoryInfo memory_info() {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  size_t free = page * static_cast<size_t>(sysconf(_SC_AVPHYS_PAGES));
  // What files occupy in memory is free, too; only the kernel's own estimate counts it.
  std::ifstream info("/proc/meminfo");
  for (std::string key, rest; info >> key; std::getline(info, rest))
    if (key == "MemAvailable:" && info >> free) free *= 1024;
  return {page * static_cast<size_t>(sysconf(_SC_PHYS_PAGES)), free};
}

// Large blocks lie on large pages where the system has them: a step walks through hundreds of megabytes,
// which in small pages asks for more translations than a core holds.
void* allocate(size_t bytes) {
  constexpr size_t kLargePage = size_t{2} << 20;
  const size_t step = bytes < 8 * kLargePage ? 256 : kLargePage, size = (bytes + step) / step * step;
  void* memory = std::aligned_alloc(step, size);
  PRISM_CHECK(memory, "memory: ", bytes, " bytes needed, ", memory_info().free, " free");
#ifdef MADV_HUGEPAGE
  if (step == kLargePage) madvise(memory, size, MADV_HUGEPAGE);
#endif
  return memory;
}

void release(void* memory) { std::free(memory); }
void fill_bytes(void* memory, int value, size_t bytes) { std::memset(memory, value, bytes); }
void copy_within(void* to, const void* from, size_t bytes) { std::memmove(to, from, bytes); }
void copy_in(void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); }
void copy_out(void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); }
void synchronize() {}
void capture_begin() { PRISM_FAIL("graph: the cpu runs its work at once; only cuda records it"); }
void* capture_end() { return nullptr; }
void graph_launch(void*) {}
void graph_release(void*) {}

// The time itself, in nanoseconds, in the place of an address.
void* mark() {
  return reinterpret_cast<void*>(std::chrono::steady_clock::now().time_since_epoch() /
                                 std::chrono::nanoseconds(1));
}
double milliseconds(void* from, void* to) {
  return static_cast<double>(reinterpret_cast<intptr_t>(to) - reinterpret_cast<intptr_t>(from)) * 1e-6;
}

std::string describe() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);)
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  return "cpu";
}

}  // namespace cpu

bool cuda_usable() {
  if constexpr (!kWithCuda) return false;
  try {
    describe(Device::cuda);
    return true;
  } catch (const Error&) {
    return false;
  }
}

}  // namespace prism
