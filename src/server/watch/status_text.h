// SPDX-License-Identifier: Apache-2.0
// The status of a server (watch.h) for people: what `gradwire status` prints. Some fifteen lines of "name  value", a
// table of the workers, nothing else. Names that workers chose cannot move the cursor or change colours: control
// characters and bytes that are not UTF-8 are shown as '?'.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace gradwire::server {

// A ledger that is off by more than this, relative to the magnitude of all updates, is said to be off.
inline constexpr double kLedgerTolerance = 1e-6;

std::string status_text(const nlohmann::json& status);

}  // namespace gradwire::server
