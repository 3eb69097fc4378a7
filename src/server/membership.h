// SPDX-License-Identifier: Apache-2.0
// The workers of a server: those that are connected, those that left, those that may come back. This is a table with
// rules; it has no threads and no lock of its own. Every function is called with the hub's mutex held.
//
// A worker keeps its slot for as long as the server knows its id, over reconnects and restarts. Sums are made in the
// order of slots, so the slots are what makes a run reproducible.
#pragma once

#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "core/clock.h"
#include "server/hub_options.h"
#include "server/session.h"

namespace gradwire::server {

struct WorkerRecord {
  std::string id, name;
  uint32_t slot = 0;
  std::shared_ptr<Session> session;  // null: it is not connected
  bool left = false;                 // it has said goodbye
  bool lost = false;                 // it has been away for too long
  bool awaited = false;              // the server was restarted, and still waits for it
  std::vector<char> straggler;       // for each shard: steps do not wait for this worker
  std::vector<uint64_t> clock;       // async, for each shard: how many steps it has made
  SteadyClock::time_point joined, connected, last_update, away;
  uint64_t updates = 0, late = 0, step = 0, staleness = 0, bytes_up = 0, bytes_down = 0;
  std::optional<double> loss;

  bool takes_part() const { return session && !left; }
  nlohmann::json label() const { return {{"worker", id.substr(0, 8)}, {"name", name}}; }  // for the journal
  void take_report(const nlohmann::json& text);
};

class Membership {
 public:
  explicit Membership(const HubOptions& options) : options_(options) {}

  WorkerRecord* find(uint32_t slot);
  WorkerRecord* find(const Session* session);
  WorkerRecord* find(const std::string& id);
  std::map<uint32_t, WorkerRecord>& all() { return workers_; }
  const std::map<uint32_t, WorkerRecord>& all() const { return workers_; }

  uint32_t present() const;  // how many take part
  // The most that took part at one time, at least 1. As many can have made an update stale, also those that have left.
  uint32_t most_present() const { return most_present_; }
  uint32_t buffer_owner() const;  // the slot whose buffers are kept: of those that take part, the one that came first
  std::optional<double> loss() const;               // the mean of what the connected workers reported last
  uint64_t most_steps(size_t weight_shards) const;  // of the worker that has made most
  bool finished() const;                            // there were workers, and all have left on purpose

  // A worker has said hello on this session: a new one, or one that is back.
  WorkerRecord& connect(const std::string& id, const std::string& name, std::shared_ptr<Session> session,
                        size_t shards);
  void disconnect(WorkerRecord& worker);
  void clear() { workers_.clear(); }
  // Gives up on workers that are away for too long, with a call for each that is lost. True if steps may have waited
  // for one of them.
  bool expire(const std::function<void(const WorkerRecord&)>& lost);
  // Drops the oldest worker that went away for good, if the table has grown beyond its bound. Returns its slot.
  std::optional<uint32_t> forget_oldest();

  // Asynchronous mode (stale-synchronous parallel, Ho et al. 2013): a worker may be at most `staleness` steps ahead of
  // the slowest one that is waited for.
  void count_step(WorkerRecord& worker, uint32_t shard);
  bool may_run_ahead(uint32_t slot, uint32_t shard) const;
  void stop_waiting_for_slower(uint32_t slot, uint32_t shard);

  // A checkpoint's.
  void restore(WorkerRecord worker);
  uint32_t next_slot() const { return next_slot_; }
  void set_next_slot(uint32_t slot) { next_slot_ = slot; }

 private:
  const HubOptions& options_;
  std::map<uint32_t, WorkerRecord> workers_;  // by slot
  std::map<const Session*, uint32_t> slots_;  // of the sessions
  uint32_t next_slot_ = 0;
  uint32_t most_present_ = 1;
};

}  // namespace gradwire::server
