// SPDX-License-Identifier: Apache-2.0
// ThreadSanitizer makes code ten times slower, and a race shows with small data and few rounds as it does with large
// and many. The same tests run in full without it.
#pragma once

namespace gradwire::test {

#if defined(__SANITIZE_THREAD__)
inline constexpr bool kThreadSanitizer = true;
#else
inline constexpr bool kThreadSanitizer = false;
#endif

template <class Number>
constexpr Number lighter(Number full, Number under_thread_sanitizer) {
  return kThreadSanitizer ? under_thread_sanitizer : full;
}

}  // namespace gradwire::test
