// SPDX-License-Identifier: Apache-2.0
// When a checkpoint is made, and by whom. Shards are independent: each is copied by its own strand between two of its
// steps, together with the table of what was applied of which worker, and a thread of its own writes the copies while
// training goes on. Workers are then told what is on disk, since they keep everything that they sent until it is.
//
// A disk that fails is tried again every second. When three checkpoints are overdue, steps wait for the disk, because
// workers cannot keep more.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <thread>

#include "server/checkpoint_lock.h"
#include "server/hub_context.h"
#include "server/membership.h"
#include "server/model_state.h"
#include "server/status.h"

namespace gradwire::server {

class Saving {
 public:
  // `on_saved` is called by the writing thread, without the lock: steps may have waited for the disk.
  Saving(HubContext& context, Membership& membership, Status& status, std::function<void()> on_saved);
  ~Saving();

  void load();   // locks the checkpoint, and loads the newest one if there is any; before start(); Error
  void start();  // the writing thread
  void stop();   // ends it, without another checkpoint

  // These are called with the hub's mutex held.
  void request();  // a checkpoint of what there is now
  void request_if_overdue(const ServerModel& model);
  uint64_t interval() const;  // in versions of a shard
  bool holds_up(const ServerModel& model, uint32_t shard) const;
  void drain(std::unique_lock<std::mutex>& lock);  // one more checkpoint, and waits until it is written or has failed
  nlohmann::json report() const;

 private:
  void write_loop();
  std::string write(const ServerModel& model, const ModelCopy& copy, uint64_t& bytes) const;  // the error, or nothing
  void succeeded(ServerModel& model, const ModelCopy& copy, uint64_t bytes);
  void failed(const std::string& error);
  bool busy() const { return copying_ || writing_; }

  HubContext& context_;
  Membership& membership_;
  Status& status_;
  std::function<void()> on_saved_;
  std::optional<CheckpointLock> lock_;
  std::condition_variable wake_;
  std::shared_ptr<ModelCopy> copying_;  // strands are still copying their shards
  std::shared_ptr<ModelCopy> writing_;  // complete
  bool again_ = false;                  // another one was requested meanwhile
  bool retrying_ = false;               // the disk failed, and is given a second
  bool stop_ = false;
  uint64_t saved_ = 0, failed_ = 0, bytes_ = 0;
  std::string error_;
  std::optional<SteadyClock::time_point> last_;
  std::thread writer_;
};

}  // namespace gradwire::server
