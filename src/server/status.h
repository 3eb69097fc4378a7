// SPDX-License-Identifier: Apache-2.0
// What a server counts, and the status that it shows: one JSON object for `gradwire status`, the page and the metrics.
// docs/server.md names its fields. Every function but count_connection() is called with the hub's mutex held.
#pragma once

#include <array>
#include <atomic>
#include <deque>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "core/clock.h"
#include "server/hub_context.h"
#include "server/ledger.h"
#include "server/membership.h"

namespace gradwire::server {

class Saving;

class Status {
 public:
  Status(const HubContext& context, const Membership& membership) : context_(context), membership_(membership) {}

  void count_refusal(const std::string& why) { ++refused_[why]; }
  void count_connection(int change) { connections_ += change; }
  void count_up(uint64_t bytes) { bytes_up_ += bytes; }
  void count_down(uint64_t bytes) { bytes_down_ += bytes; }
  void count_update(WorkerRecord* worker, UpdateStatus status, uint64_t staleness);  // null: it was forgotten
  bool reach_step(uint64_t step);  // false if the server was there already

  nlohmann::json report(const Saving& saving) const;
  // In words, why the training has failed: it has skipped more than half of its steps. Empty if it has not.
  std::string failure() const;

  // What a checkpoint keeps of it.
  void save(nlohmann::json& extra) const;
  void restore(const nlohmann::json& extra, uint64_t step);

 private:
  nlohmann::json worker_list() const;
  nlohmann::json worker_entry(const WorkerRecord& worker) const;
  nlohmann::json traffic() const;
  nlohmann::json refusals() const;
  nlohmann::json staleness() const;
  nlohmann::json step_seconds() const;
  nlohmann::json ledger() const;
  const char* state_name(const Saving& saving) const;
  double steps_per_second() const;

  const HubContext& context_;
  const Membership& membership_;
  const SteadyClock::time_point started_ = SteadyClock::now();
  uint64_t bytes_up_ = 0, bytes_down_ = 0;  // of messages
  uint64_t step_ = 0;
  uint64_t staleness_sum_ = 0, staleness_count_ = 0, staleness_max_ = 0;
  std::map<std::string, uint64_t> refused_;
  std::vector<std::pair<uint64_t, double>> losses_;
  uint64_t loss_stride_ = 1;                                             // every how many steps a loss is kept
  std::deque<std::pair<SteadyClock::time_point, uint64_t>> step_times_;  // of the last minute
  // How long steps took, from the one before: counts by upper bound (kStepBounds), the last one for all beyond.
  static constexpr std::array kStepBounds = {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25,
                                             0.5,   1.0,    2.5,   5.0,  10.0,  30.0, 60.0};
  std::array<uint64_t, kStepBounds.size() + 1> step_counts_{};
  double step_sum_ = 0;
  std::optional<SteadyClock::time_point> last_step_;
  std::atomic<int> connections_{0};
};

}  // namespace gradwire::server
