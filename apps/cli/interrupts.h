// SPDX-License-Identifier: Apache-2.0
// Ctrl-C and SIGTERM ask a command to stop. The command stops where it can leave its files complete.
#pragma once

#include <atomic>

namespace gradwire::app {

// The flag is set by the first Ctrl-C or SIGTERM from now on. A second one, more than a second later, ends the program.
const std::atomic<bool>& catch_interrupts();

}  // namespace gradwire::app
