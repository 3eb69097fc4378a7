// SPDX-License-Identifier: Apache-2.0
#include "codec/optquant/level_model.h"

#include <algorithm>
#include <numeric>

namespace gradwire {
namespace {

constexpr double kNearest = 0.4995;  // above: 1 / (1 - 2 kappa)^2 would magnify the sums' rounding

}  // namespace

LevelModel::LevelModel(const LevelBins& bins, const LevelRule& rule) : bins_(bins), below_(bins.edge.size()) {
  const double total = std::accumulate(bins.weight.begin(), bins.weight.end(), bins.zeros);
  scale_ = total > 0 ? 1 / total : 0;
  for (size_t b = 0; b < bins.weight.size(); ++b) {
    const double w = bins.weight[b] * scale_, mean = bins.mean[b], half = half_width(b);
    const LevelSums& s = below_[b];
    const double zeros = bins.edge[b] == 0 ? bins.zeros * scale_ : 0;
    below_[b + 1] = {s.w + w + zeros, s.m + w * mean, s.q + w * (mean * mean + half * half / 3)};
  }
  kappa_ = rule.biased ? (rule.kappa > kNearest ? 0.5 : rule.kappa) : 0;
  const double g = kappa_ < 0.5 ? 1 / (1 - 2 * kappa_) : 0;
  square_ = g * g * (4 * kappa_ * kappa_ - 1 / rule.workers);
  constant_ = g * g * (kappa_ * kappa_ - kappa_ * (1 - kappa_) / rule.workers);
}

size_t LevelModel::bin(double x) const {
  const size_t above = std::upper_bound(edge().begin(), edge().end(), x) - edge().begin();
  return std::min(above ? above - 1 : 0, edge().size() - 2);
}

LevelSums LevelModel::below(double x) const {
  if (x <= edge().front()) return {};
  if (x >= edge().back()) return below_.back();
  const size_t b = bin(x);
  LevelSums s = below_[b];
  if (x == edge()[b]) return s;
  if (edge()[b] == 0) s.w += bins_.zeros * scale_;
  double w = bins_.weight[b] * scale_;
  const double half = half_width(b), low = bins_.mean[b] - half, high = bins_.mean[b] + half;
  if (w == 0 || x <= low) return s;
  if (x >= high) return below_[b + 1];
  w *= (x - low) / (high - low);
  return {s.w + w, s.m + w * (low + x) / 2, s.q + w * (low * low + low * x + x * x) / 3};
}

double LevelModel::cell(double c, double d) const {
  const double width = d - c;
  const LevelSums from = below(c), to = below(d);
  if (kappa_ == 0) return middle(to - from, c, width);
  const LevelSums up = below(d - kappa_ * width);
  const LevelSums down = kappa_ == 0.5 ? up : below(c + kappa_ * width);
  const double cost = (down - from).about(c) + (to - up).about(d);
  return kappa_ == 0.5 ? cost : cost + middle(up - down, c, width);
}

double LevelModel::error(std::span<const double> levels) const {
  double sum = under(levels.front()) + over(levels.back());
  for (size_t i = 1; i < levels.size(); ++i) sum += cell(levels[i - 1], levels[i]);
  return std::max(sum, 0.0);
}

double LevelModel::half_width(size_t b) const {
  return std::min(bins_.mean[b] - edge()[b], edge()[b + 1] - bins_.mean[b]);
}

// Where rounding is random: with u = t - c, bias^2 + variance / workers = square u (u - width) + constant width^2.
double LevelModel::middle(const LevelSums& s, double c, double width) const {
  const double u = s.m - c * s.w;
  return square_ * (s.about(c) - width * u) + constant_ * width * width * s.w;
}

double level_error(std::span<const float> levels, std::span<const double> t, std::span<const double> weight,
                   const LevelRule& rule) {
  const double kappa = rule.biased ? rule.kappa : 0;
  double sum = 0, total = 0;
  for (size_t i = 0; i < t.size(); ++i) {
    const double x = std::clamp<double>(t[i], levels.front(), levels.back());
    size_t up = std::upper_bound(levels.begin(), levels.end(), x) - levels.begin();
    up = std::clamp<size_t>(up, 1, levels.size() - 1);
    const double c = levels[up - 1], width = levels[up] - c, p = (x - c) / width;
    const double q = kappa < 0.5 ? std::clamp((p - kappa) / (1 - 2 * kappa), 0.0, 1.0) : p >= 0.5;
    const double bias = c + q * width - t[i];
    sum += weight[i] * (bias * bias + q * (1 - q) * width * width / rule.workers);
    total += weight[i];
  }
  return total > 0 ? sum / total : 0;
}

}  // namespace gradwire
