// SPDX-License-Identifier: Apache-2.0
// Seconds on the wall, for differences.
#pragma once

#include <chrono>

namespace gradwire::train {

inline double wall_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace gradwire::train
