// SPDX-License-Identifier: Apache-2.0
// What an ErrorFeedback holds: shared by the files that implement it.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "feedback/residual_store.h"

namespace gradwire {

struct ErrorFeedback::State {
  State(DType dtype, const Device& device) : store(dtype, device) {}
  ResidualStore store;
  std::map<std::string, std::vector<std::byte>> extras;
};

struct FeedbackAccess {
  static ResidualStore& store(ErrorFeedback& feedback) { return feedback.state_->store; }
};

}  // namespace gradwire
