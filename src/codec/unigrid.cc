// SPDX-License-Identifier: Apache-2.0
// The weight grid of Chen et al., Quantized Adam with Error Feedback, ACM TIST 2021: evenly spaced values.
#include "codec/body.h"
#include "codec/parameters.h"
#include "codec/stats.h"

namespace gradwire {

CodecDef codec_unigrid() {
  return {.name = "unigrid",
          .summary =
              "evenly spaced values, to nearest, of a fixed range or of the largest magnitude: for weights (Quantized "
              "Adam)",
          .example = "unigrid:bits=8",
          .specs = {"unigrid:bits=13,range=0.5", "unigrid:bits=16,range=0.5"},
          .parameters = {integer("bits", "8", 2, 16, "bits of a code: 2^(bits-1) - 1 values on each side of zero"),
                         real("range", "0", 0, 3e38,
                              "values beyond become it, as reconstructed (there 0.5). 0: the largest magnitude of each "
                              "bucket"),
                         scale_parameter(), bucket_parameter()},
          .scheme =
              [](const Values& v) {
                return Scheme{.body = Body::wide,
                              .norm = v.real("range") > 0 ? Norm::fixed : Norm::absmax,
                              .bits = static_cast<uint8_t>(v.integer("bits")),
                              .nearest = true,
                              .scale_words = 1,
                              .unit = unit_of_scale(v),
                              .limit = static_cast<float>(v.real("range"))};
              },
          .traits =
              [](const Values& v) {
                return Traits{.lossless = false, .unbiased = false, .feedback = false, .unit = unit_of_scale(v)};
              }};
}

}  // namespace gradwire
