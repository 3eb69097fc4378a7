// SPDX-License-Identifier: Apache-2.0
#include "server/status.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "collective/feedback_rule.h"
#include "server/machine.h"
#include "server/saving.h"

namespace gradwire::server {
namespace {

using nlohmann::json;

constexpr size_t kAwayShown = 50;     // workers that are not connected; the page and its readers need no more
constexpr double kSpeedSeconds = 60;  // over which the speed is measured
constexpr size_t kMaxLosses = 2000;

// JSON has no number for what is not finite.
json number(std::optional<double> value) { return value && std::isfinite(*value) ? json(*value) : json(nullptr); }

}  // namespace

void Status::count_update(WorkerRecord* worker, UpdateStatus status, uint64_t staleness) {
  if (status == UpdateStatus::late) ++refused_["late"];
  if (status == UpdateStatus::corrupt) ++refused_["corrupt"];
  if (!worker) return;
  if (status == UpdateStatus::late) ++worker->late;
  if (status != UpdateStatus::applied) return;
  ++worker->updates;
  worker->last_update = SteadyClock::now();
  worker->staleness = staleness;
  staleness_sum_ += staleness;
  ++staleness_count_;
  staleness_max_ = std::max(staleness_max_, staleness);
}

bool Status::reach_step(uint64_t step) {
  if (step == step_) return false;
  step_ = step;
  const SteadyClock::time_point now = SteadyClock::now();
  if (last_step_) {
    const double took = std::chrono::duration<double>(now - *last_step_).count();
    const auto bound = std::lower_bound(kStepBounds.begin(), kStepBounds.end(), took);
    ++step_counts_[static_cast<size_t>(bound - kStepBounds.begin())];
    step_sum_ += took;
  }
  last_step_ = now;
  step_times_.emplace_back(now, step);
  while (step_times_.size() > 2 &&
         std::chrono::duration<double>(now - step_times_.front().first).count() > kSpeedSeconds)
    step_times_.pop_front();
  const std::optional<double> loss = membership_.loss();
  if (!loss || !std::isfinite(*loss) || step % loss_stride_ != 0) return true;
  losses_.emplace_back(step, *loss);
  if (losses_.size() > kMaxLosses) {
    // The curve is bounded: every other point goes, and from now on points come at twice the distance.
    for (size_t i = 0; i < losses_.size() / 2; ++i) losses_[i] = losses_[2 * i + 1];
    losses_.resize(losses_.size() / 2);
    loss_stride_ *= 2;
  }
  return true;
}

void Status::save(json& extra) const {
  json losses = json::array();
  for (const auto& [step, loss] : losses_) losses.push_back({step, loss});
  extra["bytes_up"] = bytes_up_;
  extra["bytes_down"] = bytes_down_;
  extra["losses"] = std::move(losses);
}

void Status::restore(const json& extra, uint64_t step) {
  bytes_up_ = extra.at("bytes_up").get<uint64_t>();
  bytes_down_ = extra.at("bytes_down").get<uint64_t>();
  for (const json& one : extra.at("losses")) losses_.emplace_back(one.at(0).get<uint64_t>(), one.at(1).get<double>());
  step_ = step;
}

json Status::worker_entry(const WorkerRecord& worker) const {
  const ServerModel* model = context_.model.get();
  const size_t shards = model ? model->weight_shards() : 0;
  const bool lagging = worker.session && std::any_of(worker.straggler.begin(),
                                                     worker.straggler.begin() + static_cast<std::ptrdiff_t>(shards),
                                                     [](char one) { return one; });
  return {{"id", worker.id.substr(0, 8)},
          {"name", worker.name},
          {"peer", worker.session ? worker.session->peer() : ""},
          {"state", worker.left       ? "left"
                    : worker.lost     ? "lost"
                    : !worker.session ? "gone"
                    : lagging         ? "lagging"
                                      : "present"},
          {"step", worker.step},
          {"staleness", worker.staleness},
          {"lag_s", seconds_since(worker.last_update)},
          {"updates", model ? worker.updates / std::max<size_t>(1, shards) : 0},
          {"late", worker.late},
          {"loss", number(worker.loss)},
          {"bytes_up", worker.bytes_up + (worker.session ? worker.session->bytes_in() : 0)},
          {"bytes_down", worker.bytes_down + (worker.session ? worker.session->bytes_out() : 0)},
          {"joined_s", seconds_since(worker.joined)}};
}

// Those that are connected first, then the latest of the others.
json Status::worker_list() const {
  json list = json::array(), away = json::array();
  for (const auto& [slot, worker] : membership_.all()) (worker.session ? list : away).push_back(worker_entry(worker));
  for (size_t i = away.size() > kAwayShown ? away.size() - kAwayShown : 0; i < away.size(); ++i)
    list.push_back(std::move(away[i]));
  return list;
}

json Status::traffic() const {
  const ServerModel* model = context_.model.get();
  uint64_t updates = 0;
  for (const auto& [slot, worker] : membership_.all()) updates += worker.updates;
  if (model) updates /= std::max<size_t>(1, model->weight_shards());
  const uint64_t fp32 = model ? 4 * model->signature.elements() * updates : 0;
  return {{"up", bytes_up_}, {"down", bytes_down_}, {"fp32_up", fp32}, {"fp32_down", fp32}};
}

json Status::refusals() const {
  json counts;
  for (const char* why :
       {"late", "corrupt", "token", "signature", "version", "full", "oversize", "slow", "calls", "bench"}) {
    const auto found = refused_.find(why);
    counts[why] = found == refused_.end() ? 0 : found->second;
  }
  return counts;
}

json Status::staleness() const {
  const HubOptions& options = context_.options;
  const double count = static_cast<double>(std::max<uint64_t>(1, staleness_count_));
  return {{"mean", static_cast<double>(staleness_sum_) / count},
          {"max", staleness_max_},
          {"sum", staleness_sum_},
          {"updates", staleness_count_},
          {"bound", options.async ? json(membership_.most_present() * (2 * options.staleness + 1)) : json(nullptr)}};
}

json Status::step_seconds() const {
  json bounds = json::array();
  uint64_t count = 0;
  for (size_t i = 0; i < kStepBounds.size(); ++i) bounds.push_back({kStepBounds[i], count += step_counts_[i]});
  return {{"at_most", std::move(bounds)}, {"sum", step_sum_}, {"count", count + step_counts_.back()}};
}

json Status::ledger() const {
  Ledger ledger;
  if (const ServerModel* model = context_.model.get())
    for (size_t p = 0; p < model->weight_shards(); ++p) {
      ledger.applied += model->applied[p];
      for (const auto& [slot, tally] : model->tallies[p]) {
        ledger.computed += tally.computed;
        ledger.squares += tally.squares;
        // A worker that was forgotten had left or was lost before.
        const auto worker = membership_.all().find(slot);
        (worker == membership_.all().end() || worker->second.lost ? ledger.lost : ledger.held) += tally.residual;
      }
    }
  return {{"computed", ledger.computed},  {"applied", ledger.applied},         {"held", ledger.held},
          {"lost", ledger.lost},          {"difference", ledger.difference()}, {"magnitude", ledger.magnitude()},
          {"relative", ledger.relative()}};
}

const char* Status::state_name(const Saving& saving) const {
  const ServerModel* model = context_.model.get();
  const uint32_t present = membership_.present();
  if (context_.stopping) return "stopping";
  if (!model || !model->whole()) return "waiting for the first worker";
  if (saving.holds_up(*model, 0)) return "waiting for the disk";
  if (present < context_.options.min_workers || present == 0) return "waiting for workers";
  return "training";
}

double Status::steps_per_second() const {
  if (step_times_.size() < 2 || seconds_since(step_times_.back().first) >= kSpeedSeconds) return 0;
  const double seconds = std::chrono::duration<double>(step_times_.back().first - step_times_.front().first).count();
  return seconds > 0 ? static_cast<double>(step_times_.back().second - step_times_.front().second) / seconds : 0;
}

std::string Status::failure() const {
  const ServerModel* model = context_.model.get();
  const ServerModel::StepCounts counts = model ? model->step_counts(context_.options.async) : ServerModel::StepCounts{};
  if (!counts.failed()) return {};
  return fmt::format("{} of {} {} were left out, because they were not finite", counts.skipped, counts.tried,
                     context_.options.async ? "updates" : "steps");
}

json Status::report(const Saving& saving) const {
  const HubOptions& options = context_.options;
  const ServerModel* model = context_.model.get();
  Signature signature;
  signature.up = signature.down = "";
  if (model) signature = model->signature;
  json curve = json::array();
  for (const auto& [step, loss] : losses_) curve.push_back({step, number(loss)});
  return {{"version", 1},
          {"name", "gradwire"},
          {"mode", options.async ? "async" : "sync"},
          {"state", state_name(saving)},
          {"uptime_s", seconds_since(started_)},
          {"step", model ? model->step() : 0},
          {"durable_step", options.checkpoint.empty() ? json(nullptr) : json(model ? model->durable_step() : 0)},
          {"skipped_steps", model ? model->step_counts(options.async).skipped : 0},
          {"failed", !failure().empty()},
          {"steps_per_s", steps_per_second()},
          {"step_seconds", step_seconds()},
          {"loss", number(membership_.loss())},
          {"losses", std::move(curve)},
          {"model",
           {{"tensors", signature.parameters.size()},
            {"elements", signature.elements()},
            {"parts", model ? model->layouts.size() : 0}}},
          {"up", signature.up},
          {"down", signature.down},
          {"feedback", name_of(signature.feedback)},
          {"send", signature.sends_updates ? "updates" : "weights"},
          {"workers",
           {{"present", membership_.present()},
            {"min", options.min_workers},
            {"max", options.max_workers},
            {"list", worker_list()}}},
          {"bytes", traffic()},
          {"staleness", staleness()},
          {"ledger", ledger()},
          {"refused", refusals()},
          {"checkpoint", saving.report()},
          {"memory_bytes", model ? model->memory_bytes() : 0},
          {"process",
           {{"resident_bytes", resident_memory()}, {"open_files", open_files()}, {"start_time", process_start()}}},
          {"connections", connections_.load()}};
}

}  // namespace gradwire::server
