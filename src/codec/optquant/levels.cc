// SPDX-License-Identifier: Apache-2.0
// The level programme. D_k(j) is the least cost of everything below edge j with k levels, the k-th at edge j (nearest:
// with k intervals, the k-th ending there), and D_k(j) = min over i < j of D_{k-1}(i) + cost(i, j).
//
// Cell costs come in O(1) from sums of weight, weight r and weight r^2 below a point. Unbiased and nearest costs are
// Monge (two overlapping cells never cost more than their union and their intersection), so the best i grows with j and
// with k, and halving the range of j leaves few i to look at. For these two, sums of r^2 are the same for every choice
// of levels and are left out of the programme.
#include "codec/optquant/levels.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <string>

#include "core/check.h"
#include "gradwire/error.h"

namespace gradwire {
namespace {

constexpr double kNearest = 0.4995;       // above: 1 / (1 - 2 kappa)^2 would magnify the sums' rounding
constexpr double kGap = 1.0 / (1 << 20);  // between magnitudes; floats in [-1, 1] and 1 / gap are good for it
constexpr int kStride = 4;                // the plain programme's candidates, in edges
constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct LevelSums {
  double w = 0, m = 0, q = 0;  // of weight, weight r, weight r^2
  friend LevelSums operator-(const LevelSums& a, const LevelSums& b) { return {a.w - b.w, a.m - b.m, a.q - b.q}; }
  double about(double c) const { return q - 2 * c * m + c * c * w; }  // weight (r - c)^2
};

// The model of the data: sums below any point, and costs of cells under one rule.
class LevelModel {
 public:
  LevelModel(const LevelBins& bins, const LevelRule& rule) : bins_(bins), edge_(bins.edge), below_(bins.edge.size()) {
    double total = 0;
    for (double w : bins.weight) total += w;
    scale_ = total > 0 ? 1 / total : 0;
    for (size_t b = 0; b < bins.weight.size(); ++b) {
      double w = bins.weight[b] * scale_, mean = bins.mean[b], half = half_width(b);
      const LevelSums& s = below_[b];
      below_[b + 1] = {s.w + w, s.m + w * mean, s.q + w * (mean * mean + half * half / 3)};
    }
    kappa_ = rule.biased ? (rule.kappa > kNearest ? 0.5 : rule.kappa) : 0;
    double g = kappa_ < 0.5 ? 1 / (1 - 2 * kappa_) : 0;
    square_ = g * g * (4 * kappa_ * kappa_ - 1 / rule.workers);
    constant_ = g * g * (kappa_ * kappa_ - kappa_ * (1 - kappa_) / rule.workers);
  }

  const std::vector<double>& edge() const { return edge_; }
  const LevelSums& below(size_t i) const { return below_[i]; }
  double kappa() const { return kappa_; }
  bool empty() const { return scale_ == 0; }
  size_t bin(double x) const {
    size_t i = std::upper_bound(edge_.begin(), edge_.end(), x) - edge_.begin();
    return std::min(i ? i - 1 : 0, edge_.size() - 2);
  }

  LevelSums below(double x) const {
    if (x <= 0) return {};
    if (x >= edge_.back()) return below_.back();
    size_t b = bin(x);
    LevelSums s = below_[b];
    double w = bins_.weight[b] * scale_, half = half_width(b);
    double low = bins_.mean[b] - half, high = bins_.mean[b] + half;
    if (w == 0 || x <= low) return s;
    if (x >= high) return below_[b + 1];
    w *= (x - low) / (high - low);
    return {s.w + w, s.m + w * (low + x) / 2, s.q + w * (low * low + low * x + x * x) / 3};
  }

  // The cost of what lies in [max(c, 0), d]. A cell with c < 0 is the middle one, c = -d.
  double cell(double c, double d) const {
    double width = d - c;
    LevelSums from = below(c), to = below(d);
    if (kappa_ == 0) return middle(to - from, c, width);
    LevelSums up = below(d - kappa_ * width);
    LevelSums down = kappa_ == 0.5 ? up : below(c + kappa_ * width);
    double cost = (down - from).about(c) + (to - up).about(d);
    return kappa_ == 0.5 ? cost : cost + middle(up - down, c, width);
  }

  double saturated(double top) const { return (below_.back() - below(top)).about(top); }

  double error(std::span<const double> magnitudes, bool zero) const {
    double first = magnitudes[0];
    double sum = cell(zero ? 0 : -first, first) + saturated(magnitudes.back());
    for (size_t i = 1; i < magnitudes.size(); ++i) sum += cell(magnitudes[i - 1], magnitudes[i]);
    return std::max(sum, 0.0);
  }

 private:
  double half_width(size_t b) const { return std::min(bins_.mean[b] - edge_[b], edge_[b + 1] - bins_.mean[b]); }

