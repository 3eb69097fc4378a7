// SPDX-License-Identifier: Apache-2.0
// Wang et al., FFT-based gradient sparsification for the distributed training of deep neural networks, HPDC 2020: the
// strongest frequencies of each chunk. docs/algorithms.md has the formulas, what the paper leaves open and what we
// chose.
#include <fmt/format.h>

#include <cstring>

#include "codec/body.h"
#include "codec/fft/cpu.h"
#include "codec/fft/fitter.h"
#include "codec/parameters.h"

namespace gradwire {
namespace {

double theta_of(const Values& v, Table table) {
  if (table.empty()) return v.real("theta");
  const uint64_t bits = uint64_t{table[2]} << 32 | table[1];
  double theta = 0;
  std::memcpy(&theta, &bits, sizeof theta);
  return theta;
}

uint32_t mantissa_of(const Values& v, Table table) {
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
}

Scheme scheme(const Values& v) {
  mantissa_of(v, {});  // throws where the values do not go together
  return Scheme{.body = Body::own,
                .bits = static_cast<uint8_t>(v.choice("format") == "float" ? 32 : v.integer("bits")),
                .unit = v.integer("chunk"),
                .truncate = v.choice("mode") == "paper"};
}

void apply(const Values& v, Table table, Scheme& s, std::vector<float>&) {
  s.steps = mantissa_of(v, table);
  s.ratio = 1 - theta_of(v, table);
}

std::vector<std::string> describe(const Values& v, Table table) {
  return {fmt::format("theta: {}", theta_of(v, table)),
          fmt::format("mantissa{}: {}", table.empty() && !v.integer("mantissa") ? " (not fitted)" : "",
                      mantissa_of(v, table))};
}

}  // namespace

CodecDef codec_fft() {
  return {
      .name = "fft",
      .summary = "the strongest frequencies of each chunk, as range floats with a bitmap (FFT sparsification)",
      .example = "fft:theta=0.85",
      .specs = {"fft:bits=16,mantissa=14", "fft:theta=0,bits=6,mantissa=4,chunk=256", "fft:chunk=256,bits=5",
                "fft:chunk=4096,theta=0.5,mode=paper", "fft:format=float,theta=0"},
      .parameters = {real("theta", "0.85", 0, 0.9999, "share of the frequencies that is dropped"),
                     power_of_two("chunk", "1024", 256, 4096, "elements that are transformed together"),
                     choice("format", {"range", "float"}, "of the kept ones: range floats, or f32"),
                     integer("bits", "10", 4, 16, "bits of a range float"),
                     integer("mantissa", "0", 0, 14, "bits of its mantissa, at most bits - 2; 0: fitted to the data"),
                     choice("mode", {"round", "paper"}, "range floats to nearest, or towards zero, as published"),
                     learning(
                         choice("schedule", {"constant", "rate", "step"},
                                "theta over time: constant; with the learning rate, theta^2 = smooth * rate, at most "
                                "theta; 0 from step `until` on"),
                         "constant"),
                     learning(real("smooth", "1", 0, 1e12, "schedule=rate: the smoothness L of the loss")),
                     learning(integer("until", "0", 0, 1e9, "schedule=step: the first step with theta 0")),
                     refit_parameter("100")},
      .scheme = scheme,
      .traits =
          [](const Values& v) {
            return Traits{.lossless = false, .unbiased = false, .feedback = true, .unit = v.integer("chunk")};
          },
      .apply = apply,
      .describe = describe,
      .fitter = fft_fitter,
      .unit = &kFftUnits};
}

}  // namespace gradwire
