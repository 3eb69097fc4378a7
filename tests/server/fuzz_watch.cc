// SPDX-License-Identifier: Apache-2.0
// libFuzzer is a browser: its bytes go to the watch port as they are, and after an honest request. Whatever comes, the
// server answers with a known status or closes the connection, and it goes on answering others.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <set>
#include <string>

#include "server/watch/watch_http.h"
#include "support/fuzz_source.h"

namespace {

using namespace gradwire::server;
using gradwire::fuzz::promise;
using gradwire::fuzz::Source;

// What a server on this machine answers until it closes the connection.
std::string ask(int port, const std::string& request) {
  const int s = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  promise(s >= 0 && ::connect(s, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0);
  const timeval patience{.tv_sec = 30, .tv_usec = 0};
  ::setsockopt(s, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  // The server may have answered and closed before all of it has arrived.
  for (size_t at = 0; at < request.size();) {
    const ssize_t n = ::send(s, request.data() + at, request.size() - at, MSG_NOSIGNAL);
    if (n <= 0) break;
    at += static_cast<size_t>(n);
  }
  ::shutdown(s, SHUT_WR);
  std::string answer;
  char chunk[4096];
  ssize_t n;
  while ((n = ::recv(s, chunk, sizeof chunk, 0)) > 0) answer.append(chunk, static_cast<size_t>(n));
  promise(n == 0 || errno == ECONNRESET);  // not the time-out
  ::close(s);
  return answer;
}

void check_answers(const std::string& answer) {
  static const std::set<std::string> kKnown = {"200", "400", "404", "405", "413", "414",
                                               "421", "431", "500", "503", "505"};
  if (answer.empty()) return;
  promise(answer.starts_with("HTTP/1.1 ") && kKnown.contains(answer.substr(9, 3)));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static HttpServer server("127.0.0.1", 0, "X-Test: 1\r\n", [](std::string_view path) -> HttpReply {
    static const auto body = std::make_shared<const std::string>("hello");
    return path == "/" ? HttpReply{.body = body} : HttpReply{.status = 404, .body = body};
  });
  Source source{data, size};
  const auto how = source.next<uint8_t>();
  const std::string bytes = source.rest();
  static const std::string kHonest = "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n";
  switch (how % 4) {
    case 0:
      check_answers(ask(server.port(), bytes));
      break;
    case 1:
      check_answers(ask(server.port(), "GET " + bytes + " HTTP/1.1\r\nHost: localhost\r\n\r\n"));
      break;
    case 2:
      check_answers(ask(server.port(), "GET / HTTP/1.1\r\nHost: localhost\r\n" + bytes + "\r\n\r\n"));
      break;
    default:  // a second request on the same connection
      check_answers(ask(server.port(), kHonest + bytes));
      break;
  }
  if (how & 64) promise(ask(server.port(), kHonest).starts_with("HTTP/1.1 200"));
  return 0;
}
