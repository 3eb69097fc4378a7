// SPDX-License-Identifier: Apache-2.0
// An engine whose ranks are said to run on given nodes, and that counts what a rank sends to ranks of other nodes: for
// measurements.
#pragma once

#include <utility>
#include <vector>

#include "engine/call.h"
#include "engine/forwarding_engine.h"

namespace gradwire {

class CountingEngine final : public ForwardingEngine {
 public:
  // `nodes`: of each rank. `inner` must outlive it.
  CountingEngine(Engine& inner, std::vector<int> nodes) : ForwardingEngine(inner), nodes_(std::move(nodes)) {}

  uint64_t bytes_left_node() const { return left_; }  // payload to ranks of other nodes, so far

  int node() const override { return nodes_[static_cast<size_t>(rank())]; }
  Handle all_to_all(std::span<const ConstBytes> send, std::span<const Bytes> recv) override {
    count(engine_detail::all_to_all_call(size(), send, recv));
    return ForwardingEngine::all_to_all(send, recv);
  }
  Handle all_gather(ConstBytes mine, std::span<const Bytes> recv) override {
    count(engine_detail::all_gather_call(size(), mine, recv));
    return ForwardingEngine::all_gather(mine, recv);
  }
  Handle broadcast(Bytes data, int root) override {
    count(engine_detail::broadcast_call(size(), rank(), data, root));
    return ForwardingEngine::broadcast(data, root);
  }

 private:
  void count(const engine_detail::Call& call) {
    for (size_t p = 0; p < nodes_.size(); ++p)
      if (nodes_[p] != nodes_[static_cast<size_t>(rank())]) left_ += call.send[p].size();
  }

  std::vector<int> nodes_;
  uint64_t left_ = 0;
};

}  // namespace gradwire
