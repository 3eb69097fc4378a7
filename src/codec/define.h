// SPDX-License-Identifier: Apache-2.0
// How a codec defines itself: its parameters, and the Scheme and Traits that follow from their values.
#pragma once

#include <functional>
#include <map>
#include <span>
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
  bool learning = false;  // says how the codec learns, not how a step is encoded: it is no part of a message

  std::string allowed() const;                            // in words
  std::string canonical(const std::string& value) const;  // throws Error{usage}
};

struct Values {
  std::map<std::string, std::string> text;
  const std::string& choice(const std::string& name) const { return text.at(name); }
  double real(const std::string& name) const;
  uint32_t integer(const std::string& name) const { return static_cast<uint32_t>(std::stoul(text.at(name))); }
};

// What a codec learned, as it stands in a message: words whose meaning is the codec's.
using Table = std::span<const uint32_t>;

struct CodecDef {
  std::string name;
  std::string summary;
  std::string example;
  std::vector<Parameter> parameters;
  std::function<Scheme(const Values&)> scheme;  // may throw Error{usage} where values do not go together
  std::function<Traits(const Values&)> traits;
  // Codecs that learn. `apply` puts a table (of any content: it may come from a message) into a scheme, and what the drivers look up
  // into `floats`, which stays where it is; it throws Error{usage, "table"}. An empty table means the defaults.
  std::function<void(const Values&, Table, Scheme&, std::vector<float>& floats)> apply = {};
  std::function<std::vector<std::string>(const Values&, Table)> describe = {};
};

#define GW_CODEC(name) CodecDef codec_##name();
#include "codec/codecs.def"
#undef GW_CODEC

}  // namespace gradwire
