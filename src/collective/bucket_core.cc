// SPDX-License-Identifier: Apache-2.0
#include "collective/bucket_core.h"

#include <algorithm>
#include <set>
#include <type_traits>
#include <utility>

#include "core/bits.h"
#include "feedback/feedback_state.h"
#include "message/bounded.h"

namespace gradwire {
namespace {

template <class Pointer>
std::vector<Pointer> located(const Job& job, std::span<const Shard> shards, std::span<const Pointer> tensors) {
  using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<Pointer>>, const std::byte, std::byte>;
  std::vector<Pointer> at;
  for (const Shard& shard : shards)
    at.push_back(static_cast<Byte*>(tensors[shard.tensor]) +
                 (shard.first - job.firsts[shard.tensor]) * bytes_of(job.tensors[shard.tensor].dtype));
  return at;
}

// What a coder shows to the learners of a direction.
MessageCoder::Observe observer(Learning* learning, std::span<const Shard> shards, uint64_t step, bool ahead) {
  if (!learning || learning->empty()) return {};
  return [=](const std::shared_ptr<Runner>& runner, std::span<const void* const> tensors, const Residuals* residuals,
             ConstBytes message) { learning->observe(runner, shards, step, tensors, residuals, message, ahead); };
}

}  // namespace

ShardLists by_owner(std::span<const Shard> shards, int world) {
  ShardLists lists(static_cast<size_t>(world));
  for (const Shard& shard : shards) lists[static_cast<size_t>(shard.owner)].push_back(shard);
  return lists;
}

Stamp stamp_of(const Job& job, RankInfo self, uint64_t step, Direction direction, size_t sender) {
  return {.seed = job.options.seed,
          .step = step,
          .stage = static_cast<uint32_t>(direction),
          .rank = static_cast<uint32_t>(sender),
          .world = static_cast<uint32_t>(self.world)};
}

std::vector<const void*> locate(const Job& job, std::span<const Shard> shards, std::span<const void* const> tensors) {
  return located(job, shards, tensors);
}
std::vector<void*> locate(const Job& job, std::span<const Shard> shards, std::span<void* const> tensors) {
  return located(job, shards, tensors);
}

BucketCore::BucketCore(const Job& job, RankInfo self, const Device& device, BucketPlan plan, Messages messages,
                       const std::array<uint64_t, 2>& epochs)
    : job_(job),
      self_(self),
      device_(device),
      memory_(memory_of(device)),
      plan_(std::move(plan)),
      epochs_(epochs),
      staging_(memory_, messages) {
  if (has_up()) {
    up_mine_ = plan_.gather ? plan_.up[0] : plan_.up[rank()];
    std::set<size_t> tensors;
    for (const std::vector<Shard>& list : plan_.up) {
      for (const Shard& shard : list) tensors.insert(shard.tensor);
      up_writers_.push_back(std::make_unique<MessageCoder>(job.specs(list, Direction::up, false), device));
    }
    for (size_t tensor : tensors) whole_.push_back({tensor, job.firsts[tensor], job.tensors[tensor].count, 0});
    up_reader_ = std::make_unique<MessageCoder>(job.specs(up_mine_, Direction::up, true), device);
    sums_.emplace(memory_, job, up_mine_, plan_.sums);
  }
  if (has_down()) {
    for (const std::vector<Shard>& list : plan_.down)
      down_readers_.push_back(std::make_unique<MessageCoder>(job.specs(list, Direction::down, false), device));
    down_writer_ = std::make_unique<MessageCoder>(job.specs(down_shards(), Direction::down, plan_.f32_down), device);
  }
  resize_staging();
}

bool BucketCore::follow(const std::array<uint64_t, 2>& epochs) {
  const std::array<uint64_t, 2> before = std::exchange(epochs_, epochs);
  for (const Direction direction : {Direction::up, Direction::down})
    if (const auto d = static_cast<size_t>(direction); before[d] != epochs[d]) recode(direction);
  return before != epochs;
}

void BucketCore::recode(Direction direction) {
  if (direction == Direction::up && has_up()) {
    for (size_t m = 0; m < up_writers_.size(); ++m)
      up_writers_[m]->recode(job_.specs(plan_.up[m], Direction::up, false));
    up_reader_->recode(job_.specs(up_mine_, Direction::up, true));
  }
  if (direction == Direction::down && has_down()) {
    for (size_t p = 0; p < down_readers_.size(); ++p)
      down_readers_[p]->recode(job_.specs(plan_.down[p], Direction::down, false));
    down_writer_->recode(job_.specs(down_shards(), Direction::down, plan_.f32_down));
  }
  resize_staging();
}

void BucketCore::resize_staging() {
  size_t largest = has_up() ? up_received() : 0;
  for (size_t bytes : up_sent()) largest = std::max(largest, bytes);
  for (size_t bytes : down_bytes()) largest = std::max(largest, bytes);
  staging_.resize(largest);
}

void BucketCore::begin(const StepContext& context) {
  if (context.feedback && FeedbackAccess::store(*context.feedback).version() != complete_) {
    if (has_up()) job_.add_residuals(*context.feedback, whole_, Direction::up);
    if (has_down()) job_.add_residuals(*context.feedback, down_shards(), Direction::down);
    complete_ = FeedbackAccess::store(*context.feedback).version();
  }
  if (has_up()) {
    for (size_t m = 0; m < up_writers_.size(); ++m)
      up_writers_[m]->begin(context, Direction::up, context.loss_scale, plan_.up[m]);
  }
  if (has_down()) {
    // Residuals are kept in units of the mean, so that they mean the same in a world of another size. Where the sum is
    // sent, what is encoded is `world` times that, which is a scale like the loss's.
    const bool sum = job_.options.op == ReduceOptions::Op::sum;
    down_writer_->begin(context, Direction::down, context.loss_scale * (sum ? static_cast<float>(self_.world) : 1.0f),
                        down_shards());
  }
}

std::vector<size_t> BucketCore::up_sent() const {
  std::vector<size_t> bytes;
  for (const auto& writer : up_writers_) bytes.push_back(writer->message_bytes());
  return bytes;
}
size_t BucketCore::up_received() const { return up_reader_->message_bytes(); }
std::vector<size_t> BucketCore::down_bytes() const {
  std::vector<size_t> bytes;
  for (const auto& reader : down_readers_) bytes.push_back(reader->message_bytes());
  return bytes;
}

void BucketCore::encode_up(uint64_t step, std::span<const void* const> in, std::span<const Bytes> to,
                           Learning* learning, bool ahead) {
  const Stamp stamp = stamp_of(job_, self_, step, Direction::up, rank());
  for (size_t m = 0; m < up_writers_.size(); ++m)
    up_writers_[m]->encode(locate(job_, plan_.up[m], in), stamp, to[m], staging_,
                           observer(learning, plan_.up[m], step, ahead), ahead);
}

void BucketCore::decode_own(uint64_t step, std::span<const ConstBytes> messages, std::span<void* const> out) {
  const Stamp stamp = stamp_of(job_, self_, step, Direction::up, rank());
  for (size_t m = 0; m < up_writers_.size(); ++m)
    up_writers_[m]->decode(messages[m], locate(job_, plan_.up[m], out), Write::set, stamp, staging_);
}

// Half-precision results can overflow where the sums do not. What lies on a GPU is checked there.
void BucketCore::start_bounds(std::span<const Shard> shards, std::vector<uint8_t>& bounded) const {
  bounded.clear();
  for (const Shard& shard : shards)
    bounded.push_back(memory_->on_host() && job_.tensors[shard.tensor].dtype != DType::f16);
}

void BucketCore::decode_up(uint64_t step, std::span<const ConstBytes> messages, std::span<void* const> out) {
  const std::vector<float*> sums = sums_->places(out);
  const std::vector<void*> to(sums.begin(), sums.end());
  start_bounds(up_mine_, up_bounded_);
  for (size_t p = 0; p < messages.size(); ++p) {
    up_reader_->decode(messages[p], to, p == 0 ? Write::set : Write::add, stamp_of(job_, self_, step, Direction::up, p),
                       staging_);
    keep_bounded(up_reader_->plan(), messages[p], up_bounded_);
  }
  sums_->divide_by(device_, self_.world, sums);
  if (plan_.sums == ShardSums::Use::tensors) sums_->round(device_, out);
}

void BucketCore::read_sums(std::span<void* const> out) const {
  const std::vector<float*> sums = sums_->places({});
  for (size_t i = 0; i < sums.size(); ++i)
    if (const Shard& shard = up_mine_[i]; out[shard.tensor])
      memory_->copy(static_cast<float*>(out[shard.tensor]) + shard.first, sums[i], shard.count * sizeof(float));
}

void BucketCore::encode_down(uint64_t step, Bytes to, std::span<const void* const> values, Learning* learning,
                             bool ahead) {
  std::vector<const void*> from(values.begin(), values.end());
  if (from.empty() && sums_) {
    const std::vector<float*> sums = sums_->places({});
    from.assign(sums.begin(), sums.end());
  }
  down_writer_->encode(from, stamp_of(job_, self_, step, Direction::down, rank()), to, staging_,
                       observer(learning, down_shards(), step, ahead), ahead);
}

void BucketCore::decode_down(uint64_t step, std::span<const ConstBytes> messages, std::span<void* const> out) {
  down_bounded_.resize(down_readers_.size());
  for (size_t p = 0; p < down_readers_.size(); ++p) {
    down_readers_[p]->decode(messages[p], locate(job_, plan_.down[p], out), Write::set,
                             stamp_of(job_, self_, step, Direction::down, p), staging_);
    start_bounds(plan_.down[p], down_bounded_[p]);
    keep_bounded(down_readers_[p]->plan(), messages[p], down_bounded_[p]);
  }
}

std::vector<ResultSpan> BucketCore::up_results(std::span<void* const> out) const {
  std::vector<ResultSpan> results;
  for (size_t i = 0; i < up_mine_.size(); ++i)
    if (!up_bounded_[i]) results.push_back({out[i], up_mine_[i].count, job_.tensors[up_mine_[i].tensor].dtype});
  return results;
}

std::vector<ResultSpan> BucketCore::down_results(std::span<void* const> tensors) const {
  std::vector<ResultSpan> results;
  for (size_t p = 0; p < plan_.down.size(); ++p) {
    const std::vector<Shard>& list = plan_.down[p];
    const std::vector<void*> at = locate(job_, list, tensors);
    for (size_t i = 0; i < list.size(); ++i)
      if (!down_bounded_[p][i]) results.push_back({at[i], list[i].count, job_.tensors[list[i].tensor].dtype});
  }
  return results;
}

void BucketCore::wait(Direction direction) {
  staging_.wait();
  if (direction == Direction::up) return up_reader_->wait();
  for (const auto& reader : down_readers_) reader->wait();
}

uint64_t BucketCore::signature() const {
  uint64_t hash = 0;
  const auto add = [&hash](const std::unique_ptr<MessageCoder>& coder) {
    if (coder) hash = mix64(hash) + coder->signature();
  };
  for (const auto& writer : up_writers_) add(writer);
  add(up_reader_);
  add(down_writer_);
  for (const auto& reader : down_readers_) add(reader);
  return hash;
}

void BucketCore::poll(Direction direction) {
  if (direction == Direction::up) return up_reader_->poll();
  for (const auto& reader : down_readers_) reader->poll();
}

}  // namespace gradwire
