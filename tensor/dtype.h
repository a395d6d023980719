// Number types. Kernels have a storage type T and an accumulation type acc_t<T>: float and bf16 accumulate in
// float, double in double.
#pragma once

#include <bit>
#include <cstdint>
#include <ostream>

#include "tensor/check.h"

#ifdef __CUDACC__
#define PRISM_HD __host__ __device__
#else
#define PRISM_HD
#endif

namespace prism {

// bfloat16 as bits: the upper half of a float, rounded to nearest even; NaN stays NaN. Same layout as
// __nv_bfloat16.
struct bf16 {
  uint16_t bits;

  bf16() = default;
  PRISM_HD explicit bf16(float value) {
#ifdef __CUDA_ARCH__
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
#else
    const uint32_t u = std::bit_cast<uint32_t>(value);
    const bool nan = (u & 0x7fffffffu) > 0x7f800000u;
    bits = static_cast<uint16_t>((nan ? u | 0x400000u : u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
#endif
  }
  PRISM_HD explicit operator float() const {
    const uint32_t u = static_cast<uint32_t>(bits) << 16;
#ifdef __CUDA_ARCH__
    return __uint_as_float(u);
#else
    return std::bit_cast<float>(u);
#endif
  }
};

enum class DType : uint8_t { f64, f32, bf16, i32 };
enum class Device : uint8_t { cpu, cuda };

inline constexpr int64_t size_of(DType t) { return t == DType::f64 ? 8 : t == DType::bf16 ? 2 : 4; }
inline const char* name_of(DType t) {
  constexpr const char* names[] = {"f64", "f32", "bf16", "i32"};
  return names[static_cast<int>(t)];
}
inline const char* name_of(Device d) { return d == Device::cpu ? "cpu" : "cuda"; }
inline std::ostream& operator<<(std::ostream& out, DType t) { return out << name_of(t); }
inline std::ostream& operator<<(std::ostream& out, Device d) { return out << name_of(d); }

template <class T>
struct TypeInfo;
template <>
struct TypeInfo<double> {
  static constexpr DType dtype = DType::f64;
  using acc = double;
};
template <>
struct TypeInfo<float> {
  static constexpr DType dtype = DType::f32;
  using acc = float;
};
template <>
struct TypeInfo<bf16> {
  static constexpr DType dtype = DType::bf16;
  using acc = float;
};
template <>
struct TypeInfo<int32_t> {
  static constexpr DType dtype = DType::i32;
  using acc = int32_t;
};

template <class T>
inline constexpr DType dtype_of = TypeInfo<T>::dtype;
template <class T>
using acc_t = typename TypeInfo<T>::acc;
inline constexpr DType acc_of(DType t) { return t == DType::bf16 ? DType::f32 : t; }

}  // namespace prism
