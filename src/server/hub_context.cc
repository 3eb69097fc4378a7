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

HubContext::HubContext(HubOptions given)
    : options(completed(std::move(given))), strands(options.threads, kStrands, [this](const char* why) {
        log("internal error", {{"note", why}});
      }) {}

void HubContext::post(uint32_t shard, std::function<void()> work) { strands.post(shard % kStrands, std::move(work)); }

bool LineLimit::allows() {
  const auto now = SteadyClock::now();
  left_ = std::min(most_, left_ + per_second_ * std::chrono::duration<double>(now - counted_).count());
  counted_ = now;
  if (left_ < 1) {
    ++left_out_;
    return false;
  }
  left_ -= 1;
  return true;
}

void HubContext::log(const char* event, nlohmann::json fields) const {
  if (!options.log) return;
  fields["event"] = event;
  const std::lock_guard lock(log_mutex_);
  options.log(fields);
}

void HubContext::log_refusal(const std::string& reason, const std::string& peer, const std::string& words) const {
  log_limited(refusals_, "refused", {{"reason", reason}, {"peer", peer}, {"note", words}});
}

void HubContext::log_saved(nlohmann::json fields) const { log_limited(saves_, "saved", std::move(fields)); }

void HubContext::log_skipped(nlohmann::json fields) const { log_limited(skips_, "skipped", std::move(fields)); }

void HubContext::log_limited(LineLimit& limit, const char* event, nlohmann::json fields) const {
  {
    const std::lock_guard lock(log_mutex_);
    if (!limit.allows()) return;
    if (const uint64_t more = limit.left_out()) fields["left_out"] = more;
  }
  log(event, std::move(fields));
}

std::shared_ptr<ServerModel> HubContext::current_model() {
  const std::lock_guard lock(mutex);
  return model;
}

}  // namespace gradwire::server
