// SPDX-License-Identifier: Apache-2.0
#include "server/shard.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "core/bits.h"
#include "core/check.h"
#include "gradwire/error.h"
#include "gradwire/message.h"
#include "server/ledger.h"

namespace gradwire::server {
namespace {

constexpr size_t kReaders = 4;
const ResidualKey kResidual{Direction::down, "", 0};

std::vector<const void*> constant(const std::vector<void*>& list) { return {list.begin(), list.end()}; }

}  // namespace

ServerShard::ServerShard(const Signature& signature, const ShardLayout& layout)
    : layout_(layout),
      sends_updates_(signature.sends_updates && layout.role == ShardRole::weights),
      seed_(signature.seed),
      elements_(layout.elements()),
      up_(specs_of(signature, layout, ShardMessage::up)),
      down_plan_(specs_of(signature, layout, ShardMessage::down)),
      whole_plan_(specs_of(signature, layout, ShardMessage::whole)),
      down_runner_(make_runner(down_plan_, {})),
      whole_runner_(make_runner(whole_plan_, {})) {
  for (const TensorSpec& spec : up_) name_hashes_.push_back(hash_name(spec.name));
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

// What a message says about its codecs is believed only if they are the codecs of the signature, perhaps with other
// tables: a codec that learns refits them, and the table travels with the message.
ServerShard::MessageReader& ServerShard::reader_for(std::span<const std::byte> message) {
  const Head head = read_head(message, {.max_elements = elements_, .max_tensors = static_cast<uint32_t>(up_.size())});
  if (head.tensors.size() != up_.size())
    throw Error(ErrorKind::frame,
                fmt::format("bad message: it has {} tensors; expected {}", head.tensors.size(), up_.size()), "tensors");
  std::vector<Codec> codecs;
  for (const TensorSpec& tensor : head.tensors) codecs.push_back(tensor.codec);
  // Building a plan is expensive, so the readers that were used last are kept.
  for (size_t i = 0; i < readers_.size(); ++i)
    if (readers_[i].codecs == codecs) {
      std::rotate(readers_.begin(), readers_.begin() + static_cast<std::ptrdiff_t>(i),
                  readers_.begin() + static_cast<std::ptrdiff_t>(i) + 1);
      return readers_.front();
    }
  std::vector<TensorSpec> specs = up_;
  for (size_t i = 0; i < specs.size(); ++i) {
    if (codecs[i].wire_spec() != specs[i].codec.wire_spec())
      throw Error(ErrorKind::frame,
                  fmt::format("bad message: tensor[{}] is coded by {}; expected {}", i, codecs[i].wire_spec(),
                              specs[i].codec.wire_spec()),
                  "spec");
    specs[i].codec = codecs[i];
  }
  MessageReader reader{codecs, std::make_unique<Plan>(std::move(specs)), nullptr};
  reader.runner = make_runner(*reader.plan, {});
  if (readers_.size() == kReaders) readers_.pop_back();
  readers_.insert(readers_.begin(), std::move(reader));
  return readers_.front();
}

void ServerShard::decode(const Blob& message, std::vector<float>& to, Write write) {
  reader_for(*message).runner->decode(*message, pointers(to), write);
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

UpdateStatus ServerShard::submit(uint32_t slot, const Frame& frame, Blob message) {
  if (has_applied(slot, frame.sequence)) return UpdateStatus::again;
  if (frame.step < version_) return UpdateStatus::late;
  const bool pool = layout_.role == ShardRole::pool;
  if (frame.step > version_ && (!pool || frame.step - version_ > kMaxAhead)) return UpdateStatus::early;
  try {  // what the head says is refused at once; the body is read once, by close()
    reader_for(*message);
  } catch (const Error&) {
    return UpdateStatus::corrupt;
  }
  make_room();
  if (frame.step > version_) std::erase_if(pending_, [](const auto& one) { return one.second.resent; });
  version_ = frame.step;
  pending_[slot] = {frame.sequence, frame.tally, std::move(message), pool && (frame.flags & kQuiet)};
  return UpdateStatus::none;
}

// ---- Arithmetic

// Floating-point sums depend on their order, which is that of the slots, whatever order messages arrive in.
void ServerShard::sum_pending() {
  Write write = Write::set;
  for (const auto& [slot, update] : pending_) {
    decode(update.message, sum_, write);
    write = Write::add;
  }
}

// Decodes each pending update alone, to find those that cannot be read or are not finite.
void ServerShard::drop_unusable(std::vector<std::pair<uint32_t, UpdateStatus>>& dropped) {
  std::vector<float> alone(elements_);
  std::erase_if(pending_, [&](const auto& one) {
    try {
      decode(one.second.message, alone, Write::set);
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
  if (!pending_.empty() && (!std::isfinite(sum) || !subtract_mean(contributors_))) {
    // Each is finite, but their sum or the new weights are not: none of them can count.
    for (const auto& [slot, update] : pending_) result.updates.emplace_back(slot, UpdateStatus::corrupt);
    contributors_ = 0;
    pending_.clear();
  }
  result.contributors = contributors_;
  for (const auto& [slot, update] : pending_) {
    progress_[slot] = {update.sequence, update.tally};
    result.updates.emplace_back(slot, UpdateStatus::applied);
  }
  if (!pending_.empty() && layout_.role == ShardRole::weights) applied_ += sum;
  pending_.clear();
  ++version_;
  begin_version();
  return result;
}

// Applies sum_ / divisor. False, and nothing is changed, if the weights would not stay finite.
bool ServerShard::subtract_mean(uint32_t divisor) {
  const float by = static_cast<float>(divisor);
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
  if (!sends_updates_) return;
  if (contributors_ == 0) std::fill(sum_.begin(), sum_.end(), 0.0f);  // the residual still goes out
  std::vector<std::byte> message(down_plan_.message_bytes());
  const auto begun = residuals_.begin(Direction::down, version_, residual_ranges_, 1.0f);
  down_runner_->encode(constant(pointers(sum_)), {.seed = seed_, .step = version_, .stage = 1}, message,
                       &begun->residuals);
  residuals_.commit(version_);
  down_runner_->decode(message, pointers(weights_), Write::add);
  change_ = make_blob(std::move(message));
}

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
  if (!sends_updates_) return encoded(down_, *down_runner_);
  if (change_ && held != kNone && held + 1 == version_) return change_;
  frame.flags |= kWhole;  // a change is of no use to a worker that does not hold the step before
  return encoded(whole_, *whole_runner_);
}

UpdateStatus ServerShard::apply(uint32_t slot, const Frame& frame, const Blob& message, uint32_t workers) {
  // After a restart versions may be lower than what the worker saw: its sequence alone decides.
  if (has_applied(slot, frame.sequence)) return UpdateStatus::again;
  try {
    decode(message, sum_, Write::set);
  } catch (const Error&) {
    return UpdateStatus::corrupt;
  }
  const double sum = signed_sum_of(sum_);
  if (!std::isfinite(sum) || !subtract_mean(workers)) return UpdateStatus::corrupt;
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
  for (size_t i = 0; i < to.size(); ++i)
    if (!std::isfinite(to[i] - sum_[i] / by)) return UpdateStatus::corrupt;
  applied_ += sum;
  progress_[slot] = {frame.sequence, frame.tally};
  // Some workers may hold this version already. The others must get the same bits, so its message is made before the
  // weights change.
  if (workers <= 1)
    down_ = nullptr;
  else if (!sends_updates_)
    encoded(down_, *down_runner_);
  for (size_t i = 0; i < to.size(); ++i) to[i] -= sum_[i] / by;
  return UpdateStatus::applied;
}

ShardSnapshot ServerShard::snapshot() const {
  ShardSnapshot copy{version_, applied_, weights_, {residual().begin(), residual().end()}, progress_};
  copy.weights.resize(elements_);  // of a shard that has heard of nobody yet: zeros
  copy.residual.resize(sends_updates_ ? elements_ : 0);
  return copy;
}

void ServerShard::restore(ShardSnapshot snapshot) {
  if (snapshot.weights.size() != elements_ || snapshot.residual.size() != (sends_updates_ ? elements_ : 0))
    throw Error(ErrorKind::frame,
                fmt::format("bad state: a shard has {} weights; expected {}", snapshot.weights.size(), elements_),
                "weights");
  make_room();
  version_ = snapshot.version;
  applied_ = snapshot.applied;
  weights_ = std::move(snapshot.weights);
  if (sends_updates_) residuals_.set(kResidual, snapshot.residual);
  progress_ = std::move(snapshot.progress);
  ready_ = true;
}

uint64_t ServerShard::bytes() const {
  uint64_t bytes = 4 * (weights_.size() + sum_.size()) + residuals_.bytes();
  for (const auto& [slot, update] : pending_) bytes += update.message->size();
  for (const Blob& blob : {down_, change_, whole_})
    if (blob) bytes += blob->size();
  return bytes;
}

}  // namespace gradwire::server
