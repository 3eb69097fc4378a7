// SPDX-License-Identifier: Apache-2.0
// The best levels there are for given points, in double precision and without a histogram, and data to try them on.
// Nothing is shared with the library but the histogram that the data are also put into.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "codec/optquant/level_histogram.h"

namespace gradwire::test {

// Buckets of 1024 divided by their largest magnitude and weighted by its square, as the codec does it.
struct LevelSample {
  std::vector<std::vector<float>> buckets;
  std::vector<double> t, weight;  // sorted by t
  LevelHistogram histogram;

  void add(std::vector<float> values) {
    float top = 0;
    for (float v : values) top = std::max(top, std::fabs(v));
    const auto w = static_cast<int64_t>(std::llround(static_cast<double>(top) * top * 1024));
    histogram.add(values, top, w);
    for (float v : values) points_.emplace_back(static_cast<double>(v) / top, static_cast<double>(w));
    buckets.push_back(std::move(values));
  }
  void sort() {
    std::sort(points_.begin(), points_.end());
    for (auto [at, w] : points_) t.push_back(at), weight.push_back(w);
    points_.clear();
  }

 private:
  std::vector<std::pair<double, double>> points_;
};

// A gradient of one kind. "laplace60" is Laplace with 60 % of exact zeros, and so on; "layers" has buckets that are
// Laplace of three scales in themselves; "skewed" has large positive and small negative values; "onesided" only
// positive ones and a third of zeros.
inline double draw_level(const std::string& kind, std::mt19937_64& random) {
  std::normal_distribution<double> normal;
  std::exponential_distribution<double> exponential;
  std::uniform_real_distribution<double> uniform;
  const double sign = random() & 1 ? 1 : -1;
  if (kind == "gauss") return normal(random);
  if (kind == "laplace") return sign * exponential(random);
  if (kind == "laplace33") return uniform(random) < 0.33 ? 0 : sign * exponential(random);
  if (kind == "laplace60") return uniform(random) < 0.60 ? 0 : sign * exponential(random);
  if (kind == "laplace81") return uniform(random) < 0.81 ? 0 : sign * exponential(random);
  if (kind == "skewed") return uniform(random) < 0.5 ? exponential(random) : -0.1 * exponential(random);
  if (kind == "onesided") return uniform(random) < 0.33 ? 0 : exponential(random);
  if (kind == "layers") return sign * exponential(random) * std::pow(10.0, static_cast<double>(random() % 3) - 2);
  if (kind == "lognormal") return sign * std::exp(1.5 * normal(random));
  if (kind == "uniform") return sign * uniform(random);
  if (kind == "student") return std::student_t_distribution<double>(3)(random);
  throw std::logic_error("no gradient of the kind " + kind);
}

inline LevelSample level_sample(const std::string& kind, int buckets, uint64_t seed = 1) {
  std::mt19937_64 random(seed);
  LevelSample data;
  for (int b = 0; b < buckets; ++b) {
    std::vector<float> values(1024);
    for (float& v : values) v = static_cast<float>(draw_level(kind, random));
    data.add(std::move(values));
  }
  data.sort();
  return data;
}

// Sums over points that are sorted, and the programme over cells of them that both kinds of rounding share. Entry k of
// what `least` returns is the least cost of k cells, for k up to `cells`.
class PointProgramme {
 public:
  PointProgramme(std::vector<double> x, const std::vector<double>& weight) : x_(std::move(x)), sums_(x_.size() + 1) {
    double total = 0;
    for (double w : weight) total += w;
    for (size_t i = 0; i < x_.size(); ++i) {
      const double w = weight[i] / total;
      sums_[i + 1] = {sums_[i].w + w, sums_[i].m + w * x_[i], sums_[i].q + w * x_[i] * x_[i]};
    }
  }

