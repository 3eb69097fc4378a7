// SPDX-License-Identifier: Apache-2.0
#include "codec/optquant/level_histogram.h"

#include <algorithm>
#include <cmath>

namespace gradwire {

double LevelHistogram::edge(int i) {
  const int from_zero = std::abs(i - kSide);
  const double g = std::ldexp(1 + (from_zero % 512) / 512.0, from_zero / 512 - 4);
  return std::copysign((g - 1 / 16.0) * 16 / 15, i - kSide);
}

void LevelHistogram::add(std::span<const float> values, float top, int64_t weight) {
  for (float value : values) {
    const float t = std::clamp(value / top, -1.0f, 1.0f);
    if (t == 0) {
      counts.back() += weight;
      continue;
    }
    const BinPosition to = place(t);
    counts[2 * to.bin] += weight;
    counts[2 * to.bin + 1] += weight * to.position;
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
