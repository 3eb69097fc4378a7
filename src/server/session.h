// SPDX-License-Identifier: Apache-2.0
// One connection of a worker, as a transport gives it to the hub. rpc/listen.cc has the one over gRPC; tests have one
// without a network.
#pragma once

#include <cstdint>
#include <string>

#include "server/frame.h"

namespace gradwire::server {

// Why a worker is sent away. The transport tells the worker, together with the words.
enum class Refusal { signature, full, protocol, malformed, slow, replaced, stopping };

// All calls may come from any thread, also while the hub's mutex is held: none of them may call the hub.
class Session {
 public:
  virtual ~Session() = default;
  virtual void send(const Frame& frame, const Blob& payload) = 0;  // payload may be null
  virtual void refuse(Refusal why, const std::string& words) = 0;  // the last words
  virtual std::string peer() const = 0;
  virtual uint64_t bytes_in() const = 0;  // payloads and heads
  virtual uint64_t bytes_out() const = 0;
};

}  // namespace gradwire::server
