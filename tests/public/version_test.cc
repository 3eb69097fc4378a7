// SPDX-License-Identifier: Apache-2.0
// The version that programs see is the version that CMake and packages see.
#include "gradwire/version.h"

#include <gtest/gtest.h>

#include <string>

namespace gradwire {
namespace {

TEST(Version, IsThatOfTheProject) {
  EXPECT_EQ(kVersionString, GRADWIRE_PROJECT_VERSION);
  EXPECT_EQ(kVersionString,
            std::to_string(kVersionMajor) + "." + std::to_string(kVersionMinor) + "." + std::to_string(kVersionPatch));
}

}  // namespace
}  // namespace gradwire
