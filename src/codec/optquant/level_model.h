// SPDX-License-Identifier: Apache-2.0
// What a set of levels costs. The model of the data: a bin knows its weight and its mean; its weight is spread evenly
// over the widest interval around that mean that fits in the bin. So sums up to an edge are those of the data, and the
// rest is off by second order in a bin's width. The weight at 0 is a point.
#pragma once

#include <span>
#include <vector>

#include "codec/optquant/level_histogram.h"

namespace gradwire {

// How a value t in a cell [c, d] is rounded: up with probability clip((p - kappa) / (1 - 2 kappa), 0, 1), where
// p = (t - c) / (d - c). What an element costs: bias^2 + variance / workers.
struct LevelRule {
  bool biased = false;  // false: kappa = 0 and the outermost levels are -1 and 1; true: they are free, and saturate
  double kappa = 0.5;   // 0..1/2; 1/2 is rounding to nearest. Not looked at unless biased
  double workers = 1;   // at least 1
};

struct LevelSums {
  double w = 0, m = 0, q = 0;  // of weight, weight t, weight t^2
  friend LevelSums operator-(const LevelSums& a, const LevelSums& b) { return {a.w - b.w, a.m - b.m, a.q - b.q}; }
  double about(double c) const { return q - 2 * c * m + c * c * w; }  // weight (t - c)^2
};

// Sums below any point, and costs of cells under one rule. The weights are scaled to a sum of 1. `bins` must outlive
// the model.
class LevelModel {
 public:
  LevelModel(const LevelBins& bins, const LevelRule& rule);

  const std::vector<double>& edge() const { return bins_.edge; }
  double kappa() const { return kappa_; }  // 0 where the rule is not biased
  bool empty() const { return scale_ == 0; }
  size_t bin(double x) const;

  const LevelSums& below(size_t edge) const { return below_[edge]; }  // what lies at the edge is not below it
  LevelSums below(double x) const;

  double cell(double c, double d) const;  // the cost of what lies between two neighbouring levels
  double under(double first) const { return below(first).about(first); }
  double over(double last) const { return (below_.back() - below(last)).about(last); }
  double error(std::span<const double> levels) const;

 private:
  double half_width(size_t b) const;
  double middle(const LevelSums& s, double c, double width) const;

  const LevelBins& bins_;
  std::vector<LevelSums> below_;  // of every edge
  double scale_ = 0, kappa_ = 0, square_ = 0, constant_ = 0;
};

// The cost of any ascending levels on raw points t, exactly: for tests and reports.
double level_error(std::span<const float> levels, std::span<const double> t, std::span<const double> weight,
                   const LevelRule& rule);

}  // namespace gradwire
