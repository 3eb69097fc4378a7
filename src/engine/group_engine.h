// SPDX-License-Identifier: Apache-2.0
// Some ranks of an engine as an engine of their own, without another connection: rank i here is rank ranks[i] there.
// Every operation is one all_to_all of the whole engine, in which the ranks of a group send to each other only. So the
// ranks of the whole engine are dealt to groups of equal size, and all groups do the same operations at once; groups of
// one rank do nothing. In return there is one order of operations, one poison and one time-out, and an error names a
// rank by its number in the whole engine.
#pragma once

#include <span>
#include <vector>

#include "gradwire/engine.h"

namespace gradwire {

class GroupEngine final : public Engine {
 public:
  // `ranks`: distinct, this rank among them. `whole` must outlive the group.
  GroupEngine(Engine& whole, std::vector<int> ranks);

  std::string name() const override { return whole_.name(); }
  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(ranks_.size()); }
  int node() const override { return whole_.node(); }
  bool stays_on_its_thread() const override { return whole_.stays_on_its_thread(); }

  Handle all_to_all(std::span<const ConstBytes> send, std::span<const Bytes> recv) override;
  Handle all_gather(ConstBytes mine, std::span<const Bytes> recv) override;
  Handle broadcast(Bytes data, int root) override;
  Handle barrier() override;
  std::unique_ptr<Engine> split(int colour) override;  // Error{unsupported}

  uint64_t bytes_sent() const override { return bytes_sent_; }
  void set_timeout(std::chrono::milliseconds timeout) override { whole_.set_timeout(timeout); }
  void poison(const std::string& why) override { whole_.poison(why); }

 private:
  Engine& whole_;
  std::vector<int> ranks_;
  int rank_ = -1;
  uint64_t bytes_sent_ = 0;
};

}  // namespace gradwire
