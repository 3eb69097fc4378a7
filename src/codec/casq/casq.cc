// SPDX-License-Identifier: Apache-2.0
// Ge et al., CASQ, CLUSTER 2021 and Sci. China Inf. Sci. 2023: clusters of values, each with a table of bucket means.
// docs/algorithms.md has the formulas, the bounds, what the papers leave open and what we chose.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "codec/body.h"
#include "codec/casq/cluster_table.h"
#include "codec/casq/cpu.h"
#include "codec/casq/fitter.h"
#include "codec/parameters.h"

namespace gradwire {
namespace {

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
                      "in the released prototype"),
               learning(choice("rule", {"optimal", "density", "entropy", "outliers"},
                               "mode=paper: how buckets are shared among clusters")),
               learning(real("cut", "0", 0, 0.9999,
                             "share of a sign's values before its outliers (prototype: 0.95); 0: fitted")),
               choice("counts", {"off", "on"},
                      "mode=paper: send the buckets' counts too, for receivers that merge tables; gradwire does not"),
               learning(integer("start", "0", 0, 1e9, "steps that are sent as fp32 before (prototype: 500)"), "0"),
               refit_parameter("100", "10")},  // in mode=paper as in the prototype
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
