// SPDX-License-Identifier: Apache-2.0
// A worker's end of a connection to the server: frames out, frames in. dial.h makes one over gRPC.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "server/frame.h"

namespace gradwire::server {

// The connection is gone; another one may be tried.
struct LinkLost : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Link {
 public:
  virtual ~Link() = default;
  virtual void send(const Frame& frame, const Blob& payload) = 0;  // enqueues; payload may be null
  // False when nothing came within `patience`. Throws LinkLost, or Error where another attempt is of no use: the server
  // has said why it refuses this worker.
  virtual bool receive(Frame& frame, Blob& payload, std::chrono::milliseconds patience) = 0;
};

using Dialer = std::function<std::unique_ptr<Link>()>;

}  // namespace gradwire::server
