// SPDX-License-Identifier: Apache-2.0
// The level solver against slower ways to the same answer: brute force over all sets of edges on a few bins, an exact
// programme over the sorted raw points on data, closed forms of the rounding rule, and numbers found independently.
// Data are buckets of 1024 divided by their largest magnitude and weighted by its square, as the codec does it.
#include "codec/optquant/levels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <functional>
#include <numeric>
#include <random>
#include <string>

#include "gradwire/error.h"

namespace gradwire {
namespace {

const LevelRule kUnbiased{};
const LevelRule kNearestRule{.biased = true, .kappa = 0.5, .workers = 1};

struct LevelSample {
  std::vector<std::vector<float>> buckets;
  std::vector<double> r, weight;  // sorted by r
  LevelHistogram histogram;
};

LevelSample sample(const std::string& kind, int buckets, uint64_t seed = 1) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal;
  std::student_t_distribution<double> student(3);
  std::exponential_distribution<double> exponential;
  auto draw = [&]() -> double {
    double sign = random() & 1 ? 1 : -1;
    if (kind == "gauss") return normal(random);
    if (kind == "laplace") return sign * exponential(random);
    if (kind == "lognormal") return sign * std::exp(1.5 * normal(random));
    if (kind == "student") return student(random);
    return sign * std::generate_canonical<double, 53>(random);  // uniform
  };
  LevelSample data;
  std::vector<std::pair<double, double>> points;
  for (int b = 0; b < buckets; ++b) {
    std::vector<float> values(1024);
    float top = 0;
    for (float& v : values) v = static_cast<float>(draw()), top = std::max(top, std::fabs(v));
    auto weight = static_cast<int64_t>(std::llround(static_cast<double>(top) * top * 1024));
    data.histogram.add(values, top, weight);
    for (float v : values) points.emplace_back(std::fabs(static_cast<double>(v)) / top, weight);
    data.buckets.push_back(std::move(values));
  }
  std::sort(points.begin(), points.end());
  for (auto [r, w] : points) data.r.push_back(r), data.weight.push_back(w);
  return data;
}

std::vector<float> signed_levels(const std::vector<double>& magnitudes, bool zero) {
  std::vector<float> levels;
  for (size_t i = magnitudes.size(); i-- > 0;) levels.push_back(static_cast<float>(-magnitudes[i]));
  if (zero) levels.push_back(0);
  for (double x : magnitudes) levels.push_back(static_cast<float>(x));
  return levels;
}

double squares(const LevelSample& data) {
  double sum = 0, total = 0;
  for (size_t i = 0; i < data.r.size(); ++i) sum += data.weight[i] * data.r[i] * data.r[i], total += data.weight[i];
  return sum / total;
}

// The least error of `count` magnitudes on the raw points. Unbiased: levels at points, which is where a best set has
// them (but for l_1 without zero, which may lie between two points). Nearest: k-means, each interval's mean as its
// level.
double raw_optimum(const LevelSample& data, int count, bool zero, bool nearest) {
  size_t n = data.r.size();
  double total = std::accumulate(data.weight.begin(), data.weight.end(), 0.0);
  std::vector<double> x(n + 1), w(n + 1), m(n + 1), q(n + 1);  // node 0 is r = 0 and holds no point
  for (size_t i = 1; i <= n; ++i) {
    double r = x[i] = data.r[i - 1], weight = data.weight[i - 1] / total;
    w[i] = w[i - 1] + weight, m[i] = m[i - 1] + weight * r, q[i] = q[i - 1] + weight * r * r;
  }
  auto cost = [&](size_t i, size_t j) {
    double dw = w[j] - w[i], dm = m[j] - m[i], dq = q[j] - q[i];
    return nearest ? dq - dm * dm / dw : (x[i] + x[j]) * dm - x[i] * x[j] * dw - dq;
  };
  std::vector<double> now(n + 1), next(n + 1);
  for (size_t j = 0; j <= n; ++j) {
    if (nearest)
      now[j] = zero ? q[j] : j ? cost(0, j) : 0;
    else
      now[j] = zero ? cost(0, j) : x[j] * x[j] * w[j] - q[j];
  }
  std::function<void(size_t, size_t, size_t, size_t)> layer = [&](size_t from, size_t to, size_t low, size_t high) {
    size_t j = (from + to) / 2, at = low;
    next[j] = 1e300;
    for (size_t i = low; i <= std::min(high, j - 1); ++i) {
      double value = now[i] + cost(i, j);
      if (value < next[j]) next[j] = value, at = i;
    }
    if (j > from) layer(from, j - 1, low, at);
    if (j < to) layer(j + 1, to, at, high);
  };
  int cells = count + (zero && nearest);
  for (int k = 2; k <= cells; ++k) {
    next[0] = now[0];
    layer(k == cells ? n : 1, n, 0, n - 1);
    std::swap(now, next);
  }
  return now[n];
}

double raw_optimum(const LevelSample& data, int bits, bool nearest) {
  int half = 1 << (bits - 1);
  return std::min(raw_optimum(data, half, false, nearest), raw_optimum(data, half - 1, true, nearest));
}

void expect_well_formed(const LevelFit& fit, int bits, bool biased) {
  const std::vector<float>& v = fit.levels;
  ASSERT_EQ(v.size(), (1u << bits) - fit.zero);
  for (size_t i = 0; i < v.size(); ++i) {
    EXPECT_EQ(v[i], -v[v.size() - 1 - i]);
    EXPECT_LE(std::fabs(v[i]), 1.0f);
    if (i) {
      EXPECT_GE(v[i] - v[i - 1], 1.0f / (1 << 21));
    }
  }
  if (!biased) {
    EXPECT_EQ(v.back(), 1.0f);
  }
  EXPECT_TRUE(std::isfinite(fit.error));
}

TEST(Levels, EveryPlaceLiesBetweenItsEdgesAndBothEndsAreExact) {
  using H = LevelHistogram;
  EXPECT_EQ(H::edge(0), 0);
  EXPECT_EQ(H::edge(H::kBins), 1);
  EXPECT_EQ(H::place(0).bin, 0u);
  EXPECT_EQ(H::place(0).position, 0u);
  EXPECT_EQ(H::place(1).bin, H::kBins - 1u);
  EXPECT_EQ(H::place(1).position, 256u);
  for (int i = 0; i <= 100000; ++i) {
    float r = static_cast<float>(i) / 100000;
    auto [bin, position] = H::place(r * r);
    double low = H::edge(bin), high = H::edge(bin + 1);
    ASSERT_LT(low, high);
    ASSERT_NEAR(r * r, low + (high - low) * position / 256, (high - low) / 500) << r;
  }
}

class OnData : public testing::TestWithParam<const char*> {};

TEST_P(OnData, FittedLevelsAreWithinHalfAPercentOfTheOptimumOnTheRawPoints) {
  LevelSample data = sample(GetParam(), 40);
  for (bool nearest : {false, true}) {
    const LevelRule& rule = nearest ? kNearestRule : kUnbiased;
    for (int bits = 2; bits <= 4; ++bits) {
      LevelFit fit = fit_levels(data.histogram, bits, rule);
      expect_well_formed(fit, bits, nearest);
      double error = level_error(fit.levels, data.r, data.weight, rule);
      double optimum = raw_optimum(data, bits, nearest);
      std::printf("%-9s %-8s %d bits: error %.6g, optimum %.6g, ratio %.6f, reported/raw %.6f, zero %d\n", GetParam(),
                  nearest ? "nearest" : "unbiased", bits, error, optimum, error / optimum, fit.error / error, fit.zero);
      EXPECT_LE(error, 1.005 * optimum);
      EXPECT_GE(error, 0.999 * optimum);  // or the reference is no optimum
      EXPECT_NEAR(fit.error, error, 0.005 * error);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Levels, OnData, testing::Values("gauss", "laplace", "lognormal", "student"));

TEST(Levels, EightBitsAreNearTheOptimumToo) {
  for (const char* kind : {"gauss", "laplace", "lognormal", "student", "uniform"}) {
    LevelSample data = sample(kind, 20);
    for (bool nearest : {false, true}) {
      const LevelRule& rule = nearest ? kNearestRule : kUnbiased;
      LevelFit fit = fit_levels(data.histogram, 8, rule);
      expect_well_formed(fit, 8, nearest);
      double error = level_error(fit.levels, data.r, data.weight, rule);
      double optimum = raw_optimum(data, 128, false, nearest);
      std::printf("%-9s %-8s 8 bits: error %.6g, optimum %.6g, ratio %.6f, reported/raw %.6f\n", kind,
                  nearest ? "nearest" : "unbiased", error, optimum, error / optimum, fit.error / error);
      EXPECT_LE(error, 1.02 * optimum);
    }
  }
}

TEST(Levels, LeavingZeroOutPaysOnLaplaceData) {
  LevelSample data = sample("laplace", 60, 2);
  LevelBins bins = level_bins(data.histogram);
  double expected[] = {0.38, 0.73, 0.87};
  for (int bits = 2; bits <= 4; ++bits) {
    int half = 1 << (bits - 1);
    auto error = [&](int count, bool zero) {
      auto levels = signed_levels(best_magnitudes(bins, count, zero, kUnbiased), zero);
      return level_error(levels, data.r, data.weight, kUnbiased);
    };
    double ratio = error(half, false) / error(half - 1, true);
    std::printf("laplace %d bits: without zero / with zero = %.4f\n", bits, ratio);
    EXPECT_NEAR(ratio, expected[bits - 2], 0.03);
    EXPECT_FALSE(fit_levels(data.histogram, bits, kUnbiased).zero);
  }
}

TEST(Levels, ExponentialDensityHasItsKnownLevels) {
  LevelBins bins;
  std::vector<double> r, weight;
  const int n = 2000;
  auto below = [](double x) { return -std::exp(-x / 0.08); };
  auto moment = [](double x) { return -(x + 0.08) * std::exp(-x / 0.08); };
  for (int i = 0; i < n; ++i) {
    double low = double(i) / n, high = double(i + 1) / n, w = below(high) - below(low);
    bins.edge.push_back(low);
    bins.weight.push_back(w);
    bins.mean.push_back((moment(high) - moment(low)) / w);
    for (double at : {0.125, 0.375, 0.625, 0.875}) {
      r.push_back(low + at / n);
      weight.push_back(std::exp(-r.back() / 0.08));
    }
  }
  bins.edge.push_back(1);
  auto magnitudes = best_magnitudes(bins, 3, true, kUnbiased);
  double error = level_error(signed_levels(magnitudes, true), r, weight, kUnbiased);
  std::printf("exp(-r/.08): levels 0 %.4f %.4f %.4f, V %.6f\n", magnitudes[0], magnitudes[1], magnitudes[2], error);
  EXPECT_NEAR(magnitudes[0], 0.108, 0.001);
  EXPECT_NEAR(magnitudes[1], 0.301, 0.001);
  EXPECT_EQ(magnitudes[2], 1);
  EXPECT_NEAR(error, 0.00374, 0.00001);
}

// Bins whose weight sits on their lower edge, so that costs can be summed point by point.
struct Atoms {
  LevelBins bins;
  double error(const std::vector<double>& magnitudes, bool zero, const LevelRule& rule) const {
    return level_error(signed_levels(magnitudes, zero), bins.mean, bins.weight, rule);
  }
};

Atoms atoms(const std::vector<double>& edge, const std::vector<double>& weight) {
  return {{edge, weight, std::vector<double>(edge.begin(), edge.end() - 1)}};
}

// Calls `visit` with every ascending choice of `count` numbers in first..last.
void choose(int first, int last, size_t count, std::vector<int>& chosen, const std::function<void()>& visit) {
  if (chosen.size() == count) return visit();
  for (int i = chosen.empty() ? first : chosen.back() + 1; i <= last; ++i) {
    chosen.push_back(i);
    choose(first, last, count, chosen, visit);
    chosen.pop_back();
  }
}

double brute_force(const Atoms& a, int count, bool zero, const LevelRule& rule) {
  int last = static_cast<int>(a.bins.weight.size());
  double least = 1e300;
  std::vector<int> chosen;
  std::vector<double> magnitudes;
  if (rule.biased && rule.kappa == 0.5) {  // ends of intervals, and their means
    choose(1, last - 1, count + zero - 1, chosen, [&] {
      double sum = 0, total = 0;
      for (size_t k = 0; k <= chosen.size(); ++k) {
        double w = 0, m = 0, q = 0;
        for (int b = k ? chosen[k - 1] : 0; b < (k < chosen.size() ? chosen[k] : last); ++b) {
          double weight = a.bins.weight[b], r = a.bins.mean[b];
          w += weight, m += weight * r, q += weight * r * r;
        }
        sum += zero && k == 0 ? q : w > 0 ? q - m * m / w : 0;
        total += w;
      }
      least = std::min(least, sum / total);
    });
    return least;
  }
  choose(1, rule.biased ? last : last - 1, rule.biased ? count : count - 1, chosen, [&] {
    magnitudes.clear();
    for (int i : chosen) magnitudes.push_back(a.bins.edge[i]);
    if (!rule.biased) magnitudes.push_back(1);
    least = std::min(least, a.error(magnitudes, zero, rule));
  });
  return least;
}

TEST(Levels, ProgrammeEqualsBruteForceOnSmallHistograms) {
  std::mt19937 random(5);
  std::uniform_real_distribution<double> uniform(0, 1);
  const LevelRule rules[] = {kUnbiased,       kNearestRule,   {false, 0.5, 4}, {true, 0.125, 4},
                             {true, 0.25, 1}, {true, 0.4, 2}, {true, 0, 1}};
  for (int round = 0; round < 60; ++round) {
    int n = 9 + round % 4;
    std::vector<double> edge{0, 1}, weight;
    while (edge.size() < n + 1u) edge.push_back(uniform(random));
    std::sort(edge.begin(), edge.end());
    for (int i = 0; i < n; ++i) {
      double u = uniform(random);
      weight.push_back(uniform(random) < 0.3 ? 0 : u * u * u);  // many bins hold nothing
    }
    weight[round % n] = 1;
    Atoms a = atoms(edge, weight);
    for (const LevelRule& rule : rules) {
      for (bool zero : {false, true}) {
        for (int count = 1; count <= 4; ++count) {
          double least = brute_force(a, count, zero, rule);
          auto magnitudes = best_magnitudes(a.bins, count, zero, rule);
          ASSERT_EQ(magnitudes.size(), static_cast<size_t>(count));
          EXPECT_NEAR(a.error(magnitudes, zero, rule), least, 1e-6 * least + 1e-9)
              << "round " << round << " biased " << rule.biased << " kappa " << rule.kappa << " count " << count;
        }
      }
    }
  }
}

TEST(Levels, TrimodalHistogramTrapsCoordinateDescentButNotTheProgramme) {
  const int n = 24;
  std::vector<double> edge, weight;
  for (int i = 0; i <= n; ++i) edge.push_back(double(i) / n);
  for (int i = 0; i < n; ++i) {
    double x = edge[i], sum = 1e-4;
    for (double mode : {0.06, 0.5, 0.9}) sum += std::exp(-(x - mode) * (x - mode) / (2 * 0.04 * 0.04));
    weight.push_back(sum);
  }
  Atoms a = atoms(edge, weight);
  double least = brute_force(a, 7, true, kUnbiased);
  double found = a.error(best_magnitudes(a.bins, 7, true, kUnbiased), true, kUnbiased);
  EXPECT_NEAR(found, least, 1e-6 * least);

  double worst = 0;
  for (int start = 0; start < 2; ++start) {  // even, and powers of 1/2
    std::vector<int> at(8);
    for (int k = 1; k <= 7; ++k) at[k] = start ? std::max(k, n >> (7 - k)) : n * k / 7;
    auto error = [&] {
      std::vector<double> magnitudes;
      for (int k = 1; k <= 7; ++k) magnitudes.push_back(edge[at[k]]);
      return a.error(magnitudes, true, kUnbiased);
    };
    for (int sweep = 0; sweep < 50; ++sweep) {
      for (int k = 1; k < 7; ++k) {
        int best = at[k];
        double now = error();
        for (int i = at[k - 1] + 1; i < at[k + 1]; ++i) {
          at[k] = i;
          if (double e = error(); e < now) now = e, best = i;
        }
        at[k] = best;
      }
    }
    worst = std::max(worst, error());
    std::printf("trimodal: coordinate descent from start %d ends at %.3f of the optimum\n", start, error() / least);
  }
  EXPECT_GT(worst, 1.05 * least);
}

// Lloyd's iteration on magnitudes with a zero level and the top level held at 1.
double lloyd_with_top_one(const LevelSample& data, int count) {
  std::vector<double> x;
  for (int k = 1; k <= count; ++k) x.push_back(std::pow(double(k) / count, 1.5));
  for (int sweep = 0; sweep < 300; ++sweep) {
    std::vector<double> w(count), m(count);
    size_t at = 0;
    for (size_t i = 0; i < data.r.size(); ++i) {
      auto level = [&](size_t k) { return k ? x[k - 1] : 0.0; };
      while (at < x.size() && data.r[i] > (level(at) + level(at + 1)) / 2) ++at;
      if (at) w[at - 1] += data.weight[i], m[at - 1] += data.weight[i] * data.r[i];
    }
    for (int k = 0; k + 1 < count; ++k)
      if (w[k] > 0) x[k] = m[k] / w[k];
  }
  return level_error(signed_levels(x, true), data.r, data.weight, kNearestRule) / squares(data);
}

TEST(Levels, FreeTopLevelCutsTheErrorOfNearestRounding) {
  LevelSample data = sample("gauss", 60, 3);
  LevelBins bins = level_bins(data.histogram);
  struct LevelCase {
    int count;
    double held, free;
  };
  for (auto [count, held, free] :
       {LevelCase{1, 0.753, 0.194}, LevelCase{3, 0.068, 0.045}, LevelCase{7, 0.0122, 0.0108}}) {
    auto magnitudes = best_magnitudes(bins, count, true, kNearestRule);
    double error = level_error(signed_levels(magnitudes, true), data.r, data.weight, kNearestRule) / squares(data);
    double fixed = lloyd_with_top_one(data, count);
    std::printf("gauss, %d magnitudes and zero: top held at 1 %.5f, free %.5f (top %.3f)\n", count, fixed, error,
                magnitudes.back());
    EXPECT_NEAR(error, free, 0.03 * free);
    EXPECT_NEAR(fixed, held, 0.03 * held);
    if (count == 1) {
      EXPECT_NEAR(magnitudes[0], 0.35, 0.03);
    }
  }
}

TEST(Levels, DeadZoneFitsAreNoWorseThanTheFitsOfOtherRules) {
  for (const char* kind : {"gauss", "lognormal"}) {
    LevelSample data = sample(kind, 20);
    for (int bits : {2, 3, 4}) {
      for (double kappa : {0.0625, 0.125, 0.25, 0.4}) {
        LevelRule rule{true, kappa, 0.5 / kappa};
        LevelFit fit = fit_levels(data.histogram, bits, rule);
        expect_well_formed(fit, bits, true);
        double error = level_error(fit.levels, data.r, data.weight, rule);
        EXPECT_NEAR(fit.error, error, 0.005 * error);
        for (const LevelRule& other : {kUnbiased, kNearestRule}) {
          auto levels = fit_levels(data.histogram, bits, other).levels;
          EXPECT_LE(error, 1.001 * level_error(levels, data.r, data.weight, rule)) << kind << bits << kappa;
        }
      }
    }
  }
}

TEST(Levels, MeanOfWorkersWithTheSameValueHasItsClosedForm) {
  std::vector<float> levels{-1, 0, 1};
  std::vector<double> r, weight(100000, 1);
  for (int i = 0; i < 100000; ++i) r.push_back((i + 0.5) / 100000);
  for (int workers : {1, 2, 4, 8, 32}) {
    LevelRule rule{true, 0.5 / workers, static_cast<double>(workers)};
    double expected = 1.0 / (6 * workers) * (1 - 1.0 / (2 * workers));
    EXPECT_NEAR(level_error(levels, r, weight, rule), expected, 1e-4 * expected) << workers;
    EXPECT_NEAR(level_error(levels, r, weight, {false, 0, double(workers)}), 1.0 / (6 * workers), 1e-4 / workers);
  }
}

TEST(Levels, MeanOfIndependentWorkersHasItsClosedForm) {
  std::mt19937_64 random(7);
  std::uniform_real_distribution<double> uniform(0, 1);
  std::vector<float> levels{-1, 0, 1};
  std::vector<double> r, weight(20000, 1);
  for (int i = 0; i < 20000; ++i) r.push_back((i + 0.5) / 20000);
  for (int workers : {2, 4, 8}) {
    for (double kappa : {0.0, 0.5 / workers, 0.25, 0.5}) {
      double expected = (1.0 / 12 + (0.5 - kappa) * (0.5 - kappa) / 3) / workers;
      EXPECT_NEAR(level_error(levels, r, weight, {true, kappa, 1}) / workers, expected, 1e-4 * expected);
      double sum = 0;
      const int samples = 400000;
      for (int i = 0; i < samples; ++i) {
        double error = 0;
        for (int m = 0; m < workers; ++m) {
          double p = uniform(random);
          double q = kappa < 0.5 ? (p - kappa) / (1 - 2 * kappa) : p >= 0.5;
          error += (uniform(random) < q) - p;
        }
        sum += error * error / (workers * workers);
      }
      // The relative standard error of a mean of squares is about sqrt(2 / samples): 0.2 %.
      EXPECT_NEAR(sum / samples, expected, 0.02 * expected) << workers << " " << kappa;
    }
  }
}

TEST(Levels, OrderOfBucketsAndRanksDoesNotMatter) {
  LevelSample data = sample("student", 30);
  auto weight_of = [](const std::vector<float>& bucket, float* top) {
    *top = 0;
    for (float v : bucket) *top = std::max(*top, std::fabs(v));
    return static_cast<int64_t>(std::llround(static_cast<double>(*top) * *top * 1024));
  };
  LevelHistogram ranks[3], pooled;
  for (size_t b = data.buckets.size(); b-- > 0;) {
    float top;
    int64_t weight = weight_of(data.buckets[b], &top);
    std::vector<float> bucket(data.buckets[b].rbegin(), data.buckets[b].rend());
    ranks[b % 3].add(bucket, top, weight);
  }
  for (int rank : {1, 2, 0})
    for (size_t i = 0; i < pooled.counts.size(); ++i) pooled.counts[i] += ranks[rank].counts[i];
  EXPECT_EQ(pooled.counts, data.histogram.counts);
  EXPECT_EQ(fit_levels(pooled, 4, kUnbiased).levels, fit_levels(data.histogram, 4, kUnbiased).levels);
}

TEST(Levels, DegenerateHistogramsGiveLevelsThatAscend) {
  std::vector<LevelHistogram> cases(9);
  cases[1].add(std::vector<float>(100, 3.0f), 3.0f, 5);                 // all at 1
  cases[2].add(std::vector<float>(100, 0.0f), 1.0f, 5);                 // all at 0
  cases[3].add(std::vector<float>(100, 0.2500123f), 1.0f, 5);           // all inside one bin
  cases[4].add(std::vector<float>{0, 0, 1, -1, 0.5f, -0.5f}, 1.0f, 1);  // three values
  cases[5].add(std::vector<float>{1e-45f, -1e-45f, 0}, 1e-45f, 1);      // the smallest top there is
  cases[6].add(std::vector<float>{3e38f, 1.0f, -1e-30f}, 3e38f, 1);     // the widest range
  for (int i = 100; i < 102; ++i) {  // the upper end of a bin and the lower end of the next
    cases[7].counts[2 * i] = 10;
    cases[7].counts[2 * i + 1] = i == 100 ? 2560 : 0;
  }
  cases[8].counts[0] = int64_t{1} << 52;  // as heavy as it may get
  cases[8].counts[2 * 2047] = cases[8].counts[1] = 1;
  for (size_t c = 0; c < cases.size(); ++c) {
    for (int bits : {2, 3, 5, 8}) {
      for (const LevelRule& rule : {kUnbiased, kNearestRule, LevelRule{true, 0.125, 4}, LevelRule{true, 0.49999, 1}}) {
        SCOPED_TRACE(testing::Message() << "case " << c << ", " << bits << " bits, kappa " << rule.kappa);
        LevelFit fit = fit_levels(cases[c], bits, rule);
        expect_well_formed(fit, bits, rule.biased);
        EXPECT_LE(fit.error, 0.26);
        if (c == 1) {
          EXPECT_LT(fit.error, 1e-9);
        }
      }
    }
  }
  LevelFit nothing = fit_levels(cases[0], 2, kUnbiased);
  EXPECT_EQ(nothing.levels, (std::vector<float>{-1, -1.0f / 3, 1.0f / 3, 1}));
  EXPECT_EQ(nothing.error, 0);
  EXPECT_TRUE(fit_levels(cases[2], 3, kNearestRule).zero);
}

TEST(Levels, RefusesWhatIsOutOfRange) {
  auto field = [](const LevelHistogram& histogram, int bits, const LevelRule& rule) -> std::string {
    try {
      fit_levels(histogram, bits, rule);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::usage);
      return error.field();
    }
    return "none";
  };
  LevelHistogram histogram, cut;
  cut.counts.pop_back();
  EXPECT_EQ(field(histogram, 1, kUnbiased), "bits");
  EXPECT_EQ(field(histogram, 9, kUnbiased), "bits");
  EXPECT_EQ(field(histogram, 3, {true, 0.51, 1}), "kappa");
  EXPECT_EQ(field(histogram, 3, {true, std::nan(""), 1}), "kappa");
  EXPECT_EQ(field(histogram, 3, {true, 0.5, 0}), "workers");
  EXPECT_EQ(field(cut, 3, kUnbiased), "counts");
}

TEST(Levels, FitsTakeMilliseconds) {
  LevelSample data = sample("laplace", 40);
  for (auto [bits, limit] : {std::pair{3, 2.0}, std::pair{8, 20.0}}) {
    for (const LevelRule& rule : {kUnbiased, kNearestRule, LevelRule{true, 0.125, 4}}) {
      double least = 1e9;
      for (int run = 0; run < 5; ++run) {
        auto from = std::chrono::steady_clock::now();
        LevelFit fit = fit_levels(data.histogram, bits, rule);
        std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - from;
        ASSERT_FALSE(fit.levels.empty());
        least = std::min(least, took.count());
      }
      bool limited = !rule.biased || rule.kappa == 0.5;
      std::printf("fit, %d bits, %s kappa %.3f: %.3f ms\n", bits, rule.biased ? "biased" : "unbiased", rule.kappa,
                  least);
#if defined(__OPTIMIZE__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
      if (limited) {  // machines are shared; the target is `limit`
        EXPECT_LE(least, 4 * limit);
      }
#else
      (void)limited, (void)limit;
#endif
    }
  }
}

}  // namespace
}  // namespace gradwire
