// SPDX-License-Identifier: Apache-2.0
// Reading the status object without trusting it to be complete: a value by its path, or null. `gradwire status` may
// talk to an older or newer server, whose status lacks a field or has it as null.
#pragma once

#include <initializer_list>
#include <nlohmann/json.hpp>

namespace gradwire::server {

inline const nlohmann::json& at(const nlohmann::json& status, std::initializer_list<const char*> path) {
  static const nlohmann::json kNull;
  const nlohmann::json* value = &status;
  for (const char* name : path) {
    if (!value->is_object()) return kNull;
    const auto found = value->find(name);
    if (found == value->end()) return kNull;
    value = &*found;
  }
  return *value;
}

}  // namespace gradwire::server
