// SPDX-License-Identifier: Apache-2.0
// What is known of the data when levels are fitted. A bucket is divided by its largest magnitude, so its values t lie
// in [-1, 1]. A histogram of t with its sign, weighted by the bucket's squared norm, is pooled over buckets, threads
// and ranks as integers. Zeros are counted apart: many gradients are zero in a large share of their elements, and a
// level that lies beside them instead of on them costs more than any other.
#pragma once

#include <bit>
#include <cstdint>
#include <span>
#include <vector>

namespace gradwire {

struct LevelHistogram {
  // Each sign has 512 even bins to each octave of g = 1/16 + |t| 15/16, which runs from 2^-4 to 1: 1.3e-4 wide at 0,
  // 1e-3 at 1. So mass near 0 is resolved, and the bits of g, read as an integer, are the bin and the position in it.
  static constexpr int kSide = 2048;       // bins of one sign
  static constexpr int kBins = 2 * kSide;  // ascending from -1 to 1; edge(kSide) is 0
  static constexpr int kPositions = 256;   // a position is 0..256: both ends of a bin are exact
  static constexpr int kCounts = 2 * kBins + 1;

  struct BinPosition {
    uint32_t bin;
    uint32_t position;
  };
  // -1 <= t <= 1. In integers, because compilers make vectors of these and not of comparisons of floats.
  static BinPosition place(float t) {
    constexpr int kShift = 14;  // 23 bits of mantissa, 9 of which are the bin
    const uint32_t bits = std::bit_cast<uint32_t>(t), below = 0 - (bits >> 31);
    const float g = std::bit_cast<float>(bits & 0x7fffffffu) * (15.0f / 16.0f) + 1.0f / 16.0f;
    const uint32_t k = std::bit_cast<uint32_t>(g) - std::bit_cast<uint32_t>(1.0f / 16.0f);
    const uint32_t bin = k >> kShift < kSide ? k >> kShift : kSide - 1;
    const uint32_t position = (k - (bin << kShift) + 32) >> 6;
    return {kSide + (bin ^ below), (position ^ below) - below + (kPositions & below)};  // ~x is -1 - x
  }
  static double edge(int i);  // 0 <= i <= kBins

  // [2 bin]: the sum of the weights; [2 bin + 1]: the sum of weight * position; the last: the weight of the zeros,
  // which are in no bin. Histograms are pooled by adding these.
  std::vector<int64_t> counts = std::vector<int64_t>(kCounts);

  // One bucket of finite values, its largest magnitude (> 0) and the weight of each of its values. The weights of all
  // values ever pooled must sum to less than 2^53, so that neither count overflows and doubles hold the weights
  // exactly.
  void add(std::span<const float> values, float top, int64_t weight);
};

// The same as numbers: edges ascending, the weight and the mean of every bin, and the weight at exactly 0.
struct LevelBins {
  std::vector<double> edge;
  std::vector<double> weight;
  std::vector<double> mean;
  double zeros = 0;  // where it is not 0, 0 is one of the edges and not the last of them
};
LevelBins level_bins(const LevelHistogram& histogram);
LevelBins in_pairs(const LevelBins& bins);  // half as many, each two neighbours in one

}  // namespace gradwire
