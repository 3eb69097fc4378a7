// SPDX-License-Identifier: Apache-2.0
// Who owns which element of a tensor when W ranks share the work. A tensor is seen as tiles of kTileElements elements;
// its tiles are dealt as W contiguous runs, as even as whole tiles allow, and the rank of the first run is drawn from
// the name. So a tensor of one tile goes whole to an owner by name, and the odd tiles of many tensors spread over
// all ranks. Nothing here looks at other tensors: the owner of an element is the same however tensors are grouped.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace gradwire {

struct OwnedRun {
  uint64_t first;  // element
  uint64_t count;
  int owner;
};

// In the order of `first`; covers [0, count) exactly, and each owner has at most one run.
std::vector<OwnedRun> owners(std::string_view name, uint64_t count, int world);

}  // namespace gradwire
