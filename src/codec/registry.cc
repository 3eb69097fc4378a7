// SPDX-License-Identifier: Apache-2.0
// From a spec string to a Codec and back: parsing (core/spec.h), and printing, its inverse.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <set>
#include <stdexcept>

#include "codec/define.h"
#include "codec/lowrank/lowrank.h"
#include "codec/regions.h"
#include "core/nearest.h"
#include "core/spec.h"
#include "gradwire/error.h"

namespace gradwire {
namespace {

const std::vector<CodecDef>& definitions() {
  static const std::vector<CodecDef> all = {
#define GW_CODEC(name) codec_##name(),
#include "codec/codecs.def"
#undef GW_CODEC
  };
  return all;
}

template <class T>
bool read_number(const std::string& text, T& value) {
  const char* end = text.data() + text.size();
  const auto result = std::from_chars(text.data(), end, value);
  return result.ec == std::errc() && result.ptr == end;
}

}  // namespace

std::string Parameter::allowed() const {
  switch (type) {
    case Type::integer:
      return fmt::format("an integer from {} to {}", low, high);
    case Type::power_of_two:
      return fmt::format("a power of two from {} to {}", low, high);
    case Type::real:
      return fmt::format("a number from {} to {}", low, high);
    case Type::choice:
      return fmt::format("one of {}", fmt::join(choices, ", "));
  }
  return {};
}

std::string Parameter::canonical(const std::string& value) const {
  if (type == Type::choice) {
    for (const std::string& choice : choices)
      if (value == choice) return value;
  } else if (type == Type::real) {
    double number = 0;
    if (read_number(value, number) && number >= low && number <= high)
      return fmt::format("{}", number == 0 ? 0.0 : number);  // no -0
  } else {
    int64_t number = 0;
    if (read_number(value, number) && static_cast<double>(number) >= low && static_cast<double>(number) <= high &&
        (type == Type::integer || (number & (number - 1)) == 0))
      return fmt::format("{}", number);
  }
  throw Error(ErrorKind::usage, fmt::format("{} is '{}'; allowed is {}", name, shown(value), allowed()), name);
}

// Not std::stod: that follows the locale, and throws on subnormals.
double Values::real(const std::string& name) const {
  double number = 0;
  read_number(text.at(name), number);
  return number;
}

struct Codec::Impl {
  const CodecDef* def;
  Values values;
  Scheme scheme;
  Traits traits;
  std::string text, wire_text;  // with all parameters; with those that a decoder needs
  std::vector<uint32_t> table;
  std::vector<float> floats;  // what scheme.table points to

  // `wire`: of a message, which has no learning parameters.
  static std::shared_ptr<const Impl> parse(std::string_view spec, bool wire);

