// SPDX-License-Identifier: Apache-2.0
// From statistics to side values, from side values to what a body needs. All devices run these few lines alike.
//
// Statistics do not depend on the order of summation: the largest magnitude is an integer maximum over bit patterns
// (Inf and NaN come out on top), and sums are sums of integers: each value is rounded to a grid set by the
// power of two at or below the largest magnitude of its unit, 2^-19 of it for sums and 2^-19 of its square for squares. A block's sum then fits 32 bits.
#pragma once

#include <cstdint>

#include "core/bits.h"
#include "device/scheme.h"

namespace gradwire {

struct Sums {
  int64_t first = 0;      // clip: sum of values; signs: sum of the non-negative ones
  uint64_t second = 0;    // l2, clip: sum of squares; signs: sum of the negative ones' magnitudes
  uint64_t negative = 0;  // signs: how many are negative
};

struct UnitParams {
  float pre = 1;    // a power of two that lifts tiny units out of the subnormals, else 1
  float scale = 0;  // uniform: steps of 2^-16 level per unit of pre * x
  float limit = 0;  // uniform: values beyond are clipped, when the statistic is Stat::clip; levels: the middle one
  float
      a = 0,
      b = 0;  // uniform: a is the step between levels; sign: the values of codes 0 and 1; levels: the norm and the ramp's offset
  const float* table = nullptr;  // levels
  // log: base is the least exponent, top the codes above zero. range: base is the pattern of the least magnitude, top and bottom
  // the codes above and below zero, shift the mantissa bits that are dropped.
  uint32_t base = 0, top = 0, bottom = 0, shift = 0;
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

// Side values of a unit of n elements. A unit that holds Inf or NaN gets the marker.
GW_HD inline void make_side(const Scheme& s, uint32_t absmax, const Sums& sums, uint64_t n, uint32_t side[2]) {
  if (absmax >= kInfBits) {
    side[0] = side[1] = kMarker;
    return;
  }
  if (s.stat == Stat::absmax || s.stat == Stat::fixed) {
    side[0] = side[1] = s.stat == Stat::fixed ? float_bits(s.limit) : absmax;
    return;
  }
  const double step = grid_step(absmax), count = static_cast<double>(n);
  float first = bits_float(absmax), second = 0;
  if (s.stat == Stat::l2) {
    const float norm = static_cast<float>(sqrt(static_cast<double>(sums.second) / kSquareScale) * step);
    if (norm > first) first = norm;
    if (float_bits(first) >= kInfBits) first = 0x1.fffffep127f;
  } else if (s.stat == Stat::clip && s.clip > 0) {
    const double mean = static_cast<double>(sums.first) / kSumScale / count;
    const double variance = static_cast<double>(sums.second) / kSquareScale / count - mean * mean;
    const double bound = variance > 0 ? static_cast<double>(s.clip) * sqrt(variance) * step : 0;
    // Variance zero: all values alike (up to the grid), nothing to clip.
    if (bound > 0 && bound < static_cast<double>(first)) first = static_cast<float>(bound);
  } else if (s.stat == Stat::signs) {
    const uint64_t others = n - sums.negative;
    first = others
                ? static_cast<float>(static_cast<double>(sums.first) / kSumScale * step / static_cast<double>(others))
                : 0.0f;
    second = sums.negative ? -static_cast<float>(static_cast<double>(sums.second) / kSumScale * step /
                                                 static_cast<double>(sums.negative))
                           : 0.0f;
  }
  side[0] = float_bits(first);
  side[1] = float_bits(second) == 0x80000000u ? 0u : float_bits(second);
}

// Side values come from a message that may lie: anything but a finite value of the right sign or the marker is refused.
GW_HD inline bool side_is_valid(const Scheme& s, const uint32_t* side) {
  if (s.stat == Stat::fixed) return side[0] == kMarker || side[0] == float_bits(s.limit);
  if (s.side == 1) return side[0] == kMarker || side[0] < kInfBits;
  if (side[0] == kMarker || side[1] == kMarker) return side[0] == side[1];
  return side[0] < kInfBits && (side[1] == 0 || (side[1] > 0x80000000u && finite_bits(side[1])));
}

// A range float drops the mantissa's lower bits and counts the patterns that are left, from that of the least magnitude on
// (Wang et al., HPDC 2020). Where the least magnitude is not given, it is the one with which the positive codes take half of all.
GW_HD inline void make_range(const Scheme& s, UnitParams& p) {
  p.shift = 23 - s.steps;
  if (s.stat == Stat::fixed) {
    p.base = s.base;
    p.top = s.top;
    p.bottom = s.bottom;
    return;
  }
  const uint32_t half = 1u << (s.bits - 1), top = float_bits(p.a) >> p.shift;
  p.base = top + 1 > half ? top + 1 - half : 0;
  p.top = top + 1 - p.base;
  p.bottom = p.top < half ? p.top : half - 1;
}

GW_HD inline UnitParams make_params(const Scheme& s, const uint32_t* side) {
  UnitParams p;
  p.a = bits_float(side[0]);
  if (s.body == Body::range) {
    if (side[0] != kMarker) make_range(s, p);
    return p;
  }
  if (s.body == Body::sign) {
    p.b = bits_float(side[1]);
    return p;
  }
  const float norm = p.a;
  const bool relative = s.body == Body::levels || s.body == Body::log;  // values are brought to [-1, 1]
  if (relative) {
    p.table = s.table;
    p.limit = s.limit;
    p.b = s.offset;
    p.base = 127 - s.steps;
    p.top = s.steps + 1;
  } else {
    p.top = levels(s);
  }
  if (side[0] == kMarker || norm == 0.0f) return p;  // scale 0: a marked unit is encoded as zeros
  const float top = relative ? 1.0f : static_cast<float>(levels(s)), steps = top * (relative               ? 1.0f
                                                                                    : s.body == Body::wide ? 256.0f
                                                                                                           : 65536.0f);
  if (!relative) p.limit = norm;
  float lifted = norm;
  if (norm < 0x1p-100f) {
    p.pre = 0x1p100f;
    lifted = norm * p.pre;
  }
  // Rounded so that norm itself never lands beyond the top level; and the top level never beyond the floats.
  p.scale = steps / lifted;
  if (lifted * p.scale > steps) p.scale = below(p.scale);
  p.a = norm / top;
  if (float_bits(p.a * top) >= kInfBits) p.a = below(p.a);
  return p;
}

}  // namespace gradwire
