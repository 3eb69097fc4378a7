// SPDX-License-Identifier: Apache-2.0
// The methods that quantise element by element: optquant, dqsgd, rangefloat, loggrid, unigrid. docs/algorithms.md has the
// formulas, the bounds, what the papers leave open and what we chose.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "codec/define.h"
#include "codec/parameters.h"
#include "gradwire/error.h"

namespace gradwire {
namespace {

using Type = Parameter::Type;

std::vector<float> floats_of(Table table) {
  std::vector<float> values;
  for (uint32_t word : table) values.push_back(bits_float(word));
  return values;
}

// optquant without a table: the squares of evenly spaced numbers, without zero: fine near zero, where most values are.
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

uint32_t bits_of(uint32_t values) {
  uint32_t bits = 1;
  while ((1u << bits) < values) ++bits;
  return bits;
}

}  // namespace

// After He et al., OptQuant, Neurocomputing 2019: levels of the largest magnitude per bucket that minimise the expected error of what was seen.
CodecDef codec_optquant() {
  return {
      "optquant",
      "the best levels for the gradients seen so far, per bucket of a largest magnitude (OptQuant)",
      "optquant:bits=3",
      {{"bits", Type::integer, "4", 2, 8, {}, "bits of a code: up to 2^bits levels, with or without zero"},
       bucket_parameter(),
       {"mode",
        Type::choice,
        "unbiased",
        0,
        0,
        {"unbiased", "biased"},
        "unbiased: the mean is right; biased: less error, wants feedback"},
       {"kappa", Type::real, "0.5", 0, 0.5, {}, "biased: dead zone at both ends of a cell; 0.5 is rounding to nearest"},
       {"workers",
        Type::integer,
        "1",
        1,
        65536,
        {},
        "biased: ranks whose random errors average out, for the fit",
        true},
       refit_parameter("100")},
      [](const Values& v) {
        const bool biased = v.choice("mode") == "biased";
        return Scheme{.body = Body::levels,
                      .stat = Stat::absmax,
                      .bits = static_cast<uint8_t>(v.integer("bits")),
                      .nearest = biased && v.real("kappa") == 0.5,
                      .side = 1,
                      .unit = v.integer("bucket")};
      },
      [](const Values& v) {
        const bool biased = v.choice("mode") == "biased" && v.real("kappa") > 0;
        return Traits{.lossless = false,
                      .unbiased = v.choice("mode") == "unbiased",
                      .feedback = biased,
                      .unit = v.integer("bucket")};
      },
      [](const Values& v, Table table, Scheme& s, std::vector<float>& floats) {
        const int bits = s.bits;
        const std::vector<float> levels = table.empty() ? default_levels(bits) : floats_of(table);
        check_levels(levels, bits, v.choice("mode") == "unbiased");
        const size_t size = bits <= 4 ? size_t{1} << bits : 256;  // as the bodies have it
        const double kappa = v.choice("mode") == "biased" && !s.nearest ? v.real("kappa") : 0,
                     ramp = 65536 / (1 - 2 * kappa);
        floats.assign((size > 16 ? 3 : 2) * size, HUGE_VALF);
        std::copy(levels.begin(), levels.end(), floats.begin());
        for (size_t step = 1; size > 16 && step < size; step *= 2)  // a bisection's first, second, ... step
          for (size_t i = 0; i < step; ++i) floats[2 * size + step + i] = floats[(2 * i + 1) * (size / 2 / step)];
        for (size_t i = 0; i < size; ++i) {
          const double gap = i + 1 < levels.size() ? static_cast<double>(levels[i + 1]) - levels[i] : 0;
          floats[size + i] = gap > 0 ? static_cast<float>(std::min(ramp / gap, 1e30)) : 0;
        }
        s.limit = floats[size / 2];
        s.offset = static_cast<float>(-kappa * ramp);
        s.top = static_cast<uint32_t>(levels.size());
      },
      [](const Values& v, Table table) {
        const std::vector<float> levels =
            table.empty() ? default_levels(static_cast<int>(v.integer("bits"))) : floats_of(table);
        std::vector<std::string> shown;
        for (float level : levels) shown.push_back(fmt::format("{:.5g}", level));
        return std::vector<std::string>{
            fmt::format("levels{}: {}", table.empty() ? " (not fitted)" : "", fmt::join(shown, " "))};
      }};
}

// Yan et al., DQ-SGD, 2021: QSGD whose number of bits follows the gradient norm. The controller is fit/bits.h; a message has the width.
CodecDef codec_dqsgd() {
  const auto width = [](const Values& v, Table table) -> uint32_t {
    const uint32_t least = v.integer("min"), most = v.integer("max");
    if (least > most)
      throw Error(ErrorKind::usage, fmt::format("min is {}, above max, which is {}", least, most), "min");
    if (table.empty()) return std::clamp(static_cast<uint32_t>(std::lround(v.real("budget"))), least, most);
    if (table.size() != 1 || (table[0] != 0 && (table[0] < least || table[0] > most)))
      refuse_table(
          fmt::format("{} words, the first {}; expected one, 0 or from {} to {}", table.size(), table[0], least, most));
    return table[0];
  };
  return {"dqsgd",
          "uniform levels whose number of bits follows the gradient's norm, within a budget or an error (DQ-SGD)",
          "dqsgd:budget=4.5",
          {{"budget", Type::real, "4", 1, 16, {}, "mean bits of a code over the run, brought into min to max"},
           {"error",
            Type::real,
            "0",
            0,
            1e30,
            {},
            "instead of a budget: what quantisation may add to the loss's bound; 0: the budget rules",
            true},
           {"min", Type::integer, "2", 2, 16, {}, "least bits of a step"},
           {"max", Type::integer, "16", 2, 16, {}, "most bits of a step"},
           {"rule",
            Type::choice,
            "nonconvex",
            0,
            0,
            {"nonconvex", "convex"},
            "which bound of the paper is minimised",
            true},
           {"steps", Type::integer, "0", 0, 1e9, {}, "length of the run; 0: not known", true},
           {"alpha", Type::real, "0.99", 0, 1, {}, "convex: contraction of the loss in a step", true},
           {"eta", Type::real, "0.1", 0, 1e6, {}, "error form: the learning rate", true},
           {"smooth", Type::real, "1", 0, 1e12, {}, "error form: the smoothness L of the loss", true},
           {"norm",
            Type::choice,
            "max",
            0,
            0,
            {"max", "l2"},
            "the bucket's norm: largest magnitude, or Euclidean as published"},
           bucket_parameter(),
           {"mode",
            Type::choice,
            "lag",
            0,
            0,
            {"lag", "paper"},
            "lag: a step's width follows the norm of the step before; paper: its own, which has to be waited for",
            true}},
          [](const Values& v) {
            return Scheme{.body = Body::uniform,
                          .stat = v.choice("norm") == "l2" ? Stat::l2 : Stat::absmax,
                          .side = 1,
                          .unit = v.integer("bucket")};
          },
          [](const Values& v) {
            return Traits{.lossless = false, .unbiased = true, .feedback = false, .unit = v.integer("bucket")};
          },
          [width](const Values& v, Table table, Scheme& s, std::vector<float>&) {
            const uint32_t bits = width(v, table);
            s.bits = static_cast<uint8_t>(bits);
            if (bits > 8) s.body = Body::wide;
            if (bits == 0) s = Scheme{.body = Body::none, .bits = 0, .unit = 1};
          },
          [width](const Values& v, Table table) {
            return std::vector<std::string>{
                fmt::format("bits{}: {}", table.empty() ? " (not fitted)" : "", width(v, table))};
          }};
}

// The range-based float of Wang et al., FFT-based gradient sparsification, HPDC 2020.
CodecDef codec_rangefloat() {
  const auto mantissa = [](const Values& v, Table table) -> uint32_t {
    const uint32_t bits = v.integer("bits"), given = given_mantissa(v);
    if (!table.empty() && (given || table.size() != 1 || table[0] < 1 || table[0] > bits - 2))
      refuse_table(
          fmt::format("{} words, the first {}; expected a mantissa from 1 to {}, and none where the spec gives it",
                      table.size(), table[0], bits - 2));
    return given ? given : table.empty() ? default_mantissa(bits) : table[0];
  };
  return {
      "rangefloat",
      "floats of few bits with a short mantissa and just the range that is needed (range-based float)",
      "rangefloat:bits=8",
      {{"bits", Type::integer, "8", 4, 16, {}, "bits of a code"},
       {"mantissa", Type::integer, "0", 0, 14, {}, "bits of the mantissa, at most bits - 2; 0: fitted to the data"},
       {"min", Type::real, "0", -3e38, 0, {}, "with max: least value; below it values become it. 0: -max"},
       {"max",
        Type::real,
        "0",
        0,
        3e38,
        {},
        "largest value; above it values become it. 0: the largest magnitude of each bucket"},
       {"eps",
        Type::real,
        "0",
        0,
        3e38,
        {},
        "with max: least magnitude that is not zero. 0: such that positive codes take half of all"},
       {"mode",
        Type::choice,
        "round",
        0,
        0,
        {"round", "paper"},
        "round: to nearest; paper: towards zero, as published"},
       scale_parameter(),
       bucket_parameter(),
       refit_parameter("100")},
      [mantissa](const Values& v) {
        mantissa(v, {});
        const bool fixed = v.real("max") > 0;
        return Scheme{.body = Body::range,
                      .stat = fixed ? Stat::fixed : Stat::absmax,
                      .bits = static_cast<uint8_t>(v.integer("bits")),
                      .side = 1,
                      .unit = unit_of_scale(v),
                      .limit = static_cast<float>(v.real("max")),
                      .truncate = v.choice("mode") == "paper"};
      },
      [](const Values& v) {
        return Traits{.lossless = false, .unbiased = false, .feedback = false, .unit = unit_of_scale(v)};
      },
      [mantissa](const Values& v, Table table, Scheme& s, std::vector<float>&) {
        s.steps = mantissa(v, table);
        const float least = static_cast<float>(v.real("eps")), low = static_cast<float>(-v.real("min"));
        if (s.stat != Stat::fixed) {
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
              fmt::format(
                  "eps is {}; from there to {} a mantissa of {} bits takes more than {} bits have codes for, or none",
                  least, s.limit, s.steps, s.bits),
              "eps");
        s.top = top - s.base + 1;
        const uint32_t bottom = low > 0 ? float_bits(low) >> shift : top;
        if (bottom < s.base)
          throw Error(ErrorKind::usage, fmt::format("min is {}; its magnitude must be at least eps", -low), "min");
        s.bottom = std::min(bottom - s.base + 1, all - s.top);
      },
      [mantissa](const Values& v, Table table) {
        const bool fitted = !table.empty() || v.integer("mantissa");
        return std::vector<std::string>{
            fmt::format("mantissa{}: {}", fitted ? "" : " (not fitted)", mantissa(v, table))};
      }};
}

// The gradient grid of Chen et al., Quantized Adam with Error Feedback, ACM TIST 2021.
CodecDef codec_loggrid() {
  return {"loggrid",
          "zero and the powers of two of the largest magnitude, to nearest (Quantized Adam); wants feedback",
          "loggrid:k=2",
          {{"k", Type::integer, "2", 0, 30, {}, "powers of two below the largest magnitude: 2k + 3 values"},
           scale_parameter(),
           bucket_parameter()},
          [](const Values& v) {
            return Scheme{.body = Body::log,
                          .stat = Stat::absmax,
                          .bits = static_cast<uint8_t>(bits_of(2 * v.integer("k") + 3)),
                          .side = 1,
                          .unit = unit_of_scale(v),
                          .steps = v.integer("k")};
          },
          [](const Values& v) {
            return Traits{.lossless = false, .unbiased = false, .feedback = true, .unit = unit_of_scale(v)};
          }};
}

// ... and its weight grid.
CodecDef codec_unigrid() {
  return {
      "unigrid",
      "evenly spaced values, to nearest, of a fixed range or of the largest magnitude: for weights (Quantized Adam)",
      "unigrid:bits=8",
      {{"bits", Type::integer, "8", 2, 16, {}, "bits of a code: 2^(bits-1) - 1 values on each side of zero"},
       {"range",
        Type::real,
        "0",
        0,
        3e38,
        {},
        "values beyond become it, as published (there 0.5). 0: the largest magnitude of each bucket"},
       scale_parameter(),
       bucket_parameter()},
      [](const Values& v) {
        const bool fixed = v.real("range") > 0;
        return Scheme{.body = Body::wide,
                      .stat = fixed ? Stat::fixed : Stat::absmax,
                      .bits = static_cast<uint8_t>(v.integer("bits")),
                      .nearest = true,
                      .side = 1,
                      .unit = unit_of_scale(v),
                      .limit = static_cast<float>(v.real("range"))};
      },
      [](const Values& v) {
        return Traits{.lossless = false, .unbiased = false, .feedback = false, .unit = unit_of_scale(v)};
      }};
}

}  // namespace gradwire
