// SPDX-License-Identifier: Apache-2.0
// What a driver must know of a codec, as plain data that also travels to a GPU, and the layout that follows from it.
//
// A tensor is cut in blocks of 1024 elements (32 rows of 32 lanes) and in units: the elements that share scales and a
// not-a-number marker. A unit is a bucket (a power of two below or above a block), a tile (32768 elements) or the whole
// tensor (unit 0). What one tensor takes in the body of a message is its region, counted in 32-bit words:
//
//   [codes of the full blocks][codes of the last, partial block][scales, unit after unit]
//
// Codecs with units of their own (codec/unit.h) say themselves what their regions are.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/bits.h"

namespace gradwire {

inline constexpr uint32_t kBlock = 1024, kLane = 32, kTile = 32768;

// The element body that turns values into codes. A driver only passes it on; its values are in codec/body.h.
enum class Body : uint8_t;

// Which norm of a unit is its scale, for the bodies that have one scale. Its values are in codec/stats.h.
enum class Norm : uint8_t;

// What a driver adds up over a unit beside its largest magnitude (Sums in params.h says where each sum goes).
enum class SumKind : uint8_t {
  none,
  squares,  // of the values
  moments,  // values and their squares
  by_sign,  // magnitudes of the values of either sign
};

struct Scheme {
  Body body{};
  Norm norm{};
  SumKind sums = SumKind::none;
  uint8_t bits = 32;        // of one code; 0-16 or 32
  bool nearest = false;     // bodies that round at random: round to nearest instead
  uint8_t scale_words = 0;  // of one unit; 0: the body needs no statistics
  uint32_t unit = 1;        // elements; 0: the whole tensor. Element-wise bodies have 1

  // The rest has a meaning for some codecs only. Each codec's body or folder says which fields it reads.
  float clip = 0;                          // where to clip, in standard deviations; 0 for nowhere
  double ratio = 0;                        // a share of the unit: of what is kept, or of buckets per element
  float limit = 0;                         // the largest magnitude where it is fixed; the middle level of a table
  uint32_t steps = 0;                      // a small count: powers of two, mantissa bits
  bool truncate = false;                   // cut off instead of rounding
  uint32_t base = 0, top = 0, bottom = 0;  // patterns and codes of a fixed range
  float offset = 0;                        // of the rounding ramp, in 2^-16 of a cell
  const float* table = nullptr;            // the codec owns it; a GPU has a copy
  uint32_t table_size = 0;                 // floats
};

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
GW_HD inline uint64_t scales_offset(const Scheme& s, uint64_t count) {
  return full_words(s, count) + tail_words(s, count);
}

}  // namespace gradwire
