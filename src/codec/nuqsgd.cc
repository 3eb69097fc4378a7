// SPDX-License-Identifier: Apache-2.0
// Ramezani-Kebrya et al., NUQSGD, JMLR 2021: levels 0 and +-2^-i of a norm per bucket, which are finest near zero,
// where most of a gradient's values are.
#include <cmath>

#include "codec/levels.h"
#include "codec/norm_buckets.h"

namespace gradwire {
namespace {

// i goes from 0 to 2^(bits-1) - 2, so that together with zero all codes but one are in use.
std::vector<float> exponential_levels(uint32_t bits) {
  const int magnitudes = (1 << (bits - 1)) - 1;
  std::vector<float> levels(2 * magnitudes + 1);
  for (int i = 0; i < magnitudes; ++i) {
    levels[i] = -std::ldexp(1.0f, -i);
    levels[2 * magnitudes - i] = std::ldexp(1.0f, -i);
  }
  return levels;
}

}  // namespace

CodecDef codec_nuqsgd() {
  return {.name = "nuqsgd",
          .summary = "levels 0 and +-2^-i of a norm per bucket, rounded at random so that the mean is right (NUQSGD)",
          .example = "nuqsgd:bits=4",
          .specs = {"nuqsgd:bits=2,bucket=64", "nuqsgd:bits=3,bucket=128,norm=l2", "nuqsgd:bits=8,rounding=nearest",
                    "nuqsgd:bits=6,bucket=2048,norm=l2"},
          .parameters = {integer("bits", "4", 2, 8, "bits of a code: zero and 2^(bits-1) - 1 powers of two per sign"),
                         bucket_parameter(), norm_parameter(), rounding_parameter()},
          .scheme = [](const Values& v) { return rounded_bucket_scheme(Body::levels, v); },
          .traits = rounded_bucket_traits,
          .apply = [](const Values& v, Table, Scheme& s,
                      std::vector<float>& floats) { set_levels(exponential_levels(v.integer("bits")), 0, s, floats); },
          .nearest = round_to_nearest};
}

}  // namespace gradwire
