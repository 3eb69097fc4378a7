// SPDX-License-Identifier: Apache-2.0
// The hub on the network: gRPC with raw bytes, one stream per worker. Only listen.cc sees gRPC.
#pragma once

#include <memory>
#include <string>

#include "server/endpoint.h"
#include "server/hub.h"

namespace gradwire::server {

struct ListenOptions {
  std::string address = "127.0.0.1:7070";
  Security security;
  int max_connections = 2048;
  double hello_s = 10;   // a connection that has not said hello by then is closed
  double stall_s = 120;  // so is one that does not read for so long
};

class RpcListener {
 public:
  RpcListener(ServerHub& hub, const ListenOptions& options);  // Error{io, "listen"} if the address cannot be had
  ~RpcListener();
  int port() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace gradwire::server
