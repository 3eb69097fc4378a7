// SPDX-License-Identifier: Apache-2.0
// The coding half of a reduction: what is encoded for whom, and what becomes of the messages that come. Who carries
// the bytes is not known here: a Stage hands them to an Engine, a Relay to whoever asked for it.
//
//   UpCoding     every rank encodes, for every owner, the shards of that owner; the owner decodes and adds them in rank
//                order. With one list, which everybody gets, it is the whole of `gather`.
//   DownCoding   every owner encodes its shards once; everybody decodes all of them.
//
// Own messages are decoded like those of others: that is what keeps ranks bit-identical. On a GPU everything is only
// enqueued on the device's stream.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "collective/job.h"
#include "collective/learning.h"
#include "collective/staging.h"
#include "gradwire/merge.h"

namespace gradwire {

// Which step, and with what residuals.
struct StepContext {
  uint64_t step;
  ErrorFeedback* feedback;  // may be null
  float loss_scale;
  std::span<const uint8_t> idle = {};  // per tensor of the job, or empty: no feedback in this step, the debt stays
};

// A plan, the runner that runs it, and the residual pointers of the step.
class Coder {
 public:
  Coder(std::vector<TensorSpec> specs, const Device& device);
  size_t message_bytes() const { return plan_.message_bytes(); }
  void recode(std::vector<TensorSpec> specs);  // the same tensors with other codecs, also between begin() and encode()
  void begin(const StepContext& context, Side side, float scale, std::span<const Shard> shards);
  // `look`, where given, sees what was encoded. With `again` the residuals stay for a second encoding of the step, and the
  // message goes nowhere. On a GPU both calls only enqueue.
  using Look = std::function<void(Runner&, std::span<const void* const> tensors, const Residuals*, ConstBytes message)>;
  void encode(std::span<const void* const> shards, const Stamp& stamp, Bytes message, Staging& staging,
              const Look& look = {}, bool again = false);
  void decode(ConstBytes message, std::span<void* const> shards, Write write, const Stamp& expected, Staging& staging);
  void wait() { runner_->wait(); }  // throws what decoding found
  void poll() { runner_->poll(); }  // ... so far, without waiting
  // Tables that can be merged are, where all messages go to everybody; the result is the mean.
  bool merges() const { return can_merge(plan_); }
  void merge(std::span<const ConstBytes> messages, std::span<float* const> means);

 private:
  Device device_;
  Plan plan_;
  std::unique_ptr<Runner> runner_;
  std::unique_ptr<ErrorFeedback::Pointers> residuals_;
};

// Whose work it is. Engines know it of themselves, a Relay is told.
struct Seat {
  int rank = 0;
  int world = 1;
};

enum Stage : uint32_t { kUp = 0, kDown = 1 };
Stamp stamp_of(const Job& job, Seat seat, uint64_t step, Stage stage, size_t rank);

// Where the shards lie, given where their tensors do.
std::vector<const void*> locate(const Job& job, std::span<const Shard> shards, std::span<const void* const> tensors);
std::vector<void*> locate(const Job& job, std::span<const Shard> shards, std::span<void* const> tensors);

using ShardLists = std::vector<std::vector<Shard>>;  // per owner
ShardLists by_owner(const Job& job, int world);

class UpCoding {
 public:
  UpCoding(const Job& job, Seat seat, const Device& device, ShardLists lists);
  void recode();  // after the job's codecs have changed
  void begin(const StepContext& context);
  // to[m]: where the message of list m goes. `ahead`: encodes for those who must see a step before it is encoded for good.
  void encode(uint64_t step, std::span<const void* const> in, std::span<const Bytes> to, Staging& staging,
              Learning* learning = nullptr, bool ahead = false);
  // `sums`: where the f32 sums of this rank's shards go, in their order.
  void decode(uint64_t step, std::span<const ConstBytes> messages, std::span<float* const> sums, Staging& staging);
  // Own messages, as they were written, into whole tensors.
  void decode_own(uint64_t step, std::span<const ConstBytes> messages, std::span<void* const> out, Staging& staging);
  bool merges() const { return reader_->merges(); }
  void merge(std::span<const ConstBytes> messages, std::span<float* const> means) { reader_->merge(messages, means); }
  std::vector<size_t> written() const;                      // bytes of each message that this rank writes
  size_t read() const { return reader_->message_bytes(); }  // ... and of those that it reads
  const std::vector<Shard>& mine() const {
    return lists_.size() == 1 ? lists_[0] : lists_[static_cast<size_t>(seat_.rank)];
  }
  void wait() { reader_->wait(); }
  void poll() { reader_->poll(); }

 private:
  const Job& job_;
  Seat seat_;
  ShardLists lists_;
  std::vector<Shard> whole_;  // the tensors of all lists
  std::vector<std::unique_ptr<Coder>> writers_;
  std::unique_ptr<Coder> reader_;
};

class DownCoding {
 public:
  // `as_f32`: the values that are encoded are f32, whatever the tensors' type is.
  DownCoding(const Job& job, Seat seat, const Device& device, ShardLists lists, bool as_f32 = true);
  void recode();
  void begin(const StepContext& context);
  // `values`: of this rank's shards, in their order.
  void encode(uint64_t step, std::span<const void* const> values, Bytes to, Staging& staging,
              Learning* learning = nullptr, bool ahead = false);
  void decode(uint64_t step, std::span<const ConstBytes> messages, std::span<void* const> out, Staging& staging);
  std::vector<size_t> read() const;  // bytes of every owner's message
  const std::vector<Shard>& mine() const { return lists_[static_cast<size_t>(seat_.rank)]; }
  const ShardLists& lists() const { return lists_; }
  void wait();
  void poll();

 private:
  const Job& job_;
  Seat seat_;
  ShardLists lists_;
  bool as_f32_;
  std::unique_ptr<Coder> writer_;
  std::vector<std::unique_ptr<Coder>> readers_;
};

}  // namespace gradwire
