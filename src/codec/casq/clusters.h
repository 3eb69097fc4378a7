// SPDX-License-Identifier: Apache-2.0
// Where casq's clusters begin and end, and how many buckets each deserves.
//
// Both follow from one histogram of the values divided by the root mean square of their unit: per sign 64 bins a binade
// from 2^-8 to 2^8, each with count, sum and sum of squares in fixed point. All are integers, so that the ranks'
// histograms can be added in any order; the fit is then the same on all of them.
//
// With rank buckets a cluster of n elements and variance v that gets m buckets has the error v (n - m). Tails are cheap
// to cut off: a cluster of few elements of great variance, filled with a bucket each, costs nothing but the budget. So
// each sign has one outlier cluster beyond a cut, the rest is 1-D k-means (exact, a dynamic programme that yields every
// cut's rest at once), and the pair of cuts is searched for the least predicted error. mode=paper cuts at a percentile,
// takes the percentile itself as the centre, and lets the nearest centre decide.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace gradwire {

class ClusterHistogram {
 public:
  static constexpr uint32_t kSide = 1024, kBins = 2 * kSide;  // negative values first, each side by rising magnitude
  static constexpr double kUnit = 0x1p-24;                    // of the sums

  ClusterHistogram() : words_(3 * kBins) {}

  // A unit's values; not-a-numbers are left out, as is a unit without a positive finite rms. `weight` counts every
  // value that often (a sample stands for more).
  void add(std::span<const float> values, double rms, uint32_t weight = 1);
  void merge(const ClusterHistogram& other);

  static uint32_t bin(float ratio);           // of a value over its rms
  static float edge(uint32_t magnitude_bin);  // the least magnitude of a bin

  // Count, sum of magnitudes, sum of squares, bin after bin: what ranks add up.
  std::span<int64_t> words() { return words_; }
  std::span<const int64_t> words() const { return words_; }
  double total() const;

 private:
  std::vector<int64_t> words_;
};

enum class ClusterMode { best, paper };

// Everything in units of the rms, clusters from the most negative to the most positive.
struct Clusters {
  std::vector<float> centres;
  std::vector<float> thresholds;  // one fewer; cluster_rules.h says how they apply
  std::vector<uint8_t> order;     // clusters by falling variance: the order in which buckets are given
  std::vector<double> counts, variances;
  std::vector<double> shares, entropies;  // as the paper's rules want them, each summing to 1 within a sign
  double error = 0;                       // predicted, relative to the squared norm, with rank buckets
};

// 2^bits clusters (bits 1..4), half of them per sign, for `budget` buckets per element.
Clusters fit_clusters(const ClusterHistogram& histogram, int bits, double budget, ClusterMode mode = ClusterMode::best,
                      double percentile = 0.95);

// The expected error of n elements in m buckets relative to the variance: by a random hash, and by rank.
double hash_loss(double count, double buckets);
double rank_loss(double count, double buckets);

// Hash buckets that sum to `total`. The optimum gives every cluster with elements 1 or more; it satisfies
// 1 - exp(-load) (1 + load) = mu / variance. The paper's rules give at least 10, or an equal part if there are too few:
// entropy * centre * share, entropy * centre, or a list set by hand, scaled.
std::vector<uint32_t> allocate_hash(std::span<const double> counts, std::span<const double> variances, uint32_t total);
// The same buckets, but those of each pair of mirrored clusters shared by count * deviation. A message loses little by
// this. With error feedback it matters: the optimum follows a small difference of the variances with nearly all
// buckets, and the residual of the other sign grows until the next fit.
std::vector<uint32_t> balance_signs(std::vector<uint32_t> buckets, std::span<const double> counts,
                                    std::span<const double> variances);
enum class PaperRule { density, entropy, list };
std::vector<uint32_t> allocate_paper(const Clusters& clusters, PaperRule rule, uint32_t total,
                                     std::span<const double> list = {});

}  // namespace gradwire
