// SPDX-License-Identifier: Apache-2.0
// Updates, and steps that close. In synchronous mode a part's step closes when every worker that it waits for has sent its
// update, or when the deadline has passed; a worker is waited for from the moment it is given the step's weights until it
// says that it will send nothing for them (a pull of a later step) or misses a deadline. Without steps an update is applied
// when it comes, and an answer is held back while its worker is too far ahead of the slowest (stale-synchronous, Ho et al.).
#include <algorithm>
#include <cmath>

#include "gradwire/error.h"
#include "server/hub.h"

namespace gradwire::server {
namespace {

constexpr double kWarmSteps = 60;  // seconds over which the pace is measured

}  // namespace

// Only who brings a part's first weights may ask for them before all are here.
bool Hub::refuse_unready(const Model& model, uint32_t part, Session& session) {
  if (model.desks[part].part->ready()) return false;
  count_refusal("corrupt");
  session.refuse(Refusal::malformed, "bad frame: there are no weights yet");
  return true;
}

void Hub::take_update(const std::shared_ptr<Session>& session, uint32_t slot, const Frame& frame, Blob payload,
                      std::function<void()> done) {
  std::shared_ptr<Model> model;
  {
    const Lock lock(mutex_);
    model = model_;
    if (!model) return done();
    bytes_up_ += payload->size();
  }
  post(frame.part, [this, model, session, slot, frame, payload = std::move(payload), done = std::move(done)]() mutable {
    Desk& desk = model->desks[frame.part];
    Part& part = *desk.part;
    if (refuse_unready(*model, frame.part, *session)) return done();
    const uint64_t staleness = part.version() > frame.step ? part.version() - frame.step : 0;
    Waiter waiter{slot, session, frame, 0, Verdict::none, Clock::now()};
    if (!options_.async) {
      waiter.verdict = part.offer(slot, frame, std::move(payload));
      if (waiter.verdict == Verdict::none) {
        waiter.version = part.version() + 1;
        // A pool's round may have moved on, with what was offered for it.
        std::erase_if(desk.waiters, [&](const Waiter& other) {
          return other.request.kind == Kind::update && !part.offered(other.slot);
        });
        for (Waiter& other : desk.waiters)
          if (other.request.kind == Kind::update) other.version = part.version() + 1;
        wait(*model, frame.part, waiter);
        {
          const Lock lock(mutex_);
          if (auto member = members_.find(slot); member != members_.end()) member->second.lags[frame.part] = 0;
        }
        done();
        return try_close(model, frame.part, false);
      }
    } else {
      uint64_t allowed;
      uint32_t workers;
      {
        const Lock lock(mutex_);
        workers = std::max(1u, present());
        allowed = workers * (2 * options_.staleness + 1);
      }
      waiter.verdict = part.knows(slot, frame.sequence) ? Verdict::again
                       : staleness > allowed            ? Verdict::late
                                                        : part.apply(slot, frame, payload, workers);
      if (waiter.verdict == Verdict::applied) note_part(model, frame.part);
      const Lock lock(mutex_);
      if (auto member = members_.find(slot); member != members_.end()) take_clock(member->second, frame.part);
    }
    count_verdict(slot, waiter.verdict, staleness);
    done();
    if (!options_.async) return answer(model, frame.part, waiter);
    wait(*model, frame.part, waiter);
    answer_due(model, frame.part);
  });
}

void Hub::take_pull(const std::shared_ptr<Session>& session, uint32_t slot, const Frame& frame,
                    std::function<void()> done) {
  std::shared_ptr<Model> model;
  {
    const Lock lock(mutex_);
    model = model_;
    if (!model) return done();
  }
  post(frame.part, [this, model, session, slot, frame, done = std::move(done)] {
    Desk& desk = model->desks[frame.part];
    if (refuse_unready(*model, frame.part, *session)) return done();
    const Waiter waiter{slot, session, frame, frame.step, Verdict::none, Clock::now()};
    if (!options_.async && frame.step > desk.part->version() && frame.step - desk.part->version() > kMaxAhead) {
      count_refusal("corrupt");
      session->refuse(Refusal::malformed, "bad frame: step is further ahead than any worker can be");
      return done();
    }
    done();
    if (options_.async) {  // a step without an update: those who wait for this worker see that it goes on
      const Lock lock(mutex_);
      if (auto member = members_.find(slot); member != members_.end()) take_clock(member->second, frame.part);
    }
    if (options_.async || frame.step <= desk.part->version()) return answer(model, frame.part, waiter);
    {
      const Lock lock(mutex_);
      if (auto member = members_.find(slot); member != members_.end()) member->second.lags[frame.part] = 1;
    }
    wait(*model, frame.part, waiter);
    try_close(model, frame.part, false);
  });
}

// One answer a worker and part: who asks again has forgotten the question before.
void Hub::wait(Model& model, uint32_t part, const Waiter& waiter) {
  std::vector<Waiter>& waiters = model.desks[part].waiters;
  if (waiters.empty()) model.desks[part].since = Clock::now();
  std::erase_if(waiters, [&](const Waiter& one) { return one.slot == waiter.slot; });
  waiters.push_back(waiter);
  const Lock lock(mutex_);
  model.open[part] = 1;
}

void Hub::take_handover(const std::shared_ptr<Session>& session, uint32_t slot, const Frame& frame, Blob payload,
                        std::function<void()> done) {
  std::shared_ptr<Model> model;
  uint32_t workers;
  {
    const Lock lock(mutex_);
    model = model_;
    if (!model) return done();
    workers = present();
    bytes_up_ += payload->size();
    if (auto member = members_.find(slot); member != members_.end())
      member->second.lags[frame.part] = 1;  // nothing more will come
  }
  post(frame.part, [this, model, session, slot, frame, workers, payload = std::move(payload), done = std::move(done)] {
    Desk& desk = model->desks[frame.part];
    if (refuse_unready(*model, frame.part, *session)) return done();
    Frame reply{.kind = Kind::weights, .part = frame.part, .step = desk.part->version(), .sequence = frame.sequence};
    reply.verdict =
        desk.part->role() == Role::weights ? desk.part->take_over(slot, frame, payload, workers) : Verdict::corrupt;
    note_part(model, frame.part);
    reply.held = options_.checkpoint.empty() ? desk.part->version() : 0;
    done();
    session->send(reply, nullptr);
    try_close(model, frame.part, false);
  });
}

// Without steps a version is one update, and all workers' together make what elsewhere is a step.
uint64_t Hub::save_interval() const { return options_.save_every * (options_.async ? std::max(1u, present()) : 1); }

// Whether it fails or is slow is the same to workers, who keep everything until it is on disk.
bool Hub::disk_holds_us_up(const Model& model, uint32_t part) const {
  return !options_.checkpoint.empty() && model.versions[part] >= model.durable[part] + 3 * save_interval() + 1;
}

void Hub::try_close(const std::shared_ptr<Model>& model, uint32_t index, bool overdue) {
  Desk& desk = model->desks[index];
  Part& part = *desk.part;
  if (options_.async || (part.offers() == 0 && desk.waiters.empty())) return;
  {
    const Lock lock(mutex_);
    if (model != model_ || stopping_ || draining_ || present() < options_.min_workers ||
        disk_holds_us_up(*model, index))
      return;
    std::vector<uint32_t> missing;
    if (part.offers() == 0) {
      // Nobody has anything for this step, and everybody wants a later one: after a restart the only worker that had may
      // be dead.
      for (const auto& [slot, member] : members_) {
        const bool waits = std::any_of(desk.waiters.begin(), desk.waiters.end(),
                                       [own = slot](const Waiter& one) { return one.slot == own; });
        if (member.awaited || (member.session && !member.left && !waits && !overdue)) return;
      }
    }
    for (const auto& [slot, member] : members_)
      if (((member.session && !member.left) || member.awaited) && !member.lags[index] && !part.offered(slot))
        missing.push_back(slot);
    if (!missing.empty() && !overdue) return;
    for (uint32_t slot : missing) {
      const Member& member = members_.at(slot);
      // After a restart they have a time of their own, and whoever has just come has as much time as others had.
      if (member.awaited || seconds_since(member.here) <= options_.deadline_s) return;
    }
    for (uint32_t slot : missing) {
      Member& member = members_.at(slot);
      member.lags[index] = 1;
      for (size_t p = model->weight_parts(); p < model->cuts.size(); ++p) member.lags[p] = 1;
      say("late",
          {{"worker", member.id.substr(0, 8)}, {"name", member.name}, {"step", part.version()}, {"part", index}});
    }
  }
  const Part::Closed closed = part.close();
  for (Waiter& waiter : desk.waiters)
    if (waiter.request.kind == Kind::update)
      for (const auto& [slot, verdict] : closed.verdicts)
        if (slot == waiter.slot) {
          waiter.verdict = verdict;
          count_verdict(slot, verdict, 0);
        }
  note_part(model, index);
  answer_due(model, index);
  if (desk.waiters.empty()) return;
  desk.since = Clock::now();
  post(index, [this, model, index] { try_close(model, index, false); });
}

// What status, checkpoint and ledger know of a part.
void Hub::note_part(const std::shared_ptr<Model>& model, uint32_t index) {
  const Part& part = *model->desks[index].part;
  const Lock lock(mutex_);
  model->versions[index] = part.version();
  model->applied[index] = part.applied();
  model->bytes[index] = part.bytes();
  if (part.role() == Role::weights) {
    model->tallies[index].clear();
    for (const auto& [slot, row] : part.rows()) model->tallies[index][slot] = row.tally;
  }
  // The rest is once a step, when the last part has closed it.
  const uint64_t step = model->step();
  if (part.role() == Role::pool || step == step_) return;
  step_ = step;
  const Clock::time_point now = Clock::now();
  pace_.emplace_back(now, step);
  while (pace_.size() > 2 && std::chrono::duration<double>(now - pace_.front().first).count() > kWarmSteps)
    pace_.pop_front();
  double sum = 0;
  int count = 0;
  for (const auto& [slot, member] : members_)
    if (member.session && member.loss) {
      sum += *member.loss;
      ++count;
    }
  if (count > 0 && std::isfinite(sum) && step % loss_stride_ == 0) {
    losses_.emplace_back(step, sum / count);
    if (losses_.size() > 2000) {  // every other one, from now on at twice the distance
      for (size_t i = 0; i < losses_.size() / 2; ++i) losses_[i] = losses_[2 * i + 1];
      losses_.resize(losses_.size() / 2);
      loss_stride_ *= 2;
    }
  }
  if (step % save_interval() == 0) want_save();
}

void Hub::count_verdict(uint32_t slot, Verdict verdict, uint64_t staleness) {
  const Lock lock(mutex_);
  auto found = members_.find(slot);
  if (verdict == Verdict::late) ++refused_["late"];
  if (verdict == Verdict::corrupt) ++refused_["corrupt"];
  if (found == members_.end()) return;
  Member& member = found->second;
  if (verdict == Verdict::late) ++member.late;
  if (verdict != Verdict::applied) return;
  ++member.updates;
  member.last_update = Clock::now();
  member.staleness = staleness;
  staleness_sum_ += staleness;
  ++staleness_count_;
  staleness_max_ = std::max(staleness_max_, staleness);
}

// One more of its steps. Who was not waited for any more goes on where the others are.
void Hub::take_clock(Member& member, uint32_t part) {
  ++member.clock[part];
  if (!std::exchange(member.lags[part], 0)) return;
  uint64_t least = kNone;
  for (const auto& [slot, other] : members_)
    if (other.session && !other.left && slot != member.slot && !other.lags[part])
      least = std::min(least, other.clock[part]);
  if (least != kNone) member.clock[part] = std::max(member.clock[part], least);
}

bool Hub::may_run_ahead(uint32_t part, uint32_t slot) const {
  uint64_t slowest = kNone;
  for (const auto& [other, member] : members_)
    if (member.session && !member.left && !member.lags[part]) slowest = std::min(slowest, member.clock[part]);
  const auto own = members_.find(slot);
  return own == members_.end() || slowest == kNone || own->second.clock[part] <= slowest + options_.staleness;
}

void Hub::answer_due(const std::shared_ptr<Model>& model, uint32_t index) {
  Desk& desk = model->desks[index];
  std::vector<Waiter> due;
  {
    const Lock lock(mutex_);
    std::erase_if(desk.waiters, [&](const Waiter& waiter) {
      bool ready = waiter.version <= desk.part->version();
      if (ready && options_.async && disk_holds_us_up(*model, index)) return false;
      if (ready && options_.async && !may_run_ahead(index, waiter.slot)) {
        ready = false;
        if (seconds_since(waiter.since) > options_.deadline_s) {
          // Whoever holds others up for so long is not waited for until it is heard of again.
          for (auto& [slot, member] : members_)
            if (member.session && slot != waiter.slot &&
                member.clock[index] + options_.staleness < members_.at(waiter.slot).clock[index])
              member.lags[index] = 1;
        }
      }
      if (ready) due.push_back(waiter);
      return ready;
    });
    model->open[index] = !desk.waiters.empty();
  }
  for (const Waiter& waiter : due) answer(model, index, waiter);
}

void Hub::answer(const std::shared_ptr<Model>& model, uint32_t index, const Waiter& waiter) {
  Part& part = *model->desks[index].part;
  Frame frame{.kind = Kind::weights,
              .verdict = waiter.verdict,
              .part = index,
              .contributors = part.contributors(),
              .step = part.version(),
              .sequence = waiter.request.sequence};
  const bool quiet = waiter.request.flags & kQuiet;
  const Blob payload = quiet ? nullptr : part.down(waiter.request.held, frame);
  if (quiet) frame.flags |= kQuiet;
  {
    const Lock lock(mutex_);
    frame.held = options_.checkpoint.empty() ? part.version() : model->durable[index];
    if (payload) bytes_down_ += payload->size();
    if (waiter.slot == keeper()) frame.flags |= kKeeper;
    // It holds this step's weights now, so this step waits for it.
    if (auto member = members_.find(waiter.slot); member != members_.end() && !member->second.left) {
      member->second.lags[index] = 0;
      if (index == 0) member->second.step = part.version();
    }
  }
  waiter.session->send(frame, payload);
}

}  // namespace gradwire::server
