// SPDX-License-Identifier: Apache-2.0
// How definitions write their parameters, and the parameters that several codecs have under one name and one meaning.
#pragma once

#include <fmt/format.h>

#include <string>
#include <utility>
#include <vector>

#include "codec/define.h"
#include "gradwire/error.h"

namespace gradwire {

inline Parameter integer(const std::string& name, const std::string& fallback, double low, double high,
                         const std::string& meaning) {
  return {name, Parameter::Type::integer, fallback, low, high, {}, meaning, false, {}};
}
inline Parameter power_of_two(const std::string& name, const std::string& fallback, double low, double high,
                              const std::string& meaning) {
  return {name, Parameter::Type::power_of_two, fallback, low, high, {}, meaning, false, {}};
}
inline Parameter real(const std::string& name, const std::string& fallback, double low, double high,
                      const std::string& meaning) {
  return {name, Parameter::Type::real, fallback, low, high, {}, meaning, false, {}};
}
// The first choice is the default.
inline Parameter choice(const std::string& name, std::vector<std::string> choices, const std::string& meaning) {
  const std::string fallback = choices.front();
  return {name, Parameter::Type::choice, fallback, 0, 0, std::move(choices), meaning, false, {}};
}
// A parameter of learning alone; `alone`: its value when one tensor is fitted by itself.
inline Parameter learning(Parameter parameter, const std::string& alone = {}) {
  parameter.learning = true;
  parameter.alone = alone;
  return parameter;
}

// A parameter that came to a codec after its first messages; see Parameter::later.
inline Parameter later(Parameter parameter) {
  parameter.later = true;
  return parameter;
}

inline Parameter bucket_parameter() { return power_of_two("bucket", "1024", 64, kTile, "elements that share a norm"); }
inline Parameter norm_parameter() {
  return choice("norm", {"max", "l2"}, "the bucket's norm: largest magnitude, or Euclidean as published");
}
inline Parameter rounding_parameter() {
  return choice("rounding", {"random", "nearest"},
                "random is unbiased; nearest has the least error and wants feedback");
}
inline Codec round_to_nearest(const Codec& codec) { return codec.with("rounding", "nearest"); }

// What shares scales: tiles, or the whole tensor.
inline Parameter mode_parameter(const std::string& what) {
  return choice("mode", {"tile", "paper"}, what + ": tiles of 32768 elements, or the whole tensor as published");
}
inline uint32_t unit_of_mode(const Values& v) { return v.choice("mode") == "paper" ? 0 : kTile; }

// What has a scale of its own: buckets, or the whole tensor.
inline Parameter scale_parameter() {
  return choice("scale", {"bucket", "tensor"},
                "what has a scale of its own: each bucket, or the whole tensor, as reconstructed");
}
inline uint32_t unit_of_scale(const Values& v) { return v.choice("scale") == "tensor" ? 0 : v.integer("bucket"); }

// When learning codecs fit anew: after steps 1, 2, 4, 8, ... and then after every `refit` steps. `paper`: the default
// in mode=paper, where that is another one.
inline Parameter refit_parameter(const std::string& fallback, const std::string& paper = {}) {
  const std::string other = paper.empty() ? "" : fmt::format("; {} by default in mode=paper", paper);
  Parameter parameter =
      learning(integer("refit", fallback, 0, 1e9, "steps from fit to fit, more often at first; 0: never" + other), "1");
  parameter.paper = paper;
  return parameter;
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