  // Where rounding is random: with u = r - c, bias^2 + variance / workers = square u (u - width) + constant width^2.
  double middle(const LevelSums& s, double c, double width) const {
    double u = s.m - c * s.w;
    return square_ * (s.about(c) - width * u) + constant_ * width * width * s.w;
  }

  const LevelBins& bins_;
  const std::vector<double>& edge_;
  std::vector<LevelSums> below_;
  double scale_ = 0, kappa_ = 0, square_ = 0, constant_ = 0;
};

// Unbiased. D + (e_i + e_j)(M_j - M_i) - e_i e_j (W_j - W_i), ordered so that one i costs two products.
class UnbiasedCost {
 public:
  UnbiasedCost(const LevelModel& model, bool zero)
      : model_(model), zero_(zero), a_(model.edge().size()), b_(a_.size()) {
    for (size_t i = 0; i < b_.size(); ++i) b_[i] = model.edge()[i] * model.below(i).w - model.below(i).m;
  }
  double first(size_t j) const {
    double e = model_.edge()[j];
    return zero_ ? e * model_.below(j).m : e * e * model_.below(j).w;
  }
  void begin_layer(const std::vector<double>& previous) {
    for (size_t i = 0; i < a_.size(); ++i) a_[i] = previous[i] - model_.edge()[i] * model_.below(i).m;
  }
  size_t best(size_t low, size_t high, size_t j, double* cost) const {
    const double* edge = model_.edge().data();
    double y = edge[j], x = model_.below(j).m - y * model_.below(j).w, least = kInfinity;
    size_t at = low;
    for (size_t i = low; i <= high; ++i) {
      double value = a_[i] + edge[i] * x + b_[i] * y;
      if (value < least) least = value, at = i;
    }
    *cost = least + y * model_.below(j).m;
    return at;
  }

 private:
  const LevelModel& model_;
  bool zero_;
  std::vector<double> a_, b_;
};

// Nearest: one-dimensional k-means, D - (M_j - M_i)^2 / (W_j - W_i). With a zero level, the first interval is rounded
// to 0 and costs only the sum of r^2 that is left out.
class NearestCost {
 public:
  NearestCost(const LevelModel& model, bool zero) : zero_(zero), w_(model.edge().size()), m_(w_.size()) {
    for (size_t i = 0; i < w_.size(); ++i) w_[i] = model.below(i).w, m_[i] = model.below(i).m;
  }
  double first(size_t j) const { return zero_ ? 0 : -m_[j] * m_[j] / std::max(w_[j], kTiny); }
  void begin_layer(const std::vector<double>& previous) { previous_ = previous.data(); }
  size_t best(size_t low, size_t high, size_t j, double* cost) const {
    double w = w_[j], m = m_[j], least = kInfinity;
    size_t at = low;
    for (size_t i = low; i <= high; ++i) {
      double sum = m - m_[i];
      double value = previous_[i] - sum * sum / std::max(w - w_[i], kTiny);
      if (value < least) least = value, at = i;
    }
    *cost = least;
    return at;
  }

 private:
  static constexpr double kTiny = 1e-300;  // an interval without weight has sum 0
  bool zero_;
  std::vector<double> w_, m_;
  const double* previous_ = nullptr;
};

// The ends (edge numbers, the last of them at the last edge) of `cells` cells of least cost, for a Monge cost.
template <class Cost>
class MongeProgramme {
 public:
  MongeProgramme(Cost cost, size_t edges, size_t cells)
      : cost_(std::move(cost)),
        last_(edges - 1),
        cells_(cells),
        now_(edges),
        best_(cells, std::vector<uint32_t>(edges)) {}

  std::vector<size_t> solve() {
    std::vector<double> previous(now_.size(), kInfinity);
    for (size_t j = 1; j <= last_; ++j) previous[j] = cost_.first(j);
    for (size_t k = 2; k <= cells_; ++k) {
      cost_.begin_layer(previous);
      std::fill(now_.begin(), now_.end(), kInfinity);
      size_t most = last_ - (cells_ - k);  // every later cell needs a bin of its own
      layer(k, k == cells_ ? most : k, most, k - 1, most - 1);
      std::swap(now_, previous);
    }
    std::vector<size_t> ends(cells_, last_);
    for (size_t k = cells_; k-- > 1;) ends[k - 1] = best_[k][ends[k]];
    return ends;
  }

 private:
  void layer(size_t k, size_t from, size_t to, size_t low, size_t high) {
    while (from <= to) {
      size_t j = from + (to - from) / 2;
      size_t h = std::min(high, j - 1);
      size_t l = std::min(h, std::max<size_t>(low, k > 2 ? best_[k - 2][j] : 0));
      size_t at = cost_.best(l, h, j, &now_[j]);
      best_[k - 1][j] = static_cast<uint32_t>(at);
      if (j > from) layer(k, from, j - 1, low, at);
      from = j + 1;
      low = at;
    }
  }

