// SPDX-License-Identifier: Apache-2.0
// What a worker has sent and the server may still ask for. An update is kept, shard by shard, until it is on the
// server's disk: a server that is killed comes back with its last checkpoint, and the worker sends again what the
// checkpoint does not have. Together with the numbers of the updates, by which the server drops what it has applied
// before, that makes every update count exactly once.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <vector>

#include "server/frame.h"

namespace gradwire::server {

// One shard of an update.
struct SentShard {
  enum class State : uint8_t {
    open,      // the server has not said what became of it, or has forgotten it
    applied,   // it counts
    refunded,  // it was refused, and is held back for later updates
  };
  State state = State::open;
  uint64_t step = 0;        // of the weights that it was computed at
  uint64_t applied_at = 0;  // the version that has it
  Blob message;             // null before it is encoded, and after a refund; with its tail
  uint64_t tail = 0;        // of its bytes: statistics
  Tally tally;
  float rate = 0;
};

struct SentUpdate {
  uint64_t sequence;
  std::vector<SentShard> shards;
};

class ReplayLog {
 public:
  SentUpdate& append(uint64_t sequence, size_t shards);
  // The update that has to be sent next for a shard: the server takes them in order. Null if there is none.
  SentUpdate* oldest_open(size_t shard);
  bool is_newest(const SentUpdate& update) const { return &update == &log_.back(); }
  SentUpdate* find(uint64_t sequence);

  // What the welcome of a server says about a shard: it has applied all updates up to `sequence`, and is at `version`.
  // Returns how many updates it had applied once, and has to be sent again.
  uint64_t reconcile(size_t shard, uint64_t sequence, uint64_t version);
  // The residual has grown by `change` because an update was refunded. Updates after it were encoded without it, and
  // report that much more.
  void add_to_later_tallies(const SentUpdate& refunded, size_t shard, double change);
  // Drops updates of which no shard can be asked for any more, from the oldest on.
  void drop_durable(const std::function<uint64_t(size_t shard)>& durable);
  uint64_t bytes() const;

 private:
  std::deque<SentUpdate> log_;
};

}  // namespace gradwire::server
