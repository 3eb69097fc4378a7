// SPDX-License-Identifier: Apache-2.0
#include "collective/sums.h"

#include <utility>

#include "device/sums.h"

namespace gradwire {
namespace {

constexpr uint64_t kInOutput = ~uint64_t{0};

}  // namespace

ShardSums::ShardSums(std::shared_ptr<Memory> memory, const Job& job, std::span<const Shard> mine, Use use)
    : job_(job), mine_(mine.begin(), mine.end()), own_(std::move(memory), Buffer::Place::device, 0) {
  uint64_t floats = 0;
  for (const Shard& shard : mine_) {
    const bool in_output = use == Use::floats || (use == Use::tensors && job.tensors[shard.tensor].dtype == DType::f32);
    offsets_.push_back(in_output ? kInOutput : floats);
    if (!in_output) floats += (shard.count + 15) / 16 * 16;  // vectors are faster at the start of a cache line
  }
  own_.resize(floats * sizeof(float));
}

std::vector<float*> ShardSums::places(std::span<void* const> outputs) const {
  std::vector<float*> at;
  for (size_t i = 0; i < mine_.size(); ++i)
    at.push_back(offsets_[i] == kInOutput ? static_cast<float*>(outputs[i]) : own_.floats() + offsets_[i]);
  return at;
}

void ShardSums::divide_by(const Device& device, int world, std::span<float* const> places) const {
  std::vector<SumSpan> spans;
  for (size_t i = 0; i < mine_.size(); ++i) spans.push_back({places[i], mine_[i].count});
  divide(device, spans, job_.options.op == ReduceOptions::Op::mean ? static_cast<float>(world) : 1.0f);
}

void ShardSums::round(const Device& device, std::span<void* const> outputs) const {
  std::vector<NarrowSpan> spans;
  for (size_t i = 0; i < mine_.size(); ++i)
    if (offsets_[i] != kInOutput)
      spans.push_back({own_.floats() + offsets_[i], outputs[i], mine_[i].count, job_.tensors[mine_[i].tensor].dtype});
  narrow(device, spans);
}

}  // namespace gradwire
