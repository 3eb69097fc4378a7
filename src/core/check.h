// SPDX-License-Identifier: Apache-2.0
// GW_CHECK(condition): an invariant of the library, which no input can break. Where one is broken all the same, it
// throws std::logic_error with the condition and its place.
#pragma once

#include <stdexcept>

#define GW_STRINGIFY_(x) #x
#define GW_STRINGIFY(x) GW_STRINGIFY_(x)
#define GW_CHECK(condition)                                                                                           \
  do {                                                                                                                \
    if (!(condition))                                                                                                 \
      throw std::logic_error("gradwire: broken invariant: " #condition " (" __FILE__ ":" GW_STRINGIFY(__LINE__) ")"); \
  } while (false)
