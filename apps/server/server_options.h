// SPDX-License-Identifier: Apache-2.0
// The options that concern a connection, for both of its ends.
#pragma once

#include <CLI/CLI.hpp>

#include "server/endpoint.h"

namespace gradwire::app {

inline void add_security(CLI::App& command, server::Security& security, bool serves) {
  command
      .add_option("--tls-cert", security.certificate,
                  serves ? "The server's certificate, PEM" : "This worker's certificate, PEM (mutual TLS)")
      ->type_name("FILE");
  command.add_option("--tls-key", security.key, "Its key, PEM")->type_name("FILE");
  command
      .add_option("--tls-ca", security.authority,
                  serves ? "Workers must have a certificate signed by this one, PEM"
                         : "The server's certificate must be signed by this one, PEM")
      ->type_name("FILE");
  command
      .add_option("--token-file", security.token_file,
                  serves ? "Workers must know its first line" : "The server's token, on its first line")
      ->type_name("FILE");
  command.add_flag("--insecure", security.insecure, "Plain text beyond this machine, too");
}

}  // namespace gradwire::app