  Impl(const CodecDef& d, Values v, Table t)
      : def(&d), values(std::move(v)), scheme(d.scheme(values)), traits(d.traits(values)), table(t.begin(), t.end()) {
    traits.learns = d.fitter != nullptr;
    if (!table.empty() && !d.fitter)
      throw Error(ErrorKind::usage,
                  fmt::format("table has {} words; {} learns nothing and has none", table.size(), d.name), "table");
    if (d.apply) d.apply(values, table, scheme, floats);
    // The GPU's kernels for several units per block add up squares at most. A definition that asks for more is a
    // mistake in the library, which must not show as other bytes on some devices.
    if (scheme.scale_words && scheme.sums != SumKind::none && scheme.sums != SumKind::squares && scheme.unit > 0 &&
        scheme.unit < kBlock)
      throw std::logic_error(d.name + " asks for sums that units below a block do not have");
    if (!floats.empty()) {
      floats.resize(std::max<size_t>(floats.size(), 32));  // vectors load whole tables
      scheme.table = floats.data();
      scheme.table_size = static_cast<uint32_t>(floats.size());
    }
    text = wire_text = d.name;
    const bool as_before = std::all_of(d.parameters.begin(), d.parameters.end(), [&](const Parameter& p) {
      return !p.later || values.text.at(p.name) == p.fallback;
    });
    for (const Parameter& p : d.parameters) {
      if (p.later && as_before) continue;
      const std::string item = fmt::format("{}={}", p.name, values.text.at(p.name));
      text += (text.size() == d.name.size() ? ':' : ',') + item;
      if (!p.learning) wire_text += (wire_text.size() == d.name.size() ? ':' : ',') + item;
    }
  }
};

struct CodecAccess {
  static const Codec::Impl& impl(const Codec& codec) { return *codec.impl_; }
};
const CodecDef& definition_of(const Codec& codec) { return *CodecAccess::impl(codec).def; }
const Scheme& scheme_of(const Codec& codec) { return CodecAccess::impl(codec).scheme; }
const UnitOps* unit_ops_of(const Codec& codec) { return definition_of(codec).unit; }

Codec nearest_of(const Codec& codec) {
  const CodecDef& def = definition_of(codec);
  return def.nearest ? def.nearest(codec) : codec;
}

Codec alone_of(const Codec& codec) {
  Codec alone = codec;
  for (const Parameter& p : definition_of(codec).parameters)
    if (!p.alone.empty()) alone = alone.with(p.name, p.alone);
  return alone;
}

Codec::Codec(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}
Codec::Codec() : Codec(parse("fp32")) {}

Codec Codec::parse(std::string_view spec) { return Codec(Impl::parse(spec, false)); }
Codec Codec::parse_wire(std::string_view spec) { return Codec(Impl::parse(spec, true)); }

std::shared_ptr<const Codec::Impl> Codec::Impl::parse(std::string_view spec, bool wire) {
  const std::string_view name = name_of_spec(spec);
  const CodecDef* def = nullptr;
  for (const CodecDef& d : definitions())
    if (d.name == name) def = &d;
  if (!def) {
    if (is_lowrank(name))  // its factors are tensors that other codecs encode
      throw Error(ErrorKind::unsupported,
                  "lowrank is no codec of messages: it works where matrices are reduced, in a Reducer, in `gradwire "
                  "train` and in the hook of PyTorch's DistributedDataParallel",
                  "codec");
    std::vector<std::string> names;
    for (const CodecDef& d : definitions()) names.push_back(d.name);
    const std::string meant = nearest_name(name, names);
    throw Error(ErrorKind::usage,
                fmt::format("codec is '{}'{}; known are {}", shown(name),
                            meant.empty() ? "" : fmt::format(" (did you mean {}?)", meant), fmt::join(names, ", ")),
                "codec");
  }
  std::set<std::string> given;
  Values values{parse_spec("codec", spec, def->parameters, [&](const Parameter& p) {
    if (wire && p.learning)
      throw Error(ErrorKind::usage,
                  fmt::format("{} of {} says how a sender learns and is no part of a message", p.name, def->name),
                  p.name);
    given.insert(p.name);
  })};
  for (const Parameter& p : def->parameters)
    if (!p.paper.empty() && !given.contains(p.name) && values.choice("mode") == "paper") values.text[p.name] = p.paper;
  if (def->defaults) def->defaults(values, given);
  return std::make_shared<Impl>(*def, std::move(values), Table{});
}

std::string Codec::str() const { return impl_->text; }
std::string Codec::wire_spec() const { return impl_->wire_text; }
const std::string& Codec::name() const { return impl_->def->name; }
Traits Codec::traits() const { return impl_->traits; }
uint64_t Codec::bytes(uint64_t count) const { return region_words(*this, count) * 4; }
bool Codec::has(std::string_view parameter) const { return impl_->values.text.count(std::string(parameter)) > 0; }

std::string Codec::get(std::string_view parameter) const {
  const auto found = impl_->values.text.find(std::string(parameter));
  if (found == impl_->values.text.end())
    throw Error(ErrorKind::usage, fmt::format("{} has no parameter '{}'", name(), parameter), std::string(parameter));
  return found->second;
}

Codec Codec::with(std::string_view parameter, std::string_view value) const {
  get(parameter);  // throws if there is none
  std::string spec = name();
  char separator = ':';
  for (const Parameter& p : impl_->def->parameters) {
    spec += fmt::format("{}{}={}", separator, p.name,
                        p.name == parameter ? std::string(value) : impl_->values.text.at(p.name));
    separator = ',';
  }
  return parse(spec);
}

std::span<const uint32_t> Codec::table() const { return impl_->table; }
Codec Codec::fitted(std::span<const uint32_t> table) const {
  return Codec(std::make_shared<Impl>(*impl_->def, impl_->values, table));
}
std::vector<std::string> Codec::describe() const {
  return impl_->def->describe ? impl_->def->describe(impl_->values, impl_->table) : std::vector<std::string>{};
}
bool operator==(const Codec& a, const Codec& b) {
  return a.impl_ == b.impl_ || (a.impl_->text == b.impl_->text && a.impl_->table == b.impl_->table);
}

const std::vector<CodecInfo>& codecs() {
  static const std::vector<CodecInfo> all = [] {
    std::vector<CodecInfo> out;
    for (const CodecDef& d : definitions()) {
      CodecInfo info{d.name, d.summary, d.example, {d.name, d.example}, {}};
      info.specs.insert(info.specs.end(), d.specs.begin(), d.specs.end());
      for (const Parameter& p : d.parameters)
        info.parameters.push_back({p.name, p.fallback, p.allowed(), p.meaning, p.learning});
      out.push_back(std::move(info));
    }
    return out;
  }();
  return all;
}

}  // namespace gradwire
