// SPDX-License-Identifier: Apache-2.0
// Parameters that several codecs have, under one name and with one meaning.
#pragma once

#include <fmt/format.h>

#include <string>

#include "codec/define.h"
#include "gradwire/error.h"

namespace gradwire {

inline Parameter bucket_parameter() {
  return {"bucket", Parameter::Type::power_of_two, "1024", 64, kTile, {}, "elements that share a norm"};
}

// What has a scale of its own.
inline Parameter scale_parameter() {
  return {"scale",
          Parameter::Type::choice,
          "bucket",
          0,
          0,
          {"bucket", "tensor"},
          "what has a scale of its own: each bucket, or the whole tensor as published"};
}
inline uint32_t unit_of_scale(const Values& v) { return v.choice("scale") == "tensor" ? 0 : v.integer("bucket"); }

// When learning codecs fit anew: after steps 1, 2, 4, 8, ... and then after every `refit` steps.
inline Parameter refit_parameter(const std::string& fallback) {
  return {
      "refit", Parameter::Type::integer, fallback, 0, 1e9, {}, "steps from fit to fit, more often at first; 0: never",
      true};
}

// The mantissa that the spec gives; 0: none.
inline uint32_t given_mantissa(const Values& v) {
  const uint32_t bits = v.integer("bits"), given = v.integer("mantissa");
  if (given > bits - 2)
    throw Error(ErrorKind::usage,
                fmt::format("mantissa is {}; a float of {} bits has at most {}", given, bits, bits - 2), "mantissa");
  return given;
}

// Eight binades: what gradients of one bucket usually need.
inline uint32_t default_mantissa(uint32_t bits) { return bits > 5 ? bits - 4 : 1; }

[[noreturn]] inline void refuse_table(const std::string& what) {
  throw Error(ErrorKind::usage, fmt::format("table has {}", what), "table");
}

}  // namespace gradwire
