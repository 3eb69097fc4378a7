// SPDX-License-Identifier: Apache-2.0
// Ctrl-C and SIGTERM ask a command to stop; it does so where it can leave things in order.
#pragma once

#include <atomic>

namespace gradwire::app {

// Set by the first Ctrl-C or SIGTERM from now on; another one a while later ends the program at once.
const std::atomic<bool>& catch_interrupts();

}  // namespace gradwire::app
