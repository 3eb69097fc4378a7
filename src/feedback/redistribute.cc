// SPDX-License-Identifier: Apache-2.0
// Residuals for another number of ranks, or for other nodes. What is kept is the sum of all residuals in units of the
// mean: (1/W) times the sum of the workers' residuals, plus the owners' residuals. The arithmetic is in double, and
// every value is rounded once. On two levels a worker is a node, whose ranks have a piece of every tensor each.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "core/bits.h"
#include "core/float_mode.h"
#include "core/refuse.h"
#include "feedback/feedback_state.h"
#include "feedback/owners.h"
#include "feedback/state_nodes.h"
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
using Parts = std::map<uint64_t, std::vector<float>>;  // of a tensor, by first element

// The mean of one up residual over some ranks, which are all that have it.
std::vector<float> mean_of(const Stores& all, std::span<const size_t> ranks, const ResidualKey& key) {
  std::vector<double> sum;
  for (size_t rank : ranks) {
    const auto found = all[rank]->residuals().find(key);
    if (found == all[rank]->residuals().end() || (rank != ranks.front() && found->second.count != sum.size()))
      refuse_usage(fmt::format("redistribute: rank {} has no up residual of tensor '{}' like the others (first {})",
                               rank, key.name, key.first),
                   "ranks");
    const std::vector<float> own = all[rank]->values(key);
    sum.resize(own.size());
    for (size_t i = 0; i < own.size(); ++i) sum[i] += own[i];
  }
  std::vector<float> mean(sum.size());
  for (size_t i = 0; i < sum.size(); ++i)
    mean[i] = round_to(sum[i] / static_cast<double>(ranks.size()), all[0]->dtype());
  return mean;
}

[[noreturn]] void refuse_cover(const std::string& name, const char* direction) {
  refuse_usage(fmt::format("redistribute: the {} residuals of tensor '{}' do not cover its elements exactly once",
                           direction, name),
               "ranks");
}

// All parts of one tensor, joined.
std::vector<float> joined(const Parts& parts, const std::string& name, const char* direction) {
  std::vector<float> whole;
  for (const auto& [first, part] : parts) {
    if (first != whole.size()) refuse_cover(name, direction);
    whole.insert(whole.end(), part.begin(), part.end());
  }
  return whole;
}

// The ranks that have the same pieces: one list for each place in a node, and one in all where there is one level.
std::vector<std::vector<size_t>> ranks_by_place(std::span<const ExtraState* const> extras) {
  const StateNodes first = nodes_of(*extras[0]);
  std::vector<std::vector<size_t>> places(first.nodes == 0 ? 1 : first.per_node);
  std::set<uint32_t> positions;
  for (size_t rank = 0; rank < extras.size(); ++rank) {
    const StateNodes here = nodes_of(*extras[rank]);
    if (here.nodes != first.nodes || here.per_node != first.per_node)
      refuse_usage(fmt::format("redistribute: the state of rank {} is of {}, that of rank 0 of {}", rank, here.str(),
                               first.str()),
                   "ranks");
    if (first.nodes > 0 && !positions.insert(here.position).second)
      refuse_usage(fmt::format("redistribute: the state of position {} stands twice", here.position), "ranks");
    places[here.position % places.size()].push_back(rank);
  }
  if (first.nodes > 0 && positions.size() != size_t{first.nodes} * first.per_node)
    refuse_usage(fmt::format("redistribute: {} states of {}; pass one of every rank", positions.size(), first.str()),
                 "ranks");
  return places;
}

// All residuals by tensor: the means of the workers', and the owners'.
struct CollectedResiduals {
  std::map<std::string, Parts> up, down;
};

CollectedResiduals collected(const Stores& stores, std::span<const ExtraState* const> extras) {
  CollectedResiduals all;
  for (const std::vector<size_t>& holders : ranks_by_place(extras)) {
    std::set<ResidualKey> keys;
    for (size_t rank : holders)
      for (const auto& [key, residual] : stores[rank]->residuals()) {
        if (key.direction == Direction::up)
          keys.insert(key);
        else if (residual.count > 0 && !all.down[key.name].emplace(key.first, stores[rank]->values(key)).second)
          refuse_cover(key.name, "down");
      }
    for (const ResidualKey& key : keys) all.up[key.name].emplace(key.first, mean_of(stores, holders, key));
  }
  return all;
}

