// SPDX-License-Identifier: Apache-2.0
// What the programs `gradwire` and `gradwire-train` have in common: parse, run the chosen command, and turn what went
// wrong into one line on stderr and an exit code. The library only ever throws.
#pragma once

#include <functional>
#include <string>

#include "cli/command.h"

namespace gradwire::app {

int run_program(int argc, char** argv, const std::string& footer,
                const std::function<void(CLI::App&, Action&)>& add_commands);

}  // namespace gradwire::app
