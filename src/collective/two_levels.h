// SPDX-License-Identifier: Apache-2.0
// The second level of a Reducer: its engine seen as nodes of several ranks. `node` is the ranks of this node, by place,
// which exchange plain values; `between` is the ranks with this place, by node, which exchange messages.
#pragma once

#include <span>
#include <utility>
#include <vector>

#include "collective/node_exchange.h"
#include "collective/node_layout.h"
#include "engine/group_engine.h"
#include "feedback/state_nodes.h"

namespace gradwire {

struct TwoLevels {
  TwoLevels(Engine& engine, NodeLayout found, const Job& whole, ReduceTimer& timer)
      : layout(std::move(found)),
        node(engine, layout.neighbours()),
        between(engine, layout.peers()),
        exchange(node, whole, timer) {}

  // With one node there is nothing to compress.
  bool plain() const { return layout.nodes() == 1; }
  JobPlace place() const { return {layout.place(), layout.per_node()}; }
  StateNodes state_nodes() const {
    return {static_cast<uint32_t>(layout.nodes()), static_cast<uint32_t>(layout.per_node()),
            static_cast<uint32_t>(layout.position())};
  }
  int others() const { return layout.per_node() * (layout.nodes() - 1); }  // ranks of other nodes

  // What all ranks have, place after place. Every byte leaves its node once for every other node, and not once for
  // every rank there.
  void all_gather(ConstBytes mine, Bytes all) {
    const auto nodes = static_cast<size_t>(layout.nodes()), places = static_cast<size_t>(layout.per_node());
    const auto slots = [](Bytes whole, size_t count) {
      std::vector<Bytes> cut;
      for (size_t i = 0; i < count; ++i) cut.push_back(whole.subspan(i * whole.size() / count, whole.size() / count));
      return cut;
    };
    const std::vector<Bytes> by_place = slots(all, places);
    const Bytes own = by_place[static_cast<size_t>(layout.place())];
    between.all_gather(mine, slots(own, nodes)).wait();
    node.all_gather(own, by_place).wait();
  }

  NodeLayout layout;
  GroupEngine node, between;
  NodeExchange exchange;
};

}  // namespace gradwire
