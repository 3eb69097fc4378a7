// SPDX-License-Identifier: Apache-2.0
#include "server/hub_context.h"

#include <algorithm>

namespace gradwire::server {
namespace {

constexpr size_t kStrands = 4096;  // with more shards than that, some share a strand

HubOptions completed(HubOptions options) {
  if (options.threads <= 0) options.threads = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  return options;
}

}  // namespace

HubContext::HubContext(HubOptions given) : options(completed(std::move(given))), strands(options.threads, kStrands) {}

void HubContext::post(uint32_t shard, std::function<void()> work) { strands.post(shard % kStrands, std::move(work)); }

void HubContext::log(const char* event, nlohmann::json fields) const {
  if (!options.log) return;
  fields["event"] = event;
  const std::lock_guard lock(log_mutex_);
  options.log(fields);
}

std::shared_ptr<ServerModel> HubContext::current_model() {
  const std::lock_guard lock(mutex);
  return model;
}

}  // namespace gradwire::server
