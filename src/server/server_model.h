// SPDX-License-Identifier: Apache-2.0
// The model that a server trains: its signature, its shards, and what the other objects of the server know about them.
//
// A shard belongs to its strand (strands.h): only work that was posted there touches the ShardQueue. After each change
// the strand publishes a summary of its shard in the vectors of the ServerModel, which the hub's mutex guards; the
// status, the checkpoint and the rules for closing a step read those.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "core/clock.h"
#include "gradwire/runner.h"
#include "server/session.h"
#include "server/shard.h"
#include "server/signature.h"

namespace gradwire::server {

// An answer that a worker gets when the shard has reached a version.
struct PendingAnswer {
  uint32_t slot;
  std::shared_ptr<Session> session;
  Frame request;
  uint64_t version;
  UpdateStatus status;
  SteadyClock::time_point since;
};

struct ShardQueue {
  std::unique_ptr<ServerShard> shard;
  std::vector<PendingAnswer> waiting;  // at most one for each worker
  SteadyClock::time_point since;       // when the oldest of them began to wait for the step to close
};

struct ServerModel {
  ServerModel(const Signature& signature, uint64_t shard_elements, bool async);

  size_t weight_shards() const;  // they come first; the rest pool second moments
  uint64_t step() const;         // the step that all shards of the weights have reached
  uint64_t durable_step() const;
  // Of the shard that has skipped most steps: those, and all that were tried.
  struct StepCounts {
    uint64_t skipped = 0, tried = 0;
    bool failed() const { return 2 * skipped > tried; }  // the weights are not what was asked for
  };
  StepCounts step_counts(bool async) const;
  bool whole() const;  // all shards have their first weights
  uint64_t memory_bytes() const;
  void set_buffers(const Blob& payload);  // Error{frame} if it is not what the signature says

  // These never change.
  Signature signature;
  std::vector<ShardLayout> layouts;
  std::vector<ShardQueue> queues;  // the vector; each element belongs to its strand
  Plan buffer_plan;
  std::unique_ptr<Runner> buffer_runner;

  // Guarded by the hub's mutex; one element for each shard.
  std::vector<uint64_t> versions, durable;  // the step in memory, and the step on disk
  std::vector<uint64_t> skipped;            // steps that changed nothing because something was not finite
  std::vector<double> applied;
  std::vector<std::map<uint32_t, Tally>> tallies;
  std::vector<uint64_t> bytes;
  std::vector<char> ready;
  std::vector<char> open;  // an answer waits
  Blob buffers;
};

}  // namespace gradwire::server
