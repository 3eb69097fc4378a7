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

// In the order of `first`; covers [0, count) exactly, and each owner has at most one run. `drawn`: where a tensor was
// cut for so many places before, the rest of the draw decides here. Otherwise one rank would be first in both cuts.
std::vector<OwnedRun> owners(std::string_view name, uint64_t count, int world, int drawn = 1);

// On two levels each of `places` ranks of a node has a piece of every tensor, cut in this way, which may be empty. The
// ranks with the same place in all nodes share the work on their piece.
struct TensorPiece {
  uint64_t first, count;
};
TensorPiece piece_of(std::string_view name, uint64_t count, int place, int places);

}  // namespace gradwire
