// SPDX-License-Identifier: Apache-2.0
// Residuals for another number of ranks. What is kept is the sum of all residuals in units of the mean: (1/W) times the
// sum of the workers' residuals, plus the owners' residuals. The arithmetic is in double, and every value is rounded
// once.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "core/bits.h"
#include "core/float_mode.h"
#include "core/refuse.h"
#include "feedback/feedback_state.h"
#include "feedback/owners.h"
#include "gradwire/error.h"

namespace gradwire {
namespace {

// A double rounded once to f32 or bf16. Going to bf16 through f32 would round twice; if the first rounding is to odd
// (inexact results get an odd last bit), the second one is right.
float round_to(double x, DType dtype) {
  float f = static_cast<float>(x);
  if (dtype == DType::f32) return f;
  if (static_cast<double>(f) != x && (float_bits(f) & 1u) == 0)
    f = std::nextafter(f, static_cast<double>(f) < x ? HUGE_VALF : -HUGE_VALF);
  return bf16_to_f32(f32_to_bf16(f));
}

void fill(ResidualStore& store, const ResidualKey& key, std::span<const float> values) {
  store.make(key, values.size());
  store.set(key, values);
}

using Stores = std::vector<const ResidualStore*>;

// The mean of one up residual over all ranks.
std::vector<float> mean_of(const Stores& ranks, const ResidualKey& key) {
  std::vector<double> sum;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    const auto found = ranks[rank]->residuals().find(key);
    if (found == ranks[rank]->residuals().end() || (rank > 0 && found->second.count != sum.size()))
      refuse_usage(fmt::format("redistribute: rank {} has no up residual of tensor '{}' like the others (first {})",
                               rank, key.name, key.first),
                   "ranks");
    const std::vector<float> own = ranks[rank]->values(key);
    sum.resize(own.size());
    for (size_t i = 0; i < own.size(); ++i) sum[i] += own[i];
  }
  std::vector<float> mean(sum.size());
  for (size_t i = 0; i < sum.size(); ++i)
    mean[i] = round_to(sum[i] / static_cast<double>(ranks.size()), ranks[0]->dtype());
  return mean;
}

// All down residuals of one tensor, joined.
std::vector<float> joined(const Stores& ranks, const std::string& name) {
  std::map<uint64_t, std::vector<float>> shards;
  uint64_t total = 0, end = 0;
  for (const ResidualStore* rank : ranks)
    for (const auto& [key, residual] : rank->residuals())
      if (key.direction == Direction::down && key.name == name && residual.count > 0) {
        shards.emplace(key.first, rank->values(key));
        total += residual.count;
        end = std::max(end, key.first + residual.count);
      }
  std::vector<float> whole;
  whole.reserve(total);
  for (const auto& [first, shard] : shards) {
    if (first != whole.size()) break;
    whole.insert(whole.end(), shard.begin(), shard.end());
  }
  if (whole.size() != end || total != end)
    refuse_usage(
        fmt::format("redistribute: the down residuals of tensor '{}' do not cover its elements exactly once", name),
        "ranks");
  return whole;
}

}  // namespace

std::vector<ErrorFeedback> ErrorFeedback::redistribute(std::span<const ErrorFeedback> ranks, int new_world) {
  const FloatMode ieee;
  if (ranks.empty()) refuse_usage("redistribute: no states were given; pass one of every rank", "ranks");
  if (new_world < 1)
    refuse_usage(fmt::format("redistribute: new_world is {}; it must be at least 1", new_world), "new_world");
  const State& model = *ranks.front().state_;
  Stores stores;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    stores.push_back(&ranks[rank].state_->store);
    stores.back()->check_closed("redistribute");
    if (stores.back()->dtype() != model.store.dtype())
      refuse_usage(fmt::format("redistribute: residuals of rank {} are {}, those of rank 0 {}", rank,
                               name_of(stores.back()->dtype()), name_of(model.store.dtype())),
                   "residual");
  }
  std::vector<ErrorFeedback> fresh;
  for (int rank = 0; rank < new_world; ++rank) {
    fresh.emplace_back(model.store.dtype(), model.store.device());
    fresh.back().state_->extras = model.extras;
  }

  std::set<ResidualKey> up;
  std::set<std::string> down;
  for (const ResidualStore* rank : stores)
    for (const auto& [key, residual] : rank->residuals())
      if (key.direction == Direction::up)
        up.insert(key);
      else
        down.insert(key.name);
  // Every new rank gets the mean of the old ranks' residuals, so that the mean over the new ranks is the same.
  for (const ResidualKey& key : up) {
    const std::vector<float> mean = mean_of(stores, key);
    for (ErrorFeedback& rank : fresh) fill(rank.state_->store, key, mean);
  }
  // Every element has one owner: the shards are joined and cut again for the new owners.
  for (const std::string& name : down) {
    const std::vector<float> whole = joined(stores, name);
    for (const OwnedRun& run : owners(name, whole.size(), new_world))
      fill(fresh[static_cast<size_t>(run.owner)].state_->store, {Direction::down, name, run.first},
           std::span(whole).subspan(run.first, run.count));
  }
  return fresh;
}

}  // namespace gradwire
