// SPDX-License-Identifier: Apache-2.0
// How a codec defines itself: its parameters, and the Scheme and Traits that follow from their values.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "device/scheme.h"
#include "gradwire/codec.h"

namespace gradwire {

struct Parameter {
  enum class Type { integer, power_of_two, real, choice };
  std::string name;
  Type type;
  std::string fallback;
  double low = 0, high = 0;  // numbers; both ends allowed
  std::vector<std::string> choices;
  std::string meaning;

  std::string allowed() const;                          // in words
  std::string canonical(const std::string& value) const;  // throws Error{usage}
};

struct Values {
  std::map<std::string, std::string> text;
  const std::string& choice(const std::string& name) const { return text.at(name); }
  double real(const std::string& name) const;
  uint32_t integer(const std::string& name) const { return static_cast<uint32_t>(std::stoul(text.at(name))); }
};

struct CodecDef {
  std::string name;
  std::string summary;
  std::string example;
  std::vector<Parameter> parameters;
  std::function<Scheme(const Values&)> scheme;
  std::function<Traits(const Values&)> traits;
};

#define GW_CODEC(name) CodecDef codec_##name();
#include "codec/codecs.def"
#undef GW_CODEC

}  // namespace gradwire