// (nodes, ranks of each) of the new ranks; on one level every rank is a node.
StateNodes checked_nodes(int world, int nodes) {
  if (world < 1) refuse_usage(fmt::format("redistribute: new_world is {}; it must be at least 1", world), "new_world");
  if (nodes < 0 || (nodes > 0 && world % nodes != 0))
    refuse_usage(
        fmt::format("redistribute: new_nodes is {}; allowed are 0 and numbers that divide the {} ranks", nodes, world),
        "new_nodes");
  if (nodes == 0) nodes = world;
  return {static_cast<uint32_t>(nodes), static_cast<uint32_t>(world / nodes), 0};
}

}  // namespace

std::vector<ErrorFeedback> ErrorFeedback::redistribute(std::span<const ErrorFeedback> ranks, int new_world,
                                                       int new_nodes) {
  const FloatMode ieee;
  if (ranks.empty()) refuse_usage("redistribute: no states were given; pass one of every rank", "ranks");
  const StateNodes now = checked_nodes(new_world, new_nodes);
  const State& model = *ranks.front().state_;
  Stores stores;
  std::vector<const ExtraState*> extras;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    stores.push_back(&ranks[rank].state_->store);
    extras.push_back(&ranks[rank].state_->extras);
    stores.back()->check_closed("redistribute");
    if (stores.back()->dtype() != model.store.dtype())
      refuse_usage(fmt::format("redistribute: residuals of rank {} are {}, those of rank 0 {}", rank,
                               name_of(stores.back()->dtype()), name_of(model.store.dtype())),
                   "residual");
  }
  const auto [up, down] = collected(stores, extras);
  const bool one_level = now.per_node == 1;
  std::vector<ErrorFeedback> fresh;
  for (uint32_t position = 0; position < static_cast<uint32_t>(new_world); ++position) {
    fresh.emplace_back(model.store.dtype(), model.store.device());
    ExtraState& own = fresh.back().state_->extras;
    own = model.extras;
    set_nodes(own, one_level ? StateNodes{} : StateNodes{now.nodes, now.per_node, position});
  }
  const int places = static_cast<int>(now.per_node), nodes = static_cast<int>(now.nodes);
  const auto store_of = [&](int node, int place) -> ResidualStore& {
    return fresh[static_cast<size_t>(node * places + place)].state_->store;
  };
  const auto piece = [&](const std::string& name, const std::vector<float>& whole, int place) {
    return piece_of(name, whole.size(), place, places);
  };
  // Every new rank gets the mean of the old ranks' residuals, so that the mean over the new ranks is the same.
  for (const auto& [name, parts] : up) {
    if (one_level && nodes_of(model.extras).nodes == 0) {  // tensors of which only a part is sent stay so
      for (int node = 0; node < nodes; ++node)
        for (const auto& [first, part] : parts) fill(store_of(node, 0), {Direction::up, name, first}, part);
      continue;
    }
    const std::vector<float> whole = joined(parts, name, "up");
    for (int place = 0; place < places; ++place)
      if (const auto [first, count] = piece(name, whole, place); count > 0)
        for (int node = 0; node < nodes; ++node)
          fill(store_of(node, place), {Direction::up, name, first}, std::span(whole).subspan(first, count));
  }
  // Every element has one owner: the shards are joined and cut again for the new owners.
  for (const auto& [name, parts] : down) {
    const std::vector<float> whole = joined(parts, name, "down");
    for (int place = 0; place < places; ++place) {
      const auto [first, count] = piece(name, whole, place);
      for (const OwnedRun& run : owners(name, count, nodes, places))
        fill(store_of(run.owner, place), {Direction::down, name, first + run.first},
             std::span(whole).subspan(first + run.first, run.count));
    }
  }
  return fresh;
}

}  // namespace gradwire
