// SPDX-License-Identifier: Apache-2.0
// The coding of a bucket: some tensors of a job that are reduced together. It encodes what this rank sends and decodes
// what it receives, and does not know how the bytes move: the Reducer hands them to an Engine, a BucketCoder to its
// caller.
//
//   encode_up     every rank encodes, for every owner, the shards of that owner
//   decode_up     the owner decodes these messages, adds them in rank order and divides
//   encode_down   every owner encodes its shards once
//   decode_down   every rank decodes the messages of all owners
//
// With one message for all ranks on the way up (`gather`), decode_up gives the results and there is no way down. Every
// rank also decodes what it sent itself: that is what keeps ranks bit-identical. On a GPU everything is only enqueued
// on the device's stream.
//
// Threads: the four functions may belong to different threads, if each takes the steps in the same order.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "collective/job.h"
#include "collective/learning.h"
#include "collective/message_coder.h"
#include "collective/sums.h"
#include "device/finite_check.h"

namespace gradwire {

struct RankInfo {
  int rank = 0;
  int world = 1;
};

using ShardLists = std::vector<std::vector<Shard>>;  // per owner
ShardLists by_owner(std::span<const Shard> shards, int world);

// Who sends what in a bucket.
struct BucketPlan {
  bool gather = false;   // all ranks receive the same message on the way up: `up` has one list
  ShardLists up = {};    // per owner. Empty: there is no way up
  ShardLists down = {};  // per owner. Empty: there is no way down
  ShardSums::Use sums = ShardSums::Use::kept;
  bool f32_down = true;  // the values that are encoded for the way down are f32, whatever the tensors' type is
};

Stamp stamp_of(const Job& job, RankInfo self, uint64_t step, Direction direction, size_t sender);

// Where the shards lie, given where their tensors do.
std::vector<const void*> locate(const Job& job, std::span<const Shard> shards, std::span<const void* const> tensors);
std::vector<void*> locate(const Job& job, std::span<const Shard> shards, std::span<void* const> tensors);

class BucketCore {
 public:
  // `epochs`: of the codecs that the job has now, per direction; see follow().
  BucketCore(const Job& job, RankInfo self, const Device& device, BucketPlan plan, Messages messages,
             const std::array<uint64_t, 2>& epochs = {});

  bool has_up() const { return !plan_.up.empty(); }
  bool has_down() const { return !plan_.down.empty(); }
  bool gathers() const { return plan_.gather; }
  const std::vector<Shard>& up_shards() const { return up_mine_; }  // those that this rank reduces
  const std::vector<Shard>& down_shards() const { return plan_.down[rank()]; }
  const ShardLists& down_lists() const { return plan_.down; }

  // Takes the codecs of the job again where they have changed since; says whether they have. The sizes change with
  // them.
  bool follow(const std::array<uint64_t, 2>& epochs);
  // Takes the residuals of a step. This may fail on one rank alone, so it comes before the ranks agree on the step.
  void begin(const StepContext& context);

  std::vector<size_t> up_sent() const;     // bytes of each message that this rank writes, per entry of BucketPlan::up
  size_t up_received() const;              // bytes of each message that it reads
  std::vector<size_t> down_bytes() const;  // bytes of every owner's message

  // `to`: one message per entry of BucketPlan::up. `ahead`: only for the learners that must see a step before it is
  // encoded.
  void encode_up(uint64_t step, std::span<const void* const> in, std::span<const Bytes> to,
                 Learning* learning = nullptr, bool ahead = false);
  // `out`: one place per up_shards(), none for ShardSums::Use::kept.
  void decode_up(uint64_t step, std::span<const ConstBytes> messages, std::span<void* const> out);
  // This rank's own messages, as the others will see them, into whole tensors.
  void decode_own(uint64_t step, std::span<const ConstBytes> messages, std::span<void* const> out);
  // The sums that decode_up kept, at their places in whole tensors of f32. Elements of other owners are left alone.
  void read_sums(std::span<void* const> out) const;
  // `values`: one place per down_shards(); empty: the sums that decode_up kept.
  void encode_down(uint64_t step, Bytes to, std::span<const void* const> values = {}, Learning* learning = nullptr,
                   bool ahead = false);
  void decode_down(uint64_t step, std::span<const ConstBytes> messages, std::span<void* const> out);

  // Results for a FiniteCheck: those of decode_up in `out`, as there, and those of decode_down in whole tensors. What
  // the scales of the messages prove finite is left out.
  std::vector<ResultSpan> up_results(std::span<void* const> out) const;
  std::vector<ResultSpan> down_results(std::span<void* const> tensors) const;

  void wait(Direction direction);  // until everything of this direction is done; throws what decoding found
  void poll(Direction direction);  // throws what has been found so far, without waiting
  // For work that was recorded (device/recording.h) and runs again: what it would be now follows from this, from the
  // addresses that the four functions are given, and from the step, which a clock has.
  uint64_t signature() const;
  void wait_for_copies() { staging_.wait(); }

  uint64_t staging_memory() const { return staging_.held(); }
  uint64_t sum_memory() const { return sums_ ? sums_->held() : 0; }

 private:
  size_t rank() const { return static_cast<size_t>(self_.rank); }
  void recode(Direction direction);
  void resize_staging();
  void start_bounds(std::span<const Shard> shards, std::vector<uint8_t>& bounded) const;

  const Job& job_;
  RankInfo self_;
  Device device_;
  std::shared_ptr<Memory> memory_;
  BucketPlan plan_;
  std::vector<Shard> up_mine_, whole_;  // whole_: the tensors of all up lists
  std::vector<std::unique_ptr<MessageCoder>> up_writers_, down_readers_;
  std::unique_ptr<MessageCoder> up_reader_, down_writer_;
  std::optional<ShardSums> sums_;
  std::array<uint64_t, 2> epochs_;
  uint64_t complete_ = 0;  // the version of the residuals that has all of this bucket's
  // Per shard: whether the scales of the step's messages prove the results finite (message/bounded.h).
  std::vector<uint8_t> up_bounded_;
  std::vector<std::vector<uint8_t>> down_bounded_;
  HostStaging staging_;  // last: it waits before the rest is released
};

}  // namespace gradwire
