// SPDX-License-Identifier: Apache-2.0
// The sockets of a server. The server accepts connections by itself and hands them to gRPC, because gRPC's own listener
// gives up for good when descriptors run out, and because nothing else can bound what a peer does before gRPC tells
// anybody about it. Three rules, which docs/server.md has in words:
//
//   - There are never more than `most` sockets. When they are all taken, the oldest one without an admitted worker
//     goes, first of the address that has most of those, so that a flood of connections hurts its sender.
//   - A connection begins few calls; one that begins many, as an attack by rapid resets does, is cut off.
//   - Before a connection has begun a call with the right token it may send kStrangerBytes. From then until its worker
//     is admitted it may send a hello, and all connections in that state together kHelloPool.
//
// gRPC owns a socket once it has it. The table keeps its number and its inode, by which it notices that the socket was
// closed; to cut one off, it is duplicated for a moment, so that another file that has taken the number is never hit.
#pragma once

#include <sys/socket.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/clock.h"
#include "server/endpoint.h"

namespace gradwire::server {

inline constexpr uint64_t kStrangerBytes = uint64_t{64} << 10;
inline constexpr uint64_t kHelloPool = uint64_t{64} << 20;

class Acceptor {
 public:
  using Log = std::function<void(const char* event, const std::string& words)>;

  // Listens; nobody is accepted before start(). Error{io, "listen"} if the address cannot be had.
  Acceptor(const HostPort& address, size_t most, Log log);
  ~Acceptor();
  int port() const { return port_; }

  void start(std::function<void(int socket)> hand_over);  // which owns the socket from then on
  void stop();

  // What the calls of a connection are about; `peer` is gRPC's name for it.
  bool began_call(const std::string& peer);         // false: one too many, and the connection is cut off
  void trust(const std::string& peer);              // the token is right: a hello may come
  void admit(const std::string& peer, int change);  // a worker was admitted (1), or its call has ended (-1)

  size_t open() const;  // sockets
  uint64_t cut_off() const { return cut_off_; }
  std::string trouble() const;  // why nobody is accepted at present, or nothing

  static std::string readable(const std::string& peer);  // "127.0.0.1:1234", "[::1]:1234"

 private:
  struct Peer {
    int socket;
    uint64_t inode;
    std::string host;
    SteadyClock::time_point since;
    double calls = 0;  // that it may begin at once
    SteadyClock::time_point counted;
    uint64_t counted_from = 0;  // bytes received when its state changed
    int workers = 0;
    bool trusted = false, cut = false;
  };

  void listen_on(const HostPort& address);
  void run();
  bool accept_some();  // false: there is no room, or no descriptor
  void take(int socket, const sockaddr_storage& from);
  void sweep();  // forgets sockets that were closed, and cuts off those that send too much
  void make_room();
  void cut(Peer& peer);
  void close_listeners();

  const size_t most_;
  const Log log_;
  std::function<void(int)> hand_over_;
  std::vector<int> listeners_;
  int port_ = 0, wake_ = -1;
  std::atomic<uint64_t> cut_off_{0};
  std::atomic<bool> starved_{false};
  std::atomic<SteadyClock::time_point::rep> last_seen_{0};  // when the thread last went round
  mutable std::mutex mutex_;
  std::map<std::string, Peer> peers_;  // by readable name
  bool strangers_ = false;             // the thread's own: some have no worker
  std::thread thread_;
};

}  // namespace gradwire::server
