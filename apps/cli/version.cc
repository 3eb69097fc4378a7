// SPDX-License-Identifier: Apache-2.0
#include "cli/version.h"

#include "commit.h"  // made at build time by cmake/commit.cmake

namespace gradwire::app {

std::string version_text() {
  const std::string commit = GRADWIRE_COMMIT;
  return commit.empty() ? GRADWIRE_VERSION : GRADWIRE_VERSION " (commit " + commit + ")";
}

}  // namespace gradwire::app
