// SPDX-License-Identifier: Apache-2.0
// Levels of topk as two numbers, for host and GPU alike: how a fit of them moves on from the sums over the kept values,
// how it is said by the scales of a unit, and which magnitudes those mean. levels-inl.h says what is fitted and why.
//
// The sums are integers, exact in any order; all the rest is a fixed list of IEEE operations.
#pragma once

#include <cstdint>

#include "device/params.h"

namespace gradwire {

// Level i is low + rise * i^2, in units of 2^-19 of the power of two at or below the largest magnitude.
struct KeptFit {
  double low = 0, rise = 0;

  // What choosing the nearest level works with, in f32.
  GW_HD float from() const { return static_cast<float>(low); }
  GW_HD float times() const { return rise >= 0x1p-20 ? static_cast<float>(1 / rise) : 0.0f; }
};

// Over the kept values: i^2 and i^4 for their levels i, and i^2 times the value.
struct KeptSums {
  uint64_t squares = 0, fourths = 0, products = 0;

  GW_HD void add(uint32_t level, float units) {
    const uint32_t square = level * level, q = static_cast<uint32_t>(static_cast<int32_t>(units));
    squares += square;
    fourths += uint64_t{square} * square;
    products += uint64_t{square} * q;
  }
};

constexpr int kLevelRounds = 4;

// From the least to the largest value. With two levels half of that, since the upper one is a mean.
GW_HD inline KeptFit first_levels(float least, float most, uint32_t top) {
  KeptFit fit;
  fit.low = static_cast<double>(least);
  fit.rise = (static_cast<double>(most) - fit.low) / (top == 1 ? 2.0 : static_cast<double>(top * top));
  return fit;
}

// Least squares: the sum of (q - low - rise * i^2)^2 over `count` values q, whose sum is `total`, is least.
GW_HD inline void refine_levels(KeptFit& fit, const KeptSums& sums, double count, double total) {
  const double a = static_cast<double>(sums.squares), b = static_cast<double>(sums.fourths);
  const double p = static_cast<double>(sums.products), determinant = count * b - a * a;
  if (!(determinant > 0)) return;  // all at one level
  fit.rise = (count * p - a * total) / determinant;
  if (!(fit.rise > 0)) fit.rise = 0;
  fit.low = (total - fit.rise * a) / count;
  if (!(fit.low > 0)) fit.low = 0;
}

GW_HD inline uint32_t level_scale(double units, uint32_t absmax) {
  const uint32_t bits = float_bits(static_cast<float>(units / static_cast<double>(kSumScale) * grid_step(absmax)));
  return bits < kInfBits ? bits : kInfBits - 1;
}
GW_HD inline uint32_t low_scale(const KeptFit& fit, uint32_t absmax) { return level_scale(fit.low, absmax); }
GW_HD inline uint32_t rise_scale(const KeptFit& fit, uint32_t top, uint32_t absmax) {
  return level_scale(fit.rise * static_cast<double>(top * top), absmax);
}

// The magnitude that level i of 0 to `top` stands for: `low` and `rise` are the unit's scales.
GW_HD inline float level_magnitude(uint32_t i, uint32_t top, float low, float rise) {
  if (i == 0) return low;
  const float share = static_cast<float>(i * i) / static_cast<float>(top * top), largest = bits_float(kInfBits - 1);
  const float magnitude = low + rise * share;
  return largest < magnitude ? largest : magnitude;
}

// What a code of `bits` bits stands for: a sign above the number of a level.
GW_HD inline float level_value(const float* magnitudes, uint32_t code, uint32_t bits) {
  const uint32_t sign = code >> (bits - 1);
  return bits_float(float_bits(magnitudes[code & ((1u << (bits - 1)) - 1)]) | sign << 31);
}

// The nearest finite bf16, ties to even: a value that would become an infinity takes the largest one.
GW_HD inline uint32_t nearest_bf16(float x) {
  const uint32_t h = f32_to_bf16(x);
  return (h & 0x7fffu) == 0x7f80u ? h - 1 : h;
}

}  // namespace gradwire
