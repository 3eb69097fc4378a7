// SPDX-License-Identifier: Apache-2.0
#include "server/steps.h"

#include <algorithm>
#include <mutex>

#include "gradwire/error.h"

namespace gradwire::server {
namespace {

// A session whose frame could not be handled, for want of memory for example, ends; the others go on.
template <class Work>
auto guarded(const std::shared_ptr<Session>& session, Work work) {
  return [session, work = std::move(work)]() mutable {
    try {
      work();
    } catch (const std::exception& error) {
      session->refuse(Refusal::malformed, error.what());
    }
  };
}

}  // namespace

// ---- What workers send

// Before all first weights are here, only the worker that brings them has anything to say about a shard.
bool Steps::refuse_unready(const ServerModel& model, uint32_t shard, Session& session) {
  if (model.queues[shard].shard->ready()) return false;
  {
    const std::lock_guard lock(context_.mutex);
    status_.count_refusal("corrupt");
  }
  context_.log_refusal("corrupt", session.peer(), "bad frame: there are no weights yet");
  session.refuse(Refusal::malformed, "bad frame: there are no weights yet");
  return true;
}

void Steps::take_update(const std::shared_ptr<Session>& session, uint32_t slot, const Frame& frame, Blob payload,
                        Done done) {
  ModelPointer model;
  {
    const std::lock_guard lock(context_.mutex);
    model = context_.model;
    if (!model) return done();
    status_.count_up(payload->size());
  }
  context_.post(frame.shard, guarded(session, [this, model, session, slot, frame, payload = std::move(payload),
                                               done = std::move(done)]() mutable {
                  if (refuse_unready(*model, frame.shard, *session)) return done();
                  PendingAnswer answer{slot, session, frame, 0, UpdateStatus::none, SteadyClock::now()};
                  if (context_.options.async)
                    update_at_once(model, std::move(answer), payload, done);
                  else
                    update_in_step(model, std::move(answer), std::move(payload), done);
                }));
}

// Synchronous: the update is kept until its step closes, and the answer with it. One that does not fit the step is
// answered at once.
void Steps::update_in_step(const ModelPointer& model, PendingAnswer answer, Blob payload, const Done& done) {
  const uint32_t index = answer.request.shard;
  ShardQueue& queue = model->queues[index];
  ServerShard& shard = *queue.shard;
  const uint64_t version = shard.version();
  answer.status = shard.submit(answer.slot, answer.request, std::move(payload));
  if (answer.status != UpdateStatus::none) {
    count_update(answer.slot, answer.status, version > answer.request.step ? version - answer.request.step : 0);
    done();
    return this->answer(model, answer);
  }
  // submit() may have moved a pool to a later round. Updates that went along wait for the new round; those that were
  // dropped are not answered, since their workers have their answers already.
  std::erase_if(queue.waiting, [&](const PendingAnswer& other) {
    return other.request.kind == FrameKind::update && !shard.has_pending(other.slot);
  });
  answer.version = shard.version() + 1;
  for (PendingAnswer& other : queue.waiting)
    if (other.request.kind == FrameKind::update) other.version = answer.version;
  enqueue(*model, answer);
  set_straggler(answer.slot, index, false);  // it has been heard of: the next step waits for it again
  done();
  try_close(model, index, false);
}

// Asynchronous: the update is applied now; the answer may have to wait for slower workers.
void Steps::update_at_once(const ModelPointer& model, PendingAnswer answer, const Blob& payload, const Done& done) {
  const uint32_t index = answer.request.shard;
  ServerShard& shard = *model->queues[index].shard;
  const uint64_t staleness = shard.version() > answer.request.step ? shard.version() - answer.request.step : 0;
  uint32_t workers, most;
  {
    const std::lock_guard lock(context_.mutex);
    workers = std::max(1u, membership_.present());
    most = membership_.most_present();
  }
  // A worker that keeps to the rule is never staler than that, so only one that was not waited for can be refused.
  const uint64_t allowed = most * (2 * context_.options.staleness + 1);
  answer.status = shard.has_applied(answer.slot, answer.request.sequence) ? UpdateStatus::again
                  : staleness > allowed                                   ? UpdateStatus::late
                                        : shard.apply(answer.slot, answer.request, payload, workers);
  publish(model, index);
  count_step(answer.slot, index);
  count_update(answer.slot, answer.status, staleness);
  done();
  enqueue(*model, answer);
  answer_due(model, index);
}

// Asynchronous: a worker had no finite gradient.
void Steps::skip_at_once(const ModelPointer& model, uint32_t index) {
  ServerShard& shard = *model->queues[index].shard;
  shard.skip();
  context_.log_skipped({{"step", shard.version()}, {"part", index}});
  publish(model, index);
}

void Steps::take_pull(const std::shared_ptr<Session>& session, uint32_t slot, const Frame& frame, Done done) {
  const ModelPointer model = context_.current_model();
  if (!model) return done();
  context_.post(frame.shard, guarded(session, [this, model, session, slot, frame, done = std::move(done)] {
                  if (refuse_unready(*model, frame.shard, *session)) return done();
                  const uint64_t version = model->queues[frame.shard].shard->version();
                  const bool async = context_.options.async;
                  if (!async && frame.step > version && frame.step - version > kMaxAhead) {
                    {
                      const std::lock_guard lock(context_.mutex);
                      status_.count_refusal("corrupt");
                    }
                    session->refuse(Refusal::malformed, "bad frame: step is further ahead than any worker can be");
                    return done();
                  }
                  done();
                  const PendingAnswer pull{slot, session, frame, frame.step, UpdateStatus::none, SteadyClock::now()};
                  if (async) {
                    // A step without an update: workers that wait for this one see that it goes on.
                    count_step(slot, frame.shard);
                    if (frame.flags & kNotFinite) skip_at_once(model, frame.shard);
                  }
                  if (async || frame.step <= version) return answer(model, pull);
                  // It will send nothing for the steps before the one it pulls, so these need not wait for it.
                  set_straggler(slot, frame.shard, true);
                  enqueue(*model, pull);
                  try_close(model, frame.shard, false);
                }));
}

void Steps::take_residual(const std::shared_ptr<Session>& session, uint32_t slot, const Frame& frame, Blob payload,
                          Done done) {
  ModelPointer model;
  uint32_t workers;
  {
    const std::lock_guard lock(context_.mutex);
    model = context_.model;
    if (!model) return done();
    workers = membership_.present();
    status_.count_up(payload->size());
    if (WorkerRecord* worker = membership_.find(slot)) worker->straggler[frame.shard] = 1;  // nothing more will come
  }
  context_.post(
      frame.shard, guarded(session, [this, model, session, slot, frame, workers, payload = std::move(payload),
                                     done = std::move(done)] {
        if (refuse_unready(*model, frame.shard, *session)) return done();
        ServerShard& shard = *model->queues[frame.shard].shard;
        Frame reply{
            .kind = FrameKind::weights, .shard = frame.shard, .step = shard.version(), .sequence = frame.sequence};
        reply.status = shard.role() == ShardRole::weights ? shard.absorb_residual(slot, frame, payload, workers)
                                                          : UpdateStatus::corrupt;
        publish(model, frame.shard);
        reply.held = context_.options.checkpoint.empty() ? shard.version() : 0;
        done();
        session->send(reply, nullptr);
        try_close(model, frame.shard, false);
      }));
}

// A worker has one open question for each shard: one that asks again has given up the question before.
void Steps::enqueue(ServerModel& model, const PendingAnswer& answer) {
  ShardQueue& queue = model.queues[answer.request.shard];
  if (queue.waiting.empty()) queue.since = SteadyClock::now();
  std::erase_if(queue.waiting, [&](const PendingAnswer& one) { return one.slot == answer.slot; });
  queue.waiting.push_back(answer);
  const std::lock_guard lock(context_.mutex);
  model.open[answer.request.shard] = 1;
}

// ---- Steps that close

// Whether a step to which no worker has anything to add can be passed over: all workers wait for a later one. That
// happens after a restart, when the only worker that contributed to the step is dead.
bool Steps::all_want_a_later_step(const ShardQueue& queue, bool overdue) const {
  for (const auto& [slot, worker] : membership_.all()) {
    const bool waits = std::any_of(queue.waiting.begin(), queue.waiting.end(),
                                   [own = slot](const PendingAnswer& one) { return one.slot == own; });
    if (worker.awaited || (worker.takes_part() && !waits && !overdue)) return false;
  }
  return true;
}

// Decides, under the lock, whether the step of a shard closes now. The workers that it closes without become
// stragglers.
bool Steps::may_close(const ServerModel& model, uint32_t index, bool overdue) {
  const ShardQueue& queue = model.queues[index];
  const std::lock_guard lock(context_.mutex);
  if (&model != context_.model.get() || context_.stopping || context_.draining) return false;
  if (membership_.present() < context_.options.min_workers || saving_.holds_up(model, index)) return false;
  if (queue.shard->pending() == 0 && !all_want_a_later_step(queue, overdue)) return false;
  std::vector<WorkerRecord*> missing;
  for (auto& [slot, worker] : membership_.all())
    if ((worker.takes_part() || worker.awaited) && !worker.straggler[index] && !queue.shard->has_pending(slot))
      missing.push_back(&worker);
  if (!missing.empty() && !overdue) return false;
  // After a restart the workers that were known have a time of their own (--return), and one that has just connected
  // gets as much time as the others had.
  for (const WorkerRecord* worker : missing)
    if (worker->awaited || seconds_since(worker->connected) <= context_.options.deadline_s) return false;
  for (WorkerRecord* worker : missing) {
    worker->straggler[index] = 1;
    // A worker that is late with its weights does not come to the round of moments of this step either.
    for (size_t p = model.weight_shards(); p < model.layouts.size(); ++p) worker->straggler[p] = 1;
    nlohmann::json event = worker->label();
    event["step"] = queue.shard->version();
    event["part"] = index;
    context_.log("late", std::move(event));
  }
  return true;
}

void Steps::try_close(const ModelPointer& model, uint32_t index, bool overdue) {
  ShardQueue& queue = model->queues[index];
  if (context_.options.async || (queue.shard->pending() == 0 && queue.waiting.empty())) return;
  if (!may_close(*model, index, overdue)) return;
  const uint64_t version = queue.shard->version();
  const bool not_finite = std::any_of(queue.waiting.begin(), queue.waiting.end(), [&](const PendingAnswer& one) {
    return (one.request.flags & kNotFinite) && one.request.step == version + 1;
  });
  const ServerShard::ClosedStep closed = queue.shard->close(not_finite);
  if (closed.skipped) context_.log_skipped({{"step", version}, {"part", index}});
  for (PendingAnswer& answer : queue.waiting)
    if (answer.request.kind == FrameKind::update)
      for (const auto& [slot, status] : closed.updates)
        if (slot == answer.slot) {
          answer.status = status;
          count_update(slot, status, 0);
        }
  publish(model, index);
  answer_due(model, index);
  if (queue.waiting.empty()) return;
  // Some wait for a step that is later still. Their time begins now, and they go behind whatever came meanwhile.
  queue.since = SteadyClock::now();
  context_.post(index, [this, model, index] { try_close(model, index, false); });
}

// Tells the rest of the server what has become of a shard.
void Steps::publish(const ModelPointer& model, uint32_t index) {
  const ServerShard& shard = *model->queues[index].shard;
  const std::lock_guard lock(context_.mutex);
  model->versions[index] = shard.version();
  model->applied[index] = shard.applied();
  model->skipped[index] = shard.skipped();
  model->bytes[index] = shard.bytes();
  if (shard.role() == ShardRole::pool) return;
  model->tallies[index].clear();
  for (const auto& [slot, progress] : shard.progress()) model->tallies[index][slot] = progress.tally;
  // Once for each step of the model, when its last shard has reached it.
  const uint64_t step = model->step();
  if (status_.reach_step(step) && step % saving_.interval() == 0) saving_.request();
}

void Steps::count_update(uint32_t slot, UpdateStatus status, uint64_t staleness) {
  const std::lock_guard lock(context_.mutex);
  status_.count_update(membership_.find(slot), status, staleness);
}

void Steps::count_step(uint32_t slot, uint32_t shard) {
  const std::lock_guard lock(context_.mutex);
  if (WorkerRecord* worker = membership_.find(slot)) membership_.count_step(*worker, shard);
}

void Steps::set_straggler(uint32_t slot, uint32_t shard, bool straggler) {
  const std::lock_guard lock(context_.mutex);
  if (WorkerRecord* worker = membership_.find(slot)) worker->straggler[shard] = straggler;
}

// ---- What goes down

bool Steps::is_due(const ServerModel& model, uint32_t index, const PendingAnswer& answer) {
  if (answer.version > model.queues[index].shard->version()) return false;
  if (!context_.options.async) return true;
  if (saving_.holds_up(model, index)) return false;
  if (membership_.may_run_ahead(answer.slot, index)) return true;
  // A worker that has held up others until the deadline is not waited for until it is heard of again. The answer goes
  // out at the next look at the queue.
  if (seconds_since(answer.since) > context_.options.deadline_s)
    membership_.stop_waiting_for_slower(answer.slot, index);
  return false;
}

void Steps::answer_due(const ModelPointer& model, uint32_t index) {
  ShardQueue& queue = model->queues[index];
  std::vector<PendingAnswer> due;
  {
    const std::lock_guard lock(context_.mutex);
    std::erase_if(queue.waiting, [&](const PendingAnswer& answer) {
      if (!is_due(*model, index, answer)) return false;
      due.push_back(answer);
      return true;
    });
    model->open[index] = !queue.waiting.empty();
  }
  // Encoding the weights takes time: not under the lock.
  for (const PendingAnswer& answer : due) this->answer(model, answer);
}

void Steps::answer(const ModelPointer& model, const PendingAnswer& answer) {
  const uint32_t index = answer.request.shard;
  ServerShard& shard = *model->queues[index].shard;
  Frame frame{.kind = FrameKind::weights,
              .status = answer.status,
              .shard = index,
              .contributors = shard.contributors(),
              .step = shard.version(),
              .sequence = answer.request.sequence};
  const bool quiet = answer.request.flags & kQuiet;
  const Blob payload = quiet ? nullptr : shard.message_for(answer.request.held, frame);
  if (quiet) frame.flags |= kQuiet;
  {
    const std::lock_guard lock(context_.mutex);
    frame.held = context_.options.checkpoint.empty() ? shard.version() : model->durable[index];
    if (payload) status_.count_down(payload->size());
    if (answer.slot == membership_.buffer_owner()) frame.flags |= kBufferOwner;
    // The worker holds this step's weights now, so this step waits for it.
    if (WorkerRecord* worker = membership_.find(answer.slot); worker && !worker->left) {
      worker->straggler[index] = 0;
      if (index == 0) worker->step = shard.version();
    }
  }
  answer.session->send(frame, payload);
}

// ---- What changes without a message

void Steps::recheck() {
  const ModelPointer model = context_.current_model();
  if (!model) return;
  for (uint32_t p = 0; p < model->layouts.size(); ++p)
    context_.post(p, [this, model, p] {
      try_close(model, p, false);
      if (context_.options.async) answer_due(model, p);
    });
}

void Steps::check_deadlines(const ModelPointer& model, const std::vector<uint32_t>& shards, bool changed) {
  for (uint32_t p : shards)
    context_.post(p, [this, model, p, changed] {
      const ShardQueue& queue = model->queues[p];
      const bool overdue = !queue.waiting.empty() && seconds_since(queue.since) > context_.options.deadline_s;
      if (overdue || changed) try_close(model, p, overdue);
      if (context_.options.async) answer_due(model, p);
    });
}

void Steps::forget_worker(const ModelPointer& model, uint32_t slot) {
  for (uint32_t p = 0; p < model->layouts.size(); ++p)
    context_.post(p, [this, model, p, slot] {
      model->queues[p].shard->forget(slot);
      publish(model, p);
    });
}

}  // namespace gradwire::server
