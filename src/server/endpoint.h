// SPDX-License-Identifier: Apache-2.0
// What both ends of a connection are told about it, and the rules they share: plain text stays on this machine unless
// the user asks for more.
#pragma once

#include <string>

namespace gradwire::server {

struct Security {
  std::string certificate, key;  // PEM files: the server's own; for mutual TLS also the worker's own
  std::string authority;         // a PEM file: its certificates are trusted. A server with one asks workers for theirs
  std::string token_file;        // its first line is the token; workers without it are refused
  bool insecure = false;         // allow plain text beyond this machine

  bool tls() const { return !certificate.empty() || !authority.empty(); }
};

inline constexpr const char* kWorkMethod = "/gradwire.Server/Work";
inline constexpr const char* kStatusMethod = "/gradwire.Server/Status";
inline constexpr const char* kTokenKey = "authorization";

// "HOST:PORT", "[::1]:7070". Error{usage, field} if it is not.
struct HostPort {
  std::string host;
  int port = 0;
};
HostPort parse_address(const std::string& text, const std::string& field);
bool is_loopback(const std::string& host);
std::string read_secret(const std::string& path, const std::string& field);  // a file, whole; Error{io, field}
std::string read_pem(const std::string& path, const std::string& field);  // likewise; Error{usage, field} if it is none
std::string read_token(const std::string& path);                          // "Bearer ...", or nothing without a path
// Error{usage, "insecure"} for plain text beyond this machine without `insecure`; Error{usage} for half a key pair.
void check_security(const Security& security, const HostPort& address);

}  // namespace gradwire::server
