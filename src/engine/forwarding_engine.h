// SPDX-License-Identifier: Apache-2.0
// An engine that hands everything on to another one: for engines that look at what passes, or change it.
#pragma once

#include <memory>
#include <string>

#include "gradwire/engine.h"

namespace gradwire {

class ForwardingEngine : public Engine {
 public:
  explicit ForwardingEngine(Engine& inner) : inner_(inner) {}  // which must outlive it

  std::string name() const override { return inner_.name(); }
  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  int node() const override { return inner_.node(); }
  bool stays_on_its_thread() const override { return inner_.stays_on_its_thread(); }
  Handle all_to_all(std::span<const ConstBytes> send, std::span<const Bytes> recv) override {
    return inner_.all_to_all(send, recv);
  }
  Handle all_gather(ConstBytes mine, std::span<const Bytes> recv) override { return inner_.all_gather(mine, recv); }
  Handle broadcast(Bytes data, int root) override { return inner_.broadcast(data, root); }
  Handle barrier() override { return inner_.barrier(); }
  std::unique_ptr<Engine> split(int colour) override { return inner_.split(colour); }
  uint64_t bytes_sent() const override { return inner_.bytes_sent(); }
  void set_timeout(std::chrono::milliseconds timeout) override { inner_.set_timeout(timeout); }
  void poison(const std::string& why) override { inner_.poison(why); }

 private:
  Engine& inner_;
};

}  // namespace gradwire
