// SPDX-License-Identifier: Apache-2.0
// The one clock of the server and its workers: it never jumps.
#pragma once

#include <chrono>

namespace gradwire::server {

using Clock = std::chrono::steady_clock;

inline double seconds_since(Clock::time_point then) {
  return std::chrono::duration<double>(Clock::now() - then).count();
}

}  // namespace gradwire::server
