// SPDX-License-Identifier: Apache-2.0
#include "server/shard.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "core/bits.h"
#include "core/check.h"
#include "gradwire/error.h"
#include "server/ledger.h"

namespace gradwire::server {
namespace {

const ResidualKey kResidual{Direction::down, "", 0};

std::vector<const void*> constant(const std::vector<void*>& list) { return {list.begin(), list.end()}; }

}  // namespace

ServerShard::ServerShard(const Signature& signature, const ShardLayout& layout)
    : layout_(layout),
      sends_updates_(signature.sends_updates && layout.role == ShardRole::weights),
      sgd_(layout.role == ShardRole::weights ? signature.sgd : std::nullopt),
      seed_(signature.seed),
      elements_(layout.elements()),
      reader_(specs_of(signature, layout, ShardMessage::up)),
      learning_(reader_.specs(), Direction::up),
      writer_(specs_of(signature, layout, ShardMessage::down), Direction::down, {}),
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

// ---- Arithmetic

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

ServerShard::ClosedStep ServerShard::close() {
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

// With updates down, the change in sum_ is encoded with error feedback, and the server applies to its own weights what
// the workers will decode: all hold the same bits.
void ServerShard::begin_version() {
  down_ = whole_ = change_ = nullptr;
  tailed_ = {};
  if (!sends_updates_) return;
  if (contributors_ == 0) std::fill(sum_.begin(), sum_.end(), 0.0f);  // the residual still goes out
  Runner& runner = writer_.runner(version_);
  std::vector<std::byte> message(writer_.message_bytes());
  const std::vector<const void*> in = constant(pointers(sum_));
  const auto begun = residuals_.begin(Direction::down, version_, residual_ranges_, 1.0f);
  runner.encode(in, {.seed = seed_, .step = version_, .stage = 1}, message, &begun->residuals);
  const std::vector<std::byte> statistics =
      writer_.learning().observe(runner, version_, version_, in, &begun->residuals, message);
  residuals_.commit(version_);
  runner.decode(message, pointers(weights_), Write::add);
  change_ = make_blob(std::move(message));
  // This change is over: the next one is encoded with what it has taught.
  const std::span<const std::byte> all[] = {statistics};
  writer_.learning().learn(version_, all);
}

// ---- Learning

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
      learning.observe(runner, version_, version_, constant(pointers(weights_)), nullptr, *message);
  const std::span<const std::byte> all[] = {statistics};
  learning.learn(version_, all);
}

// ---- What goes down

// The weights as `runner` sends them, encoded once for each version.
const Blob& ServerShard::encoded(Blob& kept, Runner& runner) {
  if (!kept) {
    std::vector<std::byte> message(runner.plan().message_bytes());
    runner.encode(constant(pointers(weights_)), {.seed = seed_, .step = version_, .stage = 1}, message);
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
  if (!std::isfinite(sum)) return UpdateStatus::corrupt;
  learn_from_weights();
  if (!subtract_mean(workers, 0)) return UpdateStatus::corrupt;
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

ShardSnapshot ServerShard::snapshot() const {
  ShardSnapshot copy{.version = version_,
                     .applied = applied_,
                     .weights = weights_,
                     .residual = {residual().begin(), residual().end()},
                     .progress = progress_,
                     .learned_up = learning_.save(),
                     .learned_down = writer_.learning().save(),
                     .momentum = momentum_};
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
