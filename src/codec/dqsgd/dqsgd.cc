// SPDX-License-Identifier: Apache-2.0
// Yan et al., DQ-SGD, 2021: QSGD whose number of bits follows the gradient norm (dqsgd/budget.h says how). A message
// has the width of its step as a table of one word.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "codec/dqsgd/fitter.h"
#include "codec/norm_buckets.h"

namespace gradwire {
namespace {

uint32_t width_of(const Values& v, Table table) {
  const uint32_t least = v.integer("min"), most = v.integer("max");
  if (least > most) throw Error(ErrorKind::usage, fmt::format("min is {}, above max, which is {}", least, most), "min");
  if (table.empty()) return std::clamp(static_cast<uint32_t>(std::lround(v.real("budget"))), least, most);
  if (table.size() != 1 || (table[0] != 0 && (table[0] < least || table[0] > most)))
    refuse_table(
        fmt::format("{} words, the first {}; expected one, 0 or from {} to {}", table.size(), table[0], least, most));
  return table[0];
}

void apply(const Values& v, Table table, Scheme& s, std::vector<float>&) {
  const uint32_t bits = width_of(v, table);
  s.bits = static_cast<uint8_t>(bits);
  if (bits > 8) s.body = Body::wide;
  if (bits == 0) s = Scheme{.body = Body::none, .bits = 0, .unit = 1};  // a step of zeros
}

}  // namespace

CodecDef codec_dqsgd() {
  return {
      .name = "dqsgd",
      .summary =
          "uniform levels whose number of bits follows the gradient's norm, within a budget or an error (DQ-SGD)",
      .example = "dqsgd:budget=4.5",
      .specs = {"dqsgd:budget=9,norm=l2", "dqsgd:budget=11", "dqsgd:budget=12,bucket=64", "dqsgd:min=16"},
      .parameters =
          {real("budget", "4", 1, 16, "mean bits of a code over the run, brought into min to max"),
           learning(real("error", "0", 0, 1e30,
                         "instead of a budget: what quantisation may add to the loss's bound; 0: the budget rules")),
           integer("min", "2", 2, 16, "least bits of a step"), integer("max", "16", 2, 16, "most bits of a step"),
           learning(choice("rule", {"nonconvex", "convex"}, "which bound of the paper is minimised")),
           learning(integer("steps", "0", 0, 1e9, "length of the run; 0: what the training says, if it knows")),
           learning(real("fall", "1", 1e-6, 1e6,
                         "budget: how many times larger the first norms are than the last, if known in advance")),
           learning(real("alpha", "0.99", 0, 1, "convex: contraction of the loss in a step")),
           learning(real("eta", "0.1", 0, 1e6, "error form: the learning rate")),
           learning(real("smooth", "1", 0, 1e12, "error form: the smoothness L of the loss")), norm_parameter(),
           bucket_parameter(),
           learning(
               choice("mode", {"lag", "paper"},
                      "lag: a step's width follows the norm of the step before; paper: its own, which has to be waited "
                      "for"),
               "paper")},
      .scheme = [](const Values& v) { return norm_bucket_scheme(Body::uniform, v); },
      .traits =
          [](const Values& v) {
            const double budget = v.real("budget");
            return Traits{.lossless = false,
                          .unbiased = true,
                          .feedback = false,
                          .unit = v.integer("bucket"),
                          .momentum = budget >= 3 && budget < 4};
          },
      .apply = apply,
      .describe =
          [](const Values& v, Table table) {
            return std::vector<std::string>{
                fmt::format("bits{}: {}", table.empty() ? " (not fitted)" : "", width_of(v, table))};
          },
      .fitter = dqsgd_fitter};
}

}  // namespace gradwire
