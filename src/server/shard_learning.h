// SPDX-License-Identifier: Apache-2.0
// What the codecs of one shard learn in one direction (gradwire/learn.h). The tensors of a shard that have the same
// codec learn together, as those of a bucket do elsewhere: shards stay independent of each other.
//
// Up, every worker takes statistics of the updates that it sends, and they travel behind the message of the update. The
// server pools the statistics of the updates that count, fits, and sends what was learned behind the weights: one place
// fits, so all workers have the same tables. Down, the server is the only sender and learns from what it sends; the
// table of a message is in its head.
//
// Both kinds of bytes come from the network. Statistics are checked before they are pooled, and a state is checked when
// it is restored.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "gradwire/feedback.h"
#include "gradwire/learn.h"
#include "server/signature.h"

namespace gradwire::server {

// What a shard is told about the run that it learns in.
struct ShardRun {
  uint64_t steps = 0;  // 0: not known
  double share = 1;    // of the model's elements that are in this shard, and so of a bound that holds for the model
};
// In asynchronous mode versions count the updates of all workers, so the length of the run is not known.
ShardRun run_of(const Signature& signature, const ShardLayout& layout, bool async);

class ShardLearning {
 public:
  // Throws Error{usage, "up" or "down"} for a codec that cannot learn in this direction, and the codec's own errors.
  ShardLearning(const std::vector<TensorSpec>& specs, Direction direction, const ShardRun& run);

  bool empty() const { return entries_.empty(); }
  // The codecs of all tensors at a step. `rate` is the learning rate, for codecs that follow it.
  std::vector<TensorSpec> specs(uint64_t step, double rate) const;

  // Some codec wants statistics of a step from `first` to `last`.
  bool due(uint64_t first, uint64_t last) const;
  // Takes the statistics that are due in these steps, from what was encoded at `last`, and returns them.
  std::vector<std::byte> observe(Runner& runner, uint64_t first, uint64_t last, std::span<const void* const> tensors,
                                 const Residuals* residuals, std::span<const std::byte> message);
  // Throws Error{frame, "statistics"} unless they are what observe() can return. With `exact`, they are those that are
  // due at the step, no fewer and no more.
  void check(std::span<const std::byte> statistics, uint64_t step, bool exact) const;
  // Learns from the statistics of one or more senders, all of which were checked. If there are more than a fit can add
  // up, the first ones count. A codec that cannot make a table of them keeps the one that it has.
  void learn(uint64_t step, std::span<const std::span<const std::byte>> senders);

  std::vector<std::byte> save() const;
  void restore(std::span<const std::byte> state);  // throws Error{frame, "learned"}

 private:
  struct CodecEntry {
    std::vector<uint32_t> tensors;  // of the shard
    uint64_t elements;
    int senders;  // as many as the learner was made for
    Learner learner;
    bool due(uint64_t first, uint64_t last) const;
  };
  // The statistics of each entry, empty where there are none.
  std::vector<std::span<const std::byte>> split(std::span<const std::byte> statistics) const;

  std::vector<TensorSpec> specs_;
  ShardRun run_;
  std::vector<CodecEntry> entries_;
};

}  // namespace gradwire::server
