// SPDX-License-Identifier: Apache-2.0
// How many hash buckets the clusters get: the optimum for a random hash, and the paper's rules. (Rank buckets need no
// solver, see cluster_rules.h.)
#include <algorithm>
#include <cmath>
#include <string>

#include "codec/casq/clusters.h"
#include "gradwire/error.h"

namespace gradwire {
namespace {

// The load at which a further bucket saves the part `gain` of a cluster's variance: 1 - exp(-load) (1 + load) = gain.
double load_of(double gain) {
  if (gain >= 1) return 1e300;
  double low = 1e-9, high = 64;
  for (int i = 0; i < 60; ++i) {
    const double middle = std::sqrt(low * high), value = 1 - std::exp(-middle) * (1 + middle);
    (value < gain ? low : high) = middle;
  }
  return std::sqrt(low * high);
}

// Whole numbers in proportion to the weights, none below its least, that sum to `total`.
std::vector<uint32_t> apportion(std::vector<double> weights, const std::vector<uint32_t>& least, uint32_t total) {
  const size_t n = weights.size();
  std::vector<uint32_t> parts(least);
  std::vector<bool> fixed(n, false);
  double scale = 0;
  for (bool again = true; again;) {  // a part below its least is set to it, the others share what is left
    double room = total, sum = 0;
    for (size_t k = 0; k < n; ++k) (fixed[k] ? room : sum) += fixed[k] ? -double(least[k]) : weights[k];
    scale = sum > 0 ? std::max(0.0, room) / sum : 0;
    again = false;
    for (size_t k = 0; k < n; ++k) {
      if (!fixed[k] && weights[k] * scale < least[k]) fixed[k] = again = true;
    }
  }
  uint32_t used = 0;
  for (size_t k = 0; k < n; ++k) {
    if (!fixed[k]) parts[k] = std::max(least[k], static_cast<uint32_t>(weights[k] * scale));
    used += parts[k];
  }
  while (used != total) {  // the largest remainder gets one more; where nothing has weight, all do in turn
    size_t pick = n;
    double most = 0;
    for (size_t k = 0; k < n; ++k) {
      const double want = weights[k] * scale - parts[k], over = used < total ? want : -want;
      if ((used < total ? least[k] > 0 : parts[k] > least[k]) && (pick == n || over > most)) pick = k, most = over;
    }
    if (pick == n) break;
    used < total ? (++parts[pick], ++used) : (--parts[pick], --used);
  }
  return parts;
}

}  // namespace

double hash_loss(double count, double buckets) {
  const double load = count / buckets;
  return load > 1e-9 ? 1 - (1 - std::exp(-load)) / load : 0;
}

double rank_loss(double count, double buckets) { return count > buckets ? 1 - buckets / count : 0; }

std::vector<uint32_t> allocate_hash(std::span<const double> counts, std::span<const double> variances, uint32_t total) {
  const size_t n = counts.size();
  std::vector<uint32_t> least(n);
  std::vector<double> weights(n);
  uint32_t needed = 0;
  double greatest = 0;
  for (size_t k = 0; k < n; ++k) {
    needed += least[k] = counts[k] > 0;
    if (counts[k] > 0) greatest = std::max(greatest, variances[k]);
  }
  if (needed > total) {
    throw Error(ErrorKind::usage,
                "buckets is " + std::to_string(total) + ", expected at least one for each of the " +
                    std::to_string(needed) + " clusters with elements",
                "buckets");
  }
  if (greatest == 0) return apportion({counts.begin(), counts.end()}, least, total);
  double low = 1e-15 * greatest, high = greatest;
  for (int i = 0; i < 60; ++i) {
    const double mu = std::sqrt(low * high);
    double sum = 0;
    for (size_t k = 0; k < n; ++k) {
      weights[k] = counts[k] > 0 ? counts[k] / load_of(variances[k] > 0 ? mu / variances[k] : 1) : 0;
      sum += std::max<double>(least[k], weights[k]);
    }
    (sum > total ? low : high) = mu;
  }
  auto buckets = apportion(weights, least, total);
  const auto loss = [&](size_t k, double m) { return counts[k] * variances[k] * hash_loss(counts[k], m); };
  for (int moves = 0; moves < 256; ++moves) {  // whole numbers: a bucket moves while that helps
    size_t to = n, from = n;
    double gain = 0, price = 0;
    for (size_t k = 0; k < n; ++k) {
      if (counts[k] <= 0) continue;
      const double more = loss(k, buckets[k]) - loss(k, buckets[k] + 1.0);
      if (to == n || more > gain) to = k, gain = more;
      if (buckets[k] < 2) continue;
      const double less = loss(k, buckets[k] - 1.0) - loss(k, buckets[k]);
      if (from == n || less < price) from = k, price = less;
    }
    if (from == n || from == to || gain <= price * (1 + 1e-9)) break;
    ++buckets[to];
    --buckets[from];
  }
  return buckets;
}

std::vector<uint32_t> balance_signs(std::vector<uint32_t> buckets, std::span<const double> counts,
                                    std::span<const double> variances) {
  for (size_t k = 0; k < buckets.size() / 2; ++k) {
    const size_t mirror = buckets.size() - 1 - k;
    const double here = counts[k] * std::sqrt(variances[k]), there = counts[mirror] * std::sqrt(variances[mirror]);
    if (!(here + there > 0)) continue;
    const uint32_t both = buckets[k] + buckets[mirror];
    buckets[k] = static_cast<uint32_t>(std::lround(both * (here / (here + there))));
    buckets[mirror] = both - buckets[k];
  }
  return buckets;
}

std::vector<uint32_t> allocate_paper(const Clusters& clusters, PaperRule rule, uint32_t total,
                                     std::span<const double> list) {
  const size_t n = clusters.centres.size();
  if (rule == PaperRule::list && list.size() != n) {
    throw Error(ErrorKind::usage,
                "list has " + std::to_string(list.size()) + " entries, expected one for each of " + std::to_string(n) +
                    " clusters",
                "list");
  }
  if (total < n) {
    throw Error(ErrorKind::usage,
                "buckets is " + std::to_string(total) + ", expected at least one for each of " + std::to_string(n) +
                    " clusters",
                "buckets");
  }
  std::vector<double> weights(n);
  for (size_t k = 0; k < n; ++k) {
    const double centre = std::abs(clusters.centres[k]);  // over the greatest, which scaling cancels
    weights[k] = rule == PaperRule::list      ? list[k]
                 : rule == PaperRule::entropy ? clusters.entropies[k] * centre
                                              : clusters.entropies[k] * centre * clusters.shares[k];
    if (!(weights[k] >= 0) || !std::isfinite(weights[k])) {
      throw Error(ErrorKind::usage,
                  "list entry " + std::to_string(k) + " is " + std::to_string(weights[k]) +
                      ", expected a finite number, 0 or more",
                  "list");
    }
  }
  return apportion(weights, std::vector<uint32_t>(n, std::min<uint32_t>(10, total / static_cast<uint32_t>(n))), total);
}

}  // namespace gradwire
