// SPDX-License-Identifier: Apache-2.0
// The poll loop of watch_http.h. A connection is in one of three phases: `receiving` a request (idle while nothing of
// it has come), `sending` the answer, or `draining`: an answer that ends the connection has left, and what the client
// still sends is thrown away for a moment, because closing with unread bytes would reset the connection and could take
// the answer with it.
#include "server/watch/watch_http.h"

#include <fmt/format.h>
#include <netdb.h>
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <optional>
#include <vector>

#include "gradwire/error.h"

namespace gradwire::server {
namespace {

constexpr std::chrono::seconds kDrain{1};
constexpr size_t kMaxDrain = 64 * 1024;

enum class Phase { receiving, sending, draining };

std::string_view reason(int status) {
  switch (status) {
    case 200:
      return "OK";
    case 400:
      return "Bad Request";
    case 404:
      return "Not Found";
    case 405:
      return "Method Not Allowed";
    case 413:
      return "Content Too Large";
    case 414:
      return "URI Too Long";
    case 421:
      return "Misdirected Request";
    case 431:
      return "Request Header Fields Too Large";
    case 500:
      return "Internal Server Error";
    case 503:
      return "Service Unavailable";
    case 505:
      return "HTTP Version Not Supported";
    default:
      return "Status";
  }
}

bool same(std::string_view a, std::string_view b) {  // names of headers and their tokens: any case
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](unsigned char x, unsigned char y) { return std::tolower(x) == std::tolower(y); });
}

std::string_view trim(std::string_view text) {
  while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) text.remove_prefix(1);
  while (!text.empty() && (text.back() == ' ' || text.back() == '\t')) text.remove_suffix(1);
  return text;
}

// What of a request matters here.
struct HttpRequest {
  std::string_view method, path, host;
  bool keep_alive = true;
  int refused = 0;  // a status, or 0
};

HttpRequest parse_request(std::string_view head) {
  HttpRequest request;
  const size_t end = head.find("\r\n");
  const std::string_view line = head.substr(0, end);
  const size_t first = line.find(' '), last = line.rfind(' ');
  const auto fail = [&](int status) {
    request.refused = status;
    return request;
  };
  if (first == std::string_view::npos || first == 0 || last == first) return fail(400);
  request.method = line.substr(0, first);
  const std::string_view target = line.substr(first + 1, last - first - 1), version = line.substr(last + 1);
  if (version != "HTTP/1.1" && version != "HTTP/1.0") return fail(version.starts_with("HTTP/") ? 505 : 400);
  if (target.size() > HttpServer::kMaxTarget) return fail(414);
  if (target.find_first_of(" \t") != std::string_view::npos) return fail(400);
  request.path = target.substr(0, target.find('?'));
  request.keep_alive = version == "HTTP/1.1";
  head.remove_prefix(end == std::string_view::npos ? head.size() : end + 2);
  while (!head.empty()) {
    const size_t stop = std::min(head.find("\r\n"), head.size());
    const std::string_view field = head.substr(0, stop);
    head.remove_prefix(std::min(stop + 2, head.size()));
    const size_t colon = field.find(':');
    if (colon == std::string_view::npos || colon == 0) return fail(400);
    const std::string_view name = field.substr(0, colon), value = trim(field.substr(colon + 1));
    if (same(name, "host")) request.host = value;
    if (same(name, "connection") && same(value, "close")) request.keep_alive = false;
    if (same(name, "transfer-encoding") || (same(name, "content-length") && value != "0")) request.refused = 413;
  }
  return request;
}

std::string date_now() {  // strftime would ask the locale for the names
  static constexpr const char *kDays[] = {"Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat"},
                              *kMonths[] = {"Jan", "Feb", "Mar", "Apr", "May", "Jun",
                                            "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"};
  const time_t now = std::time(nullptr);
  tm utc{};
  gmtime_r(&now, &utc);
  return fmt::format("{}, {:02} {} {} {:02}:{:02}:{:02} GMT", kDays[utc.tm_wday], utc.tm_mday, kMonths[utc.tm_mon],
                     utc.tm_year + 1900, utc.tm_hour, utc.tm_min, utc.tm_sec);
}

