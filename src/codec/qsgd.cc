// SPDX-License-Identifier: Apache-2.0
// Alistarh et al., QSGD, NIPS 2017: levels -s..s of a norm per bucket, with s = 2^(bits-1) - 1.
#include "codec/norm_buckets.h"

namespace gradwire {

CodecDef codec_qsgd() {
  return {.name = "qsgd",
          .summary = "uniform levels of a norm per bucket, rounded at random so that the mean is right (QSGD)",
          .example = "qsgd:bits=4,bucket=1024,norm=max",
          .specs = {"qsgd:bits=2,bucket=32768,rounding=nearest", "qsgd:bits=3,bucket=128,norm=l2",
                    "qsgd:bits=8,bucket=2048"},
          .parameters = {integer("bits", "4", 2, 8,
                                 "bits of a code, sign included: 2^(bits-1) - 1 levels on each side of zero"),
                         bucket_parameter(), norm_parameter(), rounding_parameter()},
          .scheme = [](const Values& v) { return rounded_bucket_scheme(Body::uniform, v); },
          .traits = rounded_bucket_traits,
          .nearest = round_to_nearest};
}

}  // namespace gradwire
