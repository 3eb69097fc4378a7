// SPDX-License-Identifier: Apache-2.0
// HTTP for watching, and no more than that: GET and HEAD of short paths, answered from memory. One thread polls all
// connections, so a client that sends a byte per second or never reads its answer costs a slot, not a thread, and no
// other client waits for it: when all slots are taken, a new connection gets that of the one that has been slow for the
// longest time. A request by a name that is not this server's is refused (421): a page of another origin whose name
// was pointed at this address (DNS rebinding) could otherwise read the answers. Everything is bounded: connections, the
// bytes of a request, the time it may take to arrive, the time an answer may take to leave, the requests of one
// connection. Bodies are refused. The destructor returns at once whatever the clients are doing. (A library with a
// thread per connection was tried: as many slow clients as it had threads kept it from answering and from stopping.)
#pragma once

#include <chrono>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "core/clock.h"

namespace gradwire::server {

struct HttpReply {
  int status = 200;
  std::string type = "text/plain; charset=utf-8";
  std::shared_ptr<const std::string> body;  // shared: many pollers of one text cost its memory once
};

// How long a connection may take for what it does. Tests choose other limits, so that none of them depends on how fast
// the machine is.
struct HttpTimeouts {
  std::chrono::milliseconds idle{30'000};      // between two requests
  std::chrono::milliseconds arrival{5'000};    // of one request, from its first byte
  std::chrono::milliseconds delivery{10'000};  // of one answer, to its last byte
};

class HttpServer {
 public:
  using Handler = std::function<HttpReply(std::string_view path)>;

  static constexpr size_t kMaxConnections = 64;
  static constexpr size_t kMaxHead = 8192;  // request line and headers
  static constexpr size_t kMaxTarget = 1024;
  static constexpr int kMaxRequests = 1000;  // of one connection

  // `headers` ("Name: value\r\n"...) go with every answer. Error{io, "watch"} if the address cannot be had; port 0 is
  // any. `handler` is called by the server's own thread, one call at a time; what it throws becomes status 500.
  // A request may name, in its Host header, `host`, one of `hosts`, localhost, or the address that it came to.
  HttpServer(const std::string& host, int port, std::string headers, Handler handler, HttpTimeouts timeouts = {},
             std::vector<std::string> hosts = {});
  ~HttpServer();
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  int port() const { return port_; }

 private:
  struct Connection;

  void listen_on(const std::string& host, int port);
  void loop();
  void accept_all();
  void make_room();
  bool is_named(const Connection& connection, std::string_view host) const;
  bool serve(Connection& connection, short events);  // false: to be closed
  bool receive(Connection& connection);
  bool send_out(Connection& connection);
  bool take_request(Connection& connection);  // false: none complete yet
  void reply(Connection& connection, const HttpReply& what, bool head_only, std::string_view extra = {});
  void refuse(Connection& connection, int status, std::string_view extra = {});

  std::string headers_;
  Handler handler_;
  HttpTimeouts timeouts_;
  std::vector<std::string> hosts_;
  int port_ = 0;
  int listener_ = -1;
  int wake_ = -1;  // an eventfd: written once, to stop
  SteadyClock::time_point accept_after_{};
  std::list<Connection> connections_;
  std::thread thread_;
};

}  // namespace gradwire::server
