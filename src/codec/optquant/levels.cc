// SPDX-License-Identifier: Apache-2.0
#include "codec/optquant/levels.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "codec/optquant/level_programme.h"
#include "gradwire/error.h"

namespace gradwire {
namespace {

constexpr double kGap = 1.0 / (1 << 20);  // between levels; floats in [-1, 1] and 1 / gap are good for it
constexpr int kStride = 4;                // the plain programme's candidates, in edges of pairs of bins
constexpr int kFewBits = 4;               // up to here candidates that are four bins apart are near enough to polish
constexpr double kSparse = 2e-3;          // the share of the error that keeping zeros at zero may cost

// Ascending by kGap within [-1, 1]: whatever the programme found, for data with few distinct values too.
void separate(std::vector<double>& levels) {
  double floor = -1;
  for (double& x : levels) x = std::max(x, floor), floor = x + kGap;
  double ceiling = 1;
  for (size_t i = levels.size(); i-- > 0;) {
    levels[i] = std::min(levels[i], ceiling);
    ceiling = levels[i] - kGap;
  }
}

// Moves one level at a time by ever smaller steps, as long as that lowers the error. Unless the ends are free, the
// first and the last level stay where they are.
void polish(const LevelModel& model, std::vector<double>& x, bool free_ends, int stride) {
  const size_t last = x.size() - 1;
  for (double step = stride / 2.0; step > 0.01; step /= 2) {
    for (size_t j = free_ends ? 0 : 1; j <= (free_ends ? last : last - 1); ++j) {
      const double low = j > 0 ? x[j - 1] : -1 - kGap, high = j < last ? x[j + 1] : 1 + kGap;
      const auto local = [&](double l) {
        return (j > 0 ? model.cell(low, l) : model.under(l)) + (j < last ? model.cell(l, high) : model.over(l));
      };
      const size_t bin = model.bin(x[j]);
      const double h = step * (model.edge()[bin + 1] - model.edge()[bin]);
      double now = local(x[j]);
      for (double direction : {-h, h}) {
        bool moved = false;
        for (int moves = 0; moves < 4; ++moves) {
          const double next = x[j] + direction;
          if (next < low + kGap || next > high - kGap) break;
          const double cost = local(next);
          if (!(cost < now)) break;
          x[j] = next, now = cost, moved = true;
        }
        if (moved) break;
      }
    }
  }
}

// Of data with zeros: where zero is nearly as good a place as the one that was found, zeros stay zeros.
void prefer_zero(const LevelModel& model, std::vector<double>& levels, bool free_ends) {
  const auto nearest =
      std::min_element(levels.begin(), levels.end(), [](double a, double b) { return std::fabs(a) < std::fabs(b); });
  const bool fixed = !free_ends && (nearest == levels.begin() || nearest == std::prev(levels.end()));
  const bool crowded = (nearest != levels.begin() && *std::prev(nearest) > -kGap) ||
                       (std::next(nearest) != levels.end() && *std::next(nearest) < kGap);
  if (fixed || crowded) return;
  const double error = model.error(levels), found = *nearest;
  *nearest = 0;
  if (model.error(levels) > error * (1 + kSparse)) *nearest = found;
}

void check(int bits, const LevelRule& rule, const LevelHistogram& histogram) {
  if (bits < 2 || bits > 8)
    throw Error(ErrorKind::usage, "bits is " + std::to_string(bits) + ", allowed are 2 to 8", "bits");
  if (rule.biased && !(rule.kappa >= 0 && rule.kappa <= 0.5))
    throw Error(ErrorKind::usage, "kappa is " + std::to_string(rule.kappa) + ", allowed are 0 to 0.5", "kappa");
  if (!(rule.workers >= 1) || std::isinf(rule.workers))
    throw Error(ErrorKind::usage, "workers is " + std::to_string(rule.workers) + ", allowed is 1 or more", "workers");
  if (histogram.counts.size() != LevelHistogram::kCounts)
    throw Error(ErrorKind::usage,
                "a level histogram has " + std::to_string(histogram.counts.size()) + " counts, expected " +
                    std::to_string(LevelHistogram::kCounts),
                "counts");
}

}  // namespace

LevelFit fit_levels(const LevelHistogram& histogram, int bits, const LevelRule& rule) {
  check(bits, rule, histogram);
  const LevelBins bins = level_bins(histogram);
  const LevelModel model(bins, rule);
  LevelFit fit;
  if (model.empty()) {
    const int last = (1 << bits) - 1;
    for (int i = 0; i <= last; ++i) fit.levels.push_back(static_cast<float>(2 * i - last) / static_cast<float>(last));
    return fit;
  }
  const size_t count = size_t{1} << bits;
  const bool plain = rule.biased && model.kappa() < 0.5, few = !plain && bits <= kFewBits;
  const int stride = plain ? kStride : 1;
  const LevelBins coarse = few ? in_pairs(in_pairs(bins)) : in_pairs(bins);
  std::vector<double> levels = best_levels(LevelModel(coarse, rule), count, rule.biased, stride);
  separate(levels);
  polish(model, levels, rule.biased, (few ? 4 : 2) * stride);
  if (bins.zeros > 0) prefer_zero(model, levels, rule.biased);
  for (double& x : levels) {
    fit.levels.push_back(static_cast<float>(x));
    x = fit.levels.back();
  }
  fit.error = model.error(levels);
  return fit;
}

}  // namespace gradwire
