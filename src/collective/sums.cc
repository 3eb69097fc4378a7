// SPDX-License-Identifier: Apache-2.0
#include "collective/sums.h"

#include <utility>

#include "device/sums.h"

namespace gradwire {
namespace {

constexpr uint64_t kInOutput = ~uint64_t{0};

}  // namespace

Sums::Sums(std::shared_ptr<Memory> memory, const Job& job, std::span<const Shard> mine, bool to_outputs)
    : job_(job), mine_(mine.begin(), mine.end()), room_(std::move(memory), Block::Place::device, 0) {
  uint64_t floats = 0;
  for (const Shard& shard : mine_) {
    const bool in_output = to_outputs && job.tensors[shard.tensor].dtype == DType::f32;
    offsets_.push_back(in_output ? kInOutput : floats);
    if (!in_output) floats += (shard.count + 15) / 16 * 16;  // vectors like whole cache lines
  }
  room_.resize(floats * sizeof(float));
}

std::vector<float*> Sums::places(std::span<void* const> outputs) const {
  std::vector<float*> at;
  for (size_t i = 0; i < mine_.size(); ++i)
    at.push_back(offsets_[i] == kInOutput ? static_cast<float*>(outputs[i]) : room_.floats() + offsets_[i]);
  return at;
}

void Sums::round(const Device& device, std::span<void* const> outputs) const {
  std::vector<NarrowSpan> spans;
  for (size_t i = 0; i < mine_.size(); ++i)
    if (offsets_[i] != kInOutput)
      spans.push_back({room_.floats() + offsets_[i], outputs[i], mine_[i].count, job_.tensors[mine_[i].tensor].dtype});
  narrow(device, spans);
}

void finish_sums(const Job& job, const Device& device, int world, std::span<const Shard> shards,
                 std::span<float* const> sums) {
  const bool mean = job.options.op == ReduceOptions::Op::mean;
  std::vector<SumSpan> spans;
  for (size_t i = 0; i < shards.size(); ++i) spans.push_back({sums[i], shards[i].count});
  divide(device, spans, mean ? static_cast<float>(world) : 1.0f);
}

}  // namespace gradwire