bool would_block() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

}  // namespace

struct HttpServer::Connection {
  Connection(int s, SteadyClock::time_point until) : socket(s), deadline(until), since(SteadyClock::now()) {}
  ~Connection() { ::close(socket); }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;
  // Nothing is under way: also no request that has arrived but was not read yet.
  bool spare() const {
    char c;
    return phase == Phase::draining ||
           (phase == Phase::receiving && in.empty() && ::recv(socket, &c, 1, MSG_PEEK | MSG_DONTWAIT) <= 0);
  }

  int socket;
  Phase phase = Phase::receiving;
  SteadyClock::time_point deadline, since;  // since: it was accepted, or has had its last answer
  std::string in;                           // of the request that is arriving, and of those behind it
  std::string head;                         // of the answer
  std::shared_ptr<const std::string> body;
  size_t sent = 0;  // of head and body together
  size_t drained = 0;
  int requests = 0;
  bool last = false;  // close after this answer
};

HttpServer::HttpServer(const std::string& host, int port, std::string headers, Handler handler, HttpTimeouts timeouts,
                       std::vector<std::string> hosts)
    : headers_(std::move(headers)), handler_(std::move(handler)), timeouts_(timeouts), hosts_(std::move(hosts)) {
  hosts_.push_back(host);
  hosts_.push_back("localhost");
  listen_on(host, port);
  wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (wake_ < 0) {
    const int error = errno;
    ::close(listener_);
    throw Error(ErrorKind::io, fmt::format("watch: eventfd: {}", std::strerror(error)), "watch");
  }
  sigset_t all, before;  // signals are for the program's threads
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, &before);
  try {
    thread_ = std::thread([this] { loop(); });
  } catch (const std::system_error& error) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    ::close(listener_);
    ::close(wake_);
    throw Error(ErrorKind::io, fmt::format("watch: no thread: {}", error.what()), "watch");
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

HttpServer::~HttpServer() {
  const uint64_t one = 1;
  while (::write(wake_, &one, sizeof one) < 0 && errno == EINTR) {
  }
  thread_.join();
  connections_.clear();
  ::close(listener_);
  ::close(wake_);
}

