// SPDX-License-Identifier: Apache-2.0
// The shards of a list are the owned runs of its tensors, one tensor after the other (feedback/owners.h has the rule).
#include "feedback/owners.h"
#include "gradwire/collective.h"

namespace gradwire {

std::vector<Shard> shards(std::span<const NamedTensor> tensors, int world) {
  std::vector<Shard> all;
  for (size_t i = 0; i < tensors.size(); ++i)
    for (const OwnedRun& run : owners(tensors[i].name, tensors[i].count, world))
      all.push_back({i, run.first, run.count, run.owner});
  return all;
}

}  // namespace gradwire
