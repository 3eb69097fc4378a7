// SPDX-License-Identifier: Apache-2.0
// Seide et al., 1-bit SGD, Interspeech 2014: the sign, and the mean of the values of each sign.
#include "codec/body.h"
#include "codec/parameters.h"

namespace gradwire {

CodecDef codec_onebit() {
  return {.name = "onebit",
          .summary = "the sign, with the mean of the negative and of the other values (1-bit SGD); wants feedback",
          .example = "onebit",
          .specs = {"onebit:mode=paper"},
          .parameters = {mode_parameter("what shares the two means")},
          .scheme =
              [](const Values& v) {
                return Scheme{
                    .body = Body::sign, .sums = SumKind::by_sign, .bits = 1, .scale_words = 2, .unit = unit_of_mode(v)};
              },
          .traits =
              [](const Values& v) {
                return Traits{.lossless = false, .unbiased = false, .feedback = true, .unit = unit_of_mode(v)};
              }};
}

}  // namespace gradwire
