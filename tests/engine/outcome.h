// SPDX-License-Identifier: Apache-2.0
// What a rank threw, as a value, so that a test can look at every part of it and at the ranks beside it.
#pragma once

#include <functional>
#include <string>

#include "gradwire/error.h"

namespace gradwire::test {

struct Outcome {
  bool threw = false;
  ErrorKind kind = ErrorKind::usage;
  std::string text, field;
  int rank = -1;
};

inline Outcome outcome_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& e) {
    return {true, e.kind(), e.what(), e.field(), e.rank()};
  }
  return {};
}

inline bool mentions(const Outcome& outcome, const std::string& words) {
  return outcome.text.find(words) != std::string::npos;
}

}  // namespace gradwire::test
