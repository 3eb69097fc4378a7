// SPDX-License-Identifier: Apache-2.0
// From the statistics of a unit to its scales. A body derives from the structure that says how its scales are made and
// which ones a message may hold, or has functions of its own with the same names:
//
//   make_scales(scheme, absmax, sums, n, scales)   the scales of a unit of n elements; a unit that is not finite gets
//                                                  the marker in all of them
//   scales_valid(scheme, scales)                   whether an encoder could have written them
//
// All devices run these few lines alike. Drivers add up what Scheme::sums asks for and know nothing of its meaning.
#pragma once

#include "device/params.h"

namespace gradwire {

// What the one scale of a unit is.
enum class Norm : uint8_t {
  absmax,   // the largest magnitude
  l2,       // the Euclidean norm; SumKind::squares
  clipped,  // the largest magnitude, or Scheme::clip standard deviations if that is less; SumKind::moments
  fixed,    // Scheme::limit, the same in all units
};
inline SumKind sums_of(Norm norm) {
  return norm == Norm::l2 ? SumKind::squares : norm == Norm::clipped ? SumKind::moments : SumKind::none;
}

// The Euclidean norm, which the sums' grid may round to less than the largest magnitude, and which may overflow.
GW_HD inline float l2_norm(uint32_t absmax, const Sums& sums) {
  const float most = bits_float(absmax);
  const float norm = static_cast<float>(sqrt(static_cast<double>(sums.second) / kSquareScale) * grid_step(absmax));
  if (!(norm > most)) return most;
  return float_bits(norm) >= kInfBits ? 0x1.fffffep127f : norm;
}

GW_HD inline float clipped_norm(float clip, uint32_t absmax, const Sums& sums, uint64_t n) {
  const float most = bits_float(absmax);
  if (!(clip > 0)) return most;
  const double count = static_cast<double>(n), mean = static_cast<double>(sums.first) / kSumScale / count;
  const double variance = static_cast<double>(sums.second) / kSquareScale / count - mean * mean;
  // Variance zero: all values are alike (up to the grid), and nothing is to be clipped.
  const double bound = variance > 0 ? static_cast<double>(clip) * sqrt(variance) * grid_step(absmax) : 0;
  return bound > 0 && bound < static_cast<double>(most) ? static_cast<float>(bound) : most;
}

// Bodies with one scale, a norm.
struct NormScale {
  GW_HD static void make_scales(const Scheme& s, uint32_t absmax, const Sums& sums, uint64_t n, uint32_t* scales) {
    if (absmax >= kInfBits)
      scales[0] = kMarker;
    else if (s.norm == Norm::absmax)
      scales[0] = absmax;
    else if (s.norm == Norm::l2)
      scales[0] = float_bits(l2_norm(absmax, sums));
    else if (s.norm == Norm::clipped)
      scales[0] = float_bits(clipped_norm(s.clip, absmax, sums, n));
    else
      scales[0] = float_bits(s.limit);
  }
  GW_HD static bool scales_valid(const Scheme& s, const uint32_t* scales) {
    if (scales[0] == kMarker) return true;
    return s.norm == Norm::fixed ? scales[0] == float_bits(s.limit) : scales[0] < kInfBits;
  }
};

// Bodies without scales: every element stands for itself.
struct NoScales {
  GW_HD static void make_scales(const Scheme&, uint32_t, const Sums&, uint64_t, uint32_t*) {}
  GW_HD static bool scales_valid(const Scheme&, const uint32_t*) { return true; }
  GW_HD static UnitParams make_params(const Scheme&, const uint32_t*) { return {}; }
};

}  // namespace gradwire
