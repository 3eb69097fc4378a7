// SPDX-License-Identifier: Apache-2.0
// The status: one JSON object for `gradwire status`, the page, and the metrics. docs/server.md names its fields.
#include <algorithm>
#include <cmath>

#include "server/hub.h"

namespace gradwire::server {
namespace {

constexpr size_t kGoneShown = 50;

nlohmann::json number(std::optional<double> value) {
  return value && std::isfinite(*value) ? nlohmann::json(*value) : nlohmann::json(nullptr);
}

}  // namespace

nlohmann::json Hub::status() const {
  const Lock lock(mutex_);
  const bool ready = model_ && model_->whole();
  const uint32_t here = present();
  uint64_t step = 0, durable = 0;
  uint64_t memory = 0;
  if (model_) {
    step = model_->step();
    durable = *std::min_element(model_->durable.begin(),
                                model_->durable.begin() + static_cast<std::ptrdiff_t>(model_->weight_parts()));
    for (uint64_t bytes : model_->bytes) memory += bytes;
  }
  nlohmann::json list = nlohmann::json::array(), gone = nlohmann::json::array();
  double loss = 0;
  int losses = 0;
  for (const auto& [slot, member] : members_) {
    const bool lagging =
        member.session &&
        std::any_of(member.lags.begin(),
                    member.lags.begin() + static_cast<std::ptrdiff_t>(model_ ? model_->weight_parts() : 0),
                    [](char one) { return one; });
    nlohmann::json entry = {{"id", member.id.substr(0, 8)},
                            {"name", member.name},
                            {"peer", member.session ? member.session->peer() : ""},
                            {"state", member.left       ? "left"
                                      : member.lost     ? "lost"
                                      : !member.session ? "gone"
                                      : lagging         ? "lagging"
                                                        : "present"},
                            {"step", member.step},
                            {"staleness", member.staleness},
                            {"lag_s", seconds_since(member.last_update)},
                            {"updates", model_ ? member.updates / std::max<size_t>(1, model_->weight_parts()) : 0},
                            {"late", member.late},
                            {"loss", number(member.loss)},
                            {"bytes_up", member.bytes_up + (member.session ? member.session->bytes_in() : 0)},
                            {"bytes_down", member.bytes_down + (member.session ? member.session->bytes_out() : 0)},
                            {"joined_s", seconds_since(member.joined)}};
    (member.session ? list : gone).push_back(std::move(entry));
    if (member.session && member.loss) {
      loss += *member.loss;
      ++losses;
    }
  }
  for (size_t i = gone.size() > kGoneShown ? gone.size() - kGoneShown : 0; i < gone.size(); ++i)
    list.push_back(gone[i]);
  Ledger ledger;
  if (model_)
    for (size_t p = 0; p < model_->weight_parts(); ++p) {
      ledger.applied += model_->applied[p];
      for (const auto& [slot, tally] : model_->tallies[p]) {
        ledger.computed += tally.computed;
        ledger.squares += tally.squares;
        const auto member = members_.find(slot);
        (member == members_.end() || member->second.lost ? ledger.lost : ledger.held) += tally.residual;
      }
    }
  double pace = 0;
  if (pace_.size() > 1) {
    const double seconds = std::chrono::duration<double>(pace_.back().first - pace_.front().first).count();
    if (seconds > 0 && seconds_since(pace_.back().first) < 60)
      pace = static_cast<double>(pace_.back().second - pace_.front().second) / seconds;
  }
  nlohmann::json curve = nlohmann::json::array();
  for (const auto& [at, value] : losses_) curve.push_back({at, number(value)});
  const auto refused = [this](const char* why) {
    const auto found = refused_.find(why);
    return found == refused_.end() ? 0 : found->second;
  };
  const bool held_up = model_ && disk_holds_us_up(*model_, 0);
  const uint64_t fp32 = model_ ? 4 * model_->signature.elements() : 0;
  uint64_t updates = 0;
  for (const auto& [slot, member] : members_) updates += member.updates;
  if (model_) updates /= std::max<size_t>(1, model_->weight_parts());
  return {
      {"version", 1},
      {"name", "gradwire"},
      {"mode", options_.async ? "async" : "sync"},
      {"state", stopping_                                  ? "stopping"
                : !ready                                   ? "waiting for the first worker"
                : held_up                                  ? "waiting for the disk"
                : here < options_.min_workers || here == 0 ? "waiting for workers"
                                                           : "training"},
      {"uptime_s", seconds_since(started_)},
      {"step", step},
      {"durable_step", options_.checkpoint.empty() ? nlohmann::json(nullptr) : nlohmann::json(durable)},
      {"steps_per_s", pace},
      {"loss", losses > 0 ? number(loss / losses) : nlohmann::json(nullptr)},
      {"losses", curve},
      {"model",
       {{"tensors", model_ ? model_->signature.parameters.size() : 0},
        {"elements", model_ ? model_->signature.elements() : 0},
        {"parts", model_ ? model_->cuts.size() : 0}}},
      {"up", model_ ? model_->signature.up : ""},
      {"down", model_ ? model_->signature.down : ""},
      {"send", model_ && model_->signature.sends_updates ? "updates" : "weights"},
      {"workers", {{"present", here}, {"min", options_.min_workers}, {"max", options_.max_workers}, {"list", list}}},
      {"bytes", {{"up", bytes_up_}, {"down", bytes_down_}, {"fp32_up", fp32 * updates}, {"fp32_down", fp32 * updates}}},
      {"staleness",
       {{"mean", staleness_count_ ? static_cast<double>(staleness_sum_) / static_cast<double>(staleness_count_) : 0.0},
        {"max", staleness_max_},
        {"bound", options_.async ? nlohmann::json(std::max(1u, here) * (2 * options_.staleness + 1))
                                 : nlohmann::json(nullptr)}}},
      {"ledger",
       {{"computed", ledger.computed},
        {"applied", ledger.applied},
        {"held", ledger.held},
        {"lost", ledger.lost},
        {"difference", ledger.difference()},
        {"magnitude", ledger.magnitude()},
        {"relative", ledger.relative()}}},
      {"refused",
       {{"late", refused("late")},
        {"corrupt", refused("corrupt")},
        {"token", refused("token")},
        {"signature", refused("signature")},
        {"version", refused("version")},
        {"full", refused("full")},
        {"oversize", refused("oversize")}}},
      {"checkpoint",
       {{"path", options_.checkpoint.empty() ? nlohmann::json(nullptr) : nlohmann::json(options_.checkpoint)},
        {"every", options_.save_every},
        {"saved", saved_},
        {"failed", save_failed_},
        {"last_error", save_error_.empty() ? nlohmann::json(nullptr) : nlohmann::json(save_error_)},
        {"last_s", save_time_ ? nlohmann::json(seconds_since(*save_time_)) : nlohmann::json(nullptr)},
        {"bytes", save_bytes_}}},
      {"memory_bytes", memory},
      {"connections", connections_.load()}};
}

}  // namespace gradwire::server
