// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/acceptor.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <linux/tcp.h>  // the newer tcp_info, which has bytes received
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <memory>

#include "gradwire/error.h"
#include "server/frame.h"

namespace gradwire::server {
namespace {

constexpr int kBacklog = 4096;
constexpr double kCallsAtOnce = 64, kCallsPerSecond = 1;  // of one connection; a worker makes one
constexpr double kSheltered = 0.5;   // seconds in which a new connection is not cut off to make room
constexpr size_t kMakeRoomFor = 32;  // connections at a time
constexpr double kStandsStill = 10;  // seconds after which the thread is said to hang
constexpr int kUserTimeout = 20000;  // milliseconds that sent bytes may stay unconfirmed

uint64_t inode_of(int socket) {
  struct stat info {};
  return ::fstat(socket, &info) == 0 && S_ISSOCK(info.st_mode) ? info.st_ino : 0;
}

uint64_t bytes_received(int socket) {
  tcp_info info{};
  socklen_t size = sizeof info;
  if (::getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return 0;
  return size >= offsetof(tcp_info, tcpi_bytes_received) + sizeof info.tcpi_bytes_received ? info.tcpi_bytes_received
                                                                                           : 0;
}

std::pair<std::string, int> name_of(const sockaddr_storage& from) {
  char text[INET6_ADDRSTRLEN] = "";
  if (from.ss_family == AF_INET) {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(from);
    ::inet_ntop(AF_INET, &v4.sin_addr, text, sizeof text);
    return {text, ntohs(v4.sin_port)};
  }
  const auto& v6 = reinterpret_cast<const sockaddr_in6&>(from);
  if (IN6_IS_ADDR_V4MAPPED(&v6.sin6_addr)) {
    ::inet_ntop(AF_INET, v6.sin6_addr.s6_addr + 12, text, sizeof text);
    return {text, ntohs(v6.sin6_port)};
  }
  ::inet_ntop(AF_INET6, &v6.sin6_addr, text, sizeof text);
  return {fmt::format("[{}]", text), ntohs(v6.sin6_port)};
}

bool out_of_files() { return errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM; }

}  // namespace

// gRPC writes "ipv4:127.0.0.1:1234" and "ipv6:%5B::1%5D:1234", with the scope of a link-local address behind "%25".
std::string Acceptor::readable(const std::string& peer) {
  std::string text = peer.starts_with("ipv4:") || peer.starts_with("ipv6:") ? peer.substr(5) : peer;
  for (const auto& [code, character] : {std::pair("%5B", "["), {"%5D", "]"}})
    if (const size_t at = text.find(code); at != std::string::npos) text.replace(at, 3, character);
  if (const size_t scope = text.find("%25"), end = text.find(']'); scope < end && end != std::string::npos)
    text.erase(scope, end - scope);
  return text;
}

Acceptor::Acceptor(const HostPort& address, size_t most, Log log) : most_(most), log_(std::move(log)) {
  try {
    listen_on(address);
  } catch (...) {
    close_listeners();
    throw;
  }
}

Acceptor::~Acceptor() {
  stop();
  close_listeners();
}

void Acceptor::close_listeners() {
  for (int one : listeners_) ::close(one);
  listeners_.clear();
  if (wake_ >= 0) ::close(wake_);
  wake_ = -1;
}

// All addresses of a name, on one port.
void Acceptor::listen_on(const HostPort& address) {
  const auto fail = [&](const std::string& why) {
    throw Error(ErrorKind::io, fmt::format("listen: {}:{} cannot be had: {}", address.host, address.port, why),
                "listen");
  };
  wake_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (wake_ < 0) fail(std::strerror(errno));
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  const int code = ::getaddrinfo(address.host.c_str(), std::to_string(address.port).c_str(), &hints, &found);
  if (code != 0) fail(::gai_strerror(code));
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> addresses(found, ::freeaddrinfo);
  port_ = address.port;
  int error = 0;
  for (const addrinfo* one = found; one; one = one->ai_next) {
    const int s = ::socket(one->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, one->ai_protocol);
    if (s < 0) {
      error = errno;  // no IPv6 here, for example
      continue;
    }
    sockaddr_storage bound{};
    std::memcpy(&bound, one->ai_addr, one->ai_addrlen);
    // Both families keep the port at the same place. "localhost:0" is one port for all of its addresses.
    reinterpret_cast<sockaddr_in&>(bound).sin_port = htons(static_cast<uint16_t>(port_));
    const int on = 1, off = 0, timeout = kUserTimeout;
    ::setsockopt(s, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    // What follows is inherited by the accepted sockets.
    ::setsockopt(s, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    ::setsockopt(s, IPPROTO_TCP, TCP_USER_TIMEOUT, &timeout, sizeof timeout);
    const auto* v6 = reinterpret_cast<const sockaddr_in6*>(&bound);
    const bool any = one->ai_family == AF_INET6 && IN6_IS_ADDR_UNSPECIFIED(&v6->sin6_addr);  // IPv4 too
    if (one->ai_family == AF_INET6) ::setsockopt(s, IPPROTO_IPV6, IPV6_V6ONLY, any ? &off : &on, sizeof on);
    socklen_t size = one->ai_addrlen;
    if (::bind(s, reinterpret_cast<sockaddr*>(&bound), size) != 0 || ::listen(s, kBacklog) != 0 ||
        ::getsockname(s, reinterpret_cast<sockaddr*>(&bound), &size) != 0) {
      error = errno;
      ::close(s);
      if (error == EADDRINUSE) fail(std::strerror(error));  // not half of a name's addresses
      continue;
    }
    port_ = ntohs(reinterpret_cast<sockaddr_in&>(bound).sin_port);
    listeners_.push_back(s);
  }
  if (listeners_.empty()) fail(std::strerror(error));
}

void Acceptor::start(std::function<void(int)> hand_over) {
  hand_over_ = std::move(hand_over);
  last_seen_ = SteadyClock::now().time_since_epoch().count();
  sigset_t all, before;  // signals are for the program's threads
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, &before);
  thread_ = std::thread([this] { run(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Acceptor::stop() {
  if (!thread_.joinable()) return;
  const uint64_t one = 1;
  while (::write(wake_, &one, sizeof one) < 0 && errno == EINTR) {
  }
  thread_.join();
}

std::string Acceptor::trouble() const {
  if (starved_) return "no descriptors are left for connections (the limit of open files, nofile)";
  const SteadyClock::time_point last{SteadyClock::duration{last_seen_.load()}};
  return seconds_since(last) > kStandsStill ? "the thread that accepts connections stands still" : "";
}

size_t Acceptor::open() const {
  const std::lock_guard lock(mutex_);
  return peers_.size();
}

void Acceptor::run() {
  bool room = true;
  while (true) {
    last_seen_ = SteadyClock::now().time_since_epoch().count();
    std::vector<pollfd> polled = {{wake_, POLLIN, 0}};
    if (room)
      for (int one : listeners_) polled.push_back({one, POLLIN, 0});
    // Strangers are looked at often, before they can have sent much. Without room, a socket may be closed soon.
    ::poll(polled.data(), polled.size(), strangers_ || !room ? 20 : 500);
    if (polled[0].revents) return;
    try {
      sweep();
      room = accept_some();
      if (!room) make_room();
    } catch (const std::exception&) {  // no memory: later
      room = false;
    }
  }
}

bool Acceptor::accept_some() {
  for (int listener : listeners_)
    while (true) {
      {
        const std::lock_guard lock(mutex_);
        if (peers_.size() >= most_) {
          pollfd pending{listener, POLLIN, 0};
          if (::poll(&pending, 1, 0) > 0) return false;
          break;
        }
      }
      sockaddr_storage from{};
      socklen_t size = sizeof from;
      const int socket = ::accept4(listener, reinterpret_cast<sockaddr*>(&from), &size, SOCK_CLOEXEC | SOCK_NONBLOCK);
      if (socket >= 0) {
        if (starved_.exchange(false)) log_("descriptors", "there are descriptors for connections again");
        take(socket, from);
      } else if (out_of_files()) {
        if (!starved_.exchange(true)) log_("descriptors", trouble());
        return false;
      } else if (errno != EINTR && errno != ECONNABORTED) {
        break;  // there is none, or it went away
      }
    }
  return true;
}

void Acceptor::take(int socket, const sockaddr_storage& from) {
  const auto [host, port] = name_of(from);
  const auto now = SteadyClock::now();
  strangers_ = true;
  {
    const std::lock_guard lock(mutex_);
    Peer& peer = peers_[fmt::format("{}:{}", host, port)];
    peer = {
        .socket = socket, .inode = inode_of(socket), .host = host, .since = now, .calls = kCallsAtOnce, .counted = now};
  }
  hand_over_(socket);
}

void Acceptor::sweep() {
  const std::lock_guard lock(mutex_);
  strangers_ = false;
  uint64_t pool = 0;
  Peer* greediest = nullptr;
  uint64_t most = 0;
  for (auto at = peers_.begin(); at != peers_.end();) {
    Peer& peer = at->second;
    if (inode_of(peer.socket) != peer.inode) {
      at = peers_.erase(at);
      continue;
    }
    ++at;
    if (peer.workers > 0 || peer.cut) continue;
    strangers_ = true;
    const uint64_t sent = bytes_received(peer.socket) - peer.counted_from;
    if (sent > (peer.trusted ? kStrangerBytes + kFrameHead + kMaxText : kStrangerBytes)) {
      cut(peer);
    } else if (peer.trusted) {
      pool += sent;
      if (sent > most) {
        most = sent;
        greediest = &peer;
      }
    }
  }
  if (pool > kHelloPool && greediest) cut(*greediest);
}

void Acceptor::make_room() {
  const std::lock_guard lock(mutex_);
  std::map<std::string, std::vector<Peer*>> strangers;  // by address
  for (auto& [name, peer] : peers_)
    if (peer.workers == 0 && !peer.cut && seconds_since(peer.since) > kSheltered) strangers[peer.host].push_back(&peer);
  const auto worst = std::max_element(strangers.begin(), strangers.end(),
                                      [](const auto& a, const auto& b) { return a.second.size() < b.second.size(); });
  if (worst == strangers.end()) return;
  std::vector<Peer*>& list = worst->second;
  std::sort(list.begin(), list.end(), [](const Peer* a, const Peer* b) { return a->since < b->since; });
  for (size_t i = 0; i < std::min(list.size(), kMakeRoomFor); ++i) cut(*list[i]);
}

void Acceptor::cut(Peer& peer) {
  if (peer.cut) return;
  const int own = ::fcntl(peer.socket, F_DUPFD_CLOEXEC, 0);
  if (own < 0) return;  // no descriptor at present: the next sweep tries again
  // Not shutdown(): what still comes would be read for as long as it comes. This resets the connection and drops what
  // has not been read.
  sockaddr nowhere{};
  nowhere.sa_family = AF_UNSPEC;
  if (inode_of(own) == peer.inode && ::connect(own, &nowhere, sizeof nowhere) != 0) ::shutdown(own, SHUT_RDWR);
  ::close(own);
  peer.cut = true;
  ++cut_off_;
}

bool Acceptor::began_call(const std::string& name) {
  const std::lock_guard lock(mutex_);
  const auto found = peers_.find(readable(name));
  if (found == peers_.end()) return true;
  Peer& peer = found->second;
  const auto now = SteadyClock::now();
  const double passed = std::chrono::duration<double>(now - peer.counted).count();
  peer.calls = std::min(kCallsAtOnce, peer.calls + kCallsPerSecond * passed) - 1;
  peer.counted = now;
  if (peer.calls >= 0) return true;
  cut(peer);
  return false;
}

void Acceptor::trust(const std::string& name) {
  const std::lock_guard lock(mutex_);
  const auto found = peers_.find(readable(name));
  if (found != peers_.end()) found->second.trusted = true;
}

void Acceptor::admit(const std::string& name, int change) {
  const std::lock_guard lock(mutex_);
  const auto found = peers_.find(readable(name));
  if (found == peers_.end()) return;
  Peer& peer = found->second;
  peer.workers = std::max(0, peer.workers + change);
  if (peer.workers == 0) peer.counted_from = bytes_received(peer.socket);
}

}  // namespace gradwire::server
