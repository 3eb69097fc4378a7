// SPDX-License-Identifier: Apache-2.0
#include "codec/casq/cluster_table.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "codec/parameters.h"
#include "core/bits.h"

namespace gradwire {
namespace {

// Without a table outliers begin at 1.9 times the root mean square, and the rest is cut evenly.
constexpr float kDefaultCut = 1.9f;

}  // namespace

ClusterTable default_clusters(uint32_t bits, bool paper) {
  const uint32_t half = 1u << (bits - 1);
  ClusterTable t;
  for (int i = -static_cast<int>(half) + 1; i < static_cast<int>(half); ++i)
    t.thresholds.push_back(i == 0 ? 0.0f : kDefaultCut * static_cast<float>(i) / static_cast<float>(half - 1));
  for (uint32_t j = 0; j < half && !paper; ++j) t.words.insert(t.words.end(), {2 * half - 1 - j, j});
  for (uint32_t k = 0; k < 2 * half && paper; ++k)  // outliers get nearly everything
    t.words.push_back(half == 1 ? 32768 : k == 0 || k == 2 * half - 1 ? 32000 : 1536 / (2 * half - 2));
  return t;
}

ClusterTable read_clusters(uint32_t bits, bool paper, Table table) {
  const uint32_t clusters = 1u << bits;
  if (table.empty()) return default_clusters(bits, paper);
  if (table.size() != 2 * clusters - 1)
    refuse_table(fmt::format("{} words; expected {}", table.size(), 2 * clusters - 1));
  ClusterTable t;
  for (uint32_t i = 0; i + 1 < clusters; ++i) {
    const float threshold = bits_float(table[i]);
    if (!std::isfinite(threshold)) refuse_table(fmt::format("threshold {} that is not finite", i));
    if (i > 0 && !(threshold > t.thresholds.back()))
      refuse_table(fmt::format("thresholds {} and {} that are not ascending", i - 1, i));
    t.thresholds.push_back(threshold);
  }
  if (t.thresholds[clusters / 2 - 1] != 0) refuse_table("a middle threshold that is not 0");
  t.words.assign(table.begin() + (clusters - 1), table.end());
  uint64_t sum = 0, seen = 0;
  for (uint32_t word : t.words) {
    sum += word;
    if (word < clusters) seen |= uint64_t{1} << word;
  }
  if (paper && sum > 65536) refuse_table("shares that add up to more than 65536");
  if (!paper && seen != (uint64_t{1} << clusters) - 1) refuse_table("an order that does not name every cluster once");
  return t;
}

std::vector<uint32_t> words_of(const ClusterTable& table) {
  std::vector<uint32_t> words;
  for (float threshold : table.thresholds) words.push_back(float_bits(threshold));
  words.insert(words.end(), table.words.begin(), table.words.end());
  return words;
}

ClusterTable other_sign_first(ClusterTable table) {
  std::vector<uint32_t>& order = table.words;
  const auto last = static_cast<uint32_t>(order.size()) - 1;  // the outliers are the clusters 0 and last
  auto later = order.end() - 1;
  while (*later != 0 && *later != last) --later;
  std::rotate(order.begin(), later, later + 1);
  return table;
}

}  // namespace gradwire
