// SPDX-License-Identifier: Apache-2.0
// Small pure functions on bits that the host and a GPU must compute alike: mixers, and the two 16-bit float formats.
#pragma once

#include <bit>
#include <cstdint>

#if defined(__CUDACC__)
#define GW_HD __host__ __device__
#else
#define GW_HD
#endif

namespace gradwire {

GW_HD inline uint32_t float_bits(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  return std::bit_cast<uint32_t>(x);
#endif
}

GW_HD inline float bits_float(uint32_t b) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(b);
#else
  return std::bit_cast<float>(b);
#endif
}

inline constexpr uint32_t kInfBits = 0x7f800000u;  // |x| at or above it is Inf or NaN
inline constexpr uint32_t kMarker = 0x7fc00000u;   // the one NaN that may stand in a message as f32
inline constexpr uint32_t kMarkerF16 = 0x7e00u;    // ... as f16
inline constexpr uint32_t kMarkerBf16 = 0x7fc0u;   // ... as bf16

// A bijective 32-bit mixer (two rounds of xor-shift and multiply).
GW_HD inline uint32_t mix32(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  x ^= x >> 16;
  return x;
}

// A bijective 64-bit mixer (the finaliser of SplitMix64).
GW_HD inline uint64_t mix64(uint64_t x) {
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9ull;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebull;
  x ^= x >> 31;
  return x;
}

// Exact widening of an f16, subnormals included.
GW_HD inline float f16_to_f32(uint16_t h) {
  const uint32_t sign = uint32_t{h & 0x8000u} << 16, magnitude = h & 0x7fffu;
  if (magnitude >= 0x7c00u) return bits_float(sign | kInfBits | (magnitude & 0x3ffu) << 13);
  // As an f32 pattern the magnitude is 2^112 times too small; the product is exact.
  return bits_float(sign | float_bits(bits_float(magnitude << 13) * 0x1p112f));
}

GW_HD inline float bf16_to_f32(uint16_t h) { return bits_float(uint32_t{h} << 16); }

// Rounds to nearest even; what does not fit becomes Inf, as IEEE 754 says.
GW_HD inline uint16_t f32_to_f16(float x) {
  const uint32_t bits = float_bits(x), sign = (bits >> 16) & 0x8000u;
  uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > kInfBits) return static_cast<uint16_t>(sign | kMarkerF16);
  if (magnitude >= 0x47800000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 2^16 and above
  if (magnitude < 0x38800000u)  // below 2^-14: adding 0.5 lets the adder align and round to steps of 2^-24
    return static_cast<uint16_t>(sign | (float_bits(bits_float(magnitude) + 0.5f) - 0x3f000000u));
  magnitude += 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((magnitude - 0x38000000u) >> 13));
}

GW_HD inline uint16_t f32_to_bf16(float x) {
  const uint32_t bits = float_bits(x);
  if ((bits & 0x7fffffffu) > kInfBits) return static_cast<uint16_t>(((bits >> 16) & 0x8000u) | kMarkerBf16);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace gradwire
