// SPDX-License-Identifier: Apache-2.0
// What both ends of a connection are told about it, and the rules they share: plain text stays on this machine unless
// somebody says otherwise.
#pragma once

#include <string>

namespace gradwire::server {

struct Security {
  std::string certificate, key;  // PEM files: the server's own; a worker's own for mutual TLS
  std::string authority;         // PEM file: whose certificates are believed. Server: asks workers for one
  std::string token_file;        // the first line; workers without it are sent away
  bool insecure = false;         // plain text beyond this machine

  bool tls() const { return !certificate.empty() || !authority.empty(); }
};

inline constexpr const char* kWorkMethod = "/gradwire.Server/Work";
inline constexpr const char* kStatusMethod = "/gradwire.Server/Status";
inline constexpr const char* kTokenKey = "authorization";

// "HOST:PORT", "[::1]:7070". Error{usage, field} if it is not.
struct Address {
  std::string host;
  int port = 0;
};
Address parse_address(const std::string& text, const std::string& field);
bool is_loopback(const std::string& host);
std::string read_secret(const std::string& path, const std::string& field);  // a file, whole; Error{io, field}
std::string read_pem(const std::string& path, const std::string& field);  // likewise; Error{usage, field} if it is none
std::string read_token(const std::string& path);                          // "Bearer ...", or nothing without a path
// Error{usage, "insecure"} for plain text beyond this machine that nobody asked for; Error{usage} for half a key pair.
void check_security(const Security& security, const Address& address);

}  // namespace gradwire::server
