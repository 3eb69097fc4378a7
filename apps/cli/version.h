// SPDX-License-Identifier: Apache-2.0
// The version of the program and the commit that it was built from.
#pragma once

#include <string>

namespace gradwire::app {

std::string commit_text();   // "0123abc"; empty without git
std::string version_text();  // "0.1.0 (commit 0123abc)"; without git, "0.1.0"

}  // namespace gradwire::app
