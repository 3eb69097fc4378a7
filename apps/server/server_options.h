// SPDX-License-Identifier: Apache-2.0
// The options for a secure connection, for both of its ends.
#pragma once

#include <CLI/CLI.hpp>

#include "server/endpoint.h"

namespace gradwire::app {

inline void add_security(CLI::App& command, server::Security& security, bool serves) {
  command
      .add_option("--tls-cert", security.certificate,
                  serves ? "The server's certificate, PEM" : "This worker's certificate, PEM (mutual TLS)")
      ->type_name("FILE");
  command.add_option("--tls-key", security.key, "The key of the certificate, PEM")->type_name("FILE");
  command
      .add_option("--tls-ca", security.authority,
                  serves ? "Accept only workers with a certificate signed by this authority, PEM"
                         : "Accept only a server with a certificate signed by this authority, PEM")
      ->type_name("FILE");
  command
      .add_option("--token-file", security.token_file,
                  serves ? "Accept only workers that know the first line of this file"
                         : "A file with the server's token on its first line")
      ->type_name("FILE");
  command.add_flag("--insecure", security.insecure, "Allow connections beyond this machine without encryption");
}

}  // namespace gradwire::app
