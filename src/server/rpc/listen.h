// SPDX-License-Identifier: Apache-2.0
// The Hub on the network: gRPC with raw bytes, one stream a worker. Only listen.cc sees gRPC.
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
  double hello_s = 10;   // who has not said hello by then is sent away
  double stall_s = 120;  // who does not read for so long, too
};

class Listener {
 public:
  Listener(Hub& hub, const ListenOptions& options);  // Error{io, "listen"} if the address cannot be had
  ~Listener();
  int port() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace gradwire::server
