// SPDX-License-Identifier: Apache-2.0
// The histogram, the programme over its bins and the two modes of the fit. Buckets stand in cluster_buckets.cc.
#include "codec/casq/clusters.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>

#include "core/bits.h"
#include "gradwire/error.h"

namespace gradwire {
namespace {

constexpr int kBinsLog = 6, kLowest = 127 - 8;  // bins of a binade, and the biased exponent of the first
constexpr double kGreatest = 4096;              // magnitudes beyond count as this, lest the squares run over

// The bins of one sign that hold something, by rising magnitude, with running sums in units of the rms.
struct Side {
  std::vector<uint32_t> bins;
  std::vector<double> n{0}, s{0}, q{0};

  Side(const ClusterHistogram& h, bool positive) {
    for (uint32_t b = 0; b < ClusterHistogram::kSide; ++b) {
      const int64_t* word = &h.words()[3 * (b + (positive ? ClusterHistogram::kSide : 0))];
      if (word[0] <= 0) continue;
      bins.push_back(b);
      n.push_back(n.back() + static_cast<double>(word[0]));
      s.push_back(s.back() + static_cast<double>(word[1]) * ClusterHistogram::kUnit);
      q.push_back(q.back() + static_cast<double>(word[2]) * ClusterHistogram::kUnit);
    }
  }
  size_t size() const { return bins.size(); }
  double count(size_t a, size_t b) const { return n[b] - n[a]; }
  double mean(size_t a, size_t b) const { return (s[b] - s[a]) / count(a, b); }
  double cost(size_t a, size_t b) const {  // squared distance from the mean
    const double m = s[b] - s[a];
    return a == b ? 0 : std::max(0.0, q[b] - q[a] - m * m / count(a, b));
  }
};

// k-means of every prefix of a side with up to `most` clusters. The last cluster of a longer prefix begins no earlier,
// so each layer is filled by halving.
struct Programme {
  const Side& side;
  std::vector<std::vector<double>> best;
  std::vector<std::vector<uint32_t>> from;

