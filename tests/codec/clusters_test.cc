// SPDX-License-Identifier: Apache-2.0
// casq's clusters and buckets: loads of hash and rank buckets against their formulas, the allocations against each
// other, and the fit against the paper's at the same budget.
#include "codec/casq/clusters.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "codec/casq/cluster_rules.h"
#include "codec/casq/cluster_table.h"
#include "gradwire/error.h"

namespace gradwire {
namespace {

enum class ClusterValues { gauss, laplace, student };

std::vector<float> draw(ClusterValues data, size_t n, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> gauss;
  std::exponential_distribution<double> magnitude;
  std::student_t_distribution<double> student(3);
  std::vector<float> x(n);
  for (float& v : x) {
    const double y = data == ClusterValues::gauss     ? gauss(random)
                     : data == ClusterValues::student ? student(random)
                                                      : magnitude(random) * (random() & 1 ? 1 : -1);
    v = static_cast<float>(.01 * y);
  }
  return x;
}

double energy(const std::vector<float>& x) {
  double sum = 0;
  for (const double v : x) sum += v * v;
  return sum;
}
double rms(const std::vector<float>& x) { return std::sqrt(energy(x) / static_cast<double>(x.size())); }

ClusterHistogram histogram_of(const std::vector<float>& x) {
  ClusterHistogram h;
  h.add(x, rms(x));
  return h;
}

// Every element replaced by the mean of its bucket.
std::vector<double> averaged(const std::vector<float>& x, const std::vector<uint32_t>& bucket, uint32_t buckets) {
  std::vector<double> sum(buckets), count(buckets), out;
  for (size_t i = 0; i < x.size(); ++i) sum[bucket[i]] += x[i], ++count[bucket[i]];
  for (size_t i = 0; i < x.size(); ++i) out.push_back(sum[bucket[i]] / count[bucket[i]]);
  return out;
}

double squared_distance(const std::vector<float>& x, const std::vector<double>& y) {
  double sum = 0;
  for (size_t i = 0; i < x.size(); ++i) sum += (x[i] - y[i]) * (x[i] - y[i]);
  return sum;
}

using Hash = std::function<uint32_t(uint32_t index, uint32_t rank, uint32_t buckets, uint32_t count)>;
uint32_t random_hash(uint32_t i, uint32_t, uint32_t m, uint32_t) {
  return static_cast<uint32_t>(mix64(uint64_t{i} * 0x9e3779b97f4a7c15ull + 1) >> 33) % m;
}
uint32_t bkdr_hash(uint32_t i, uint32_t, uint32_t m, uint32_t) { return bkdr(i) % m; }
// The two rules that the drivers have in forms of their own: cluster and bucket of one element.
uint32_t cluster_of(float x, const float* thresholds, uint32_t count) {
  uint32_t k = 0;
  for (uint32_t i = 0; i < count; ++i) k += x >= thresholds[i];
  return k;
}

uint32_t rank_bucket(uint32_t rank, uint32_t buckets, uint32_t count) {
  return static_cast<uint32_t>(uint64_t{rank} * buckets / count);
}

uint32_t by_rank(uint32_t, uint32_t rank, uint32_t m, uint32_t n) { return rank_bucket(rank, m, n); }

// The message of x: ids by the thresholds, then buckets within each cluster, decoded again.
std::vector<double> decoded(const std::vector<float>& x, double scale, const std::vector<float>& thresholds,
                            const std::function<std::vector<uint32_t>(const std::vector<uint32_t>&)>& allocate,
                            const Hash& hash) {
  const auto clusters = static_cast<uint32_t>(thresholds.size() + 1);
  std::vector<uint32_t> id, counts(clusters), rank(clusters), start(clusters + 1), bucket;
  for (const float v : x) {
    id.push_back(cluster_of(static_cast<float>(v / scale), thresholds.data(), clusters - 1));
    ++counts[id.back()];
  }
  const auto buckets = allocate(counts);
  for (uint32_t k = 0; k < clusters; ++k) start[k + 1] = start[k] + buckets[k];
  for (uint32_t i = 0; i < x.size(); ++i) {
    const uint32_t k = id[i];
    bucket.push_back(start[k] + hash(i, rank[k]++, buckets[k], counts[k]));
  }
  return averaged(x, bucket, start[clusters]);
}

TEST(Clusters, BkdrTestVectors) {
  const uint32_t vectors[][2] = {{0, 0},           {1, 2248091},         {2, 4496182},
                                 {127, 285507557}, {128, 1859728000},    {200, 2021590552},
                                 {256, 17161},     {1000000, 145012415}, {16777216, 1}};
  for (const auto& v : vectors) EXPECT_EQ(bkdr(v[0]), v[1]) << v[0];
}

TEST(Clusters, LoadsCostWhatTheFormulasSay) {
  const uint32_t n = 1 << 20;
  const auto x = draw(ClusterValues::gauss, n, 1);
  const auto loss = [&](double load, const Hash& hash) {
    const auto m = static_cast<uint32_t>(n / load);
    std::vector<uint32_t> bucket(n);
    for (uint32_t i = 0; i < n; ++i) bucket[i] = hash(i, i, m, n);
    return squared_distance(x, averaged(x, bucket, m)) / energy(x);
  };
  const double loads[] = {1, 2, 8}, hashed[] = {.368, .568, .875}, ranked[] = {0, .5, .875};
  for (int i = 0; i < 3; ++i) {
    EXPECT_NEAR(loss(loads[i], random_hash), hashed[i], .004);
    EXPECT_NEAR(hash_loss(n, n / loads[i]), hashed[i], .001);
    EXPECT_NEAR(loss(loads[i], by_rank), ranked[i], .004);
    EXPECT_DOUBLE_EQ(rank_loss(n, n / loads[i]), ranked[i]);
  }
  const double small[] = {.25, .5, 1, 2}, weak[] = {.487, .487, .487, .682};
  for (int i = 0; i < 4; ++i) EXPECT_NEAR(loss(small[i], bkdr_hash), weak[i], .004) << small[i];
}

TEST(Clusters, RankBucketsAreEvenAndComplete) {
  for (const auto& [n, m] : {std::pair{7u, 3u}, {100u, 99u}, {32768u, 1000u}, {5u, 5u}, {4000000000u, 3999999999u}}) {
    EXPECT_EQ(rank_bucket(0, m, n), 0u);
    EXPECT_EQ(rank_bucket(n - 1, m, n), m - 1);
    if (n > 100000) continue;
    std::vector<uint32_t> load(m);
    for (uint32_t j = 0; j < n; ++j) ++load[rank_bucket(j, m, n)];
    const auto [least, most] = std::minmax_element(load.begin(), load.end());
    EXPECT_LE(*most - *least, 1u);
    EXPECT_GE(*least, 1u);
  }
}

TEST(Clusters, TheStrongestClustersAreFilledFirst) {
  const std::vector<uint32_t> counts{10, 500, 0, 30};
  const std::vector<uint8_t> order{3, 2, 0, 1};
  std::vector<uint32_t> buckets(4);
  const auto allocate = [&](uint32_t budget) {
    return allocate_rank(counts.data(), order.data(), 4, budget, buckets.data());
  };
  EXPECT_EQ(allocate(3), 3u);
  EXPECT_EQ(buckets, (std::vector<uint32_t>{1, 1, 0, 1}));
  EXPECT_EQ(allocate(20), 20u);
  EXPECT_EQ(buckets, (std::vector<uint32_t>{1, 1, 0, 18}));
  EXPECT_EQ(allocate(41), 41u);
  EXPECT_EQ(buckets, (std::vector<uint32_t>{10, 1, 0, 30}));
  EXPECT_EQ(allocate(100), 100u);
  EXPECT_EQ(buckets, (std::vector<uint32_t>{10, 60, 0, 30}));
  EXPECT_EQ(allocate(1000), 540u);
  EXPECT_EQ(buckets, counts);
}

TEST(Clusters, TheOtherSignsOutliersComeToTheFront) {
  const auto turned = [](std::vector<uint32_t> order) { return other_sign_first({{}, std::move(order)}).words; };
  using Order = std::vector<uint32_t>;
  EXPECT_EQ(turned({1, 0}), (Order{0, 1}));
  EXPECT_EQ(turned({0, 1}), (Order{1, 0}));
  EXPECT_EQ(turned({3, 0, 2, 1}), (Order{0, 3, 2, 1}));
  EXPECT_EQ(turned({0, 3, 1, 2}), (Order{3, 0, 1, 2}));
  EXPECT_EQ(turned({3, 2, 1, 0}), (Order{0, 3, 2, 1}));
  EXPECT_EQ(turned({2, 7, 6, 1, 0, 3, 4, 5}), (Order{0, 2, 7, 6, 1, 3, 4, 5}));
}

TEST(Clusters, MirroredClustersShareTheirBucketsByCountAndDeviation) {
  using Buckets = std::vector<uint32_t>;
  const auto shared = [](Buckets buckets, std::vector<double> counts, std::vector<double> variances) {
    return balance_signs(std::move(buckets), counts, variances);
  };
  EXPECT_EQ(shared({1000, 1, 1, 10}, {50, 100, 100, 50}, {4, 1, 1, 4}), (Buckets{505, 1, 1, 505}));
  EXPECT_EQ(shared({10, 1, 1, 990}, {50, 100, 100, 150}, {4, 1, 1, 4}), (Buckets{250, 1, 1, 750}));
  EXPECT_EQ(shared({10, 1, 1, 990}, {50, 100, 100, 50}, {1, 1, 1, 9}), (Buckets{250, 1, 1, 750}));
  EXPECT_EQ(shared({10, 990}, {0, 50}, {0, 9}), (Buckets{0, 1000}));  // a sign without elements needs none
  EXPECT_EQ(shared({300, 700}, {50, 50}, {0, 0}), (Buckets{300, 700}));
}

TEST(Clusters, TheSquaredNormSplitsInWhatIsSentAndWhatIsLeft) {
  const auto x = draw(ClusterValues::laplace, 1 << 16, 3);
  const auto fit = fit_clusters(histogram_of(x), 2, .03);
  const auto allocate = [&](const std::vector<uint32_t>& counts) {
    std::vector<uint32_t> m(4);
    allocate_rank(counts.data(), fit.order.data(), 4, 2000, m.data());
    return m;
  };
  for (const Hash& hash : {Hash(by_rank), Hash(random_hash), Hash(bkdr_hash)}) {
    const auto q = decoded(x, rms(x), fit.thresholds, allocate, hash);
    double sent = 0;
    for (const double v : q) sent += v * v;
    EXPECT_NEAR((sent + squared_distance(x, q)) / energy(x), 1, 1e-12);
  }
}

TEST(Clusters, TheOptimalHashAllocationBeatsTheObviousOnes) {
  // Laplace, 2 bits, clusters of the paper with the cut of its later experiments, the released tables' budget.
  const uint32_t n = 1 << 20, total = static_cast<uint32_t>(n * 1000400.0 / 21.8e6);
  const auto x = draw(ClusterValues::laplace, n, 1);
  const auto fit = fit_clusters(histogram_of(x), 2, .05, ClusterMode::paper, .85);
  const auto error = [&](const std::vector<uint32_t>& m) {
    double sum = 0;
    for (size_t k = 0; k < 4; ++k) sum += fit.counts[k] * fit.variances[k] * hash_loss(fit.counts[k], m[k]);
    return sum / n;
  };
  const auto by = [&](double power) {
    std::vector<double> w(4);
    for (size_t k = 0; k < 4; ++k) w[k] = fit.counts[k] * std::pow(fit.variances[k], power);
    return error(allocate_paper(fit, PaperRule::list, total, w));
  };
  const auto best = allocate_hash(fit.counts, fit.variances, total);
  EXPECT_EQ(std::accumulate(best.begin(), best.end(), 0u), total);
  EXPECT_NEAR(error(best), .1615, .002);
  EXPECT_NEAR(by(0), .176, .002);
  EXPECT_NEAR(by(1), .167, .002);
  EXPECT_NEAR(by(.5), .171, .002);
  const auto sent = decoded(
      x, rms(x), fit.thresholds, [&](const auto&) { return best; }, random_hash);
  EXPECT_NEAR(squared_distance(x, sent) / energy(x), error(best), .002);
}

TEST(Clusters, NoExchangeOfBucketsImprovesTheHashAllocation) {
  std::mt19937_64 random(2);
  for (int trial = 0; trial < 50; ++trial) {
    std::vector<double> counts(8), variances(8);
    for (double& n : counts) n = random() % 5 ? static_cast<double>(1 + random() % 20000) : 0;
    for (double& v : variances) v = std::exp(std::normal_distribution<double>(0, 2)(random));
    counts[0] = 100;
    const auto total = static_cast<uint32_t>(1000 + random() % 20000);
    const auto m = allocate_hash(counts, variances, total);
    const auto saving = [&](size_t k, double more) {
      return counts[k] * variances[k] * (hash_loss(counts[k], m[k]) - hash_loss(counts[k], m[k] + more));
    };
    uint32_t sum = 0;
    double greatest = 0, scale = 0;
    for (size_t k = 0; k < 8; ++k) {
      sum += m[k];
      EXPECT_EQ(m[k] == 0, counts[k] == 0);
      if (counts[k] > 0) greatest = std::max(greatest, saving(k, 1)), scale += counts[k] * variances[k];
    }
    EXPECT_EQ(sum, total);
    for (size_t k = 0; k < 8; ++k) {
      if (m[k] > 1) {
        EXPECT_LE(greatest + saving(k, -1), 1e-6 * greatest + 1e-12 * scale) << trial << " " << k;
      }
    }
  }
  EXPECT_THROW(allocate_hash(std::vector<double>{1, 2, 3}, std::vector<double>{1, 1, 1}, 2), Error);
  EXPECT_EQ(allocate_hash(std::vector<double>{5, 0, 5}, std::vector<double>{0, 0, 0}, 6),
            (std::vector<uint32_t>{3, 0, 3}));
}

TEST(Clusters, ThePapersRulesSumToTheTotalWithTheirMinimum) {
  const auto fit = fit_clusters(histogram_of(draw(ClusterValues::student, 1 << 16, 4)), 3, .05, ClusterMode::paper);
  for (const auto rule : {PaperRule::density, PaperRule::entropy}) {
    for (const uint32_t total : {8u, 79u, 80u, 81u, 1000u, 54321u}) {
      const auto m = allocate_paper(fit, rule, total);
      EXPECT_EQ(std::accumulate(m.begin(), m.end(), 0u), total);
      EXPECT_GE(*std::min_element(m.begin(), m.end()), std::min(10u, total / 8));
    }
  }
  const auto four = fit_clusters(histogram_of(draw(ClusterValues::gauss, 1 << 14, 4)), 2, .05, ClusterMode::paper);
  EXPECT_EQ(allocate_paper(four, PaperRule::list, 10004, std::vector<double>{500000, 200, 200, 500000}),
            (std::vector<uint32_t>{4992, 10, 10, 4992}));
  EXPECT_THROW(allocate_paper(four, PaperRule::list, 100, std::vector<double>{1, 2, 3}), Error);
  EXPECT_THROW(allocate_paper(four, PaperRule::list, 100, std::vector<double>{1, 2, 3, -1}), Error);
  EXPECT_THROW(allocate_paper(four, PaperRule::entropy, 3), Error);
}

TEST(Clusters, ThePapersOutlierCentreIsThePercentileItself) {
  const auto x = draw(ClusterValues::laplace, 1 << 20, 6);
  const auto fit = fit_clusters(histogram_of(x), 2, .05, ClusterMode::paper);
  const double t = std::log(20) / std::sqrt(2);  // 95 % of |x|, over the rms
  EXPECT_NEAR(fit.centres[3], t, .02 * t);
  EXPECT_NEAR(fit.centres[0], -t, .02 * t);
  for (size_t i = 0; i < 3; ++i) {
    if (i != 1) {
      EXPECT_NEAR(fit.thresholds[i], (fit.centres[i] + fit.centres[i + 1]) / 2, 1e-5);
    }
  }
  EXPECT_NEAR(fit.shares[3], .05, 1e-3);
  EXPECT_NEAR(fit.shares[2] + fit.shares[3], 1, 1e-12);
  EXPECT_NEAR(fit.entropies[0] + fit.entropies[1], 1, 1e-12);
}

TEST(Clusters, OursIsNoWorseThanThePapersAndErrsAsPredicted) {
  const uint32_t n = 1 << 18;
  for (const auto data : {ClusterValues::gauss, ClusterValues::laplace, ClusterValues::student}) {
    const auto x = draw(data, n, 11);
    const auto h = histogram_of(x);
    for (int bits = 1; bits <= 4; ++bits) {
      for (const double budget : {.01, .032, .064}) {
        const auto total = static_cast<uint32_t>(budget * n);
        const auto ours = fit_clusters(h, bits, budget), paper = fit_clusters(h, bits, budget, ClusterMode::paper);
        const auto clusters = static_cast<uint32_t>(ours.centres.size());
        const auto greedy = [&](const std::vector<uint32_t>& counts) {
          std::vector<uint32_t> m(clusters);
          EXPECT_LE(allocate_rank(counts.data(), ours.order.data(), clusters, total, m.data()), total);
          return m;
        };
        const double error = squared_distance(x, decoded(x, rms(x), ours.thresholds, greedy, by_rank)) / energy(x);
        EXPECT_NEAR(error, ours.error, .06 * error) << int(data) << " " << bits << " " << budget;
        for (const auto rule : {PaperRule::density, PaperRule::entropy, PaperRule::list}) {
          const auto m = rule == PaperRule::list ? allocate_hash(paper.counts, paper.variances, total)
                                                 : allocate_paper(paper, rule, total);
          const auto sent = decoded(
              x, rms(x), paper.thresholds, [&](const auto&) { return m; }, bkdr_hash);
          // One cluster a sign: a tie but for the luck of the hash.
          const double theirs = squared_distance(x, sent) / energy(x) * (bits == 1 ? 1.002 : 1);
          EXPECT_LE(error, theirs) << int(data) << " " << bits << " " << budget;
        }
      }
    }
  }
}

TEST(Clusters, TheCutsAreTheBestOfAllCuts) {
  // By brute force at 2 bits: every pair of thresholds on a grid, the rank error from sorted values.
  auto x = draw(ClusterValues::student, 4000, 8);
  const double scale = rms(x), budget = .03, room = budget * 4000;
  const auto fit = fit_clusters(histogram_of(x), 2, budget);
  double least = 1;
  for (double a = .2; a < 12; a *= 1.03) {
    for (double b = .2; b < 12; b *= 1.03) {
      double n[4] = {}, s[4] = {}, q[4] = {};
      for (const float v : x) {
        const double r = v / scale;
        const int k = r < -a ? 0 : r < 0 ? 1 : r < b ? 2 : 3;
        n[k] += 1, s[k] += r, q[k] += r * r;
      }
      std::vector<std::pair<double, double>> parts;
      double error = 0, left = room;
      for (int k = 0; k < 4; ++k) {
        if (n[k] > 0) parts.push_back({(q[k] - s[k] * s[k] / n[k]) / n[k], n[k]});
      }
      std::sort(parts.rbegin(), parts.rend());
      for (const auto& [v, count] : parts) {
        const double m = std::min(count, left);
        left -= m;
        error += v * (count - m);
      }
      least = std::min(least, error / 4000);
    }
  }
  EXPECT_LE(fit.error, 1.01 * least);
}

TEST(Clusters, AConstantGradientWithFeedbackStaysBounded) {
  // n = 2^14, tables [800, 1, 1, 800], BKDR, the clusters of the first step: the residual neither grows nor vanishes.
  const uint32_t n = 1 << 14;
  for (const uint64_t seed : {1, 2, 3}) {
    const auto g = draw(ClusterValues::laplace, n, seed);
    const auto fit = fit_clusters(histogram_of(g), 2, .1, ClusterMode::paper, .85);
    const std::vector<uint32_t> tables{800, 1, 1, 800};
    std::vector<float> v(g), residual(n);
    double least = 9, most = 0;
    for (int step = 1; step <= 1000; ++step) {
      for (uint32_t i = 0; i < n; ++i) v[i] = g[i] + residual[i];
      const auto sent = decoded(
          v, rms(g), fit.thresholds, [&](const auto&) { return tables; }, bkdr_hash);
      for (uint32_t i = 0; i < n; ++i) residual[i] = static_cast<float>(v[i] - sent[i]);
      const double ratio = std::sqrt(energy(residual) / energy(g));
      if (step >= 10) least = std::min(least, ratio), most = std::max(most, ratio);
    }
    EXPECT_GT(least, .80);
    EXPECT_LT(most, .95);
  }
}

TEST(Clusters, HistogramsAddUpInAnyOrder) {
  const auto x = draw(ClusterValues::student, 9000, 5);
  const double scale = rms(x);
  ClusterHistogram whole, parts, other;
  whole.add(x, scale);
  const std::span<const float> all(x);
  other.add(all.subspan(5000), scale);
  parts.merge(other);
  ClusterHistogram first;
  first.add(all.first(5000), scale);
  parts.merge(first);
  EXPECT_TRUE(std::equal(whole.words().begin(), whole.words().end(), parts.words().begin()));
  EXPECT_EQ(whole.total(), 9000);
  ClusterHistogram twice;
  twice.add(x, scale, 2);
  parts.merge(whole);
  EXPECT_TRUE(std::equal(twice.words().begin(), twice.words().end(), parts.words().begin()));
}

TEST(Clusters, BinsCoverEveryValue) {
  using H = ClusterHistogram;
  EXPECT_EQ(H::bin(0.0f), H::kSide);
  EXPECT_EQ(H::bin(-0.0f), H::kSide);
  EXPECT_EQ(H::bin(-1e-30f), 0u);
  EXPECT_EQ(H::bin(1e30f), H::kBins - 1);
  EXPECT_EQ(H::bin(-1e30f), H::kSide - 1);
  for (uint32_t b = 1; b < H::kSide; ++b) {
    EXPECT_EQ(H::bin(H::edge(b)), H::kSide + b);
    EXPECT_EQ(H::bin(-H::edge(b)), b);
    EXPECT_EQ(H::bin(std::nextafter(H::edge(b), 0.0f)), H::kSide + b - 1);
  }
  ClusterHistogram h;
  h.add(std::vector<float>{1, 2, std::nanf("")}, 0);
  h.add(std::vector<float>{1, 2}, std::numeric_limits<double>::infinity());
  h.add(std::vector<float>{std::nanf("")}, 1);
  EXPECT_EQ(h.total(), 0);
}

TEST(Clusters, OddDataStillGiveAscendingThresholds) {
  const float inf = std::numeric_limits<float>::infinity();
  const std::vector<std::vector<float>> odd{{},       {0},          {0, 0, 0, 0},   {1, 1, 1},
                                            {-1, -1}, {-1, 1},      {1, -1, 0.5},   {1e-30f, 1},
                                            {inf, 1}, {-3, -2, -1}, {1, 2, 3, 4, 5}};
  for (const auto& x : odd) {
    for (const auto mode : {ClusterMode::best, ClusterMode::paper}) {
      for (int bits = 1; bits <= 4; ++bits) {
        ClusterHistogram h;
        h.add(x, 1);
        const auto fit = fit_clusters(h, bits, .1, mode);
        const size_t k = size_t{1} << bits;
        ASSERT_EQ(fit.centres.size(), k);
        ASSERT_EQ(fit.thresholds.size(), k - 1);
        EXPECT_EQ(fit.thresholds[k / 2 - 1], 0);
        for (size_t i = 0; i < k; ++i) EXPECT_TRUE(std::isfinite(fit.centres[i]));
        for (size_t i = 0; i + 1 < k; ++i)
          EXPECT_LT(fit.centres[i], fit.centres[i + 1]) << i << " " << bits << " " << x.size();
        for (size_t i = 0; i + 2 < k; ++i) EXPECT_LT(fit.thresholds[i], fit.thresholds[i + 1]);
        auto order = fit.order;
        std::sort(order.begin(), order.end());
        for (size_t i = 0; i < k; ++i) EXPECT_EQ(order[i], i);
        EXPECT_TRUE(fit.error >= 0 && fit.error <= 1);
      }
    }
  }
  // Two values a side, at edges of bins: nothing is lost with two clusters a side.
  const std::vector<float> four{-2, -2, -1, -1, -1, 1, 1, 2};
  ClusterHistogram h;
  h.add(four, 1);
  const auto fit = fit_clusters(h, 2, 0);
  EXPECT_EQ(fit.error, 0);
  const uint32_t wanted[] = {0, 0, 1, 1, 1, 2, 2, 3};
  for (int i = 0; i < 8; ++i) EXPECT_EQ(cluster_of(four[i], fit.thresholds.data(), 3), wanted[i]) << i;
  EXPECT_EQ(cluster_of(-0.0f, fit.thresholds.data(), 3), 2u);
}

TEST(Clusters, ArgumentsOutOfRangeAreRefused) {
  const ClusterHistogram h;
  EXPECT_THROW(fit_clusters(h, 0, .1), Error);
  EXPECT_THROW(fit_clusters(h, 5, .1), Error);
  EXPECT_THROW(fit_clusters(h, 2, -.1), Error);
  EXPECT_THROW(fit_clusters(h, 2, std::nan("")), Error);
  EXPECT_THROW(fit_clusters(h, 2, .1, ClusterMode::paper, 1), Error);
}

}  // namespace
}  // namespace gradwire
