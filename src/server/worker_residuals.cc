// SPDX-License-Identifier: Apache-2.0
#include "server/worker_residuals.h"

#include <algorithm>
#include <functional>

#include "collective/feedback_rule.h"
#include "server/ledger.h"

namespace gradwire::server {

WorkerResiduals::WorkerResiduals(const Signature& signature) {
  const Rules rules = Rules::parse(signature.up);
  for (const Variable& one : signature.parameters) {
    keys_.push_back({Direction::up, one.name, 0});
    name_hashes_.push_back(hash_name(one.name));
    store_.add(keys_.back(), one.count());
    const Codec codec = rules.codec_for(one.name, static_cast<int>(one.shape.size()), one.count());
    // A lossless codec leaves nothing out, so there is nothing to drop.
    const bool drops = !codec.traits().lossless && !wants_residual(codec, signature.feedback);
    dropped_.emplace_back(drops ? one.count() : 0);
  }
}

WorkerResiduals::Dropped WorkerResiduals::commit(uint64_t step, const ShardLayout& shard) {
  store_.commit(step);
  Dropped all;
  for (const ParameterRange& range : shard.ranges) {
    if (dropped_[range.parameter].empty()) continue;
    const std::span<float> left = part(range);
    all.sum += signed_sum(left, name_hashes_[range.parameter], range.first);
    all.squares += square_sum(left);
    std::copy(left.begin(), left.end(), dropped_[range.parameter].data() + range.first);
    std::fill(left.begin(), left.end(), 0.0f);
  }
  return all;
}

double WorkerResiduals::take_back(const ShardLayout& shard) {
  double sum = 0;
  for (const ParameterRange& range : shard.ranges) {
    if (dropped_[range.parameter].empty()) continue;
    const std::span<float> held = part(range);
    const std::span<float> back = std::span(dropped_[range.parameter]).subspan(range.first, range.count);
    sum += signed_sum(back, name_hashes_[range.parameter], range.first);
    std::transform(held.begin(), held.end(), back.begin(), held.begin(), std::plus<>());
  }
  return sum;
}

std::vector<float*> WorkerResiduals::pointers() const {
  std::vector<float*> list;
  for (const ResidualKey& key : keys_) list.push_back(store_.floats(key).data());
  return list;
}

double WorkerResiduals::sum(const ShardLayout& shard) const {
  double sum = 0;
  for (const ParameterRange& range : shard.ranges)
    sum += signed_sum(part(range), name_hashes_[range.parameter], range.first);
  return sum;
}

uint64_t WorkerResiduals::bytes() const {
  uint64_t bytes = store_.bytes();
  for (const auto& one : dropped_) bytes += one.size() * sizeof(float);
  return bytes;
}

}  // namespace gradwire::server
