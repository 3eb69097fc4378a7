// SPDX-License-Identifier: Apache-2.0
// A bucket whose messages an Engine moves: the coding of a BucketCore, and host memory for its messages. A message of
// this rank to itself is decoded where it was written and does not travel.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "collective/bucket_core.h"
#include "collective/timer.h"

namespace gradwire {

class BucketTransfer {
 public:
  BucketTransfer(Engine& engine, const Job& job, BucketPlan plan, ReduceTimer& timer);

  BucketCore& core() { return core_; }
  void follow(const std::array<uint64_t, 2>& epochs);  // the codecs of the job may have changed
  void begin(const StepContext& context) { core_.begin(context); }

  // Each of these ends when its results stand in their places, also on a GPU. `out` and `values` are those of
  // BucketCore.
  void up(uint64_t step, std::span<const void* const> in, std::span<void* const> out, Learning* learning = nullptr);
  void down(uint64_t step, std::span<const void* const> values, std::span<void* const> out,
            Learning* learning = nullptr);
  // Encodes for the learners that must see a step before it is encoded for good.
  void observe_up(uint64_t step, std::span<const void* const> in, Learning& learning);
  void observe_down(uint64_t step, Learning& learning);

  // After up(): see BucketCore.
  void decode_own(uint64_t step, std::span<void* const> out);
  void read_sums(std::span<void* const> out) const { core_.read_sums(out); }

  uint64_t bytes_sent() const;  // that this rank sends to others in a step
  uint64_t message_memory() const;

 private:
  void resize();
  std::vector<Bytes> up_messages() const;  // those that this rank writes
  void encode_up(uint64_t step, std::span<const void* const> in, Learning* learning, bool ahead);
  void encode_down(uint64_t step, std::span<const void* const> values, Learning* learning, bool ahead);
  size_t rank() const { return static_cast<size_t>(engine_.rank()); }

  Engine& engine_;
  const Job& job_;
  ReduceTimer& timer_;
  // A message that all ranks receive is written where this rank would receive it.
  std::vector<Buffer> up_sent_, up_received_, down_received_;
  BucketCore core_;  // last: it waits before the buffers are released
};

// Host and GPU must have the same bits. On a GPU this replaces every NaN in the f32 tensors by the one of a CPU.
void settle_outputs(const Job& job, std::span<void* const> out);

}  // namespace gradwire
