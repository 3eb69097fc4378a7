// SPDX-License-Identifier: Apache-2.0
#include "server/membership.h"

#include <algorithm>
#include <utility>

namespace gradwire::server {
namespace {

constexpr size_t kMaxRemembered = 4096;  // workers, beyond which those that went away for good are forgotten

}  // namespace

void WorkerRecord::take_report(const nlohmann::json& text) {
  if (const auto found = text.find("loss"); found != text.end() && found->is_number()) loss = found->get<double>();
  if (const auto found = text.find("step"); found != text.end() && found->is_number_unsigned())
    step = found->get<uint64_t>();
}

WorkerRecord* Membership::find(uint32_t slot) {
  const auto found = workers_.find(slot);
  return found == workers_.end() ? nullptr : &found->second;
}

WorkerRecord* Membership::find(const Session* session) {
  const auto slot = slots_.find(session);
  return slot == slots_.end() ? nullptr : find(slot->second);
}

WorkerRecord* Membership::find(const std::string& id) {
  for (auto& [slot, worker] : workers_)
    if (worker.id == id) return &worker;
  return nullptr;
}

uint32_t Membership::present() const {
  return static_cast<uint32_t>(
      std::count_if(workers_.begin(), workers_.end(), [](const auto& one) { return one.second.takes_part(); }));
}

uint32_t Membership::buffer_owner() const {
  for (const auto& [slot, worker] : workers_)
    if (worker.takes_part()) return slot;
  return ~0u;
}

std::optional<double> Membership::loss() const {
  double sum = 0;
  int count = 0;
  for (const auto& [slot, worker] : workers_)
    if (worker.session && worker.loss) {
      sum += *worker.loss;
      ++count;
    }
  return count > 0 ? std::optional(sum / count) : std::nullopt;
}

uint64_t Membership::most_steps(size_t weight_shards) const {
  uint64_t steps = 0;
  for (const auto& [slot, worker] : workers_) steps = std::max<uint64_t>(steps, worker.updates / weight_shards);
  return steps;
}

bool Membership::finished() const {
  return !workers_.empty() && std::all_of(workers_.begin(), workers_.end(),
                                          [](const auto& one) { return one.second.left && !one.second.session; });
}

WorkerRecord& Membership::connect(const std::string& id, const std::string& name, std::shared_ptr<Session> session,
                                  size_t shards) {
  WorkerRecord* worker = find(id);
  if (!worker) {
    WorkerRecord fresh;
    fresh.id = id;
    fresh.slot = next_slot_++;
    fresh.joined = SteadyClock::now();
    worker = &(workers_[fresh.slot] = fresh);
  } else if (worker->session) {
    // The worker noticed that its old connection is dead before the server did.
    worker->session->refuse(Refusal::replaced, "the same worker has connected anew");
    disconnect(*worker);
  }
  worker->name = name;
  worker->left = worker->lost = worker->awaited = false;
  worker->straggler.assign(shards, 0);
  // In asynchronous mode it begins level with the slowest: no worker has to wait for it, and it for none.
  std::vector<uint64_t> least(shards, kNone);
  for (const auto& [slot, other] : workers_)
    if (other.session && slot != worker->slot)
      for (size_t p = 0; p < shards; ++p) least[p] = std::min(least[p], other.clock[p]);
  for (uint64_t& clock : least) clock = clock == kNone ? 0 : clock;
  worker->clock = least;
  worker->connected = worker->last_update = SteadyClock::now();
  slots_[session.get()] = worker->slot;
  worker->session = std::move(session);
  return *worker;
}

void Membership::disconnect(WorkerRecord& worker) {
  slots_.erase(worker.session.get());
  worker.bytes_up += worker.session->bytes_in();
  worker.bytes_down += worker.session->bytes_out();
  worker.session = nullptr;
  worker.away = SteadyClock::now();
}

bool Membership::expire(const std::function<void(const WorkerRecord&)>& lost) {
  bool changed = false;
  for (auto& [slot, worker] : workers_) {
    if (worker.session || worker.left || worker.lost) continue;
    if (worker.awaited && seconds_since(worker.away) > options_.return_s) {
      worker.awaited = false;
      changed = true;
    }
    if (seconds_since(worker.away) > options_.rejoin_s) {
      changed = changed || worker.awaited;
      worker.awaited = false;
      worker.lost = true;
      lost(worker);
    }
  }
  return changed;
}

std::optional<uint32_t> Membership::forget_oldest() {
  if (workers_.size() <= kMaxRemembered) return std::nullopt;
  const auto oldest = std::find_if(workers_.begin(), workers_.end(), [](const auto& one) {
    return !one.second.session && (one.second.left || one.second.lost);
  });
  if (oldest == workers_.end()) return std::nullopt;
  const uint32_t slot = oldest->first;
  workers_.erase(oldest);
  return slot;
}

void Membership::count_step(WorkerRecord& worker, uint32_t shard) {
  most_present_ = std::max(most_present_, present());
  ++worker.clock[shard];
  // A straggler that is heard of again goes on where the others are; otherwise they would wait for it to catch up.
  if (!std::exchange(worker.straggler[shard], 0)) return;
  uint64_t least = kNone;
  for (const auto& [slot, other] : workers_)
    if (other.takes_part() && slot != worker.slot && !other.straggler[shard])
      least = std::min(least, other.clock[shard]);
  if (least != kNone) worker.clock[shard] = std::max(worker.clock[shard], least);
}

bool Membership::may_run_ahead(uint32_t slot, uint32_t shard) const {
  uint64_t slowest = kNone;
  for (const auto& [other, worker] : workers_)
    if (worker.takes_part() && !worker.straggler[shard]) slowest = std::min(slowest, worker.clock[shard]);
  const auto own = workers_.find(slot);
  return own == workers_.end() || slowest == kNone || own->second.clock[shard] <= slowest + options_.staleness;
}

void Membership::stop_waiting_for_slower(uint32_t slot, uint32_t shard) {
  const uint64_t own = workers_.at(slot).clock[shard];
  for (auto& [other, worker] : workers_)
    if (worker.session && other != slot && worker.clock[shard] + options_.staleness < own) worker.straggler[shard] = 1;
}

void Membership::restore(WorkerRecord worker) {
  const uint32_t slot = worker.slot;
  workers_[slot] = std::move(worker);
}

}  // namespace gradwire::server
