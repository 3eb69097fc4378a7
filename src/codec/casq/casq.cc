// SPDX-License-Identifier: Apache-2.0
// Ge et al., CASQ, CLUSTER 2021 and Sci. China Inf. Sci. 2023: clusters of values, each with a table of bucket means.
// docs/algorithms.md has the formulas, the bounds, what the papers leave open and what we chose.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cmath>

#include "codec/body.h"
#include "codec/casq/cpu.h"
#include "codec/casq/fitter.h"
#include "codec/parameters.h"

namespace gradwire {
namespace {

// casq without a table: outliers begin at 1.9 times the root mean square, the rest is cut evenly.
constexpr float kDefaultCut = 1.9f;

struct ClusterTable {
  std::vector<float> thresholds;
  std::vector<uint32_t>
      words;  // per cluster: tile, the clusters in the order in which they get buckets; paper, shares in 2^-16
};

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

bool paper(const Values& v) { return v.choice("mode") == "paper"; }

Scheme scheme(const Values& v) {
  if (!paper(v) && v.choice("counts") == "on")
    throw Error(ErrorKind::usage, "counts is on; only mode=paper can send them", "counts");
  return Scheme{.body = Body::own,
                .sums = SumKind::squares,
                .bits = static_cast<uint8_t>(v.integer("bits")),
                .unit = paper(v) ? 0 : kTile,
                .ratio = v.real("budget"),
                .steps = paper(v) && v.choice("counts") == "on"};
}

void apply(const Values& v, Table table, Scheme&, std::vector<float>& floats) {
  const ClusterTable t = read_clusters(v.integer("bits"), paper(v), table);
  floats = t.thresholds;
  for (uint32_t word : t.words) floats.push_back(static_cast<float>(word));
}

std::vector<std::string> describe(const Values& v, Table table) {
  const ClusterTable t = read_clusters(v.integer("bits"), paper(v), table);
  std::vector<std::string> shown;
  for (float threshold : t.thresholds) shown.push_back(fmt::format("{:.4g}", threshold));
  return {fmt::format("thresholds{}, in root mean squares: {}", table.empty() ? " (not fitted)" : "",
                      fmt::join(shown, " ")),
          paper(v) ? fmt::format("shares of the buckets, in 1/65536: {}", fmt::join(t.words, " "))
                   : fmt::format("clusters in the order in which they get buckets: {}", fmt::join(t.words, " "))};
}

}  // namespace

CodecDef codec_casq() {
  return {.name = "casq",
          .summary = "clusters of values, each with a table of bucket means; few bits, wants feedback (CASQ)",
          .example = "casq:bits=2",
          .specs = {"casq:bits=1", "casq:bits=4,budget=1", "casq:mode=paper", "casq:bits=1,mode=paper",
                    "casq:bits=3,mode=paper,counts=on,budget=0.3"},
          .parameters =
              {integer("bits", "2", 1, 4, "bits of a cluster's number: half of the 2^bits clusters are negative"),
               real("budget", "0.0625", 0.0001, 1, "buckets per element: 16 bits each (32 in mode=paper)"),
               choice("mode", {"tile", "paper"},
                      "tile: tiles of 32768 elements, buckets by rank; paper: the whole tensor, buckets by hash, as "
                      "published"),
               learning(choice("rule", {"optimal", "density", "entropy", "outliers"},
                               "mode=paper: how buckets are shared among clusters")),
               learning(real("cut", "0", 0, 0.9999,
                             "share of a sign's values before its outliers (published: 0.95); 0: fitted")),
               choice("counts", {"off", "on"},
                      "mode=paper: send the buckets' counts, so that tables of several senders can be merged"),
               learning(integer("start", "0", 0, 1e9, "steps that are sent as fp32 before (published: 500)"), "0"),
               refit_parameter("100")},
          .scheme = scheme,
          .traits =
              [](const Values& v) {
                return Traits{.lossless = false, .unbiased = false, .feedback = true, .unit = paper(v) ? 0 : kTile};
              },
          .apply = apply,
          .describe = describe,
          .fitter = casq_fitter,
          .unit = &kCasqUnits};
}

}  // namespace gradwire
