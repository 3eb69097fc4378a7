// SPDX-License-Identifier: Apache-2.0
// The moves that collectives are made of. Each is built once, from a Job, and then run step after step:
//
//   UpStage        every rank encodes, for every owner, the shards of that owner; the owner decodes and adds them in
//                  rank order. With everybody as the owner of everything it is the whole of `gather`.
//   DownStage      every owner encodes its shards once; everybody decodes all of them.
//   RootStage      one rank encodes everything; everybody decodes it.
//
// A stage first begins (takes residual pointers: may fail on one rank alone, so it comes before the ranks agree on the
// step), then runs. Own messages are decoded like those of others: that is what keeps ranks bit-identical.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "collective/clock.h"
#include "collective/job.h"
#include "collective/learning.h"
#include "collective/staging.h"
#include "gradwire/merge.h"

namespace gradwire {

// A plan, the runner that runs it, and the residual pointers of the step.
class Coder {
 public:
  Coder(std::vector<TensorSpec> specs, const Device& device);
  size_t message_bytes() const { return plan_.message_bytes(); }
  void recode(std::vector<TensorSpec> specs);  // the same tensors with other codecs, also between begin() and encode()
  void begin(ErrorFeedback* feedback, Side side, uint64_t step, float loss_scale);
  // `look`, where given, sees what was encoded. With `again` the residuals stay for a second encoding of the step, and the
  // message goes nowhere. `message` and `messages` are the host's; on a GPU both calls only enqueue.
  using Look = std::function<void(Runner&, std::span<const void* const> tensors, const Residuals*, ConstBytes message)>;
  void encode(std::span<const void* const> shards, const Stamp& stamp, Bytes message, Staging& staging, const Look& look = {}, bool again = false);
  void decode(ConstBytes message, std::span<void* const> shards, Write write, const Stamp& expected, Staging& staging);
  void wait() { runner_->wait(); }  // throws what decoding found
  // Tables that can be merged are, where all messages go to everybody; the result is the mean.
  bool merges() const { return can_merge(plan_); }
  void merge(std::span<const ConstBytes> messages, std::span<float* const> means);

 private:
  Device device_;
  Plan plan_;
  std::unique_ptr<Runner> runner_;
  std::unique_ptr<ErrorFeedback::Pointers> residuals_;
};

// Which step, and with what residuals.
struct StepContext {
  uint64_t step;
  ErrorFeedback* feedback;  // may be null
  float loss_scale;
};

class UpStage {
 public:
  enum class Owners { shards, everybody };
  UpStage(Engine& engine, const Job& job, Owners owners, Clock& clock);
  void recode();  // after the job's codecs have changed
  void begin(const StepContext& context);
  // Encodes for those who must see a step before it is encoded for good.
  void look_ahead(uint64_t step, std::span<const void* const> in, Learning& learning);
  // `sums`: where the f32 sums of this rank's shards go, in their order. They may be the memory of `in`.
  void run(uint64_t step, std::span<const void* const> in, std::span<float* const> sums, Learning* learning = nullptr);
  const std::vector<Shard>& mine() const { return mine_; }
  uint64_t bytes_sent() const;
  uint64_t message_memory() const;
  uint64_t sum_memory() const { return merged_ ? merged_->held() : 0; }

 private:
  void encode(uint64_t step, std::span<const void* const> in, Learning* learning, bool ahead);
  void merge(std::span<const ConstBytes> messages, std::span<float* const> sums);
  void make_room();

  Engine& engine_;
  const Job& job_;
  Clock& clock_;
  Owners owners_;
  std::vector<std::vector<Shard>> shards_;  // per message that this rank writes: one per owner, or one for everybody
  std::vector<Shard> mine_;
  std::vector<std::unique_ptr<Coder>> writers_;
  std::unique_ptr<Coder> reader_;
  std::vector<Block> sent_, received_;  // `everybody`: the one message is written where this rank would receive it
  std::unique_ptr<Block> merged_;       // on a GPU, where tables are merged: the host's sums on their way to it
  Staging staging_;                     // last: it waits before the blocks go
};

class DownStage {
 public:
  DownStage(Engine& engine, const Job& job, Clock& clock);
  void recode();
  void begin(const StepContext& context);
  void look_ahead(uint64_t step, std::span<const float* const> values, Learning& learning);
  // `values`: the f32 values of this rank's shards, in their order.
  void run(uint64_t step, std::span<const float* const> values, std::span<void* const> out, Learning* learning = nullptr);
  const std::vector<Shard>& mine() const { return shards_[static_cast<size_t>(engine_.rank())]; }
  uint64_t bytes_sent() const;
  uint64_t message_memory() const;

 private:
  void encode(uint64_t step, std::span<const float* const> values, Learning* learning, bool ahead);
  void make_room();

  Engine& engine_;
  const Job& job_;
  Clock& clock_;
  std::vector<std::vector<Shard>> shards_;  // per owner
  std::unique_ptr<Coder> writer_;
  std::vector<std::unique_ptr<Coder>> readers_;
  std::vector<Block> received_;  // this rank's own message is written where it would be received
  Staging staging_;
};

class RootStage {
 public:
  RootStage(Engine& engine, const Job& job, int root, Clock& clock);
  void begin(const StepContext& context);
  void run(uint64_t step, std::span<void* const> data);

 private:
  Engine& engine_;
  const Job& job_;
  Clock& clock_;
  int root_;
  std::vector<Shard> shards_;
  Coder coder_;
  Block message_;
  Staging staging_;
};

// The sums become means where the job asks for it. IEEE division: exact where the mean is representable. On a GPU it is
// only enqueued.
void finish_sums(const Job& job, int world, std::span<const Shard> shards, std::span<float* const> sums);

}  // namespace gradwire
