// SPDX-License-Identifier: Apache-2.0
// What the objects of the hub share: the options, the lock, the current model, the strands and the journal. hub.h says
// in which order locks are taken.
#pragma once

#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "core/clock.h"
#include "server/hub_options.h"
#include "server/server_model.h"
#include "server/strands.h"

namespace gradwire::server {

// How many lines of one kind the journal takes: some at once, then so many per second.
class LineLimit {
 public:
  LineLimit(double at_once, double per_second) : most_(at_once), per_second_(per_second), left_(at_once) {}
  bool allows();  // false: this one is left out
  uint64_t left_out() { return std::exchange(left_out_, 0); }

 private:
  const double most_, per_second_;
  double left_;
  SteadyClock::time_point counted_ = SteadyClock::now();
  uint64_t left_out_ = 0;
};

class HubContext {
 public:
  explicit HubContext(HubOptions given);

  // Runs `work` on the strand of a shard, after everything that was posted there before.
  void post(uint32_t shard, std::function<void()> work);
  void log(const char* event, nlohmann::json fields) const;
  // A peer was refused. A flood of refusals is not a flood of lines: the next line says how many were left out.
  void log_refusal(const std::string& reason, const std::string& peer, const std::string& words) const;
  void log_saved(nlohmann::json fields) const;    // likewise: a line in ten seconds
  void log_skipped(nlohmann::json fields) const;  // likewise: a line a second
  std::shared_ptr<ServerModel> current_model();   // takes the lock

  HubOptions options;  // changes only while the hub is being constructed
  mutable std::mutex mutex;
  // Guarded by the mutex.
  std::shared_ptr<ServerModel> model;  // null until a worker or a checkpoint brings one
  bool draining = false;               // no step closes any more: the last checkpoint is being made
  bool stopping = false;

 private:
  void log_limited(LineLimit& limit, const char* event, nlohmann::json fields) const;

  mutable std::mutex log_mutex_;
  mutable LineLimit refusals_{8, 1.0}, saves_{1, 0.1}, skips_{8, 1.0};

 public:
  Strands strands;  // the last member: its threads use the others
};

}  // namespace gradwire::server
