// Counter-based random numbers: a value depends on (seed, stream, index) alone, so any element can be drawn
// in any order, on any thread, again after a resume.
#pragma once

#include <cmath>
#include <cstdint>

namespace prism {

// 64 well-mixed bits: three rounds of the SplitMix64 finaliser (Steele et al. 2014), one for each counter.
inline uint64_t random_bits(uint64_t seed, uint64_t stream, uint64_t index) {
  const auto mix = [](uint64_t z) {
    z += 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  };
  return mix(mix(mix(seed) ^ stream) ^ index);
}

// Uniform in [0, 1), 53 bits.
inline double random_uniform(uint64_t seed, uint64_t stream, uint64_t index) {
  return static_cast<double>(random_bits(seed, stream, index) >> 11) * 0x1p-53;
}

// Standard normal, by Box and Muller from the uniforms 2 index and 2 index + 1.
inline double random_normal(uint64_t seed, uint64_t stream, uint64_t index) {
  const double u = 1.0 - random_uniform(seed, stream, 2 * index);  // in (0, 1]
  const double v = random_uniform(seed, stream, 2 * index + 1);
  return std::sqrt(-2.0 * std::log(u)) * std::cos(2.0 * 3.14159265358979323846 * v);
}

// Uniform integer in [0, n), n > 0; the bias of the remainder is below n / 2^64.
inline uint64_t random_below(uint64_t n, uint64_t seed, uint64_t stream, uint64_t index) {
  return random_bits(seed, stream, index) % n;
}

}  // namespace prism
