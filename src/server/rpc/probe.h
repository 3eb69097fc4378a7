// SPDX-License-Identifier: Apache-2.0
// Why a connection never became one. gRPC says "Socket closed" for a worker that speaks plain text to a server with
// TLS, or has no certificate where one is wanted, and a worker would try again until its patience ends. This looks at
// the port with a plain socket and with TLS, and says what is there.
#pragma once

#include <optional>
#include <string>

#include "gradwire/error.h"

namespace gradwire::server {

// What a worker was given, as PEM texts.
struct TlsTexts {
  bool on = false;
  std::string authority, certificate, key;
};

// Nothing, if nobody listens there, or nothing is wrong that another attempt could not change. Takes seconds at most.
std::optional<Error> explain_failure(const std::string& address, const TlsTexts& tls);

// Whether a key belongs to a certificate, both PEM.
bool keys_fit(const std::string& certificate, const std::string& key);

}  // namespace gradwire::server
