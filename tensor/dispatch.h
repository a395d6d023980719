// From run-time dtype and device to one function. This file holds the only #ifdef for CUDA in the engine.
#pragma once

#include <type_traits>

#include "tensor/dtype.h"

namespace prism {

#ifdef PRISM_CUDA
inline constexpr bool kWithCuda = true;
#else
inline constexpr bool kWithCuda = false;
#endif

// The storage types each device computes in.
template <class T>
inline constexpr bool on_cpu = !std::is_same_v<T, bf16>;
template <class T>
inline constexpr bool on_cuda = kWithCuda && !std::is_same_v<T, double>;

template <class T>
struct Tag {
  using type = T;
};

// Calls fn(Tag<T>{}) with T the floating storage type `dtype` names.
template <class Fn>
void dispatch(DType dtype, Fn&& fn) {
  switch (dtype) {
    case DType::f64: return fn(Tag<double>{});
    case DType::f32: return fn(Tag<float>{});
    case DType::bf16: return fn(Tag<bf16>{});
    case DType::i32: break;
  }
  PRISM_FAIL("dispatch: expected a floating type, got ", dtype);
}

// The same for accumulation types: float and double.
template <class Fn>
void dispatch_acc(DType dtype, Fn&& fn) {
  if (dtype == DType::f64) return fn(Tag<double>{});
  PRISM_CHECK(dtype == DType::f32, "dispatch: expected an accumulation type, got ", dtype);
  fn(Tag<float>{});
}

[[noreturn]] inline void no_kernel(const char* op, Device device, DType dtype) {
  if (device == Device::cuda && !kWithCuda)
    PRISM_FAIL(op, ": this build has no CUDA engine (nvcc was not found when it was made); use --device cpu");
  PRISM_FAIL(op, ": no ", dtype, " kernel on ", device,
             "; the cpu computes in f32 and f64, cuda in f32 and bf16");
}

// Called before and after every kernel while it is set: how bench times the parts of a step.
inline void (*kernel_hook)(const char* kernel, Device device, bool before) = nullptr;

struct HookedCall {
  const char* kernel;
  Device device;
  HookedCall(const char* name, Device where) : kernel(name), device(where) {
    if (kernel_hook) kernel_hook(kernel, device, true);
  }
  ~HookedCall() {
    if (kernel_hook) kernel_hook(kernel, device, false);
  }
};

}  // namespace prism

#define PRISM_STRIP(...) __VA_ARGS__
#define PRISM_THEN(...) __VA_OPT__(, ) __VA_ARGS__

// Declares one kernel: cpu::name<T>, cuda::name<T>, and the chooser name<T>(device, ...).
//   PRISM_KERNEL(add, (T * y, const T* a, const T* b, int64_t n), (y, a, b, n))
// The definitions stand in kernels/*.cpp and kernels/*.cu.
#define PRISM_KERNEL(name, params, args)                              \
  namespace cpu {                                                     \
  template <class T>                                                  \
  void name params;                                                   \
  }                                                                   \
  namespace cuda {                                                    \
  template <class T>                                                  \
  void name params;                                                   \
  }                                                                   \
  template <class T>                                                  \
  inline void name(::prism::Device device, PRISM_STRIP params) {      \
    const ::prism::HookedCall hooked(#name, device);                  \
    if constexpr (::prism::on_cpu<T>)                                 \
      if (device == ::prism::Device::cpu) return cpu::name<T> args;   \
    if constexpr (::prism::on_cuda<T>)                                \
      if (device == ::prism::Device::cuda) return cuda::name<T> args; \
    ::prism::no_kernel(#name, device, ::prism::dtype_of<T>);          \
  }

// At the end of kernels/*.cpp and kernels/*.cu, in their namespace: the types of on_cpu and on_cuda.
#define PRISM_ON_CPU(name)                    \
  template decltype(name<float>) name<float>; \
  template decltype(name<double>) name<double>
#define PRISM_ON_CUDA(name)                   \
  template decltype(name<float>) name<float>; \
  template decltype(name<bf16>) name<bf16>

// PRISM_KERNEL for functions without a storage type.
#define PRISM_DEVICE_FN(type, name, params, args)              \
  namespace cpu {                                              \
  type name params;                                            \
  }                                                            \
  namespace cuda {                                             \
  type name params;                                            \
  }                                                            \
  inline type name(::prism::Device device PRISM_THEN params) { \
    if (device == ::prism::Device::cpu) return cpu::name args; \
    if constexpr (::prism::kWithCuda) return cuda::name args;  \
    ::prism::no_kernel(#name, device, ::prism::DType::f32);    \
  }