  Programme(const Side& s, int most) : side(s) {
    const double inf = std::numeric_limits<double>::infinity();
    best.assign(most + 1, std::vector<double>(s.size() + 1, inf));
    from.assign(most + 1, std::vector<uint32_t>(s.size() + 1, 0));
    best[0][0] = 0;
    for (int k = 1; k <= most; ++k) {
      best[k][0] = 0;
      if (s.size() > 0) fill(k, 1, s.size(), 0, s.size() - 1);
    }
  }
  void fill(int k, size_t low, size_t high, size_t first, size_t last) {
    const size_t middle = (low + high) / 2;
    size_t arg = first;
    for (size_t a = first; a <= std::min(last, middle - 1); ++a) {
      const double value = best[k - 1][a] + side.cost(a, middle);
      if (value < best[k][middle]) best[k][middle] = value, arg = a;
    }
    from[k][middle] = static_cast<uint32_t>(arg);
    if (low < middle) fill(k, low, middle - 1, first, arg);
    if (middle < high) fill(k, middle + 1, high, arg, last);
  }
  // Where the clusters of the prefix begin, without empty ones.
  std::vector<size_t> begins(int k, size_t prefix) const {
    std::vector<size_t> list;
    for (; prefix > 0; --k) list.push_back(prefix = from[k][prefix]);
    std::reverse(list.begin(), list.end());
    return list;
  }
};

// One way to cut off the tail of a side.
struct Cut {
  size_t at;                              // the rest is [0, at); at == size: no outlier cluster
  double rest;                            // the rest's cost
  double count, value;                    // the outliers, and their variance
  double next_count = 0, next_value = 0;  // the strongest cluster of the rest
};

std::vector<Cut> cuts_of(const Programme& programme, int clusters) {
  const Side& side = programme.side;
  std::vector<Cut> list;
  for (size_t at = clusters == 1 ? side.size() : 0; at <= side.size(); ++at) {
    if (at == 0 && side.size() > 0 && clusters > 1) continue;  // no better than a plain c-means of the side
    const bool all = at == side.size();
    const int k = all ? clusters : clusters - 1;
    Cut cut{at, programme.best[k][at], 0, 0};
    if (!all) {
      cut.count = side.count(at, side.size());
      cut.value = side.cost(at, side.size()) / cut.count;
    }
    size_t end = at;
    const auto begins = programme.begins(k, at);
    for (auto it = begins.rbegin(); it != begins.rend(); end = *it++) {
      const double count = side.count(*it, end), value = side.cost(*it, end) / count;
      if (value > cut.next_value) cut.next_count = count, cut.next_value = value;
    }
    list.push_back(cut);
  }
  return list;
}

// Takes what `room` buckets save in a cluster; clusters are visited strongest first.
double save(double count, double value, double* room) {
  const double m = std::min(count, *room);
  *room -= m;
  return m * value;
}

double predicted(const Cut& a, const Cut& b, double room) {
  double error = a.rest + b.rest + a.count * a.value + b.count * b.value;
  const Cut &first = a.value >= b.value ? a : b, &second = a.value >= b.value ? b : a;
  error -= save(first.count, first.value, &room);
  error -= save(second.count, second.value, &room);
  if (room > 0) {
    const Cut &third = a.next_value >= b.next_value ? a : b, &fourth = a.next_value >= b.next_value ? b : a;
    error -= save(third.next_count, third.next_value, &room);
    error -= save(fourth.next_count, fourth.next_value, &room);
  }
  return error;
}

// One sign's part of the result, by rising magnitude.
struct Fitted {
  std::vector<double> centres, bounds;    // bounds[i] separates centres i and i + 1
  std::vector<double> shares, entropies;  // per centre, not yet normalised
};

// Base-2 entropy of five equal bins between the least and the greatest.
double entropy5(const Side& side, size_t a, size_t b) {
  if (b <= a + 1) return 0;
  const double low = side.mean(a, a + 1), width = (side.mean(b - 1, b) - low) / 5;
  if (!(width > 0)) return 0;  // counts that were shifted to another rank's unit, or that a peer made up
  std::array<double, 5> parts{};
  for (size_t i = a; i < b; ++i) {
    parts[static_cast<size_t>(std::clamp((side.mean(i, i + 1) - low) / width, 0.0, 4.0))] += side.count(i, i + 1);
  }
  double sum = 0;
  for (const double part : parts) {
    const double p = part / side.count(a, b);
    if (p > 0) sum -= p * std::log2(p);
  }
  return sum;
}

// The clusters of the rest: means as centres, midpoints as bounds.
Fitted rest_of(const Programme& programme, int k, size_t prefix) {
  Fitted fitted;
  auto begins = programme.begins(k, prefix);
  begins.push_back(prefix);
  for (size_t i = 0; i + 1 < begins.size(); ++i) {
    fitted.centres.push_back(programme.side.mean(begins[i], begins[i + 1]));
    fitted.shares.push_back(programme.side.count(begins[i], begins[i + 1]));
    fitted.entropies.push_back(entropy5(programme.side, begins[i], begins[i + 1]));
    if (i > 0) fitted.bounds.push_back((fitted.centres[i - 1] + fitted.centres[i]) / 2);
  }
  return fitted;
}

Fitted best_side(const Programme& programme, int clusters, const Cut& cut) {
  const Side& side = programme.side;
  if (cut.at == side.size()) return rest_of(programme, clusters, cut.at);
  Fitted fitted = rest_of(programme, clusters - 1, cut.at);
  fitted.bounds.push_back(ClusterHistogram::edge(side.bins[cut.at]));
  fitted.centres.push_back(side.mean(cut.at, side.size()));
  fitted.shares.push_back(cut.count);
  fitted.entropies.push_back(entropy5(side, cut.at, side.size()));
  return fitted;
}

Fitted paper_side(const Programme& programme, int clusters, double percentile) {
  const Side& side = programme.side;
  if (clusters == 1 || side.size() == 0) return rest_of(programme, 1, side.size());
  const double wanted = percentile * side.n.back();
  size_t at = 1;  // the percentile lies in the last bin of the rest
  while (at < side.size() && side.n[at] < wanted) ++at;
  const double low = ClusterHistogram::edge(side.bins[at - 1]), high = ClusterHistogram::edge(side.bins[at - 1] + 1);
  const double t = low + (high - low) * (wanted - side.n[at - 1]) / side.count(at - 1, at);
  Fitted fitted = rest_of(programme, clusters - 1, at);
  if (t <= fitted.centres.back()) return fitted;  // more than the percentile share one bin
  fitted.bounds.push_back((fitted.centres.back() + t) / 2);
  fitted.centres.push_back(t);
  fitted.shares.push_back(side.n.back() - wanted);
  fitted.entropies.push_back(3 * entropy5(side, at, side.size()));
  return fitted;
}

// Fills a side that has fewer distinct values than clusters with empty clusters beyond its values.
void complete(Fitted* side, int clusters) {
  while (side->centres.size() < static_cast<size_t>(clusters)) {
    const double last = side->centres.empty() ? 1 : 2 * side->centres.back();
    if (!side->centres.empty()) side->bounds.push_back(std::max(last, 0x1p-8));
    side->centres.push_back(std::max(last, 0x1p-7));
    side->shares.push_back(0);
    side->entropies.push_back(0);
  }
  for (auto* list : {&side->shares, &side->entropies}) {
    const double sum = std::accumulate(list->begin(), list->end(), 0.0);
    for (double& v : *list) v = sum > 0 ? v / sum : 1.0 / clusters;
  }
}

// Joins the sides. A negative value at the magnitude of a bound belongs outside, as it was counted.
Clusters join(const Fitted& negative, const Fitted& positive) {
  Clusters result;
  const size_t c = positive.centres.size();
  for (size_t i = c; i-- > 0;) {
    result.centres.push_back(static_cast<float>(-negative.centres[i]));
    result.shares.push_back(negative.shares[i]);
    result.entropies.push_back(negative.entropies[i]);
    if (i > 0) result.thresholds.push_back(std::nextafter(static_cast<float>(-negative.bounds[i - 1]), 0.0f));
  }
  result.thresholds.push_back(0);
  for (size_t i = 0; i < c; ++i) {
    result.centres.push_back(static_cast<float>(positive.centres[i]));
    result.shares.push_back(positive.shares[i]);
    result.entropies.push_back(positive.entropies[i]);
    if (i > 0) result.thresholds.push_back(static_cast<float>(positive.bounds[i - 1]));
  }
  for (size_t i = c; i < 2 * c - 1; ++i) {  // strictly ascending from the middle outwards
    auto& t = result.thresholds;
    t[i] = std::max(t[i], std::nextafter(t[i - 1], 1e9f));
    const size_t j = 2 * c - 2 - i;
    t[j] = std::min(t[j], std::nextafter(t[j + 1], -1e9f));
  }
  return result;
}

// Counts and variances by the final thresholds (a bin goes where its mean goes), the order, and the predicted error.
void measure(const Side& negative, const Side& positive, double budget, Clusters* result) {
  const size_t clusters = result->centres.size();
  std::vector<double> n(clusters), s(clusters), q(clusters);
  double energy = 0, room = budget * (negative.n.back() + positive.n.back());
  for (const Side* side : {&negative, &positive}) {
    for (size_t i = 0; i < side->size(); ++i) {
      const double mean = side == &positive ? side->mean(i, i + 1) : -side->mean(i, i + 1);
      const auto& t = result->thresholds;
      size_t k = static_cast<size_t>(std::upper_bound(t.begin(), t.end(), mean) - t.begin());
      if (side == &negative) k = std::min(k, clusters / 2 - 1);
      n[k] += side->count(i, i + 1);
      s[k] += side->s[i + 1] - side->s[i];
      q[k] += side->q[i + 1] - side->q[i];
    }
    energy += side->q.back();
  }
  double error = 0;
  result->order.resize(clusters);
  for (size_t k = 0; k < clusters; ++k) {
    const double cost = n[k] > 0 ? std::max(0.0, q[k] - s[k] * s[k] / n[k]) : 0;
    result->counts.push_back(n[k]);
    result->variances.push_back(n[k] > 0 ? cost / n[k] : 0);
    result->order[k] = static_cast<uint8_t>(k);
    error += cost;
  }
  const auto& v = result->variances;
  std::stable_sort(result->order.begin(), result->order.end(), [&](uint8_t a, uint8_t b) { return v[a] > v[b]; });
  for (const uint8_t k : result->order) error -= save(n[k], v[k], &room);
  result->error = energy > 0 ? std::max(0.0, error) / energy : 0;
}

}  // namespace

uint32_t ClusterHistogram::bin(float ratio) {
  const uint32_t bits = float_bits(ratio), magnitude = (bits & 0x7fffffffu) >> (23 - kBinsLog);
  const uint32_t first = kLowest << kBinsLog;
  const uint32_t place = magnitude < first ? 0 : std::min(magnitude - first, kSide - 1);
  return place + (ratio < 0 ? 0 : kSide);
}

float ClusterHistogram::edge(uint32_t magnitude_bin) {
  return bits_float(((kLowest << kBinsLog) + magnitude_bin) << (23 - kBinsLog));
}

void ClusterHistogram::add(std::span<const float> values, double rms, uint32_t weight) {
  if (!(rms > 0) || !std::isfinite(rms)) return;
  for (const float x : values) {
    const double ratio = x / rms, magnitude = std::min(std::abs(ratio), kGreatest);
    if (std::isnan(ratio)) continue;
    int64_t* word = &words_[3 * bin(static_cast<float>(ratio))];
    word[0] += weight;
    word[1] += weight * std::llrint(magnitude / kUnit);
    word[2] += weight * std::llrint(magnitude * magnitude / kUnit);
  }
}

void ClusterHistogram::merge(const ClusterHistogram& other) {
  for (size_t i = 0; i < words_.size(); ++i) words_[i] += other.words_[i];
}

double ClusterHistogram::total() const {
  double sum = 0;
  for (size_t i = 0; i < words_.size(); i += 3) sum += static_cast<double>(words_[i]);
  return sum;
}

Clusters fit_clusters(const ClusterHistogram& histogram, int bits, double budget, ClusterMode mode, double percentile) {
  const auto require = [](bool fine, const char* field, double value, const char* allowed) {
    if (fine) return;
    throw Error(ErrorKind::usage, std::string(field) + " is " + std::to_string(value) + ", expected " + allowed, field);
  };
  require(bits >= 1 && bits <= 4, "bits", bits, "1 to 4");
  require(budget >= 0 && budget <= 1, "buckets", budget, "buckets per element, 0 to 1");
  require(percentile > 0 && percentile < 1, "percentile", percentile, "between 0 and 1");
  const int clusters = 1 << (bits - 1);
  const Side negative(histogram, false), positive(histogram, true);
  const Programme below(negative, clusters), above(positive, clusters);
  Fitted low, high;
  if (mode == ClusterMode::paper) {
    low = paper_side(below, clusters, percentile);
    high = paper_side(above, clusters, percentile);
  } else {
    const auto lows = cuts_of(below, clusters), highs = cuts_of(above, clusters);
    const double room = budget * (negative.n.back() + positive.n.back());
    double least = std::numeric_limits<double>::infinity();
    size_t a = 0, b = 0;
    for (size_t i = 0; i < lows.size(); ++i) {
      for (size_t j = 0; j < highs.size(); ++j) {
        const double error = predicted(lows[i], highs[j], room);
        if (error < least) least = error, a = i, b = j;
      }
    }
    low = best_side(below, clusters, lows[a]);
    high = best_side(above, clusters, highs[b]);
  }
  complete(&low, clusters);
  complete(&high, clusters);
  Clusters result = join(low, high);
  measure(negative, positive, budget, &result);
  return result;
}

}  // namespace gradwire
