// SPDX-License-Identifier: Apache-2.0
// Wen et al., TernGrad, NIPS 2017: clip at a few standard deviations, then -1, 0 or 1 times the largest magnitude left.
#include "codec/body.h"
#include "codec/parameters.h"
#include "codec/stats.h"

namespace gradwire {

CodecDef codec_terngrad() {
  return {.name = "terngrad",
          .summary = "three levels of the largest magnitude after clipping at a few standard deviations (TernGrad)",
          .example = "terngrad:clip=2.5",
          .specs = {"terngrad:clip=0", "terngrad:mode=paper"},
          .parameters = {real("clip", "2.5", 0, 100,
                              "where to clip, in standard deviations of the unit; 0: nowhere (unbiased)"),
                         mode_parameter("what shares a scale")},
          .scheme =
              [](const Values& v) {
                return Scheme{.body = Body::uniform,
                              .norm = Norm::clipped,
                              .sums = sums_of(Norm::clipped),
                              .bits = 2,
                              .scale_words = 1,
                              .unit = unit_of_mode(v),
                              .clip = static_cast<float>(v.real("clip"))};
              },
          .traits =
              [](const Values& v) {
                return Traits{
                    .lossless = false, .unbiased = v.real("clip") == 0, .feedback = false, .unit = unit_of_mode(v)};
              }};
}

}  // namespace gradwire
