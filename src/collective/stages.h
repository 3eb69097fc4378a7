// SPDX-License-Identifier: Apache-2.0
// The moves that collectives are made of: a coding half (coding.h), room for its messages, and an engine that carries
// them. Each is built once, from a Job, and then run step after step:
//
//   UpStage        an UpCoding; with everybody as the owner of everything it is the whole of `gather`
//   DownStage      a DownCoding
//   RootStage      one rank encodes everything; everybody decodes it
//
// A stage first begins (takes residual pointers: may fail on one rank alone, so it comes before the ranks agree on the
// step), then runs.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "collective/timer.h"
#include "collective/coding.h"

namespace gradwire {

class UpStage {
 public:
  enum class Owners { shards, everybody };
  UpStage(Engine& engine, const Job& job, Owners owners, ReduceTimer& clock);
  void recode();  // after the job's codecs have changed
  void begin(const StepContext& context) { coding_.begin(context); }
  // Encodes for those who must see a step before it is encoded for good.
  void look_ahead(uint64_t step, std::span<const void* const> in, Learning& learning);
  // `sums`: where the f32 sums of this rank's shards go, in their order. They may be the memory of `in`.
  void run(uint64_t step, std::span<const void* const> in, std::span<float* const> sums, Learning* learning = nullptr);
  const std::vector<Shard>& mine() const { return coding_.mine(); }
  uint64_t bytes_sent() const;
  uint64_t message_memory() const;
  uint64_t sum_memory() const { return merged_ ? merged_->held() : 0; }

 private:
  std::vector<Bytes> to_write() const;
  void encode(uint64_t step, std::span<const void* const> in, Learning* learning, bool ahead);
  void merge(std::span<const ConstBytes> messages, std::span<float* const> sums);
  void make_room();

  Engine& engine_;
  const Job& job_;
  ReduceTimer& clock_;
  Owners owners_;
  UpCoding coding_;
  std::vector<Block> sent_, received_;  // `everybody`: the one message is written where this rank would receive it
  std::unique_ptr<Block> merged_;       // on a GPU, where tables are merged: the host's sums on their way to it
  Staging staging_;                     // last: it waits before the blocks go
};

class DownStage {
 public:
  DownStage(Engine& engine, const Job& job, ReduceTimer& clock);
  void recode();
  void begin(const StepContext& context) { coding_.begin(context); }
  void look_ahead(uint64_t step, std::span<const float* const> values, Learning& learning);
  // `values`: the f32 values of this rank's shards, in their order.
  void run(uint64_t step, std::span<const float* const> values, std::span<void* const> out,
           Learning* learning = nullptr);
  const std::vector<Shard>& mine() const { return coding_.mine(); }
  uint64_t bytes_sent() const;
  uint64_t message_memory() const;

 private:
  void encode(uint64_t step, std::span<const float* const> values, Learning* learning, bool ahead);
  void make_room();

  Engine& engine_;
  const Job& job_;
  ReduceTimer& clock_;
  DownCoding coding_;
  std::vector<Block> received_;  // this rank's own message is written where it would be received
  Staging staging_;
};

class RootStage {
 public:
  RootStage(Engine& engine, const Job& job, int root, ReduceTimer& clock);
  void begin(const StepContext& context);
  void run(uint64_t step, std::span<void* const> data);

 private:
  Engine& engine_;
  const Job& job_;
  ReduceTimer& clock_;
  int root_;
  std::vector<Shard> shards_;
  Coder coder_;
  Block message_;
  Staging staging_;
};

}  // namespace gradwire
