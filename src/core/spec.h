// SPDX-License-Identifier: Apache-2.0
// The text form of a codec or a model with its parameters: "name:key=value,key=value".
#pragma once

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "gradwire/error.h"

namespace gradwire {

// A spec may come from a message: error messages show it without control characters, and cut to a readable length.
inline std::string shown(std::string_view text) {
  std::string out;
  for (char c : text.substr(0, 80)) out += c >= 32 && c < 127 ? c : '?';
  return text.size() > 80 ? out + "..." : out;
}

inline std::string_view name_of_spec(std::string_view spec) { return spec.substr(0, spec.find(':')); }

// The value of every parameter by its name, in canonical form; those that the spec does not give have their default. A
// Parameter has `name`, `fallback`, allowed() and canonical(text), which throws Error{usage} if the text is refused.
// `kind` says in error messages what the spec is of, and is their field where no parameter is to blame. `check` is
// called with every parameter that the spec gives, and may throw.
template <class Parameter, class Check>
std::map<std::string, std::string> parse_spec(const char* kind, std::string_view spec,
                                              const std::vector<Parameter>& parameters, Check&& check) {
  const std::string_view name = name_of_spec(spec);
  const auto refuse = [&](const std::string& why, const std::string& field) {
    throw Error(ErrorKind::usage, why, field.empty() ? kind : field);
  };
  std::map<std::string, std::string> values;
  std::vector<std::string> names, given;
  for (const Parameter& p : parameters) {
    values[p.name] = p.fallback;
    names.push_back(p.name);
  }
  std::string_view rest = name.size() < spec.size() ? spec.substr(name.size() + 1) : std::string_view{};
  if (name.size() < spec.size() && rest.empty())
    refuse(fmt::format("{} '{}' ends with a colon but gives no parameter", kind, shown(spec)), "");
  while (!rest.empty()) {
    const std::string_view item = rest.substr(0, rest.find(','));
    const bool more = item.size() < rest.size();
    rest = more ? rest.substr(item.size() + 1) : std::string_view{};
    const size_t equals = item.find('=');
    const std::string key(item.substr(0, equals));
    const auto parameter =
        std::find_if(parameters.begin(), parameters.end(), [&](const Parameter& p) { return p.name == key; });
    if (parameter == parameters.end())
      refuse(names.empty()
                 ? fmt::format("{} has no parameter '{}'; it takes none", name, shown(key))
                 : fmt::format("{} has no parameter '{}'; allowed are {}", name, shown(key), fmt::join(names, ", ")),
             key);
    check(*parameter);
    if (equals == std::string_view::npos)
      refuse(fmt::format("{} has no value; allowed is {}", key, parameter->allowed()), key);
    if (std::find(given.begin(), given.end(), key) != given.end()) refuse(fmt::format("{} is given twice", key), key);
    if (more && rest.empty()) refuse(fmt::format("{} '{}' ends with a comma", kind, shown(spec)), "");
    given.push_back(key);
    values[key] = parameter->canonical(std::string(item.substr(equals + 1)));
  }
  return values;
}

template <class Parameter>
std::map<std::string, std::string> parse_spec(const char* kind, std::string_view spec,
                                              const std::vector<Parameter>& parameters) {
  return parse_spec(kind, spec, parameters, [](const Parameter&) {});
}

}  // namespace gradwire
