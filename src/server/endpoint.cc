// SPDX-License-Identifier: Apache-2.0
#include "server/endpoint.h"

#include <fmt/format.h>

#include <cerrno>
#include <charconv>
#include <cstring>
#include <fstream>
#include <sstream>

#include "gradwire/error.h"

namespace gradwire::server {

HostPort parse_address(const std::string& text, const std::string& field) {
  const size_t colon = text.rfind(':');
  HostPort address;
  const char* end = text.data() + text.size();
  const bool split = colon != std::string::npos && colon > 0;
  const auto number = split ? std::from_chars(text.data() + colon + 1, end, address.port)
                            : std::from_chars_result{nullptr, std::errc::invalid_argument};
  if (!split || number.ec != std::errc() || number.ptr != end || address.port < 0 || address.port > 65535)
    throw Error(ErrorKind::usage, fmt::format("{} is '{}'; expected HOST:PORT, the port from 0 to 65535", field, text),
                field);
  address.host = text.substr(0, colon);
  if (address.host.starts_with('[') && address.host.ends_with(']'))
    address.host = address.host.substr(1, address.host.size() - 2);
  if (address.host.empty())
    throw Error(ErrorKind::usage, fmt::format("{} is '{}'; the host is missing", field, text), field);
  return address;
}

bool is_loopback(const std::string& host) {
  return host == "localhost" || host == "::1" ||
         (host.starts_with("127.") && host.find_first_not_of("0123456789.") == std::string::npos);
}

std::string read_secret(const std::string& path, const std::string& field) {
  std::ifstream file(path, std::ios::binary);
  if (!file)
    throw Error(ErrorKind::io, fmt::format("{}: {} cannot be read: {}", field, path, std::strerror(errno)), field);
  std::ostringstream text;
  text << file.rdbuf();  // a folder opens, but has nothing
  if (text.str().empty()) throw Error(ErrorKind::io, fmt::format("{}: {} is empty, or no file", field, path), field);
  return text.str();
}

std::string read_pem(const std::string& path, const std::string& field) {
  std::string text = read_secret(path, field);
  if (text.find("-----BEGIN ") == std::string::npos)
    throw Error(ErrorKind::usage, fmt::format("{}: {} is not a PEM file", field, path), field);
  return text;
}

std::string read_token(const std::string& path) {
  if (path.empty()) return {};
  std::string token = read_secret(path, "token-file");
  token = token.substr(0, token.find_first_of("\r\n"));
  if (token.size() < 8)
    throw Error(
        ErrorKind::usage,
        fmt::format("token-file: the first line of {} has {} characters; at least 8 are wanted", path, token.size()),
        "token-file");
  for (char c : token)
    if (c <= ' ' || c > '~')
      throw Error(ErrorKind::usage,
                  fmt::format("token-file: the first line of {} has characters other than visible ASCII", path),
                  "token-file");
  return "Bearer " + token;
}

void check_security(const Security& security, const HostPort& address) {
  if (security.certificate.empty() != security.key.empty())
    throw Error(ErrorKind::usage, "tls-cert and tls-key go together; one of them is missing",
                security.key.empty() ? "tls-key" : "tls-cert");
  if (security.tls() || security.insecure || is_loopback(address.host)) return;
  throw Error(ErrorKind::usage,
              fmt::format("{}:{} is beyond this machine, and nothing is encrypted: give --tls-cert, --tls-key and "
                          "--tls-ca, or say --insecure",
                          address.host, address.port),
              "insecure");
}

}  // namespace gradwire::server
