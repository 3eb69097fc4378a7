// SPDX-License-Identifier: Apache-2.0
// Range floats (Wang et al., HPDC 2020) as plain data, for the codec `rangefloat` and for the parts that `fft` sends. A
// range float is the bit pattern of a float with all but a few bits of its mantissa dropped, counted from the pattern
// of the least magnitude on: code 0 is zero, then come the positive numbers from the least on, then the negative ones.
// range_float-inl.h encodes and decodes them on any lane.
#pragma once

#include <cstdint>

#include "core/bits.h"

namespace gradwire {

struct RangeFloat {
  uint32_t shift = 0;                   // mantissa bits that are dropped
  uint32_t base = 0;                    // pattern of the least magnitude
  uint32_t positive = 0, negative = 0;  // codes on each side of zero
  uint32_t half = 0;                    // added before dropping
  uint32_t zero = 0;                    // magnitudes below this pattern become zero

  GW_HD uint32_t most() const { return positive + negative; }  // the largest code
};

// From what tells range floats apart. With `truncate` mantissas are cut off, as published; else they are rounded to the
// nearest, and what is below half of the least magnitude becomes zero.
GW_HD inline RangeFloat range_float(uint32_t shift, uint32_t base, uint32_t positive, uint32_t negative,
                                    bool truncate) {
  const uint32_t least = base << shift;
  // Half of a normal number has the exponent below; of a subnormal one, half the pattern.
  uint32_t zero = truncate ? least : least >= 0x1000000u ? least - 0x800000u : float_bits(bits_float(least) * 0.5f);
  if (zero == 0) zero = 1;
  return {shift, base, positive, negative, truncate || shift == 0 ? 0 : 1u << (shift - 1), zero};
}

// The codes that `bits` bits leave for negative numbers, of which there are no more than positive ones.
GW_HD inline uint32_t negative_codes(uint32_t bits, uint32_t positive) {
  const uint32_t left = (1u << bits) - 1 - positive;
  return positive < left ? positive : left;
}

// From `eps` up to `max`, as published.
GW_HD inline RangeFloat range_float_between(uint32_t bits, uint32_t mantissa, float eps, float max, bool truncate) {
  const uint32_t shift = 23 - mantissa, base = float_bits(eps) >> shift,
                 positive = (float_bits(max) >> shift) - base + 1;
  return range_float(shift, base, positive, negative_codes(bits, positive), truncate);
}

// Up to `max`, from the least magnitude with which the positive numbers take half of all codes.
GW_HD inline RangeFloat range_float_below(uint32_t bits, uint32_t mantissa, float max, bool truncate) {
  const uint32_t shift = 23 - mantissa, top = (float_bits(max) >> shift) + 1, half = 1u << (bits - 1);
  const uint32_t base = top > half ? top - half : 0, positive = top - base;
  return range_float(shift, base, positive, negative_codes(bits, positive), truncate);
}

}  // namespace gradwire
