// SPDX-License-Identifier: Apache-2.0
// The text of a thread's last failure. It has a fixed size, so that recording "there is not enough memory" needs none.
#include <algorithm>
#include <cstring>

#include "gradwire.h"
#include "gradwire/version.h"

namespace {

thread_local char last_text[1024] = "";

}  // namespace

extern "C" {

const char* gw_version(void) { return gradwire::kVersionString.data(); }

const char* gw_error(void) { return last_text; }

int gw_fail(int code, const char* text) {
  if (!text) text = "";
  if (text == last_text) return code;
  const size_t length = std::min(std::strlen(text), sizeof last_text - 1);
  std::memmove(last_text, text, length);
  last_text[length] = 0;
  return code;
}

}  // extern "C"
