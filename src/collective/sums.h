// SPDX-License-Identifier: Apache-2.0
// Where the f32 sums of this rank's shards stand: in the outputs where those can hold them, else in memory of their
// own, from which they are encoded again or rounded into the outputs.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "collective/job.h"
#include "device/buffer.h"

namespace gradwire {

class ShardSums {
 public:
  // What becomes of the sums of a shard:
  //   kept      they are encoded again for the way down; there are no outputs
  //   tensors   they are the result, in the type of the tensor: f32 sums stand in the output at once
  //   floats    they are the result, and every output is f32
  enum class Use { kept, tensors, floats };
  ShardSums(std::shared_ptr<Memory> memory, const Job& job, std::span<const Shard> mine, Use use);

  // One place for each shard. `outputs`: where the results of the shards go; none for Use::kept.
  std::vector<float*> places(std::span<void* const> outputs) const;
  // Divides the sums into means where the job asks for it. IEEE division is exact where the mean is representable.
  void divide_by(const Device& device, int world, std::span<float* const> places) const;
  // Rounds the sums that stand in memory of their own into the outputs. On a GPU this and divide_by() only enqueue.
  void round(const Device& device, std::span<void* const> outputs) const;
  uint64_t held() const { return own_.held(); }

 private:
  const Job& job_;
  std::vector<Shard> mine_;
  std::vector<uint64_t> offsets_;  // in own_, or kInOutput
  Buffer own_;
};

}  // namespace gradwire
