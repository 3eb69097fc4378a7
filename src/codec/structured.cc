// SPDX-License-Identifier: Apache-2.0
// The methods whose regions are more than a code an element: casq (clusters and tables of bucket means) and fft (the
// strongest frequencies). docs/algorithms.md has the formulas, the bounds, what the papers leave open and what we chose.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cmath>
#include <cstring>

#include "codec/casq/cpu.h"
#include "codec/define.h"
#include "codec/fft/cpu.h"
#include "codec/parameters.h"
#include "gradwire/error.h"

namespace gradwire {
namespace {

using Type = Parameter::Type;

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

double theta_of(const Values& v, Table table) {
  if (table.empty()) return v.real("theta");
  const uint64_t bits = uint64_t{table[2]} << 32 | table[1];
  double theta = 0;
  std::memcpy(&theta, &bits, sizeof theta);
  return theta;
}

}  // namespace

// Ge et al., CASQ, CLUSTER 2021 and Sci. China Inf. Sci. 2023.
CodecDef codec_casq() {
  return {
      "casq",
      "clusters of values, each with a table of bucket means; few bits, wants feedback (CASQ)",
      "casq:bits=2",
      {{"bits", Type::integer, "2", 1, 4, {}, "bits of a cluster's number: half of the 2^bits clusters are negative"},
       {"budget", Type::real, "0.0625", 0.0001, 1, {}, "buckets per element: 16 bits each (32 in mode=paper)"},
       {"mode",
        Type::choice,
        "tile",
        0,
        0,
        {"tile", "paper"},
        "tile: tiles of 32768 elements, buckets by rank; paper: the whole tensor, buckets by hash, as published"},
       {"rule",
        Type::choice,
        "optimal",
        0,
        0,
        {"optimal", "density", "entropy", "outliers"},
        "mode=paper: how buckets are shared among clusters",
        true},
       {"cut",
        Type::real,
        "0",
        0,
        0.9999,
        {},
        "share of a sign's values before its outliers (published: 0.95); 0: fitted",
        true},
       {"counts",
        Type::choice,
        "off",
        0,
        0,
        {"off", "on"},
        "mode=paper: send the buckets' counts, so that tables of several senders can be merged"},
       {"start", Type::integer, "0", 0, 1e9, {}, "steps that are sent as fp32 before (published: 500)", true},
       refit_parameter("100")},
      [](const Values& v) {
        if (!paper(v) && v.choice("counts") == "on")
          throw Error(ErrorKind::usage, "counts is on; only mode=paper can send them", "counts");
        return Scheme{.body = Body::clusters,
                      .stat = Stat::l2,
                      .bits = static_cast<uint8_t>(v.integer("bits")),
                      .unit = paper(v) ? 0 : kTile,
                      .ratio = v.real("budget"),
                      .steps = paper(v) && v.choice("counts") == "on"};
      },
      [](const Values& v) {
        return Traits{.lossless = false, .unbiased = false, .feedback = true, .unit = paper(v) ? 0 : kTile};
      },
      [](const Values& v, Table table, Scheme&, std::vector<float>& floats) {
        const ClusterTable t = read_clusters(v.integer("bits"), paper(v), table);
        floats = t.thresholds;
        for (uint32_t word : t.words) floats.push_back(static_cast<float>(word));
      },
      [](const Values& v, Table table) {
        const ClusterTable t = read_clusters(v.integer("bits"), paper(v), table);
        std::vector<std::string> shown;
        for (float threshold : t.thresholds) shown.push_back(fmt::format("{:.4g}", threshold));
        return std::vector<std::string>{
            fmt::format("thresholds{}, in root mean squares: {}", table.empty() ? " (not fitted)" : "",
                        fmt::join(shown, " ")),
            paper(v) ? fmt::format("shares of the buckets, in 1/65536: {}", fmt::join(t.words, " "))
                     : fmt::format("clusters in the order in which they get buckets: {}", fmt::join(t.words, " "))};
      },
      &kCasqUnits};
}

// Wang et al., FFT-based gradient sparsification for the distributed training of deep neural networks, HPDC 2020.
CodecDef codec_fft() {
  const auto mantissa = [](const Values& v, Table table) -> uint32_t {
    const uint32_t bits = v.integer("bits"), given = given_mantissa(v);
    if (!table.empty()) {
      const double theta = table.size() == 3 ? theta_of(v, table) : -1;
      if (table.size() != 3 || table[0] < 1 || table[0] > bits - 2 || (given && table[0] != given) ||
          !(theta >= 0 && theta < 1))
        refuse_table(
            fmt::format("{} words; expected a mantissa from 1 to {} (or the spec's) and theta, from 0 to below 1",
                        table.size(), bits - 2));
      return table[0];
    }
    return given ? given : default_mantissa(bits);
  };
  return {"fft",
          "the strongest frequencies of each chunk, as range floats with a bitmap (FFT sparsification)",
          "fft:theta=0.85",
          {{"theta", Type::real, "0.85", 0, 0.9999, {}, "share of the frequencies that is dropped"},
           {"chunk", Type::power_of_two, "1024", 256, 4096, {}, "elements that are transformed together"},
           {"format", Type::choice, "range", 0, 0, {"range", "float"}, "of the kept ones: range floats, or f32"},
           {"bits", Type::integer, "10", 4, 16, {}, "bits of a range float"},
           {"mantissa", Type::integer, "0", 0, 14, {}, "bits of its mantissa, at most bits - 2; 0: fitted to the data"},
           {"mode",
            Type::choice,
            "round",
            0,
            0,
            {"round", "paper"},
            "range floats to nearest, or towards zero, as published"},
           {"schedule",
            Type::choice,
            "constant",
            0,
            0,
            {"constant", "rate", "step"},
            "theta over time: constant; with the learning rate, theta^2 = smooth * rate, at most theta; 0 from step "
            "`until` on",
            true},
           {"smooth", Type::real, "1", 0, 1e12, {}, "schedule=rate: the smoothness L of the loss", true},
           {"until", Type::integer, "0", 0, 1e9, {}, "schedule=step: the first step with theta 0", true},
           refit_parameter("100")},
          [mantissa](const Values& v) {
            mantissa(v, {});
            return Scheme{.body = Body::fft,
                          .bits = static_cast<uint8_t>(v.choice("format") == "float" ? 32 : v.integer("bits")),
                          .unit = v.integer("chunk"),
                          .truncate = v.choice("mode") == "paper"};
          },
          [](const Values& v) {
            return Traits{.lossless = false, .unbiased = false, .feedback = true, .unit = v.integer("chunk")};
          },
          [mantissa](const Values& v, Table table, Scheme& s, std::vector<float>&) {
            s.steps = mantissa(v, table);
            s.ratio = 1 - theta_of(v, table);
          },
          [mantissa](const Values& v, Table table) {
            return std::vector<std::string>{
                fmt::format("theta: {}", theta_of(v, table)),
                fmt::format("mantissa{}: {}", table.empty() && !v.integer("mantissa") ? " (not fitted)" : "",
                            mantissa(v, table))};
          },
          &kFftUnits};
}

}  // namespace gradwire
