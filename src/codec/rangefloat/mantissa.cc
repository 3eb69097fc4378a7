// SPDX-License-Identifier: Apache-2.0
// Three zones by magnitude: on the grid, steps of 2^-m of the binade; between half the lowest magnitude and itself,
// where rounding goes up to it; and below, where everything is lost. A bin within one step is taken exactly from its
// sums, a bin of several steps as evenly filled.
#include "codec/rangefloat/mantissa.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "core/bits.h"
#include "gradwire/error.h"

namespace gradwire {
namespace {

constexpr double kMostExcess = 64;  // squared steps

constexpr int kBinShift = 20;  // a bin is the exponent and three mantissa bits
constexpr int kPhase = 3 * MagnitudeHistogram::kBins,
              kClamp = kPhase + MagnitudeHistogram::kPhases;  // where they begin

// A bin: [low, low + width) over the power of two in the maximum.
struct Bin {
  double low, width, count, sum, squares;

  Bin(const MagnitudeHistogram& h, int index) {
    const int64_t* word = &h.words()[3 * index];
    width = std::ldexp(1, -3 - index / 8);
    low = width * (8 + 7 - index % 8);
    count = static_cast<double>(word[0]);
    sum = static_cast<double>(word[1]) * MagnitudeHistogram::kUnit;
    squares = static_cast<double>(word[2]) * MagnitudeHistogram::kUnit;
  }
  // Squared distance of its values from a point.
  double from(double point) const {
    const double off = low - point;
    return count * off * off + width * (2 * off * sum + width * squares);
  }
};

struct CodeGrid {
  int mantissa;
  bool truncate;
  double lowest, zero;  // magnitudes: of code 1, and below which all is lost

  double inside(const Bin& bin) const {
    const double step = bin.width * std::exp2(3 - mantissa);
    if (mantissa < 3 || (truncate && mantissa == 3)) {
      const double place = bin.low / step;
      return bin.from(step * (truncate ? std::floor(place) : std::round(place + bin.width / step / 2)));
    }
    return bin.count * step * step / (truncate ? 3 : 12);
  }

  double error(const Bin& bin) const {
    const double end = bin.low + bin.width;
    if (bin.low >= lowest) return inside(bin);
    if (end <= zero) return bin.from(0);
    if (bin.low >= zero && end <= lowest) return bin.from(lowest);
    constexpr int kParts = 16;
    const double grid = inside(bin) / bin.count;
    double sum = 0;
    for (int i = 0; i < kParts; ++i) {
      const double x = bin.low + bin.width * (i + .5) / kParts;
      sum += x >= lowest ? grid : x >= zero ? (lowest - x) * (lowest - x) : x * x;
    }
    return bin.count * sum / kParts;
  }
};

}  // namespace

void MagnitudeHistogram::add(std::span<const float> values, float max, uint32_t weight) {
  if (!(max > 0) || !std::isfinite(max)) return;
  const uint32_t top = float_bits(max) >> 23 << 3 | 7;
  for (const float x : values) {
    const uint32_t bits = float_bits(std::min(std::abs(x), max));
    if (std::isnan(x) || bits < 1u << 23) continue;
    const uint32_t bin = top - (bits >> kBinShift);
    if (bin >= kBins) continue;
    const uint64_t place = bits & ((1u << kBinShift) - 1);  // u in units of 2^-20
    words_[3 * bin] += weight;
    words_[3 * bin + 1] += static_cast<int64_t>(weight * place);
    words_[3 * bin + 2] += static_cast<int64_t>(weight * (place * place >> kBinShift));
    words_[kPhase + (float_bits(max) >> 17 & (kPhases - 1))] += weight;
    add_clamping(x < 0 ? -bits_float(bits) : bits_float(bits), max, weight);
  }
}

void MagnitudeHistogram::add_clamping(float x, float max, uint32_t weight) {
  const uint32_t bits = float_bits(std::abs(x));
  for (int m = 1; m <= kMost; ++m) {
    const int shift = kMost - m;
    const uint32_t top = float_bits(max) >> shift, down = bits >> shift;
    if (down + 1 < top) return;  // nor will it be near the end with a finer step
    const uint32_t limit = top - (x < 0), nearest = (bits + (shift ? 1u << (shift - 1) : 0)) >> shift;
    const double step = std::ldexp(1, std::ilogb(max) - m);
    // Squared distance from a code, in squared steps of the maximum's binade.
    const auto from = [&](uint32_t code) {
      const double off = (double(std::abs(x)) - bits_float(code << shift)) / step;
      return off * off;
    };
    // A few steps at most; where the maximum is subnormal its binade has no steps of its own, and nothing is said.
    const auto excess = [&](uint32_t code) {
      const double more = code > limit ? from(limit) - from(code) : 0;
      return std::abs(more) <= kMostExcess ? std::llrint(more / kUnit) : 0;
    };
    words_[kClamp + m - 1] += weight * excess(nearest);
    words_[kClamp + kMost + m - 1] += weight * excess(down);
  }
}

void MagnitudeHistogram::merge(const MagnitudeHistogram& other) {
  for (size_t i = 0; i < words_.size(); ++i) words_[i] += other.words_[i];
}

double range_error(const MagnitudeHistogram& histogram, int bits, int mantissa, bool truncate) {
  if (bits < 3 || bits > 32 || mantissa < 1 || mantissa > std::min(bits - 2, 23)) {
    throw Error(ErrorKind::usage,
                "mantissa is " + std::to_string(mantissa) + " of " + std::to_string(bits) +
                    " bits, expected 1 to bits - 2, at most 23, of 3 to 32 bits",
                "mantissa");
  }
  const double steps = std::exp2(mantissa), binades = std::min(std::exp2(bits - 1 - mantissa), 512.0);
  const auto clamping =
      static_cast<double>(histogram.words()[kClamp + (truncate ? MagnitudeHistogram::kMost : 0) + mantissa - 1]);
  double error = 0, total = 0, weights = 0;
  for (int phase = 0; phase < MagnitudeHistogram::kPhases; ++phase) {
    const auto weight = static_cast<double>(histogram.words()[kPhase + phase]);
    if (weight <= 0) continue;
    weights += weight;
    const double place = (phase + (mantissa <= 6 ? 0 : .5)) / MagnitudeHistogram::kPhases;
    const double lowest = std::exp2(-binades) * (1 + (std::floor(place * steps) + 1) / steps);
    const CodeGrid grid{mantissa, truncate, lowest, truncate ? lowest : lowest / 2};
    for (int index = 0; index < MagnitudeHistogram::kBins; ++index) {
      const Bin bin(histogram, index);
      if (bin.count <= 0) continue;
      error += weight * grid.error(bin);
      total += weight * bin.from(0);
    }
  }
  error += weights * clamping * MagnitudeHistogram::kUnit / (steps * steps);
  return total > 0 ? error / total : 0;
}

int choose_mantissa(const MagnitudeHistogram& histogram, int bits, bool truncate) {
  int best = std::min(bits - 2, 23);
  double least = range_error(histogram, bits, best, truncate);
  for (int m = best - 1; m >= 1; --m) {
    const double error = range_error(histogram, bits, m, truncate);
    if (error < least) least = error, best = m;
  }
  return best;
}

}  // namespace gradwire