  // Levels on points, the first and the last of them included; what lies on a level costs nothing. The cost of a set
  // is linear in a level between two neighbouring points, so no level between points is better.
  std::vector<double> unbiased(size_t cells) const {
    return least(cells, x_.size() - 1, [this](size_t i, size_t j) {
      const double w = sums_[j + 1].w - sums_[i + 1].w, m = sums_[j + 1].m - sums_[i + 1].m,
                   q = sums_[j + 1].q - sums_[i + 1].q;
      return (x_[i] + x_[j]) * m - x_[i] * x_[j] * w - q;
    });
  }
  // k-means: points i to j - 1 and their mean.
  std::vector<double> nearest(size_t cells) const {
    return least(cells, x_.size(), [this](size_t i, size_t j) {
      const double w = sums_[j].w - sums_[i].w, m = sums_[j].m - sums_[i].m;
      return w > 0 ? sums_[j].q - sums_[i].q - m * m / w : 0;
    });
  }
  // Symmetric levels for points that are magnitudes (the first is 0). Without a zero level the first cell reaches from
  // -x to x, and what lies in it costs x^2 - r^2.
  std::vector<double> symmetric(size_t cells, bool zero) const {
    if (zero) return unbiased(cells);
    std::vector<double> first(x_.size());
    for (size_t j = 0; j < x_.size(); ++j) first[j] = x_[j] * x_[j] * sums_[j + 1].w - sums_[j + 1].q;
    return least(
        cells, x_.size() - 1,
        [this](size_t i, size_t j) {
          const double w = sums_[j + 1].w - sums_[i + 1].w, m = sums_[j + 1].m - sums_[i + 1].m,
                       q = sums_[j + 1].q - sums_[i + 1].q;
          return (x_[i] + x_[j]) * m - x_[i] * x_[j] * w - q;
        },
        first);
  }

 private:
  struct PointSums {
    double w = 0, m = 0, q = 0;
  };

  template <class Cost>
  static std::vector<double> least(size_t cells, size_t last, const Cost& cost, std::vector<double> now = {}) {
    if (now.empty())
      for (size_t j = 0; j <= last; ++j) now.push_back(j ? cost(0, j) : 0);
    std::vector<double> next(last + 1), found{0, now[last]};
    std::vector<uint32_t> at(last + 1), before(last + 1);
    const std::function<void(size_t, size_t, size_t, size_t)> layer = [&](size_t from, size_t to, size_t low,
                                                                          size_t high) {
      const size_t j = (from + to) / 2, start = std::max<size_t>(low, before[j]);
      next[j] = HUGE_VAL, at[j] = static_cast<uint32_t>(start);
      for (size_t i = start; i <= std::min(high, j - 1); ++i) {
        const double value = now[i] + cost(i, j);
        if (value < next[j]) next[j] = value, at[j] = static_cast<uint32_t>(i);
      }
      const uint32_t here = at[j];
      if (j > from) layer(from, j - 1, low, here);
      if (j < to) layer(j + 1, to, here, high);
    };
    for (size_t k = 2; k <= cells; ++k) {
      next[0] = now[0];
      layer(1, last, 0, last - 1);
      std::swap(now, next);
      std::swap(before, at);
      found.push_back(now[last]);
    }
    return found;
  }

  std::vector<double> x_;
  std::vector<PointSums> sums_;
};

// Points of equal place become one; `ends` are there even without weight.
inline PointProgramme programme_of(std::vector<std::pair<double, double>> points, const std::vector<double>& ends) {
  for (double end : ends) points.emplace_back(end, 0);
  std::sort(points.begin(), points.end());
  std::vector<double> x, weight;
  for (auto [at, w] : points) {
    if (x.empty() || at != x.back()) x.push_back(at), weight.push_back(0);
    weight.back() += w;
  }
  return {x, weight};
}

struct LevelOptima {
  std::vector<double> unbiased, symmetric;  // by bits; of any levels, and of levels that are alike on both sides
};

inline LevelOptima level_optima(const LevelSample& data, int most_bits, int most_symmetric_bits) {
  std::vector<std::pair<double, double>> points, folded;
  for (size_t i = 0; i < data.t.size(); ++i) {
    points.emplace_back(data.t[i], data.weight[i]);
    folded.emplace_back(std::fabs(data.t[i]), data.weight[i]);
  }
  LevelOptima optima;
  const std::vector<double> any = programme_of(points, {-1, 1}).unbiased((size_t{1} << most_bits) - 1);
  optima.unbiased.resize(most_bits + 1);
  for (int bits = 2; bits <= most_bits; ++bits) optima.unbiased[bits] = any[(size_t{1} << bits) - 1];
  const PointProgramme programme = programme_of(folded, {0, 1});
  const size_t half = size_t{1} << (most_symmetric_bits - 1);
  const std::vector<double> with = programme.symmetric(half, true), without = programme.symmetric(half, false);
  optima.symmetric.resize(most_symmetric_bits + 1);
  for (int bits = 2; bits <= most_symmetric_bits; ++bits) {
    const size_t here = size_t{1} << (bits - 1);
    optima.symmetric[bits] = std::min(with[here - 1], without[here]);
  }
  return optima;
}

}  // namespace gradwire::test
