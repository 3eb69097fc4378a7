// SPDX-License-Identifier: Apache-2.0
#include "train/server_updates.h"

#include <algorithm>
#include <cmath>

#include "collective/feedback_rule.h"
#include "gradwire/error.h"
#include "server/rpc/dial.h"

namespace gradwire::train {
namespace {

constexpr double kLeaveSeconds = 60;

server::Signature signature_of(const Settings& settings, uint64_t steps, std::vector<server::Variable> parameters,
                               std::vector<server::Variable> buffers) {
  server::Signature signature;
  signature.parameters = std::move(parameters);
  signature.buffers = std::move(buffers);
  signature.up = settings.up();
  const bool momenta = settings.exchanges_momenta();
  const std::string down = momenta ? settings.reduce_options().down : settings.down;
  signature.down = down.empty() ? Rules::parse(settings.up()).nearest().str() : down;
  signature.feedback = settings.feedback_rule();
  if (settings.optimizer == "sgd")
    signature.sgd = {.momentum = settings.momentum, .weight_decay = settings.weight_decay};
  signature.sends_updates = momenta || settings.send == "updates";
  signature.pools = momenta || settings.moments == "shared";
  signature.seed = settings.seed;
  signature.steps = std::min(steps, server::kMostSteps);
  signature.model = settings.task + " " + settings.model;
  return signature;
}

}  // namespace

ServerUpdates::ServerUpdates(const Settings& settings, uint64_t steps, const ServerPlace& place,
                             std::vector<server::Variable> parameters, std::vector<server::Variable> buffers)
    : client_({.signature = signature_of(settings, steps, std::move(parameters), std::move(buffers)),
               .dial = server::make_dialer({place.address, place.security}),
               .name = place.name,
               .id = {},
               .patience_s = place.patience_s}),
      warm_steps_(place.warm_steps) {}

uint64_t ServerUpdates::begin(std::span<float* const> weights) { return client_.join(weights); }

void ServerUpdates::tell(uint64_t step, const Report& report) {
  nlohmann::json text = {{"step", step}, {"samples", report.samples}};
  if (std::isfinite(report.loss)) text["loss"] = report.loss;
  client_.report(text);
}

StepResult ServerUpdates::exchange(uint64_t step, std::span<const float* const> updates,
                                   std::span<float* const> weights, const Report& report) {
  tell(step, report);
  client_.set_rate(report.rate);
  if (updates.empty()) return {.next = client_.skip(weights, server::Client::SkipReason::not_finite)};
  // A worker that has just joined may send nothing for some steps, while its moments warm up.
  if (taken_++ < warm_steps_) return {.next = client_.skip(weights, server::Client::SkipReason::watching)};
  const uint64_t corrupt = client_.counts().corrupt, next = client_.exchange(updates, weights);
  // The server found that the weights would not stay finite.
  return {.next = next, .applied = client_.counts().corrupt == corrupt};
}

void ServerUpdates::pool(uint64_t, std::span<float* const> second) { client_.pool(second); }

ExchangeStats ServerUpdates::stats() const {
  return {.bits = client_.bits(),
          .bytes_sent = client_.counts().messages_up,
          .times = client_.times(),
          .memory = client_.memory()};
}

nlohmann::json ServerUpdates::end() {
  const bool confirmed = client_.leave(kLeaveSeconds);
  const server::ClientCounts& counts = client_.counts();
  return {{"confirmed", confirmed},
          {"slot", client_.slot()},
          {"messages_up", counts.messages_up},
          {"messages_down", counts.messages_down},
          {"applied", counts.applied},
          {"late", counts.late},
          {"corrupt", counts.corrupt},
          {"replayed", counts.replayed},
          {"reconnects", counts.reconnects}};
}

}  // namespace gradwire::train
