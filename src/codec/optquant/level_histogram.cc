// SPDX-License-Identifier: Apache-2.0
#include "codec/optquant/level_histogram.h"

#include <algorithm>
#include <cmath>

#include "core/bits.h"

namespace gradwire {

double LevelHistogram::edge(int i) {
  const int from_zero = std::abs(i - kSide);
  const double g = std::ldexp(1 + (from_zero % 512) / 512.0, from_zero / 512 - 4);
  return std::copysign((g - 1 / 16.0) * 16 / 15, i - kSide);
}

// In runs that fit in a cache: places are found several at a time, and then counted one after the other without a
// branch, because the sign of a gradient cannot be predicted.
void LevelHistogram::add(std::span<const float> values, float top, int64_t weight) {
  constexpr size_t kRun = 1024;
  constexpr uint32_t kZeros = 2 * kBins;
  uint32_t first[kRun], position[kRun];
  for (; !values.empty(); values = values.subspan(std::min(kRun, values.size()))) {
    const size_t n = std::min(kRun, values.size());
    for (size_t i = 0; i < n; ++i) {
      const float t = values[i] / top;
      const BinPosition to = place(t);
      const uint32_t zero = 0 - static_cast<uint32_t>((float_bits(t) & 0x7fffffff) == 0);
      first[i] = (2 * to.bin & ~zero) | (kZeros & zero);
      position[i] = to.position & ~zero;
    }
    for (size_t i = 0; i < n; ++i) {
      counts[first[i]] += weight;
      counts[std::min(first[i] + 1, kZeros)] += weight * position[i];  // a zero adds nothing
    }
  }
}

LevelBins level_bins(const LevelHistogram& histogram) {
  constexpr int n = LevelHistogram::kBins;
  LevelBins bins{std::vector<double>(n + 1), std::vector<double>(n), std::vector<double>(n)};
  for (int i = 0; i <= n; ++i) bins.edge[i] = LevelHistogram::edge(i);
  for (int b = 0; b < n; ++b) {
    auto weight = static_cast<double>(histogram.counts[2 * b]);
    auto moment = static_cast<double>(histogram.counts[2 * b + 1]);
    double position = weight > 0 ? moment / weight / LevelHistogram::kPositions : 0.5;
    double mean = bins.edge[b] + std::clamp(position, 0.0, 1.0) * (bins.edge[b + 1] - bins.edge[b]);
    bins.weight[b] = std::max(weight, 0.0);
    bins.mean[b] = std::clamp(mean, bins.edge[b], bins.edge[b + 1]);
  }
  bins.zeros = std::max(static_cast<double>(histogram.counts.back()), 0.0);
  return bins;
}

LevelBins in_pairs(const LevelBins& bins) {
  LevelBins pairs{{bins.edge[0]}, {}, {}, bins.zeros};
  for (size_t b = 0; b + 1 < bins.weight.size(); b += 2) {
    const double weight = bins.weight[b] + bins.weight[b + 1], low = bins.edge[b], high = bins.edge[b + 2];
    const double moment = bins.weight[b] * bins.mean[b] + bins.weight[b + 1] * bins.mean[b + 1];
    pairs.edge.push_back(high);
    pairs.weight.push_back(weight);
    pairs.mean.push_back(weight > 0 ? std::clamp(moment / weight, low, high) : (low + high) / 2);
  }
  return pairs;
}

}  // namespace gradwire
