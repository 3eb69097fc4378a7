// SPDX-License-Identifier: Apache-2.0
// The gradient grid of Chen et al., Quantized Adam with Error Feedback, ACM TIST 2021: zero and a few powers of two of
// the largest magnitude.
#include <bit>

#include "codec/body.h"
#include "codec/parameters.h"
#include "codec/stats.h"

namespace gradwire {

CodecDef codec_loggrid() {
  return {.name = "loggrid",
          .summary = "zero and the powers of two of the largest magnitude, to nearest (Quantized Adam); wants feedback",
          .example = "loggrid:k=2",
          .specs = {"loggrid:k=6,scale=tensor", "loggrid:k=30,scale=tensor"},
          .parameters = {integer("k", "2", 0, 30, "powers of two below the largest magnitude: 2k + 3 values"),
                         scale_parameter(), bucket_parameter()},
          .scheme =
              [](const Values& v) {
                const uint32_t values = 2 * v.integer("k") + 3;
                return Scheme{.body = Body::log,
                              .norm = Norm::absmax,
                              .bits = static_cast<uint8_t>(std::bit_width(values - 1)),
                              .scale_words = 1,
                              .unit = unit_of_scale(v),
                              .steps = v.integer("k")};
              },
          .traits =
              [](const Values& v) {
                return Traits{.lossless = false, .unbiased = false, .feedback = true, .unit = unit_of_scale(v)};
              }};
}

}  // namespace gradwire
