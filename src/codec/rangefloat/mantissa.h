// SPDX-License-Identifier: Apache-2.0
// How many mantissa bits a range float of N bits should have. More of them make the grid finer but the range shorter,
// 2^(N-1-m) binades below the maximum, and what lies under the range is lost; so the data must decide.
//
// The histogram has 8 bins a binade, cut by the first three mantissa bits, over the 64 binades from the maximum's down.
// So the bins are parts of the very steps that the format has, wherever the maximum lies in its binade. Each has its
// count and the sums of u and u^2, u being the place of a value within the bin. The lowest magnitude of the format
// depends on the maximum's own mantissa: its first six bits, per element, make 64 more counts. And at the top the
// codes end: the maximum itself is truncated, a negative one to a step below, which matters where it holds much of the
// norm; per m, what clamping adds to the error. All are integers, so the ranks' histograms add up in any order.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace gradwire {

class MagnitudeHistogram {
 public:
  static constexpr int kBins = 8 * 64, kPhases = 64;  // bin 0 ends where the maximum's binade ends
  static constexpr int kMost = 23;                    // the widest mantissa
  static constexpr double kUnit = 0x1p-20;            // of the sums

  MagnitudeHistogram() : words_(3 * kBins + kPhases + 2 * kMost) {}

  // Values of a unit whose format has this maximum. Zeros, subnormals, not-a-numbers and what lies below all bins are
  // left out; values beyond the maximum count as it. Units are pooled relative to the power of two in their maximum;
  // `weight` says how often a value counts.
  void add(std::span<const float> values, float max, uint32_t weight = 1);
  void merge(const MagnitudeHistogram& other);

  // Count, sum of u, sum of u^2, bin after bin; the phases; rounded and truncated, what clamping adds for m = 1..23
  // in squared steps. This is what ranks add up.
  std::span<int64_t> words() { return words_; }
  std::span<const int64_t> words() const { return words_; }

 private:
  void add_clamping(float x, float max, uint32_t weight);
  std::vector<int64_t> words_;
};

// Expected squared error over the sum of squares for N = bits (3..32) and m = mantissa, in the closed form that spends
// all codes: pbase = (bits32(max) >> (23-m)) + 1 - 2^(N-1). Rounding goes to the nearest, and to zero below half the
// lowest magnitude; truncation is the paper's.
double range_error(const MagnitudeHistogram& histogram, int bits, int mantissa, bool truncate);

// The m in 1..min(N-2, 23) of least error; the largest among equals, as for an empty histogram.
int choose_mantissa(const MagnitudeHistogram& histogram, int bits, bool truncate);

}  // namespace gradwire
