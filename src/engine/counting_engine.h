// SPDX-License-Identifier: Apache-2.0
// An engine whose ranks are said to run on given nodes, and that counts what a rank sends to ranks of other nodes: for
// measurements.
#pragma once

#include <utility>
#include <vector>

#include "engine/call.h"
#include "gradwire/engine.h"

namespace gradwire {

class CountingEngine final : public Engine {
 public:
  // `nodes`: of each rank. `inner` must outlive it.
  CountingEngine(Engine& inner, std::vector<int> nodes) : inner_(inner), nodes_(std::move(nodes)) {}

  uint64_t bytes_left_node() const { return left_; }  // payload to ranks of other nodes, so far

  std::string name() const override { return inner_.name(); }
  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  int node() const override { return nodes_[static_cast<size_t>(rank())]; }
  bool stays_on_its_thread() const override { return inner_.stays_on_its_thread(); }
  Handle all_to_all(std::span<const ConstBytes> send, std::span<const Bytes> recv) override {
    count(engine_detail::all_to_all_call(size(), send, recv));
    return inner_.all_to_all(send, recv);
  }
  Handle all_gather(ConstBytes mine, std::span<const Bytes> recv) override {
    count(engine_detail::all_gather_call(size(), mine, recv));
    return inner_.all_gather(mine, recv);
  }
  Handle broadcast(Bytes data, int root) override {
    count(engine_detail::broadcast_call(size(), rank(), data, root));
    return inner_.broadcast(data, root);
  }
  Handle barrier() override { return inner_.barrier(); }
  std::unique_ptr<Engine> split(int colour) override { return inner_.split(colour); }
  uint64_t bytes_sent() const override { return inner_.bytes_sent(); }
  void set_timeout(std::chrono::milliseconds timeout) override { inner_.set_timeout(timeout); }
  void poison(const std::string& why) override { inner_.poison(why); }

 private:
  void count(const engine_detail::Call& call) {
    for (size_t p = 0; p < nodes_.size(); ++p)
      if (nodes_[p] != nodes_[static_cast<size_t>(rank())]) left_ += call.send[p].size();
  }

  Engine& inner_;
  std::vector<int> nodes_;
  uint64_t left_ = 0;
};

}  // namespace gradwire
