// SPDX-License-Identifier: Apache-2.0
// Which ranks share a node, for reductions of two levels. All nodes have equally many ranks; each rank has a node and a
// place in it, and the ranks with the same place in all nodes belong together:
//
//   node 0:   rank 0 (place 0)   rank 1 (place 1)
//   node 1:   rank 2 (place 0)   rank 3 (place 1)
#pragma once

#include <span>
#include <string>
#include <vector>

#include "gradwire/engine.h"

namespace gradwire {

// ReduceOptions::nodes for this engine, as all ranks must have it. Throws Error{usage}.
std::string checked_nodes_option(int nodes, const Engine& engine);

class NodeLayout {
 public:
  // `found`: where each rank runs, for kAutoNodes. Nodes count in the order of their lowest ranks. Throws Error{usage},
  // with the same arguments always the same.
  NodeLayout(int nodes, int rank, std::span<const int> found);

  int nodes() const { return static_cast<int>(members_.size()); }
  int per_node() const { return static_cast<int>(members_[0].size()); }
  int place() const { return place_; }  // of this rank in its node
  int position() const { return node_ * per_node() + place_; }
  const std::vector<int>& neighbours() const { return members_[static_cast<size_t>(node_)]; }  // ranks of this node
  std::vector<int> peers() const;  // the ranks with this place, one of each node

 private:
  std::vector<std::vector<int>> members_;  // ranks of each node, in ascending order
  int node_ = 0, place_ = 0;
};

}  // namespace gradwire
