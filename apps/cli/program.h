// SPDX-License-Identifier: Apache-2.0
// What the programs `gradwire`, `gradwire-train` and `gradwire-server` have in common. They parse the command line, run
// the chosen command, and turn an exception into one line on stderr and an exit code. The library only ever throws.
#pragma once

#include <functional>
#include <string>

#include "cli/command.h"

namespace gradwire::app {

int run_program(int argc, char** argv, const std::string& footer,
                const std::function<void(CLI::App&, Action&)>& add_commands);

}  // namespace gradwire::app
