// SPDX-License-Identifier: Apache-2.0
// A server on a loopback port, and what comes to it from a network: honest workers, a gRPC client that can send
// anything (RawRpcClient), a bare socket, and a relay that counts every byte. Certificates are made when they are
// needed, by two authorities.
#pragma once

#include <arpa/inet.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>

#include "core/check.h"
#include "server/rpc/dial.h"
#include "server/rpc/frame_buffer.h"
#include "server/rpc/listen.h"
#include "server/server_fixture.h"

namespace gradwire::server {

inline HubOptions small_hub(uint32_t min_workers = 1) {
  HubOptions options;
  options.min_workers = min_workers;
  options.threads = 2;
  options.deadline_s = kPatience;
  return options;
}

struct RpcServer {
  explicit RpcServer(const HubOptions& hub_options = small_hub(), ListenOptions options = {})
      : hub(hub_options), listener(hub, (options.address = "127.0.0.1:0", options)) {}
  std::string address() const { return "127.0.0.1:" + std::to_string(listener.port()); }
  Dialer dialer(const Security& security = {}) const { return make_dialer({address(), security}); }
  uint64_t refused(const char* why) const { return hub.status()["refused"][why].get<uint64_t>(); }

  ServerHub hub;
  RpcListener listener;
};

inline Signature tiny_signature() {
  Signature signature;
  signature.parameters = {{"weight", {40, 50}}, {"bias", {40}}};
  signature.model = "tiny";
  return signature;
}
inline Signature large_signature() {
  Signature signature = tiny_signature();
  signature.parameters = {{"weight", {1500, 1024}}};
  return signature;
}

inline double resident_mb() {
  std::ifstream file("/proc/self/statm");
  uint64_t all = 0, resident = 0;
  file >> all >> resident;
  return static_cast<double>(resident) * static_cast<double>(::sysconf(_SC_PAGESIZE)) / 1e6;
}

// A gRPC client without manners. Every wait ends when its deadline has passed.
class RawRpcClient {
 public:
  explicit RawRpcClient(const std::string& address, const char* method = kWorkMethod,
                        std::chrono::seconds deadline = 120s) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    arguments.SetMaxSendMessageSize(-1);
    stub_ = std::make_unique<grpc::GenericStub>(
        grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments));
    context_.set_deadline(std::chrono::system_clock::now() + deadline);
    stream_ = stub_->PrepareCall(&context_, method, &queue_);
    stream_->StartCall(this);
    EXPECT_TRUE(next());
  }
  ~RawRpcClient() {
    if (!finished_) {
      context_.TryCancel();
      finish();
    }
    queue_.Shutdown();
    void* tag;
    bool ok;
    while (queue_.Next(&tag, &ok)) {
    }
  }
  void cancel() { context_.TryCancel(); }  // from any thread
  bool write(const grpc::ByteBuffer& buffer) {
    stream_->Write(buffer, this);
    return next();
  }
  bool write(const Frame& frame, const Blob& payload = nullptr) { return write(to_buffer(frame, payload)); }
  bool write(std::span<const std::byte> bytes) {
    const grpc::Slice slice(bytes.data(), bytes.size());
    return write(grpc::ByteBuffer(&slice, 1));
  }
  bool read(Frame& frame, Blob& payload) {
    grpc::ByteBuffer buffer;
    stream_->Read(&buffer, this);
    if (!next()) return false;
    frame = from_buffer(buffer, payload);
    return true;
  }
  grpc::Status finish() {
    grpc::Status status;
    stream_->Finish(&status, this);
    next();
    finished_ = true;
    return status;
  }
  bool hello(const Signature& signature, const std::string& id = "raw-worker") {
    return write({.kind = FrameKind::hello}, text_blob({{"id", id}, {"name", "raw"}, {"signature", signature.json()}}));
  }

 private:
  bool next() {
    void* tag = nullptr;
    bool ok = false;
    return queue_.Next(&tag, &ok) && ok;
  }
  grpc::ClientContext context_;
  grpc::CompletionQueue queue_;
  std::unique_ptr<grpc::GenericStub> stub_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> stream_;
  bool finished_ = false;
};

// A TCP connection, byte by byte.
class Socket {
 public:
  explicit Socket(int port) : fd_(::socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_port = htons(static_cast<uint16_t>(port));
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    connected_ = fd_ >= 0 && ::connect(fd_, reinterpret_cast<sockaddr*>(&to), sizeof to) == 0;
  }
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)), connected_(other.connected_) {}
  ~Socket() {
    if (fd_ >= 0) ::close(fd_);
  }
  bool connected() const { return connected_; }
  bool send(const std::string& bytes) const {
    return ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size());
  }
  // Reads what comes; true once the other end has closed.
  bool closed(std::chrono::milliseconds patience) const {
    const auto until = SteadyClock::now() + patience;
    while (true) {
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - SteadyClock::now());
      pollfd one{fd_, POLLIN, 0};
      if (::poll(&one, 1, std::max(0, static_cast<int>(left.count()))) <= 0) return false;
      char bytes[4096];
      if (::recv(fd_, bytes, sizeof bytes, 0) <= 0) return true;
    }
  }

 private:
  int fd_;
  bool connected_ = false;
};