void HttpServer::listen_on(const std::string& host, int port) {
  const auto fail = [&](const std::string& why) {
    throw Error(ErrorKind::io, fmt::format("watch: cannot listen on {}:{}: {}", host, port, why), "watch");
  };
  if (port < 0 || port > 65535) fail("a port is 0 to 65535");
  std::string name = host;
  if (name.size() > 2 && name.front() == '[' && name.back() == ']') name = name.substr(1, name.size() - 2);
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  const int code = getaddrinfo(name.empty() ? nullptr : name.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (code != 0) fail(gai_strerror(code));
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> addresses(found, freeaddrinfo);
  int error = 0;
  for (const addrinfo* address = found; address && listener_ < 0; address = address->ai_next) {
    const int s = ::socket(address->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, address->ai_protocol);
    const int on = 1;  // REUSEADDR: a restart need not wait for old connections; a port in use stays refused
    sockaddr_storage bound{};
    socklen_t size = sizeof bound;
    if (s >= 0 && ::setsockopt(s, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 &&
        ::bind(s, address->ai_addr, address->ai_addrlen) == 0 && ::listen(s, kMaxConnections) == 0 &&
        ::getsockname(s, reinterpret_cast<sockaddr*>(&bound), &size) == 0) {
      char digits[NI_MAXSERV] = "";
      ::getnameinfo(reinterpret_cast<sockaddr*>(&bound), size, nullptr, 0, digits, sizeof digits, NI_NUMERICSERV);
      port_ = std::atoi(digits);
      listener_ = s;
    } else {
      if (error == 0) error = errno;
      if (s >= 0) ::close(s);
    }
  }
  if (listener_ < 0) fail(std::strerror(error));
}

void HttpServer::loop() {
  std::vector<pollfd> polled;
  for (;;) {
    const SteadyClock::time_point now = SteadyClock::now();
    SteadyClock::time_point next = now + std::chrono::hours(1);
    polled.clear();
    polled.push_back({wake_, POLLIN, 0});
    polled.push_back({listener_, static_cast<short>(now < accept_after_ ? 0 : POLLIN), 0});
    if (now < accept_after_) next = std::min(next, accept_after_);
    for (const Connection& connection : connections_) {
      polled.push_back(
          {connection.socket, static_cast<short>(connection.phase == Phase::sending ? POLLOUT : POLLIN), 0});
      next = std::min(next, connection.deadline);
    }
    // One millisecond more, so that the deadline has passed when poll returns.
    const auto wait = std::chrono::ceil<std::chrono::milliseconds>(next - now).count() + 1;
    if (::poll(polled.data(), polled.size(), static_cast<int>(std::max<int64_t>(wait, 0))) < 0 && errno != EINTR) {
      accept_after_ = SteadyClock::now() + std::chrono::milliseconds(100);  // ENOMEM: try again, do not spin
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      continue;
    }
    if (polled[0].revents) return;
    const SteadyClock::time_point woken = SteadyClock::now();
    size_t i = 2;
    for (auto it = connections_.begin(); it != connections_.end(); ++i) {
      bool open = true;
      try {
        open = polled[i].revents ? serve(*it, polled[i].revents) : woken < it->deadline;
      } catch (const std::bad_alloc&) {
        open = false;
      }
      it = open ? std::next(it) : connections_.erase(it);
    }
    if (polled[1].revents) accept_all();
  }
}

void HttpServer::accept_all() {
  for (;;) {
    const int s = ::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (s < 0) {
      if (errno == ECONNABORTED || errno == EINTR) continue;
      // Out of descriptors or memory: the pending connection would wake poll at once, again and again.
      if (!would_block()) accept_after_ = SteadyClock::now() + std::chrono::milliseconds(100);
      return;
    }
    make_room();
    connections_.emplace_back(s, SteadyClock::now() + timeouts_.idle);
  }
}

void HttpServer::make_room() {
  if (connections_.size() < kMaxConnections) return;
  // First one that has had its answer and was only kept for a next request, or to drain; then one whose request has not
  // arrived yet; then one that does not read its answer. Of each, the one that has taken longest.
  const auto rank = [](const Connection& one) {
    return std::pair(one.spare() ? 0 : one.phase == Phase::receiving ? 1 : 2, one.since);
  };
  connections_.erase(std::min_element(connections_.begin(), connections_.end(),
                                      [&](const Connection& a, const Connection& b) { return rank(a) < rank(b); }));
}

// A request without a name is of no browser.
bool HttpServer::is_named(const Connection& connection, std::string_view host) const {
  if (host.empty()) return true;
  if (host.front() == '[')
    host = host.substr(0, host.find(']') + 1);
  else
    host = host.substr(0, host.find(':'));
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  if (std::any_of(hosts_.begin(), hosts_.end(), [&](const std::string& one) { return same(one, host); })) return true;
  sockaddr_storage own{};
  socklen_t size = sizeof own;
  char text[NI_MAXHOST] = "";
  if (::getsockname(connection.socket, reinterpret_cast<sockaddr*>(&own), &size) != 0 ||
      ::getnameinfo(reinterpret_cast<sockaddr*>(&own), size, text, sizeof text, nullptr, 0, NI_NUMERICHOST) != 0)
    return false;
  const std::string_view address = text;
  return same(address, host) || (address.starts_with("::ffff:") && same(address.substr(7), host));
}

bool HttpServer::serve(Connection& connection, short events) {
  if (connection.phase == Phase::sending) {
    if (!(events & POLLOUT)) return false;  // the other side is gone
    return send_out(connection);
  }
  return receive(connection);
}

bool HttpServer::receive(Connection& connection) {
  char buffer[4096];
  const ssize_t count = ::recv(connection.socket, buffer, sizeof buffer, 0);
  if (count < 0) return would_block() && SteadyClock::now() < connection.deadline;
  if (count == 0) return false;
  if (connection.phase == Phase::draining) {
    connection.drained += static_cast<size_t>(count);
    return connection.drained < kMaxDrain && SteadyClock::now() < connection.deadline;
  }
  if (connection.in.empty()) connection.deadline = SteadyClock::now() + timeouts_.arrival;
  connection.in.append(buffer, static_cast<size_t>(count));
  if (take_request(connection)) return send_out(connection);
  return SteadyClock::now() < connection.deadline;
}

bool HttpServer::take_request(Connection& connection) {
  std::string& in = connection.in;
  while (in.starts_with("\r\n")) in.erase(0, 2);  // allowed before a request line
  const size_t end = in.find("\r\n\r\n");
  if (end > kMaxHead) {  // also when there is no end
    if (end == std::string::npos && in.size() <= kMaxHead) return false;
    refuse(connection, in.find("\r\n") > kMaxHead ? 414 : 431);
    return true;
  }
  const HttpRequest request = parse_request(std::string_view(in).substr(0, end));
  const bool head_only = request.method == "HEAD";
  connection.last = !request.keep_alive || ++connection.requests >= kMaxRequests;
  if (request.refused == 400 || request.refused == 414 || request.refused == 505) {
    refuse(connection, request.refused);
  } else if (!head_only && request.method != "GET") {
    refuse(connection, 405, "Allow: GET, HEAD\r\n");  // before 413: with these methods a body is ordinary
  } else if (request.refused) {
    refuse(connection, request.refused);
  } else if (!is_named(connection, request.host)) {
    refuse(connection, 421);
  } else {
    HttpReply what;
    try {
      what = handler_(request.path);
    } catch (const std::exception&) {
      what = {500, "text/plain; charset=utf-8", std::make_shared<const std::string>("internal error\n")};
    }
    reply(connection, what, head_only);
    in.erase(0, end + 4);
  }
  return true;
}

void HttpServer::refuse(Connection& connection, int status, std::string_view extra) {
  connection.last = true;
  connection.in.clear();
  const auto text = std::make_shared<const std::string>(fmt::format("{} {}\n", status, reason(status)));
  reply(connection, {status, "text/plain; charset=utf-8", text}, false, extra);
}

void HttpServer::reply(Connection& connection, const HttpReply& what, bool head_only, std::string_view extra) {
  connection.head =
      fmt::format("HTTP/1.1 {} {}\r\nDate: {}\r\nContent-Type: {}\r\nContent-Length: {}\r\n{}{}{}\r\n", what.status,
                  reason(what.status), date_now(), what.type, what.body ? what.body->size() : 0, headers_, extra,
                  connection.last ? "Connection: close\r\n" : "");
  connection.body = head_only ? nullptr : what.body;
  connection.sent = 0;
  connection.phase = Phase::sending;
  connection.deadline = SteadyClock::now() + timeouts_.delivery;
}

bool HttpServer::send_out(Connection& connection) {
  for (;;) {
    const size_t head = connection.head.size(), total = head + (connection.body ? connection.body->size() : 0);
    while (connection.sent < total) {
      const bool in_head = connection.sent < head;
      const std::string& part = in_head ? connection.head : *connection.body;
      const size_t from = in_head ? connection.sent : connection.sent - head;
      const int more = in_head && total > head ? MSG_MORE : 0;
      const ssize_t count = ::send(connection.socket, part.data() + from, part.size() - from, MSG_NOSIGNAL | more);
      if (count < 0) return would_block() && SteadyClock::now() < connection.deadline;
      connection.sent += static_cast<size_t>(count);
    }
    connection.body.reset();
    if (connection.last) {
      ::shutdown(connection.socket, SHUT_WR);
      connection.phase = Phase::draining;
      connection.deadline = SteadyClock::now() + kDrain;
      return true;
    }
    connection.phase = Phase::receiving;
    connection.since = SteadyClock::now();
    connection.deadline = SteadyClock::now() + (connection.in.empty() ? timeouts_.idle : timeouts_.arrival);
    if (connection.in.empty() || !take_request(connection)) return true;
  }
}

}  // namespace gradwire::server