  Cost cost_;
  size_t last_, cells_;
  std::vector<double> now_;
  std::vector<std::vector<uint32_t>> best_;
};

// Any cost: the plain programme on every stride-th edge, from a table of all cells. The last level is free: what lies
// above it saturates.
class PlainProgramme {
 public:
  PlainProgramme(const LevelModel& model, size_t stride) : model_(model) {
    for (size_t i = 0; i + 1 < model.edge().size(); i += stride) at_.push_back(model.edge()[i]);
    at_.push_back(model.edge().back());
    size_t n = at_.size();
    table_.assign(n * n, kInfinity);
    for (size_t i = 1; i < n; ++i)
      for (size_t j = i + 1; j < n; ++j) table_[i * n + j] = model.cell(at_[i], at_[j]);
  }

  std::vector<double> solve(size_t count, bool zero) const {
    size_t n = at_.size();
    std::vector<std::vector<double>> least(count, std::vector<double>(n, kInfinity));
    for (size_t j = 1; j < n; ++j) least[0][j] = model_.cell(zero ? 0 : -at_[j], at_[j]);
    for (size_t k = 1; k < count; ++k) {
      double* now = least[k].data();
      for (size_t i = k; i + 1 < n; ++i) {
        const double* row = table_.data() + i * n;
        double before = least[k - 1][i];
        for (size_t j = i + 1; j < n; ++j) now[j] = std::min(now[j], before + row[j]);
      }
    }
    size_t j = count;
    auto whole = [&](size_t i) { return least[count - 1][i] + model_.saturated(at_[i]); };
    for (size_t i = count; i < n; ++i)
      if (whole(i) < whole(j)) j = i;
    std::vector<double> magnitudes(count, at_[j]);
    for (size_t k = count - 1; k > 0; --k) {
      size_t i = k;
      while (i + 1 < j && least[k - 1][i] + table_[i * n + j] > least[k][j]) ++i;
      magnitudes[k - 1] = at_[j = i];
    }
    return magnitudes;
  }

 private:
  const LevelModel& model_;
  std::vector<double> at_, table_;
};

// Ascending by kGap, above 0, at most 1: whatever the programme found, for data with few distinct values too.
void separate(std::vector<double>& magnitudes) {
  double floor = kGap;
  for (double& x : magnitudes) x = std::max(x, floor), floor = x + kGap;
  double ceiling = 1;
  for (size_t i = magnitudes.size(); i-- > 0;) {
    magnitudes[i] = std::min(magnitudes[i], ceiling);
    ceiling = magnitudes[i] - kGap;
  }
}

// Moves one level at a time by ever smaller steps, as long as that lowers the error.
void polish(const LevelModel& model, std::vector<double>& x, bool zero, bool top_is_one, int stride) {
  size_t movable = x.size() - (top_is_one ? 1 : 0);
  for (double step = stride / 2.0; step > 0.01; step /= 2) {
    for (size_t j = 0; j < movable; ++j) {
      double low = j ? x[j - 1] : 0, high = j + 1 < x.size() ? x[j + 1] : 1 + kGap;
      auto local = [&](double l) {
        double left = model.cell(j || zero ? low : -l, l);
        return left + (j + 1 < x.size() ? model.cell(l, high) : model.saturated(l));
      };
      size_t bin = model.bin(x[j]);
      double h = step * (model.edge()[bin + 1] - model.edge()[bin]), now = local(x[j]);
      for (double direction : {-h, h}) {
        bool moved = false;
        for (int moves = 0; moves < 4; ++moves) {
          double next = x[j] + direction;
          if (next < low + kGap || next > high - kGap) break;
          double cost = local(next);
          if (!(cost < now)) break;
          x[j] = next, now = cost, moved = true;
        }
        if (moved) break;
      }
    }
  }
}

void check(int bits, const LevelRule& rule, const LevelHistogram& histogram) {
  if (bits < 2 || bits > 8)
    throw Error(ErrorKind::usage, "bits is " + std::to_string(bits) + ", allowed are 2 to 8", "bits");
  if (rule.biased && !(rule.kappa >= 0 && rule.kappa <= 0.5))
    throw Error(ErrorKind::usage, "kappa is " + std::to_string(rule.kappa) + ", allowed are 0 to 0.5", "kappa");
  if (!(rule.workers >= 1) || std::isinf(rule.workers))
    throw Error(ErrorKind::usage, "workers is " + std::to_string(rule.workers) + ", allowed is 1 or more", "workers");
  if (histogram.counts.size() != 2 * LevelHistogram::kBins)
    throw Error(ErrorKind::usage,
                "a level histogram has " + std::to_string(histogram.counts.size()) + " counts, expected " +
                    std::to_string(2 * LevelHistogram::kBins),
                "counts");
}

// The programme that fits the rule; one of these serves the sets with zero and those without.
class Solver {
 public:
  Solver(const LevelModel& model, bool biased, int stride) : model_(model), biased_(biased) {
    if (biased && model.kappa() < 0.5) plain_.emplace(model, stride);
  }

