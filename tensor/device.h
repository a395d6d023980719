// Memory and order of work on a device. On cuda a thread has a stream of its own, to which all its work goes,
// and a model belongs to one thread; copies to and from the host wait for the stream.
#pragma once

#include <cstddef>
#include <string>
#include <utility>

#include "tensor/dispatch.h"

namespace prism {

struct MemoryInfo {
  size_t total, free;  // bytes
};

// Fresh memory, 256-byte aligned; throws Error with the size asked for and what is free.
PRISM_DEVICE_FN(void*, allocate, (size_t bytes), (bytes))
PRISM_DEVICE_FN(void, release, (void* memory), (memory))
PRISM_DEVICE_FN(void, fill_bytes, (void* memory, int value, size_t bytes), (memory, value, bytes))
// Copies on one device, to the device from host memory, and back; the latter two return when the data has
// arrived.
PRISM_DEVICE_FN(void, copy_within, (void* to, const void* from, size_t bytes), (to, from, bytes))
PRISM_DEVICE_FN(void, copy_in, (void* to, const void* from_host, size_t bytes), (to, from_host, bytes))
PRISM_DEVICE_FN(void, copy_out, (void* to_host, const void* from, size_t bytes), (to_host, from, bytes))
PRISM_DEVICE_FN(void, synchronize, (), ())
PRISM_DEVICE_FN(MemoryInfo, memory_info, (), ())
// "NVIDIA H200, compute capability 9.0" or the processor's name. On cuda throws one line when there is no
// driver, no card, or no machine code for this card in the binary.
PRISM_DEVICE_FN(std::string, describe, (), ())

// Launches between begin and end are recorded, not run; the graph repeats them with the same addresses. cuda
// only.
PRISM_DEVICE_FN(void, capture_begin, (), ())
PRISM_DEVICE_FN(void*, capture_end, (), ())
PRISM_DEVICE_FN(void, graph_launch, (void* graph), (graph))
PRISM_DEVICE_FN(void, graph_release, (void* graph), (graph))

// A moment in the device's order of work, and the time between two of them, which waits for the second and
// lets go of both.
PRISM_DEVICE_FN(void*, mark, (), ())
PRISM_DEVICE_FN(double, milliseconds, (void* from, void* to), (from, to))

// True when a CUDA card can be used; never throws.
bool cuda_usable();

// Which kernels run where there are two forms: the readable one, or the one tuned for the tensor cores.
enum class KernelChoice : uint8_t { simple, fast };
inline KernelChoice kernel_choice = KernelChoice::fast;

// Owned memory on one device.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Device device, size_t bytes) : device_(device), bytes_(bytes), data_(allocate(device, bytes)) {}
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Buffer() {
    if (data_) release(device_, data_);
  }

  char* data() const { return static_cast<char*>(data_); }
  size_t bytes() const { return bytes_; }
  Device device() const { return device_; }

 private:
  void swap(Buffer& other) {
    std::swap(device_, other.device_);
    std::swap(bytes_, other.bytes_);
    std::swap(data_, other.data_);
  }
  Device device_ = Device::cpu;
  size_t bytes_ = 0;
  void* data_ = nullptr;
};

// A recorded sequence of launches.
class Graph {
 public:
  Graph() = default;
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  ~Graph() {
    if (graph_) graph_release(device_, graph_);
  }
  explicit operator bool() const { return graph_ != nullptr; }
  // Records what fn() launches. fn must not wait for the device, nor take memory from it.
  template <class Fn>
  void record(Device device, const Fn& fn) {
    device_ = device;
    capture_begin(device);
    try {
      fn();
    } catch (...) {
      try {
        graph_release(device, capture_end(device));
      } catch (const Error&) {  // a broken recording cannot be ended; the first error says what broke it
      }
      throw;
    }
    graph_ = capture_end(device);
  }
  void launch() const { graph_launch(device_, graph_); }

 private:
  Device device_ = Device::cuda;
  void* graph_ = nullptr;
};

}  // namespace prism
