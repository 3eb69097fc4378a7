// SPDX-License-Identifier: Apache-2.0
// The hub on the network: gRPC with raw bytes, one stream per worker. Only listen.cc sees gRPC.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "server/endpoint.h"
#include "server/hub.h"

namespace gradwire::server {

struct ListenOptions {
  std::string address = "127.0.0.1:7070";
  Security security;
  int max_connections = 2048;
  uint64_t spare_files = 32;  // descriptors that connections leave to checkpoints and the like
  double hello_s = 10;        // a connection that has not said hello by then is closed
  double stall_s = 120;       // so is one that does not read for so long
};

class RpcListener {
 public:
  // Error{io, "listen"} if the address cannot be had; Error{usage, "nofile"} if there are too few descriptors.
  RpcListener(ServerHub& hub, const ListenOptions& options);
  ~RpcListener();
  int port() const;
  size_t sockets() const;       // open now
  uint64_t cut_off() const;     // connections that were cut off, to make room or for what they did
  std::string trouble() const;  // why nobody can connect at present, or nothing

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace gradwire::server
