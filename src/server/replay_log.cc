// SPDX-License-Identifier: Apache-2.0
#include "server/replay_log.h"

namespace gradwire::server {

using State = SentShard::State;

SentUpdate& ReplayLog::append(uint64_t sequence, size_t shards) {
  return log_.emplace_back(SentUpdate{sequence, std::vector<SentShard>(shards)});
}

SentUpdate* ReplayLog::oldest_open(size_t shard) {
  for (SentUpdate& update : log_)
    if (update.shards[shard].state == State::open && update.shards[shard].message) return &update;
  return nullptr;
}

SentUpdate* ReplayLog::find(uint64_t sequence) {
  for (SentUpdate& update : log_)
    if (update.sequence == sequence) return &update;
  return nullptr;
}

uint64_t ReplayLog::reconcile(size_t shard, uint64_t sequence, uint64_t version) {
  uint64_t again = 0;
  for (SentUpdate& update : log_) {
    SentShard& sent = update.shards[shard];
    if (sent.state == State::refunded) continue;
    const bool applied = update.sequence <= sequence;
    // Its answer was lost with the connection. It is in this version or an earlier one.
    if (applied && sent.state == State::open) sent.applied_at = version;
    if (!applied && sent.state == State::applied) ++again;
    sent.state = applied ? State::applied : State::open;
  }
  return again;
}

void ReplayLog::add_to_later_tallies(const SentUpdate& refunded, size_t shard, double change) {
  for (SentUpdate& later : log_)
    if (later.sequence > refunded.sequence) later.shards[shard].tally.residual += change;
}

void ReplayLog::drop_durable(const std::function<uint64_t(size_t shard)>& durable) {
  const auto needless = [&](const SentUpdate& update) {
    for (size_t p = 0; p < update.shards.size(); ++p) {
      const SentShard& sent = update.shards[p];
      if (sent.state == State::open || (sent.state == State::applied && sent.applied_at > durable(p))) return false;
    }
    return true;
  };
  while (!log_.empty() && needless(log_.front())) log_.pop_front();
}

uint64_t ReplayLog::bytes() const {
  uint64_t sum = 0;
  for (const SentUpdate& update : log_)
    for (const SentShard& sent : update.shards)
      if (sent.message) sum += sent.message->size();
  return sum;
}

}  // namespace gradwire::server
