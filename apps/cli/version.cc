// SPDX-License-Identifier: Apache-2.0
#include "cli/version.h"

#include "commit.h"  // made at build time by cmake/commit.cmake
#include "gradwire/version.h"

namespace gradwire::app {

std::string commit_text() { return GRADWIRE_COMMIT; }

std::string version_text() {
  const std::string version(kVersionString), commit = commit_text();
  return commit.empty() ? version : version + " (commit " + commit + ")";
}

}  // namespace gradwire::app
