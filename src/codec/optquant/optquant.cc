// SPDX-License-Identifier: Apache-2.0
// After He et al., OptQuant, Neurocomputing 2019: levels of the largest magnitude per bucket that minimise the expected
// error of the gradients seen so far. docs/algorithms.md has the formulas and what the paper leaves open.
#include <fmt/format.h>

#include <cmath>

#include "codec/body.h"
#include "codec/levels.h"
#include "codec/optquant/fitter.h"
#include "codec/parameters.h"
#include "codec/stats.h"

namespace gradwire {
namespace {

// Without a table: the squares of evenly spaced numbers, without zero. They are fine near zero, where most values are.
std::vector<float> default_levels(int bits) {
  const int half = 1 << (bits - 1);
  std::vector<float> levels(2 * half);
  for (int i = 0; i < half; ++i) {
    const double root = (i + 0.5) / (half - 0.5);
    levels[half + i] = static_cast<float>(root * root);
    levels[half - 1 - i] = -levels[half + i];
  }
  return levels;
}

void check_levels(const std::vector<float>& levels, int bits, bool unbiased) {
  const size_t most = size_t{1} << bits;
  if (levels.size() != most && levels.size() != most - 1)
    refuse_table(fmt::format("{} levels; expected {} or {}", levels.size(), most - 1, most));
  for (size_t i = 0; i < levels.size(); ++i) {
    if (!(std::fabs(levels[i]) <= 1)) refuse_table(fmt::format("level {} is {}; allowed is -1 to 1", i, levels[i]));
    if (i > 0 && !(levels[i] > levels[i - 1]))
      refuse_table(fmt::format("levels {} and {} are not ascending", i - 1, i));
  }
  if (unbiased && (levels.front() != -1 || levels.back() != 1))
    refuse_table("unbiased levels that do not end at -1 and 1");
}

std::vector<float> levels_of(int bits, Table table) {
  if (table.empty()) return default_levels(bits);
  std::vector<float> levels;
  for (uint32_t word : table) levels.push_back(bits_float(word));
  return levels;
}

bool biased(const Values& v) { return v.choice("mode") == "biased"; }

Scheme scheme(const Values& v) {
  return Scheme{.body = Body::levels,
                .norm = Norm::absmax,
                .bits = static_cast<uint8_t>(v.integer("bits")),
                .nearest = biased(v) && v.real("kappa") == 0.5,
                .scale_words = 1,
                .unit = v.integer("bucket")};
}

Traits traits(const Values& v) {
  return Traits{.lossless = false,
                .unbiased = !biased(v),
                .feedback = biased(v) && v.real("kappa") > 0,
                .unit = v.integer("bucket"),
                .momentum = !biased(v) && v.integer("bits") >= 2 && v.integer("bits") <= 3};
}

void apply(const Values& v, Table table, Scheme& s, std::vector<float>& floats) {
  const std::vector<float> levels = levels_of(s.bits, table);
  check_levels(levels, s.bits, !biased(v));
  set_levels(levels, biased(v) && !s.nearest ? v.real("kappa") : 0, s, floats);
}

}  // namespace

CodecDef codec_optquant() {
  return {.name = "optquant",
          .summary = "the best levels for the gradients seen so far, per bucket of a largest magnitude (OptQuant)",
          .example = "optquant:bits=3",
          .specs = {"optquant:bits=2,mode=biased", "optquant:bits=3,mode=biased,kappa=0.125",
                    "optquant:bits=4,mode=biased,kappa=0.25", "optquant:bits=7,bucket=64", "optquant:bits=8,bucket=64"},
          .parameters = {integer("bits", "4", 2, 8, "bits of a code: up to 2^bits levels"), bucket_parameter(),
                         choice("mode", {"unbiased", "biased"},
                                "unbiased: the mean is right; biased: less error, wants feedback"),
                         real("kappa", "0.5", 0, 0.5,
                              "biased: dead zone at both ends of a cell; 0.5 is rounding to nearest"),
                         learning(integer("workers", "0", 0, 65536,
                                          "biased: ranks whose random errors average out, for the fit; 0: all ranks")),
                         refit_parameter("100")},
          .scheme = scheme,
          .traits = traits,
          .apply = apply,
          .describe =
              [](const Values& v, Table table) {
                return describe_levels(levels_of(static_cast<int>(v.integer("bits")), table), !table.empty());
              },
          .nearest = [](const Codec& codec) { return codec.with("mode", "biased"); },
          .fitter = optquant_fitter};
}

}  // namespace gradwire