  std::vector<double> solve(int count, bool zero) const {
    if (plain_) return plain_->solve(count, zero);
    const std::vector<double>& edge = model_.edge();
    std::vector<double> magnitudes;
    if (!biased_) {
      for (size_t end : MongeProgramme(UnbiasedCost(model_, zero), edge.size(), count).solve())
        magnitudes.push_back(edge[end]);
      return magnitudes;
    }
    std::vector<size_t> ends = MongeProgramme(NearestCost(model_, zero), edge.size(), count + zero).solve();
    size_t from = zero ? ends[0] : 0;
    for (size_t k = zero; k < ends.size(); from = ends[k], ++k) {
      LevelSums inside = model_.below(ends[k]) - model_.below(from);
      double low = edge[from], high = edge[ends[k]];
      magnitudes.push_back(inside.w > 0 ? std::clamp(inside.m / inside.w, low, high) : (low + high) / 2);
    }
    return magnitudes;
  }

 private:
  const LevelModel& model_;
  bool biased_;
  std::optional<PlainProgramme> plain_;
};

}  // namespace

double LevelHistogram::edge(int i) {
  double g = std::ldexp(1 + (i % 256) / 256.0, i / 256 - 8);
  return (g - 1 / 256.0) * 256 / 255;
}

void LevelHistogram::add(std::span<const float> values, float top, int64_t weight) {
  for (float value : values) {
    BinPosition to = place(std::min(std::fabs(value) / top, 1.0f));
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
    bins.mean[b] = std::min(mean, bins.edge[b + 1]);
  }
  return bins;
}

std::vector<double> best_magnitudes(const LevelBins& bins, int count, bool zero, const LevelRule& rule, int stride) {
  GW_CHECK(bins.weight.size() / stride > static_cast<size_t>(count));
  LevelModel model(bins, rule);
  return Solver(model, rule.biased, stride).solve(count, zero);
}

LevelFit fit_levels(const LevelHistogram& histogram, int bits, const LevelRule& rule) {
  check(bits, rule, histogram);
  LevelBins bins = level_bins(histogram);
  LevelModel model(bins, rule);
  LevelFit fit;
  if (model.empty()) {
    int last = (1 << bits) - 1;
    for (int i = 0; i <= last; ++i) fit.levels.push_back(static_cast<float>(2 * i - last) / static_cast<float>(last));
    return fit;
  }
  int stride = rule.biased && model.kappa() < 0.5 ? kStride : 1;
  Solver solver(model, rule.biased, stride);
  fit.error = kInfinity;
  for (bool zero : {false, true}) {
    int count = (1 << (bits - 1)) - zero;
    std::vector<double> magnitudes = solver.solve(count, zero);
    separate(magnitudes);
    polish(model, magnitudes, zero, !rule.biased, stride);
    for (double& x : magnitudes) x = static_cast<float>(x);
    double error = model.error(magnitudes, zero);
    if (zero && error > fit.error * (1 + 1e-6)) continue;  // as good with zero: zeros stay zeros
    fit.error = error;
    fit.zero = zero;
    fit.levels.clear();
    for (size_t i = magnitudes.size(); i-- > 0;) fit.levels.push_back(-static_cast<float>(magnitudes[i]));
    if (zero) fit.levels.push_back(0);
    for (double x : magnitudes) fit.levels.push_back(static_cast<float>(x));
  }
  return fit;
}

double level_error(std::span<const float> levels, std::span<const double> r, std::span<const double> weight,
                   const LevelRule& rule) {
  double kappa = rule.biased ? rule.kappa : 0, sum = 0, total = 0;
  for (size_t i = 0; i < r.size(); ++i) {
    double t = std::clamp<double>(r[i], levels.front(), levels.back());
    size_t up = std::upper_bound(levels.begin(), levels.end(), t) - levels.begin();
    up = std::clamp<size_t>(up, 1, levels.size() - 1);
    double c = levels[up - 1], width = levels[up] - c, p = (t - c) / width;
    double q = kappa < 0.5 ? std::clamp((p - kappa) / (1 - 2 * kappa), 0.0, 1.0) : p >= 0.5;
    double bias = c + q * width - r[i];
    sum += weight[i] * (bias * bias + q * (1 - q) * width * width / rule.workers);
    total += weight[i];
  }
  return total > 0 ? sum / total : 0;
}

}  // namespace gradwire
