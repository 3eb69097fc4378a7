// SPDX-License-Identifier: Apache-2.0
#include "feedback/owners.h"

#include <fmt/format.h>

#include <algorithm>

#include "gradwire/error.h"
#include "gradwire/plan.h"

namespace gradwire {

std::vector<OwnedRun> owners(std::string_view name, uint64_t count, int world, int drawn) {
  if (world < 1) throw Error(ErrorKind::usage, fmt::format("world is {}; it must be at least 1", world), "world");
  const auto w = static_cast<uint64_t>(world);
  const uint64_t tiles = count / kTileElements + (count % kTileElements != 0),
                 start = hash_name(name) / static_cast<uint64_t>(drawn) % w;
  std::vector<OwnedRun> runs;
  for (uint64_t slot = 0, tile = 0; tile < tiles; ++slot) {
    const uint64_t first = tile * kTileElements;
    tile += tiles / w + (slot < tiles % w);
    const uint64_t end = tile < tiles ? tile * kTileElements : count;
    runs.push_back({first, end - first, static_cast<int>((start + slot) % w)});
  }
  return runs;
}

TensorPiece piece_of(std::string_view name, uint64_t count, int place, int places) {
  for (const OwnedRun& run : owners(name, count, places))
    if (run.owner == place) return {run.first, run.count};
  return {0, 0};
}

}  // namespace gradwire
