// SPDX-License-Identifier: Apache-2.0
#include "server/shard.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "collective/feedback_rule.h"
#include "core/bits.h"
#include "core/check.h"
#include "gradwire/error.h"
#include "server/ledger.h"

namespace gradwire::server {
namespace {

const ResidualKey kResidual{Direction::down, "", 0};

}  // namespace

ServerShard::ServerShard(const Signature& signature, const ShardLayout& layout, bool async)
    : layout_(layout),
      sends_updates_(signature.sends_updates && layout.role == ShardRole::weights),
      keeps_residual_(owner_feedback_for(signature.feedback) == ReduceOptions::Feedback::on),
      sgd_(layout.role == ShardRole::weights ? signature.sgd : std::nullopt),
      seed_(signature.seed),
      elements_(layout.elements()),
      reader_(specs_of(signature, layout, ShardMessage::up)),
      learning_(reader_.specs(), Direction::up, run_of(signature, layout, async)),
      writer_(specs_of(signature, layout, ShardMessage::down), Direction::down, {}, run_of(signature, layout, async)),
      whole_plan_(specs_of(signature, layout, ShardMessage::whole)),
      whole_runner_(make_runner(whole_plan_, {})) {
  for (const TensorSpec& spec : reader_.specs()) name_hashes_.push_back(hash_name(spec.name));
  uint64_t first = 0;
  for (const ParameterRange& range : layout.ranges) {
    residual_ranges_.push_back({.name = kResidual.name, .count = range.count, .codec = {}, .first = first});
    first += range.count;
  }
  ready_ = layout.role == ShardRole::pool;  // it begins with zeros, which no worker uses before the first mean
}

void ServerShard::make_room() {
  if (sum_.size() == elements_) return;
  weights_.resize(elements_);
  if (sgd_) momentum_.resize(elements_);
  if (sends_updates_ && !residuals_.holds(kResidual, elements_)) residuals_.add(kResidual, elements_);
  sum_.resize(elements_);  // the last one: it tells that all are there
}

std::vector<void*> ServerShard::pointers(std::vector<float>& values) const {
  std::vector<void*> list;
  float* at = values.data();
  for (const ParameterRange& range : layout_.ranges) {
    list.push_back(at);
    at += range.count;
  }
  return list;
}

std::vector<const void*> ServerShard::constant(std::vector<float>& values) const {
  const std::vector<void*> list = pointers(values);
  return {list.begin(), list.end()};
}

double ServerShard::signed_sum_of(const std::vector<float>& values) const {
  double sum = 0;
  const float* at = values.data();
  for (size_t i = 0; i < layout_.ranges.size(); ++i) {
    sum += signed_sum({at, layout_.ranges[i].count}, name_hashes_[i], layout_.ranges[i].first);
    at += layout_.ranges[i].count;
  }
  return sum;
}

std::span<float> ServerShard::residual() const {
  const bool made = sends_updates_ && residuals_.holds(kResidual, elements_);
  return made ? residuals_.floats(kResidual) : std::span<float>();
}

void ServerShard::set(std::span<const std::byte> whole) {
  make_room();
  whole_runner_->decode(whole, pointers(sum_));
  if (!std::isfinite(signed_sum_of(sum_))) throw Error(ErrorKind::frame, "bad weights: they are not finite", "weights");
  weights_ = sum_;
  ready_ = true;
}

void ServerShard::set(std::span<const float> values) {
  GW_CHECK(values.size() == elements_);
  make_room();
  weights_.assign(values.begin(), values.end());
  ready_ = true;
}

// ---- Messages of workers

void ServerShard::decode(std::span<const std::byte> message, std::vector<float>& to, Write write) {
  reader_.runner(message).decode(message, pointers(to), write);
}

bool ServerShard::has_applied(uint32_t slot, uint64_t sequence) const {
  const auto found = progress_.find(slot);
  return found != progress_.end() && sequence <= found->second.sequence;
}

void ServerShard::forget(uint32_t slot) {
  const auto found = progress_.find(slot);
  if (found == progress_.end() || slot == kForgotten) return;
  progress_[kForgotten].tally += found->second.tally;
  progress_.erase(found);
}

UpdateStatus ServerShard::submit(uint32_t slot, const Frame& frame, Blob payload) {
  if (has_applied(slot, frame.sequence)) return UpdateStatus::again;
  if (frame.step < version_) return UpdateStatus::late;
  const bool pool = layout_.role == ShardRole::pool;
  if (frame.step > version_ && (!pool || frame.step - version_ > kMaxAhead)) return UpdateStatus::early;
  try {  // what the head says is refused at once, as are statistics; the body is read once, by close()
    reader_.runner(message_part(frame, payload));
    learning_.check(tail_part(frame, payload), frame.step, true);
  } catch (const Error&) {
    return UpdateStatus::corrupt;
  }
  make_room();
  if (frame.step > version_) std::erase_if(pending_, [](const auto& one) { return one.second.resent; });
  version_ = frame.step;
  pending_[slot] = {frame, std::move(payload), pool && (frame.flags & kQuiet)};
  return UpdateStatus::none;
}

// ---- What goes down

// The weights as `runner` sends them, encoded once for each version.
const Blob& ServerShard::encoded(Blob& kept, Runner& runner) {
  if (!kept) {
    std::vector<std::byte> message(runner.plan().message_bytes());
    runner.encode(constant(weights_), {.seed = seed_, .step = version_, .stage = 1}, message);
    kept = make_blob(std::move(message));
  }
  return kept;
}

Blob ServerShard::message_for(uint64_t held, Frame& frame) {
  make_room();
  if (!sends_updates_) return with_learned(encoded(down_, writer_.runner(version_)), held, frame);
  if (change_ && held != kNone && held + 1 == version_) return with_learned(change_, held, frame);
  frame.flags |= kWhole;  // a change is of no use to a worker that does not hold the step before
  return with_learned(encoded(whole_, *whole_runner_), held, frame);
}

// Whoever holds weights since the codecs learned has got what they learned.
Blob ServerShard::with_learned(const Blob& message, uint64_t held, Frame& frame) {
  if (learning_.empty() || (held != kNone && held >= learned_at_)) return message;
  if (tailed_.first != message) {
    const std::vector<std::byte> state = learning_.save();
    std::vector<std::byte> both(*message);
    both.insert(both.end(), state.begin(), state.end());
    tailed_ = {message, make_blob(std::move(both))};
  }
  frame.tail = tailed_.second->size() - message->size();
  return tailed_.second;
}

// ---- Checkpoints

ShardSnapshot ServerShard::snapshot() const {
  ShardSnapshot copy{.version = version_,
                     .applied = applied_,
                     .weights = weights_,
                     .residual = {residual().begin(), residual().end()},
                     .progress = progress_,
                     .learned_up = learning_.save(),
                     .learned_down = writer_.learning().save(),
                     .momentum = momentum_,
                     .skipped = skipped_};
  copy.weights.resize(elements_);  // of a shard that has heard of nobody yet: zeros
  copy.residual.resize(sends_updates_ ? elements_ : 0);
  copy.momentum.resize(sgd_ ? elements_ : 0);
  return copy;
}

void ServerShard::restore(ShardSnapshot snapshot) {
  if (snapshot.weights.size() != elements_ || snapshot.residual.size() != (sends_updates_ ? elements_ : 0) ||
      snapshot.momentum.size() != (sgd_ ? elements_ : 0))
    throw Error(ErrorKind::frame,
                fmt::format("bad state: a shard has {} weights; expected {}", snapshot.weights.size(), elements_),
                "weights");
  // A checkpoint of a version that did not learn with a server has nothing of it, and begins now.
  if (!snapshot.learned_up.empty()) learning_.restore(snapshot.learned_up);
  if (!snapshot.learned_down.empty()) writer_.learning().restore(snapshot.learned_down);
  make_room();
  learned_at_ = version_ = snapshot.version;
  applied_ = snapshot.applied;
  skipped_ = snapshot.skipped;
  weights_ = std::move(snapshot.weights);
  momentum_ = std::move(snapshot.momentum);
  if (sends_updates_) residuals_.set(kResidual, snapshot.residual);
  progress_ = std::move(snapshot.progress);
  ready_ = true;
}

uint64_t ServerShard::bytes() const {
  uint64_t bytes = 4 * (weights_.size() + sum_.size() + momentum_.size()) + residuals_.bytes();
  for (const auto& [slot, update] : pending_) bytes += update.payload->size();
  for (const WorkerStatistics& one : waiting_) bytes += one.bytes.size();
  for (const Blob& blob : {down_, change_, whole_, tailed_.second})
    if (blob) bytes += blob->size();
  return bytes;
}

}  // namespace gradwire::server
