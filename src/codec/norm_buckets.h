// SPDX-License-Identifier: Apache-2.0
// What codecs with a norm per bucket (qsgd, nuqsgd, dqsgd) share: the scheme and the traits that follow from their
// parameters.
#pragma once

#include "codec/body.h"
#include "codec/parameters.h"
#include "codec/stats.h"

namespace gradwire {

// From the parameters `bucket` and `norm`.
inline Scheme norm_bucket_scheme(Body body, const Values& v) {
  const Norm norm = v.choice("norm") == "l2" ? Norm::l2 : Norm::absmax;
  return {.body = body, .norm = norm, .sums = sums_of(norm), .scale_words = 1, .unit = v.integer("bucket")};
}
// From `bits` and `rounding` too.
inline Scheme rounded_bucket_scheme(Body body, const Values& v) {
  Scheme scheme = norm_bucket_scheme(body, v);
  scheme.bits = static_cast<uint8_t>(v.integer("bits"));
  scheme.nearest = v.choice("rounding") == "nearest";
  return scheme;
}

inline Traits rounded_bucket_traits(const Values& v) {
  const bool random = v.choice("rounding") == "random";
  return {.lossless = false,
          .unbiased = random,
          .feedback = !random,
          .unit = v.integer("bucket"),
          .momentum = v.integer("bits") == 3};  // of 2 bits the error is larger than what is sent, and residuals grow
}

}  // namespace gradwire
