// SPDX-License-Identifier: Apache-2.0
// The version of the library, as semantic versioning has it. Before 1.0 a minor version may change the interface. The
// version of messages is another one: kWireVersion in message.h.
#pragma once

#include <string_view>

namespace gradwire {

inline constexpr int kVersionMajor = 0;
inline constexpr int kVersionMinor = 1;
inline constexpr int kVersionPatch = 0;
inline constexpr std::string_view kVersionString = "0.1.0";

}  // namespace gradwire
