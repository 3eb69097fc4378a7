// SPDX-License-Identifier: Apache-2.0
// Whether a command may write its output: never over its own input, and over an existing file only with --force.
#pragma once

#include <string>

namespace CLI {
class App;
}

namespace gradwire::app {

void add_force(CLI::App& command, bool& force);

// Throws Error{usage} naming OUT. It is called before the input is read, so that a refusal costs nothing. Devices,
// pipes and "-" are written to as they are.
void check_output(const std::string& in, const std::string& out, bool force);

}  // namespace gradwire::app
