// SPDX-License-Identifier: Apache-2.0
// What the objects of the hub share: the options, the lock, the current model, the strands and the journal. hub.h says
// in which order locks are taken.
#pragma once

#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>

#include "server/hub_options.h"
#include "server/server_model.h"
#include "server/strands.h"

namespace gradwire::server {

class HubContext {
 public:
  explicit HubContext(HubOptions given);

  // Runs `work` on the strand of a shard, after everything that was posted there before.
  void post(uint32_t shard, std::function<void()> work);
  void log(const char* event, nlohmann::json fields) const;
  std::shared_ptr<ServerModel> current_model();  // takes the lock

  HubOptions options;  // changes only while the hub is being constructed
  mutable std::mutex mutex;
  // Guarded by the mutex.
  std::shared_ptr<ServerModel> model;  // null until a worker or a checkpoint brings one
  bool draining = false;               // no step closes any more: the last checkpoint is being made
  bool stopping = false;

  Strands strands;

 private:
  mutable std::mutex log_mutex_;
};

}  // namespace gradwire::server
