// SPDX-License-Identifier: Apache-2.0
// D_k(j) is the least cost of everything below edge j with k cells, the k-th ending at edge j, and D_k(j) = min over
// i < j of D_{k-1}(i) + cost(i, j). A cell lies between two levels; with rounding to nearest, it is what is rounded to
// one level.
//
// Cell costs come in O(1) from sums of weight, weight t and weight t^2 below an edge. Unbiased and nearest costs are
// Monge (two overlapping cells never cost more than their union and their intersection), so the best i grows with j and
// with k, and halving the range of j leaves few i to look at. For these two, sums of t^2 are the same for every choice
// of levels and are left out of the programme.
#include "codec/optquant/level_programme.h"

#include <algorithm>
#include <limits>

#include "core/check.h"

namespace gradwire {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Unbiased. D + (e_i + e_j)(M_j - M_i) - e_i e_j (W_j - W_i), ordered so that one i costs two products.
class UnbiasedCost {
 public:
  explicit UnbiasedCost(const LevelModel& model) : model_(model), a_(model.edge().size()), b_(a_.size()) {
    for (size_t i = 0; i < b_.size(); ++i) b_[i] = model.edge()[i] * model.below(i).w - model.below(i).m;
  }
  double first(size_t j) const {
    const double low = model_.edge().front(), high = model_.edge()[j];
    return (low + high) * model_.below(j).m - low * high * model_.below(j).w;
  }
  void begin_layer(const std::vector<double>& previous) {
    for (size_t i = 0; i < a_.size(); ++i) a_[i] = previous[i] - model_.edge()[i] * model_.below(i).m;
  }
  size_t best(size_t low, size_t high, size_t j, double* cost) const {
    const double* edge = model_.edge().data();
    const double y = edge[j], x = model_.below(j).m - y * model_.below(j).w;
    double least = kInfinity;
    size_t at = low;
    for (size_t i = low; i <= high; ++i) {
      const double value = a_[i] + edge[i] * x + b_[i] * y;
      if (value < least) least = value, at = i;
    }
    *cost = least + y * model_.below(j).m;
    return at;
  }

 private:
  const LevelModel& model_;
  std::vector<double> a_, b_;
};

// Nearest: one-dimensional k-means, D - (M_j - M_i)^2 / (W_j - W_i).
class NearestCost {
 public:
  explicit NearestCost(const LevelModel& model) : w_(model.edge().size()), m_(w_.size()) {
    for (size_t i = 0; i < w_.size(); ++i) w_[i] = model.below(i).w, m_[i] = model.below(i).m;
  }
  double first(size_t j) const { return -m_[j] * m_[j] / std::max(w_[j], kTiny); }
  void begin_layer(const std::vector<double>& previous) { previous_ = previous.data(); }
  size_t best(size_t low, size_t high, size_t j, double* cost) const {
    const double w = w_[j], m = m_[j];
    double least = kInfinity;
    size_t at = low;
    for (size_t i = low; i <= high; ++i) {
      const double sum = m - m_[i];
      const double value = previous_[i] - sum * sum / std::max(w - w_[i], kTiny);
      if (value < least) least = value, at = i;
    }
    *cost = least;
    return at;
  }

 private:
  static constexpr double kTiny = 1e-300;  // an interval without weight has sum 0
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
      const size_t most = last_ - (cells_ - k);  // every later cell needs a bin of its own
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
      const size_t j = from + (to - from) / 2;
      const size_t h = std::min(high, j - 1);
      const size_t l = std::min(h, std::max<size_t>(low, k > 2 ? best_[k - 2][j] : 0));
      const size_t at = cost_.best(l, h, j, &now_[j]);
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

std::vector<double> unbiased_levels(const LevelModel& model, size_t count) {
  const std::vector<double>& edge = model.edge();
  std::vector<double> levels{edge.front()};
  for (size_t end : MongeProgramme(UnbiasedCost(model), edge.size(), count - 1).solve()) levels.push_back(edge[end]);
  return levels;
}

std::vector<double> nearest_levels(const LevelModel& model, size_t count) {
  const std::vector<double>& edge = model.edge();
  std::vector<double> levels;
  size_t from = 0;
  for (size_t end : MongeProgramme(NearestCost(model), edge.size(), count).solve()) {
    const LevelSums inside = model.below(end) - model.below(from);
    const double low = edge[from], high = edge[end];
    levels.push_back(inside.w > 0 ? std::clamp(inside.m / inside.w, low, high) : (low + high) / 2);
    from = end;
  }
  return levels;
}

// Any cost, from a table of all cells. The first and the last level are free: what lies beyond them saturates.
std::vector<double> plain_levels(const LevelModel& model, size_t count, size_t stride) {
  std::vector<double> at;
  for (size_t i = 0; i + 1 < model.edge().size(); i += stride) at.push_back(model.edge()[i]);
  at.push_back(model.edge().back());
  const size_t n = at.size();
  std::vector<double> table(n * n, kInfinity);
  for (size_t i = 0; i < n; ++i)
    for (size_t j = i + 1; j < n; ++j) table[i * n + j] = model.cell(at[i], at[j]);
  std::vector<std::vector<double>> least(count, std::vector<double>(n, kInfinity));
  for (size_t j = 0; j < n; ++j) least[0][j] = model.under(at[j]);
  for (size_t k = 1; k < count; ++k) {
    double* now = least[k].data();
    for (size_t i = k - 1; i + 1 < n; ++i) {
      const double* row = table.data() + i * n;
      const double before = least[k - 1][i];
      for (size_t j = i + 1; j < n; ++j) now[j] = std::min(now[j], before + row[j]);
    }
  }
  size_t j = count - 1;
  const auto whole = [&](size_t i) { return least[count - 1][i] + model.over(at[i]); };
  for (size_t i = count - 1; i < n; ++i)
    if (whole(i) < whole(j)) j = i;
  std::vector<double> levels(count, at[j]);
  for (size_t k = count - 1; k > 0; --k) {
    size_t i = k - 1;
    while (i + 1 < j && least[k - 1][i] + table[i * n + j] > least[k][j]) ++i;
    levels[k - 1] = at[j = i];
  }
  return levels;
}

}  // namespace

std::vector<double> best_levels(const LevelModel& model, size_t count, bool biased, size_t stride) {
  GW_CHECK(count >= 2 && (model.edge().size() - 1) / stride > count);
  if (!biased) return unbiased_levels(model, count);
  if (model.kappa() == 0.5) return nearest_levels(model, count);
  return plain_levels(model, count, stride);
}

}  // namespace gradwire
