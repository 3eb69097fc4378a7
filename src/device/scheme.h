// SPDX-License-Identifier: Apache-2.0
// What a driver must know of a codec, as plain data that also travels to a GPU, and the layout that follows from it.
//
// A tensor is cut in blocks of 1024 elements (32 rows of 32 lanes) and in units: the elements that share side values
// and a not-a-number marker. A unit is a bucket (a power of two below or above a block), a tile (32768 elements) or
// the whole tensor (unit 0). What one tensor takes in the body of a message is its region, counted in 32-bit words:
//
//   [codes of the full blocks][codes of the last, partial block][side values, unit after unit]
//
// Codecs with units of their own (codec/unit.h) say themselves what their regions are.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/bits.h"

namespace gradwire {

inline constexpr uint32_t kBlock = 1024, kLane = 32, kTile = 32768;

// The element body that turns values into codes, and the statistic its side values come from.
enum class Body : uint8_t {
  cast32,
  cast16,
  castb16,
  uniform,
  sign,
  select,
  levels,
  log,
  range,
  wide,
  none,
  clusters,
  fft
};
enum class Stat : uint8_t { none, absmax, l2, clip, signs, fixed };

struct Scheme {
  Body body = Body::cast32;
  Stat stat = Stat::none;
  uint8_t bits = 32;      // of one code; 0-16 or 32
  bool nearest = false;   // uniform, levels, wide: round to nearest instead of at random
  uint8_t side = 0;       // side words of a unit
  uint32_t unit = 1;      // elements; 0: the whole tensor. Element-wise bodies have 1
  float clip = 0;         // Stat::clip: in standard deviations, 0 for none
  double ratio = 0;       // select, fft: the share of a unit that is kept; clusters: buckets per element
  float limit = 0;        // Stat::fixed: the largest magnitude; levels: the middle one
  uint32_t steps = 0;     // log: powers of two below the largest; range: mantissa bits
  bool truncate = false;  // range: cut off instead of rounding
  uint32_t base = 0, top = 0,
           bottom = 0;  // range with Stat::fixed: pattern of the least magnitude, codes above and below zero
  float offset = 0;     // levels: of the rounding ramp, in 2^-16 of a cell
  const float* table =
      nullptr;  // levels: 2^depth levels, as many slopes, and more (methods-inl.h); clusters: thresholds. The codec owns it; a GPU has a copy
  uint32_t table_size = 0;  // floats
};

// Whether side values come from sums, beside the largest magnitude.
GW_HD inline bool needs_sums(Stat stat) { return stat != Stat::absmax && stat != Stat::fixed; }

// Whether the body is one of codec/methods-inl.h, which files of their own compile.
GW_HD inline bool is_method(const Scheme& s) { return s.body >= Body::levels && s.body <= Body::none; }

GW_HD inline uint64_t div_up(uint64_t a, uint64_t b) { return a / b + (a % b != 0); }
GW_HD inline uint64_t min_u64(uint64_t a, uint64_t b) { return a < b ? a : b; }

GW_HD inline uint64_t unit_elements(const Scheme& s, uint64_t count) { return s.unit ? s.unit : count; }
GW_HD inline uint64_t unit_count(const Scheme& s, uint64_t count) {
  if (count == 0) return 0;
  return s.unit ? div_up(count, s.unit) : 1;
}

// Quantised regions.
GW_HD inline uint64_t full_words(const Scheme& s, uint64_t count) { return count / kBlock * kLane * s.bits; }
GW_HD inline uint64_t tail_words(const Scheme& s, uint64_t count) { return div_up(count % kBlock * s.bits, 32); }
GW_HD inline uint64_t side_offset(const Scheme& s, uint64_t count) {
  return full_words(s, count) + tail_words(s, count);
}

}  // namespace gradwire
