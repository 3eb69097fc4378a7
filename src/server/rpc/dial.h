// SPDX-License-Identifier: Apache-2.0
// A worker's connection to a server over gRPC. Only dial.cc sees gRPC.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "server/endpoint.h"
#include "server/link.h"

namespace gradwire::server {

struct DialOptions {
  std::string address;
  Security security;
};

// Checks files and the address now; every call of the result opens a connection.
Dialer make_dialer(const DialOptions& options);
// The status of the server; Error{engine} if it does not answer within `patience_s`.
nlohmann::json fetch_status(const DialOptions& options, double patience_s);

}  // namespace gradwire::server
