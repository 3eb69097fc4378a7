// SPDX-License-Identifier: Apache-2.0
// The engine over a communicator of C callbacks. Every operation is one exchange of bytes between all ranks, done on
// the caller's thread before the operation's handle is returned. The callbacks do not know what an operation is, so it
// is the handshake of a collective that finds out whether ranks disagree.
#pragma once

#include <optional>

#include "engine/call.h"
#include "gradwire.h"

namespace gradwire::c_api {

class CallbackEngine final : public Engine {
 public:
  explicit CallbackEngine(const gw_communicator& communicator);  // throws Error{usage}
  ~CallbackEngine() override;
  void own() { owned_ = true; }  // close() is called from now on

  std::string name() const override { return "c"; }
  int rank() const override { return communicator_.rank; }
  int size() const override { return communicator_.size; }
  int node() const override { return communicator_.node - 1; }  // 0 means that it is not known
  bool stays_on_its_thread() const override { return true; }

  Handle all_to_all(std::span<const ConstBytes> send, std::span<const Bytes> recv) override;
  Handle all_gather(ConstBytes mine, std::span<const Bytes> recv) override;
  Handle broadcast(Bytes data, int root) override;
  Handle barrier() override;
  std::unique_ptr<Engine> split(int colour) override;

  uint64_t bytes_sent() const override { return traffic_.bytes(); }
  void set_timeout(std::chrono::milliseconds timeout) override;
  void poison(const std::string& why) override;

 private:
  Handle exchange(const engine_detail::Call& call);

  const gw_communicator communicator_;
  bool owned_ = false;
  std::optional<engine_detail::EngineFailure> failure_;
  engine_detail::Traffic traffic_;
};

}  // namespace gradwire::c_api
