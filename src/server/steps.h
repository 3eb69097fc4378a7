// SPDX-License-Identifier: Apache-2.0
// Updates, steps that close, and what goes down.
//
// Synchronous mode: a shard's step closes when every worker that it waits for has sent its update, or when the deadline
// has passed. A step waits for a worker from the moment the worker is given the step's weights until the worker says
// that it will send nothing for them (it pulls a later step), or misses a deadline: it is a straggler then.
//
// Asynchronous mode: an update is applied when it comes, and its answer is held back while its worker is too far ahead
// of the slowest (Membership has the rule).
//
// The three take_ functions are called by transports, from any thread, and post their work to the shard's strand. The
// private functions run on that strand; each takes the hub's mutex for the time it looks at workers and summaries, and
// never while a message is decoded or encoded.
#pragma once

#include <functional>
#include <memory>

#include "server/hub_context.h"
#include "server/membership.h"
#include "server/saving.h"
#include "server/status.h"

namespace gradwire::server {

class Steps {
 public:
  Steps(HubContext& context, Membership& membership, Status& status, Saving& saving)
      : context_(context), membership_(membership), status_(status), saving_(saving) {}

  // `done` is called when the session may send its next frame.
  using Done = std::function<void()>;
  void take_update(const std::shared_ptr<Session>& session, uint32_t slot, const Frame& frame, Blob payload, Done done);
  void take_pull(const std::shared_ptr<Session>& session, uint32_t slot, const Frame& frame, Done done);
  // The residual of a worker that leaves.
  void take_residual(const std::shared_ptr<Session>& session, uint32_t slot, const Frame& frame, Blob payload,
                     Done done);

  void recheck();  // all shards, after a worker came or went, or the disk is back
  // What time has changed: deadlines of the open shards, and, if `changed`, workers that are no longer awaited.
  void check_deadlines(const std::shared_ptr<ServerModel>& model, const std::vector<uint32_t>& shards, bool changed);
  void forget_worker(const std::shared_ptr<ServerModel>& model, uint32_t slot);  // with the lock held

 private:
  using ModelPointer = std::shared_ptr<ServerModel>;

  bool refuse_unready(const ServerModel& model, uint32_t shard, Session& session);
  void update_in_step(const ModelPointer& model, PendingAnswer answer, Blob payload, const Done& done);
  void update_at_once(const ModelPointer& model, PendingAnswer answer, const Blob& payload, const Done& done);
  void skip_at_once(const ModelPointer& model, uint32_t index);
  void enqueue(ServerModel& model, const PendingAnswer& answer);
  void try_close(const ModelPointer& model, uint32_t index, bool overdue);
  bool may_close(const ServerModel& model, uint32_t index, bool overdue);
  bool all_want_a_later_step(const ShardQueue& queue, bool overdue) const;
  void answer_due(const ModelPointer& model, uint32_t index);
  bool is_due(const ServerModel& model, uint32_t index, const PendingAnswer& answer);
  void answer(const ModelPointer& model, const PendingAnswer& answer);
  void publish(const ModelPointer& model, uint32_t index);
  void count_update(uint32_t slot, UpdateStatus status, uint64_t staleness);
  void count_step(uint32_t slot, uint32_t shard);
  void set_straggler(uint32_t slot, uint32_t shard, bool straggler);

  HubContext& context_;
  Membership& membership_;
  Status& status_;
  Saving& saving_;
};

}  // namespace gradwire::server
