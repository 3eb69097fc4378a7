// SPDX-License-Identifier: Apache-2.0
// Who encodes and decodes the messages of one shard in one direction, while the tables of codecs that learn change.
// Both are for one thread at a time.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "gradwire/runner.h"
#include "message/changing_runner.h"
#include "server/shard_learning.h"

namespace gradwire::server {

// The sender. Its runner follows what the codecs have learned.
class ShardWriter {
 public:
  ShardWriter(std::vector<TensorSpec> specs, Direction direction, const Device& device, const ShardRun& run);

  Runner& runner(uint64_t step, double rate = -1);  // valid until the next call
  uint64_t message_bytes() const { return coding_.plan().message_bytes(); }
  ShardLearning& learning() { return learning_; }
  const ShardLearning& learning() const { return learning_; }

 private:
  ShardLearning learning_;
  ChangingRunner coding_;
};

// The receiver. A message carries the tables that it was encoded with.
class ShardReader {
 public:
  explicit ShardReader(std::vector<TensorSpec> specs, const Device& device = {});

  const std::vector<TensorSpec>& specs() const { return specs_; }
  // The runner of a message, valid until the next call. What the head says about codecs is believed only if they are
  // those of this shard, perhaps with other tables, or fp32 where a codec that learns has not begun. Error{frame}.
  Runner& runner(std::span<const std::byte> message);

 private:
  struct KnownTables {
    std::vector<Codec> codecs;
    std::unique_ptr<Plan> plan;
    std::unique_ptr<Runner> runner;
  };
  std::vector<TensorSpec> specs_;
  uint64_t elements_ = 0;
  Device device_;
  std::vector<KnownTables> known_;  // a few, the newest first
};

}  // namespace gradwire::server
