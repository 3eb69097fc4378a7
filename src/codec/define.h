// SPDX-License-Identifier: Apache-2.0
// How a codec defines itself: its parameters, and the Scheme and Traits that follow from their values.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "device/scheme.h"
#include "gradwire/codec.h"

namespace gradwire {

class Fitter;       // codec/fitter.h
struct FitContext;  // codec/fitter.h
struct UnitOps;     // codec/unit.h

struct Parameter {
  enum class Type { integer, power_of_two, real, choice };
  std::string name;
  Type type;
  std::string fallback;
  double low = 0, high = 0;  // numbers; both ends allowed
  std::vector<std::string> choices;
  std::string meaning;
  bool learning = false;  // says how the codec learns, not how a step is encoded: it is no part of a message
  std::string alone{};    // its value when one tensor is fitted by itself, at once; empty: the given one
  std::string paper{};    // its default in mode=paper; empty: the same as otherwise
  // Came to a codec that messages already carried. The text of a spec names all such parameters of a codec, or none of
  // them where all have their defaults: so the messages of before keep their bytes.
  bool later = false;

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
  std::string example;                  // what a user would write
  std::vector<std::string> specs = {};  // further specs worth testing, beside each parameter at its ends
  std::vector<Parameter> parameters = {};
  // Sets defaults that follow from the values of other parameters; `given` are those that a spec names. Null: none do.
  std::function<void(Values&, const std::set<std::string>& given)> defaults = {};
  std::function<Scheme(const Values&)> scheme;  // may throw Error{usage} where values do not go together
  std::function<Traits(const Values&)> traits;

  // Codecs with a table. `apply` puts it into a scheme, and what the drivers look up into `floats`, which stays where
  // it is. An empty table means the defaults; others are of any content, for they may come from a message, and `apply`
  // throws Error{usage, "table"}. Codecs without a fitter are given empty tables only.
  std::function<void(const Values&, Table, Scheme&, std::vector<float>& floats)> apply = {};
  std::function<std::vector<std::string>(const Values&, Table)> describe = {};

  // The codec that rounds to nearest instead of at random; null: it has no such choice.
  Codec (*nearest)(const Codec&) = nullptr;
  // Makes what learns the table while a model trains; null: the codec learns nothing. `elements` are those that one
  // rank sends with this codec in a step.
  std::unique_ptr<Fitter> (*fitter)(const Codec&, const FitContext&) = nullptr;
  const UnitOps* unit = nullptr;  // codecs with units of their own: unit.h
};

// What a Codec is made of, which its public interface does not show.
const CodecDef& definition_of(const Codec& codec);
const Scheme& scheme_of(const Codec& codec);     // what a driver needs to know of it
const UnitOps* unit_ops_of(const Codec& codec);  // null for codecs that turn each element into a code
Codec nearest_of(const Codec& codec);            // the codec itself where there is no choice
Codec alone_of(const Codec& codec);              // with the values of Parameter::alone

#define GW_CODEC(name) CodecDef codec_##name();
#include "codec/codecs.def"
#undef GW_CODEC

}  // namespace gradwire