// HTTP/2 by hand: the preface, no settings, and the head of a call that never says anything.
inline std::string bare_call() {
  std::string head = "\x83\x86";  // POST, http
  const auto named = [&](char index, const std::string& value) {
    head += index + (std::string(1, static_cast<char>(value.size())) + value);
  };
  named('\x04', kWorkMethod);  // :path
  named('\x01', "localhost");  // :authority
  head += std::string("\x0f\x10", 2) + std::string("\x10") + "application/grpc";
  head += std::string("\x00\x02te\x08trailers", 13);
  std::string bytes = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
  bytes += std::string("\0\0\0\4\0\0\0\0\0", 9);
  bytes += std::string("\0\0", 2) + static_cast<char>(head.size()) + std::string("\1\4\0\0\0\1", 6) + head;
  return bytes;
}

// Passes bytes on between one client after another and a port, and counts them.
class CountingProxy {
 public:
  explicit CountingProxy(int port) : target_(port), listener_(::socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof at;
    GW_CHECK(::bind(listener_, reinterpret_cast<sockaddr*>(&at), size) == 0 && ::listen(listener_, 8) == 0);
    GW_CHECK(::getsockname(listener_, reinterpret_cast<sockaddr*>(&at), &size) == 0);
    port_ = ntohs(at.sin_port);
    thread_ = std::thread([this] { run(); });
  }
  ~CountingProxy() {
    stop_ = true;
    ::shutdown(listener_, SHUT_RDWR);
    thread_.join();
    ::close(listener_);
  }
  std::string address() const { return "127.0.0.1:" + std::to_string(port_); }
  uint64_t bytes() const { return bytes_; }

 private:
  void run() {
    while (!stop_) {
      const int client = ::accept(listener_, nullptr, nullptr);
      if (client < 0) return;
      const int server = ::socket(AF_INET, SOCK_STREAM, 0);
      sockaddr_in to{};
      to.sin_family = AF_INET;
      to.sin_port = htons(static_cast<uint16_t>(target_));
      to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
      if (::connect(server, reinterpret_cast<sockaddr*>(&to), sizeof to) == 0) pass(client, server);
      ::close(client);
      ::close(server);
    }
  }
  void pass(int client, int server) {
    std::vector<char> bytes(1 << 18);
    while (!stop_) {
      pollfd both[2] = {{client, POLLIN, 0}, {server, POLLIN, 0}};
      if (::poll(both, 2, 100) < 0) return;
      for (int i = 0; i < 2; ++i) {
        if (!both[i].revents) continue;
        const ssize_t got = ::recv(both[i].fd, bytes.data(), bytes.size(), 0);
        if (got <= 0) return;
        bytes_ += static_cast<uint64_t>(got);
        for (ssize_t sent = 0; sent < got;) {
          const ssize_t now =
              ::send(both[1 - i].fd, bytes.data() + sent, static_cast<size_t>(got - sent), MSG_NOSIGNAL);
          if (now <= 0) return;
          sent += now;
        }
      }
    }
  }

  int target_, listener_, port_ = 0;
  std::atomic<bool> stop_{false};
  std::atomic<uint64_t> bytes_{0};
  std::thread thread_;
};

// Two authorities; each has signed a certificate for this machine and one for a worker.
class Certificates {
 public:
  static const Certificates& get() {
    static const Certificates one;
    return one;
  }
  Security server(bool mutual, const std::string& by = "good") const {
    return {file(by + "-server.pem"), file(by + "-server.key"), mutual ? file(by + "-ca.pem") : "", "", false};
  }
  Security worker(bool mutual, const std::string& by = "good") const {
    return {mutual ? file(by + "-worker.pem") : "", mutual ? file(by + "-worker.key") : "", file(by + "-ca.pem"), "",
            false};
  }
  std::string file(const std::string& name) const { return folder_ + "/" + name; }
  ~Certificates() { std::filesystem::remove_all(folder_); }

 private:
  Certificates() : folder_(scratch_file("certificates")) {
    std::filesystem::create_directory(folder_);
    std::ofstream(file("names.cnf")) << "subjectAltName=IP:127.0.0.1,DNS:localhost\n";
    for (const std::string by : {"good", "other"}) {
      run("req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=" + by + " -keyout " +
          by + "-ca.key -out " + by + "-ca.pem");
      for (const std::string who : {"server", "worker"}) {
        const std::string name = by + "-" + who;
        run("req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=" + name + " -keyout " + name +
            ".key -out " + name + ".csr");
        run("x509 -req -days 2 -CAcreateserial -CA " + by + "-ca.pem -CAkey " + by + "-ca.key -extfile names.cnf -in " +
            name + ".csr -out " + name + ".pem");
      }
    }
  }
  void run(const std::string& arguments) const {
    const std::string command = "cd '" + folder_ + "' && openssl " + arguments + " >openssl.log 2>&1";
    if (std::system(command.c_str()) != 0) throw std::runtime_error("openssl " + arguments + " failed");
  }
  std::string folder_;
};

}  // namespace gradwire::server
