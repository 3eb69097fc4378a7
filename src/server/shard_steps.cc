// SPDX-License-Identifier: Apache-2.0
// What a step does to a shard: the sum of the updates, the weights that follow from it, and what codecs learn.
#include <algorithm>
#include <cmath>

#include "core/bits.h"
#include "gradwire/error.h"
#include "server/shard.h"

namespace gradwire::server {

// Floating-point sums depend on their order, which is that of the slots, whatever order messages arrive in.
void ServerShard::sum_pending() {
  Write write = Write::set;
  for (const auto& [slot, update] : pending_) {
    decode(message_part(update.frame, update.payload), sum_, write);
    write = Write::add;
  }
}

// Decodes each pending update alone, to find those that cannot be read or are not finite.
void ServerShard::drop_unusable(DroppedUpdates& dropped) {
  std::vector<float> alone(elements_);
  std::erase_if(pending_, [&](const auto& one) {
    try {
      decode(message_part(one.second.frame, one.second.payload), alone, Write::set);
      if (std::isfinite(signed_sum_of(alone))) return false;
    } catch (const Error&) {
    }
    dropped.emplace_back(one.first, UpdateStatus::corrupt);
    return true;
  });
}

ServerShard::ClosedStep ServerShard::close(bool not_finite) {
  ClosedStep result;
  make_room();
  learn_from_weights();
  // Nearly always all updates are fine, so they are decoded straight into the sum; the sum tells whether they were.
  double sum = 0;
  try {
    sum_pending();
    sum = pending_.empty() ? 0 : signed_sum_of(sum_);
  } catch (const Error&) {
    sum = std::nan("");
  }
  if (!std::isfinite(sum)) {
    drop_unusable(result.updates);
    sum_pending();
    sum = pending_.empty() ? 0 : signed_sum_of(sum_);
  }
  contributors_ = static_cast<uint32_t>(pending_.size());
  if (!pending_.empty() && (!std::isfinite(sum) || !subtract_mean(contributors_, rate_of_step()))) {
    // Each is finite, but their sum or the new weights are not: none of them can count.
    for (const auto& [slot, update] : pending_) result.updates.emplace_back(slot, UpdateStatus::corrupt);
    contributors_ = 0;
    pending_.clear();
  }
  result.contributors = contributors_;
  result.skipped = contributors_ == 0 && (not_finite || !result.updates.empty());
  skipped_ += result.skipped;
  for (const auto& [slot, update] : pending_) {
    progress_[slot] = {update.frame.sequence, update.frame.tally};
    result.updates.emplace_back(slot, UpdateStatus::applied);
  }
  if (!pending_.empty() && layout_.role == ShardRole::weights) applied_ += sum;
  learn_from_pending();
  pending_.clear();
  ++version_;
  begin_version();
  return result;
}

// All workers take it from the same schedule. Should one of them say another one, it is not the one that decides.
float ServerShard::rate_of_step() const {
  std::vector<float> rates;
  for (const auto& [slot, update] : pending_) rates.push_back(update.frame.rate);
  const auto middle = rates.begin() + static_cast<std::ptrdiff_t>((rates.size() - 1) / 2);
  std::nth_element(rates.begin(), middle, rates.end());
  return *middle;
}

// SGD on the mean gradient sum_ / divisor, with the arithmetic of optim/adam.h. False, and nothing is changed, if the
// weights or the momentum would not stay finite.
bool ServerShard::descend(float divisor, float rate) {
  const auto decay = static_cast<float>(sgd_->weight_decay), keep = static_cast<float>(sgd_->momentum);
  const auto direction = [&](size_t i) { return keep * momentum_[i] + (sum_[i] / divisor + decay * weights_[i]); };
  const std::span<const float> left = residual();
  uint32_t top = 0;
  for (size_t i = 0; i < weights_.size(); ++i) {
    const float change = direction(i), next = weights_[i] - rate * change;
    // With updates down: begin_version() adds the residual, as in subtract_mean().
    const float room =
        left.empty() ? next : 4 * (std::fabs(weights_[i]) + std::fabs(left[i]) + std::fabs(rate * change));
    top = std::max({top, float_bits(change) & 0x7fffffffu, float_bits(room) & 0x7fffffffu});
  }
  if (top >= kInfBits) return false;
  for (size_t i = 0; i < weights_.size(); ++i) {
    momentum_[i] = direction(i);
    if (sends_updates_)
      sum_[i] = -(rate * momentum_[i]);
    else
      weights_[i] -= rate * momentum_[i];
  }
  return true;
}

// Applies sum_ / divisor. False, and nothing is changed, if the weights would not stay finite.
bool ServerShard::subtract_mean(uint32_t divisor, float rate) {
  const float by = static_cast<float>(divisor);
  if (sgd_) return descend(by, rate);
  if (layout_.role == ShardRole::pool) {
    for (size_t i = 0; i < weights_.size(); ++i) weights_[i] = sum_[i] / by;
    return true;
  }
  // The largest bit pattern of an absolute value tells whether all values are finite, without a branch in the loop.
  uint32_t top = 0;
  if (sends_updates_) {
    // begin_version() adds the residual, quantises and adds the result to the weights. The grid of a codec may go a
    // little beyond its input: the factor of 4 is room for all of that.
    const std::span<const float> left = residual();
    for (size_t i = 0; i < weights_.size(); ++i)
      top = std::max(top, float_bits(4 * (std::fabs(weights_[i]) + std::fabs(left[i]) + std::fabs(sum_[i] / by))));
    if (top >= kInfBits) return false;
    for (size_t i = 0; i < weights_.size(); ++i) sum_[i] = -(sum_[i] / by);
    return true;
  }
  for (size_t i = 0; i < weights_.size(); ++i) {
    sum_[i] = weights_[i] - sum_[i] / by;
    top = std::max(top, float_bits(sum_[i]) & 0x7fffffffu);
  }
  if (top >= kInfBits) return false;
  std::swap(weights_, sum_);
  return true;
}

// With updates down, the change in sum_ is encoded with the residual, and the server applies to its own weights what
// the workers will decode: all hold the same bits.
void ServerShard::begin_version() {
  down_ = whole_ = change_ = nullptr;
  tailed_ = {};
  if (!sends_updates_) return;
  if (contributors_ == 0) std::fill(sum_.begin(), sum_.end(), 0.0f);  // the residual still goes out
  Runner& runner = writer_.runner(version_);
  std::vector<std::byte> message(writer_.message_bytes());
  const std::vector<const void*> in = constant(sum_);
  const auto begun = residuals_.begin(Direction::down, version_, residual_ranges_, 1.0f);
  runner.encode(in, {.seed = seed_, .step = version_, .stage = 1}, message, &begun->residuals);
  const std::vector<std::byte> statistics =
      writer_.learning().observe(runner, version_, version_, in, &begun->residuals, message);
  residuals_.commit(version_);
  if (!keeps_residual_) std::fill(residual().begin(), residual().end(), 0.0f);
  runner.decode(message, pointers(weights_), Write::add);
  change_ = make_blob(std::move(message));
  // This change is over: the next one is encoded with what it has taught.
  const std::span<const std::byte> all[] = {statistics};
  writer_.learning().learn(version_, all);
}

// ---- What codecs learn

void ServerShard::learn(std::span<const std::span<const std::byte>> senders) {
  if (senders.empty()) return;
  learning_.learn(version_, senders);
  learned_at_ = version_ + 1;
}

// The statistics of the updates that count, in the order of slots.
void ServerShard::learn_from_pending() {
  std::vector<std::span<const std::byte>> senders;
  for (const auto& [slot, update] : pending_)
    if (update.frame.tail > 0) senders.push_back(tail_part(update.frame, update.payload));
  learn(senders);
}

// Without steps, statistics wait until every worker has sent some, or one of them sends more.
void ServerShard::learn_without_steps(uint32_t slot, std::span<const std::byte> statistics, uint32_t workers) {
  if (statistics.empty()) return;
  const auto learn_now = [this] {
    std::vector<std::span<const std::byte>> senders;
    for (const WorkerStatistics& one : waiting_) senders.emplace_back(one.bytes);
    learn(senders);
    waiting_.clear();
  };
  if (std::any_of(waiting_.begin(), waiting_.end(), [&](const auto& one) { return one.slot == slot; })) learn_now();
  waiting_.push_back({slot, {statistics.begin(), statistics.end()}});
  if (waiting_.size() >= std::min<size_t>(workers, Learner::kMostPooled)) learn_now();
}

// The codecs of weights learn from the version that ends here, not when it is sent: a server that was restarted sends
// it once more, with the tables that it had.
void ServerShard::learn_from_weights() {
  ShardLearning& learning = writer_.learning();
  if (sends_updates_ || !learning.due(version_, version_)) return;
  Runner& runner = writer_.runner(version_);
  const Blob& message = encoded(down_, runner);
  const std::vector<std::byte> statistics =
      learning.observe(runner, version_, version_, constant(weights_), nullptr, *message);
  const std::span<const std::byte> all[] = {statistics};
  learning.learn(version_, all);
}

// ---- Updates that are applied at once

UpdateStatus ServerShard::apply(uint32_t slot, const Frame& frame, const Blob& payload, uint32_t workers) {
  // After a restart versions may be lower than what the worker saw: its sequence alone decides.
  if (has_applied(slot, frame.sequence)) return UpdateStatus::again;
  try {
    learning_.check(tail_part(frame, payload), frame.step, false);
    decode(message_part(frame, payload), sum_, Write::set);
  } catch (const Error&) {
    return UpdateStatus::corrupt;
  }
  const double sum = signed_sum_of(sum_);
  if (std::isfinite(sum)) learn_from_weights();
  if (!std::isfinite(sum) || !subtract_mean(workers, 0)) {
    skip();
    return UpdateStatus::corrupt;
  }
  learn_without_steps(slot, tail_part(frame, payload), workers);
  applied_ += sum;
  progress_[slot] = {frame.sequence, frame.tally};
  contributors_ = 1;
  ++version_;
  begin_version();
  return UpdateStatus::applied;
}

UpdateStatus ServerShard::absorb_residual(uint32_t slot, const Frame& frame, const Blob& message, uint32_t workers) {
  if (has_applied(slot, frame.sequence)) return UpdateStatus::again;
  try {
    whole_runner_->decode(*message, pointers(sum_));  // an open step has no sum before it closes: sum_ is free
  } catch (const Error&) {
    return UpdateStatus::corrupt;
  }
  const double sum = signed_sum_of(sum_);
  if (!std::isfinite(sum)) return UpdateStatus::corrupt;
  const float by = static_cast<float>(std::max(workers, 1u));
  // With updates down, the weights are what all workers hold, and must not change without a message: the server's own
  // residual takes it, and the next changes carry it.
  const std::span<float> to = sends_updates_ ? residual() : std::span(weights_);
  // A gradient that comes late counts as if it had been in the last step.
  const float rate = sgd_ ? frame.rate : 1.0f;
  for (size_t i = 0; i < to.size(); ++i)
    if (!std::isfinite(to[i] - rate * (sum_[i] / by)) || (sgd_ && !std::isfinite(momentum_[i] + sum_[i] / by)))
      return UpdateStatus::corrupt;
  applied_ += sum;
  progress_[slot] = {frame.sequence, frame.tally};
  // Some workers may hold this version already. The others must get the same bits, so its message is made before the
  // weights change.
  if (workers <= 1)
    down_ = nullptr;
  else if (!sends_updates_)
    encoded(down_, writer_.runner(version_));
  for (size_t i = 0; i < to.size(); ++i) to[i] -= rate * (sum_[i] / by);
  for (size_t i = 0; i < momentum_.size(); ++i) momentum_[i] += sum_[i] / by;
  return UpdateStatus::applied;
}

}  // namespace gradwire::server
