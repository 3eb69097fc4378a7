// SPDX-License-Identifier: Apache-2.0
// On which nodes a state was made. On two levels a rank has residuals of its pieces of tensors only, so a state that is
// loaded elsewhere must be recognised. The numbers are kept as extra state, which one level does not have.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "gradwire/feedback.h"

namespace gradwire {

struct StateNodes {
  uint32_t nodes = 0;     // 0: one level
  uint32_t per_node = 1;  // ranks
  uint32_t position = 0;  // of the state's rank: node * per_node + place
  friend bool operator==(const StateNodes&, const StateNodes&) = default;

  std::string str() const;  // "2 nodes of 4 ranks", "one level"
};

using ExtraState = std::map<std::string, std::vector<std::byte>>;
StateNodes nodes_of(const ExtraState& extras);  // throws Error{frame} if the numbers make no sense
void set_nodes(ExtraState& extras, const StateNodes& nodes);
void set_nodes(ErrorFeedback& state, const StateNodes& nodes);

}  // namespace gradwire
