// SPDX-License-Identifier: Apache-2.0
// The range-based float of Wang et al., FFT-based gradient sparsification, HPDC 2020.
#include <fmt/format.h>

#include <algorithm>

#include "codec/body.h"
#include "codec/parameters.h"
#include "codec/rangefloat/fitter.h"
#include "codec/stats.h"

namespace gradwire {
namespace {

uint32_t mantissa_of(const Values& v, Table table) {
  const uint32_t bits = v.integer("bits"), given = given_mantissa(v);
  if (!table.empty() && (given || table.size() != 1 || table[0] < 1 || table[0] > bits - 2))
    refuse_table(
        fmt::format("{} words, the first {}; expected a mantissa from 1 to {}, and none where the spec gives it",
                    table.size(), table[0], bits - 2));
  return given ? given : table.empty() ? default_mantissa(bits) : table[0];
}

Scheme scheme(const Values& v) {
  mantissa_of(v, {});  // throws where the values do not go together
  return Scheme{.body = Body::range,
                .norm = v.real("max") > 0 ? Norm::fixed : Norm::absmax,
                .bits = static_cast<uint8_t>(v.integer("bits")),
                .scale_words = 1,
                .unit = unit_of_scale(v),
                .limit = static_cast<float>(v.real("max")),
                .truncate = v.choice("mode") == "paper"};
}

void apply(const Values& v, Table table, Scheme& s, std::vector<float>&) {
  s.steps = mantissa_of(v, table);
  const float least = static_cast<float>(v.real("eps")), low = static_cast<float>(-v.real("min"));
  if (s.norm != Norm::fixed) {
    if (least > 0) throw Error(ErrorKind::usage, "eps is given without max", "eps");
    if (low > 0) throw Error(ErrorKind::usage, "min is given without max", "min");
    return;
  }
  const uint32_t shift = 23 - s.steps, half = 1u << (s.bits - 1), all = 2 * half - 1,
                 top = float_bits(s.limit) >> shift;
  s.base = least > 0 ? float_bits(least) >> shift : top + 1 > half ? top + 1 - half : 0;
  if (s.base > top || top - s.base + 1 >= all)  // one code at least is for negative values
    throw Error(
        ErrorKind::usage,
        fmt::format("eps is {}; from there to {} a mantissa of {} bits takes more than {} bits have codes for, or none",
                    least, s.limit, s.steps, s.bits),
        "eps");
  s.top = top - s.base + 1;
  const uint32_t bottom = low > 0 ? float_bits(low) >> shift : top;
  if (bottom < s.base)
    throw Error(ErrorKind::usage, fmt::format("min is {}; its magnitude must be at least eps", -low), "min");
  s.bottom = std::min(bottom - s.base + 1, all - s.top);
}

std::vector<std::string> describe(const Values& v, Table table) {
  const bool fitted = !table.empty() || v.integer("mantissa");
  return {fmt::format("mantissa{}: {}", fitted ? "" : " (not fitted)", mantissa_of(v, table))};
}

}  // namespace

CodecDef codec_rangefloat() {
  return {
      .name = "rangefloat",
      .summary = "floats of few bits with a short mantissa and just the range that is needed (range-based float)",
      .example = "rangefloat:bits=8",
      .specs = {"rangefloat:bits=16,mantissa=14", "rangefloat:bits=4,mantissa=2",
                "rangefloat:bits=8,mantissa=3,min=-2,max=2,eps=0.125,mode=paper",
                "rangefloat:bits=10,max=1,scale=tensor", "rangefloat:bits=8,min=-0.5,max=1"},
      .parameters = {integer("bits", "8", 4, 16, "bits of a code"),
                     integer("mantissa", "0", 0, 14, "bits of the mantissa, at most bits - 2; 0: fitted to the data"),
                     real("min", "0", -3e38, 0, "with max: least value; below it values become it. 0: -max"),
                     real("max", "0", 0, 3e38,
                          "largest value; above it values become it. 0: the largest magnitude of each bucket"),
                     real("eps", "0", 0, 3e38,
                          "with max: least magnitude that is not zero. 0: such that positive codes take half of all"),
                     choice("mode", {"round", "paper"}, "round: to nearest; paper: towards zero, as published"),
                     scale_parameter(), bucket_parameter(), refit_parameter("100")},
      .scheme = scheme,
      .traits =
          [](const Values& v) {
            return Traits{.lossless = false, .unbiased = false, .feedback = false, .unit = unit_of_scale(v)};
          },
      .apply = apply,
      .describe = describe,
      .fitter = rangefloat_fitter};
}

}  // namespace gradwire
