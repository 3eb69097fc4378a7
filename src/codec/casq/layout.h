// SPDX-License-Identifier: Apache-2.0
// The layout and the arithmetic of casq's units, for host and GPU alike. The code of an element is its cluster. A
// cluster has buckets, and all elements of a bucket become their mean. The codes of a tensor stand in front, block
// after block; behind them stands a table per unit:
//
//   tile    [largest magnitude, f32][means, two f16 per word]
//           Buckets go by rank. Means are in units of the power of two at or below the largest magnitude.
//   paper   [largest magnitude, f32][means, one f32 per word][counts, one per word, where wanted]
//           Buckets go by hash.
//
// Means come from sums of integers: a value is rounded to a grid that is as fine as the largest bucket of its cluster
// leaves room for in 32 bits (64 in mode=paper), so that the order of summation does not matter.
#pragma once

#include <cstdint>

#include "codec/casq/cluster_rules.h"
#include "device/params.h"
#include "device/scheme.h"

namespace gradwire {

inline constexpr uint32_t kMaxClusters = 16;

GW_HD inline uint32_t clusters_of(const Scheme& s) { return 1u << s.bits; }
GW_HD inline bool hashed(const Scheme& s) { return s.unit == 0; }

// Buckets of a unit of n elements: the scheme's share, but one for every cluster that may be there.
GW_HD inline uint64_t buckets_of(const Scheme& s, uint64_t n) {
  const double want = s.ratio * static_cast<double>(n);
  uint64_t m = static_cast<uint64_t>(want);
  if (static_cast<double>(m) < want) ++m;
  const uint64_t least = hashed(s) ? clusters_of(s) : min_u64(n, clusters_of(s));
  return m < least ? least : m;
}
GW_HD inline uint64_t casq_table_words(const Scheme& s, uint64_t n) {
  const uint64_t m = buckets_of(s, n);
  return 1 + (hashed(s) ? m * (s.steps ? 2 : 1) : div_up(m, 2));  // steps: counts are sent too
}

// Of a tensor: its codes, then the tables of its units.
inline uint64_t casq_region_words(const Scheme& s, uint64_t count) {
  const uint64_t unit = unit_elements(s, count), full = count / unit, rest = count % unit;
  return scales_offset(s, count) + full * casq_table_words(s, unit) + (rest ? casq_table_words(s, rest) : 0);
}

// What the table of a codec says: K - 1 thresholds in units of the root mean square, and then a word per cluster. In
// tiles word i is the cluster that is the i-th to get buckets; in mode=paper it is the share of cluster i, in 2^-16.
GW_HD inline float threshold_of(const Scheme& s, float rms, uint32_t i) { return s.table[i] * rms; }
GW_HD inline uint32_t cluster_word(const Scheme& s, uint32_t k) {
  return static_cast<uint32_t>(s.table[clusters_of(s) - 1 + k]);
}

GW_HD inline void hash_buckets(const Scheme& s, uint64_t total, uint64_t* buckets) {
  // One for every cluster, so that no code can be without a bucket; the rest by share.
  for (uint32_t k = 0; k < clusters_of(s); ++k) buckets[k] = 1 + ((total - clusters_of(s)) * cluster_word(s, k) >> 16);
}

GW_HD inline float rms_of(uint32_t absmax, const Sums& sums, uint64_t n) {
  const float rms = static_cast<float>(sqrt(static_cast<double>(sums.second) / kSquareScale / static_cast<double>(n)) *
                                       grid_step(absmax));
  // Squares are rounded, so 2^128 can come out; thresholds must be numbers.
  return float_bits(rms) < kInfBits ? rms : 0x1.fffffep127f;
}

// Digits after the point of the grid on which the values of a cluster are summed; values are below 2.
GW_HD inline uint32_t sum_digits(uint32_t count, uint32_t buckets) {
  const uint32_t load = buckets ? (count + buckets - 1) / buckets : 1;
  uint32_t digits = 29;
  while (digits && load > 1u << (29 - digits)) --digits;
  return digits;
}
inline constexpr uint32_t kHashDigits = 29;
GW_HD inline float power_of_two(uint32_t exponent) { return bits_float((127 + exponent) << 23); }

// A mean as f16 in units below 2; rounding never reaches 2, which may be beyond the floats.
inline constexpr uint16_t kTopMean = 0x3fffu;
GW_HD inline uint16_t mean_code(float mean) {
  const uint16_t h = f32_to_f16(mean);
  return (h & 0x7fffu) > kTopMean ? static_cast<uint16_t>((h & 0x8000u) | kTopMean) : h;
}
GW_HD inline uint16_t mean_code(int64_t sum, uint32_t count, uint32_t digits) {
  return mean_code(static_cast<float>(static_cast<double>(sum) / static_cast<double>(count) /
                                      static_cast<double>(power_of_two(digits))));
}
GW_HD inline float mean_value(uint16_t code, double step) {
  return static_cast<float>(static_cast<double>(f16_to_f32(code)) * step);
}
GW_HD inline bool mean_is_valid(uint16_t code) { return (code & 0x7fffu) < 0x4000u; }

// mode=paper: an empty bucket has the mean 0.
GW_HD inline float hash_mean(int64_t sum, uint32_t count, double step) {
  if (count == 0) return 0.0f;
  return static_cast<float>(static_cast<double>(sum) / static_cast<double>(count) /
                            static_cast<double>(power_of_two(kHashDigits)) * step);
}

}  // namespace gradwire
