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

#include "collective/job.h"
#include "collective/learning.h"
#include "gradwire/merge.h"

namespace gradwire {

// Bytes aligned for vectors, not initialised.
class Block {
 public:
  explicit Block(size_t bytes);
  Bytes bytes() const { return {data_.get(), size_}; }
  float* floats() const { return reinterpret_cast<float*>(data_.get()); }

 private:
  struct Free {
    void operator()(std::byte* data) const;
  };
  std::unique_ptr<std::byte, Free> data_;
  size_t size_;
};

// A plan, the runner that runs it, and the residual pointers of the step.
class Coder {
 public:
  Coder(std::vector<TensorSpec> specs, const Device& device);
  size_t message_bytes() const { return plan_.message_bytes(); }
  void recode(std::vector<TensorSpec> specs);  // the same tensors with other codecs, also between begin() and encode()
  void begin(ErrorFeedback* feedback, Side side, uint64_t step, float loss_scale);
  // `look`, where given, sees what was encoded; with `again` the residuals stay for a second encoding of the step.
  using Look = std::function<void(Runner&, std::span<const void* const> tensors, const Residuals*, ConstBytes message)>;
  void encode(std::span<const void* const> shards, const Stamp& stamp, Bytes message, const Look& look = {}, bool again = false);
  void decode(ConstBytes message, std::span<void* const> shards, Write write, const Stamp& expected);
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
  UpStage(Engine& engine, const Job& job, Owners owners);
  void recode();  // after the job's codecs have changed
  void begin(const StepContext& context);
  // Encodes for those who must see a step before it is encoded for good.
  void look_ahead(uint64_t step, std::span<const void* const> in, Learning& learning);
  // `sums`: where the f32 sums of this rank's shards go, in their order. They may be the memory of `in`.
  void run(uint64_t step, std::span<const void* const> in, std::span<float* const> sums, Learning* learning = nullptr);
  const std::vector<Shard>& mine() const { return mine_; }
  uint64_t bytes_sent() const;

 private:
  void encode(uint64_t step, std::span<const void* const> in, Learning* learning, bool ahead);
  void make_room();

  Engine& engine_;
  const Job& job_;
  Owners owners_;
  std::vector<std::vector<Shard>> shards_;  // per message that this rank writes: one per owner, or one for everybody
  std::vector<Shard> mine_;
  std::vector<std::unique_ptr<Coder>> writers_;
  std::unique_ptr<Coder> reader_;
  std::vector<Block> sent_, received_;  // `everybody`: the one message is written where this rank would receive it
};

class DownStage {
 public:
  DownStage(Engine& engine, const Job& job);
  void recode();
  void begin(const StepContext& context);
  void look_ahead(uint64_t step, std::span<const float* const> values, Learning& learning);
  // `values`: the f32 values of this rank's shards, in their order.
  void run(uint64_t step, std::span<const float* const> values, std::span<void* const> out, Learning* learning = nullptr);
  const std::vector<Shard>& mine() const { return shards_[static_cast<size_t>(engine_.rank())]; }
  uint64_t bytes_sent() const;

 private:
  void make_room();

  Engine& engine_;
  const Job& job_;
  std::vector<std::vector<Shard>> shards_;  // per owner
  std::unique_ptr<Coder> writer_;
  std::vector<std::unique_ptr<Coder>> readers_;
  std::vector<Block> received_;  // this rank's own message is written where it would be received
};

class RootStage {
 public:
  RootStage(Engine& engine, const Job& job, int root);
  void begin(const StepContext& context);
  void run(uint64_t step, std::span<void* const> data);

 private:
  Engine& engine_;
  const Job& job_;
  int root_;
  std::vector<Shard> shards_;
  Coder coder_;
  Block message_;
};

// The sums become means where the job asks for it. IEEE division: exact where the mean is representable.
void finish_sums(const Job& job, int world, std::span<const Shard> shards, std::span<float* const> sums);

}  // namespace gradwire
