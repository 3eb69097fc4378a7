// SPDX-License-Identifier: Apache-2.0
// Where this rank's f32 sums stand: in the outputs, where those can hold them, else in room of their own, from which they
// are read again in another form.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "collective/job.h"
#include "collective/staging.h"

namespace gradwire {

class Sums {
 public:
  // `to_outputs`: the sums become the results, shard by shard; those of f32 tensors then stand there at once.
  Sums(std::shared_ptr<Memory> memory, const Job& job, std::span<const Shard> mine, bool to_outputs);

  // One place for each shard. `outputs`: where the results of the shards go; not looked at without `to_outputs`.
  std::vector<float*> places(std::span<void* const> outputs) const;
  // What stands in room of its own is rounded into the outputs.
  void round(const Device& device, std::span<void* const> outputs) const;
  uint64_t held() const { return room_.held(); }

 private:
  const Job& job_;
  std::vector<Shard> mine_;
  std::vector<uint64_t> offsets_;  // in the room; kInOutput: none
  Block room_;
};

// The sums become means where the job asks for it. IEEE division: exact where the mean is representable. On a GPU it is
// only enqueued.
void finish_sums(const Job& job, const Device& device, int world, std::span<const Shard> shards,
                 std::span<float* const> sums);

}  // namespace gradwire
