// SPDX-License-Identifier: Apache-2.0
// Statistics of a unit as every device computes them, and the numbers a body works with. How scales follow from the
// statistics, and these numbers from the scales, is said by the bodies (codec/stats.h and the body's own file).
//
// Statistics do not depend on the order of summation: the largest magnitude is an integer maximum over bit patterns
// (Inf and NaN come out on top), and sums are sums of integers. Each value is rounded to a grid that is set by the
// power of two at or below the largest magnitude of its unit: 2^-19 of it for sums, and 2^-19 of its square for
// squares. The sum of one block then fits 32 bits.
#pragma once

#include <cstdint>

#include "core/bits.h"
#include "device/scheme.h"

namespace gradwire {

struct Sums {
  int64_t first = 0;      // moments: sum of the values; by_sign: sum of those that are not negative
  uint64_t second = 0;    // squares, moments: sum of the squares; by_sign: sum of the negative ones' magnitudes
  uint64_t negative = 0;  // by_sign: how many are negative
};

// What encode and decode of a body read about the unit they are in.
struct UnitParams {
  float pre = 1;    // a power of two that lifts tiny units out of the subnormals, else 1
  float scale = 0;  // from pre * x to the body's steps
  float limit = 0;  // bodies that clip: in units of x; bodies with a table: its middle level
  float a = 0;      // from levels back to values. The marker here says that the unit is not finite
  float b = 0;      // a second number of the body
  const float* table = nullptr;
  uint32_t base = 0, top = 0, bottom = 0, shift = 0;  // bodies made of bit patterns
};

GW_HD inline bool finite_bits(uint32_t b) { return (b & 0x7fffffffu) < kInfBits; }
GW_HD inline float below(float x) { return bits_float(float_bits(x) - 1); }         // the next smaller positive float
GW_HD inline uint32_t levels(const Scheme& s) { return (1u << (s.bits - 1)) - 1; }  // on each side of zero

// The grid for sums: value * pre * grid is below 2 in magnitude, exactly scaled.
struct Grid {
  float pre, grid;
};
GW_HD inline Grid grid_for(uint32_t absmax) {
  Grid g{1.0f, 1.0f};
  float top = bits_float(absmax);
  // The reciprocal of a number below 2^-126 would overflow, and products with subnormals lose bits: both are avoided by
  // an exact multiplication first.
  if (top < 0x1p-100f) {
    g.pre = 0x1p100f;
    top *= 0x1p100f;
  }
  const uint32_t exponent = float_bits(top) >> 23;  // 1..254: top is normal now, or zero
  // 2^-(exponent - 127); for the topmost binades this is a subnormal that is still exact.
  g.grid = exponent == 0 ? 0.0f : exponent < 254 ? bits_float((254 - exponent) << 23) : 0x1p-127f;
  return g;
}
inline constexpr float kSumScale = 0x1p19f, kSquareScale = 0x1p19f;

// 1 / (pre * grid) as a double, exact.
GW_HD inline double grid_step(uint32_t absmax) {
  const Grid g = grid_for(absmax);
  return g.grid == 0.0f ? 0.0 : 1.0 / (static_cast<double>(g.pre) * static_cast<double>(g.grid));
}

// Brings values up to `norm` in magnitude to `top` levels of `per_level` steps each, and back: sets pre, scale and a.
// `norm` is finite and above zero.
GW_HD inline void scale_to_levels(float norm, float top, float per_level, UnitParams& p) {
  const float steps = top * per_level;
  // Below 2^-100 the quotient steps / norm could overflow. Such units are lifted first, by an exact multiplication that
  // bodies repeat for every value.
  float lifted = norm;
  if (norm < 0x1p-100f) {
    p.pre = 0x1p100f;
    lifted = norm * p.pre;
  }
  // The division may round up. Then the norm itself would land beyond the top level, in a code that does not exist.
  p.scale = steps / lifted;
  if (lifted * p.scale > steps) p.scale = below(p.scale);
  // In the same way the top level must not decode to infinity.
  p.a = norm / top;
  if (float_bits(p.a * top) >= kInfBits) p.a = below(p.a);
}

}  // namespace gradwire
