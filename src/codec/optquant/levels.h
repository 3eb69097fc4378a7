// SPDX-License-Identifier: Apache-2.0
// The levels of a scalar quantizer, fitted to what is known of the data. A bucket is divided by its largest magnitude,
// so magnitudes r lie in [0, 1]; a histogram of r, weighted by the bucket's squared norm, is pooled over buckets,
// threads and ranks as integers; and a dynamic programme over the histogram's edges finds the symmetric set of levels
// with the least expected squared error, with a zero level or without, whichever is better.
//
// The model of the data: a bin knows its weight and its mean (the position inside the bin in 1/256 of its width); its
// weight is spread evenly over the widest interval around that mean that fits in the bin. So sums up to an edge are
// those of the data, and the rest is off by second order in a bin's width.
//
// What is guaranteed, in that model and up to rounding in double:
//  - unbiased: no set of levels on edges is better.
//  - biased, kappa = 1/2 (nearest): no set of intervals that end on edges is better, each with its own mean as level.
//  - biased, 0 <= kappa < 1/2: no set of levels on every 4th edge (0 and 1 among them) is better. This cost need not be
//    Monge, so the programme is the plain one on fewer candidates. A kappa above 0.4995 is fitted as 1/2.
// A local search then moves single levels off the edges, and only ever lowers the error.
#pragma once

#include <bit>
#include <cstdint>
#include <span>
#include <vector>

namespace gradwire {

struct LevelHistogram {
  // 256 even bins to each octave of g = 1/256 + r 255/256, which runs from 2^-8 to 1: 1.5e-5 wide at r = 0, 2e-3 at r
  // = 1. So mass near 0 is resolved, and the bits of g, read as an integer, are the bin and the position in it.
  static constexpr int kBins = 2048;
  static constexpr int kPositions = 256;  // a position is 0..256: both ends of a bin are exact

  struct BinPosition {
    uint32_t bin;
    uint32_t position;
  };
  static BinPosition place(float r) {
    float g = r * (255.0f / 256.0f) + 1.0f / 256.0f;
    uint32_t k = std::bit_cast<uint32_t>(g) - std::bit_cast<uint32_t>(1.0f / 256.0f);
    uint32_t bin = k >> 15 < kBins ? k >> 15 : kBins - 1;
    return {bin, (k - (bin << 15) + 64) >> 7};
  }
  static double edge(int i);  // 0 <= i <= kBins; edge(0) = 0, edge(kBins) = 1

  // [2 bin]: the sum of the weights; [2 bin + 1]: the sum of weight * position. Histograms are pooled by adding these.
  std::vector<int64_t> counts = std::vector<int64_t>(2 * kBins);

  // One bucket of finite values, its largest magnitude (> 0) and the weight of each of its values. The weights of all
  // values ever pooled must sum to less than 2^53, so that neither count overflows and doubles hold the weights
  // exactly.
  void add(std::span<const float> values, float top, int64_t weight);
};

// How a value t in a cell [c, d] is rounded: up with probability clip((p - kappa) / (1 - 2 kappa), 0, 1), where
// p = (t - c) / (d - c). What an element costs: bias^2 + variance / workers.
struct LevelRule {
  bool biased = false;  // false: kappa = 0 and the outermost levels are -1 and 1; true: they are free, and saturate
  double kappa = 0.5;   // 0..1/2; 1/2 is rounding to nearest. Not looked at unless biased
  double workers = 1;   // at least 1
};

struct LevelFit {
  std::vector<float> levels;  // ascending by at least 2^-21, levels[i] == -levels[count - 1 - i], within [-1, 1]
  bool zero = false;          // 2^bits - 1 levels, one of them 0; otherwise 2^bits levels
  double error = 0;           // what an element costs in the mean, in units of (largest magnitude)^2
};

// bits 2..8. With no weight at all: even levels, error 0. The same counts give the same levels on every rank.
LevelFit fit_levels(const LevelHistogram& histogram, int bits, const LevelRule& rule);

// The same cost of any ascending levels on raw points, exactly: for tests and reports. r: |t| of each point.
double level_error(std::span<const float> levels, std::span<const double> r, std::span<const double> weight,
                   const LevelRule& rule);

// The programme itself, on any bins (more than `count` of them, some with weight): edges ascending from 0 to 1, and the
// weight and the mean of every bin. Gives `count` ascending magnitudes (the levels above 0), before the local search.
// stride: of the candidates where 0 <= kappa < 1/2.
struct LevelBins {
  std::vector<double> edge;
  std::vector<double> weight;
  std::vector<double> mean;
};
LevelBins level_bins(const LevelHistogram& histogram);
std::vector<double> best_magnitudes(const LevelBins& bins, int count, bool zero, const LevelRule& rule, int stride = 1);

}  // namespace gradwire
