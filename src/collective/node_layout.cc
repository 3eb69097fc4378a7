// SPDX-License-Identifier: Apache-2.0
#include "collective/node_layout.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <map>

#include "core/refuse.h"
#include "gradwire/collective.h"

namespace gradwire {
namespace {

constexpr int kAuto = ReduceOptions::kAutoNodes;

std::vector<int> divisors(int number) {
  std::vector<int> all;
  for (int k = 1; k <= number; ++k)
    if (number % k == 0) all.push_back(k);
  return all;
}

}  // namespace

std::string checked_nodes_option(int nodes, const Engine& engine) {
  if (nodes == kAuto) {
    if (engine.node() < 0)
      refuse_usage(fmt::format("nodes is auto, and the engine '{}' does not know which ranks share a node; give a "
                               "number of nodes",
                               engine.name()),
                   "nodes");
    return "auto";
  }
  if (nodes < 0)
    refuse_usage(fmt::format("nodes is {}; allowed are 0 (one level), auto ({}) and a number of nodes", nodes, kAuto),
                 "nodes");
  if (nodes > 0 && engine.size() % nodes != 0)
    refuse_usage(fmt::format("nodes is {}, which does not divide the {} ranks; allowed are {}", nodes, engine.size(),
                             fmt::join(divisors(engine.size()), ", ")),
                 "nodes");
  return std::to_string(nodes);
}

NodeLayout::NodeLayout(int nodes, int rank, std::span<const int> found) {
  const int world = static_cast<int>(found.size());
  std::map<int, size_t> index;  // of a node, by the number that its ranks have found
  for (int r = 0; r < world; ++r) {
    const int key = nodes == kAuto ? found[static_cast<size_t>(r)] : r / (world / nodes);
    const size_t node = index.emplace(key, index.size()).first->second;
    if (node == members_.size()) members_.emplace_back();
    members_[node].push_back(r);
    if (r == rank) {
      node_ = static_cast<int>(node);
      place_ = static_cast<int>(members_[node].size()) - 1;
    }
  }
  for (const std::vector<int>& ranks : members_)
    if (ranks.size() != members_[0].size())
      refuse_usage(fmt::format("nodes is auto, and the nodes have different numbers of ranks: that of rank {} has {}, "
                               "that of rank {} has {}; allowed are nodes of equal size",
                               members_[0][0], members_[0].size(), ranks[0], ranks.size()),
                   "nodes");
}

std::vector<int> NodeLayout::peers() const {
  std::vector<int> ranks;
  for (const std::vector<int>& node : members_) ranks.push_back(node[static_cast<size_t>(place_)]);
  return ranks;
}

}  // namespace gradwire
