// SPDX-License-Identifier: Apache-2.0
// How a call is refused whose arguments make no sense: Error{usage} with the name of the argument.
#pragma once

#include <string>

#include "gradwire/error.h"

namespace gradwire {

[[noreturn]] inline void refuse_usage(const std::string& words, const char* field) {
  throw Error(ErrorKind::usage, words, field);
}

}  // namespace gradwire
