// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/listen.h"

#include <fmt/format.h>
#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/resource_quota.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <list>
#include <thread>

#include "core/machine.h"
#include "gradwire/error.h"
#include "server/machine.h"
#include "server/rpc/acceptor.h"
#include "server/rpc/frame_buffer.h"
#include "server/rpc/probe.h"

namespace gradwire::server {
namespace {

constexpr size_t kFewestSockets = 16;
constexpr size_t kLeastQuota = size_t{256} << 20;  // bytes

grpc::StatusCode code_of(Refusal why) {
  switch (why) {
    case Refusal::signature:
      return grpc::StatusCode::FAILED_PRECONDITION;
    case Refusal::full:
      return grpc::StatusCode::RESOURCE_EXHAUSTED;
    case Refusal::protocol:
      return grpc::StatusCode::UNIMPLEMENTED;
    case Refusal::malformed:
      return grpc::StatusCode::INVALID_ARGUMENT;
    case Refusal::slow:
      return grpc::StatusCode::DEADLINE_EXCEEDED;
    case Refusal::replaced:
      return grpc::StatusCode::ABORTED;
    case Refusal::stopping:
      return grpc::StatusCode::UNAVAILABLE;
  }
  return grpc::StatusCode::UNKNOWN;
}

// One worker's stream as the hub sees it. It may outlive the reactor, which is deleted when gRPC is done with it.
class WorkerStream final : public Session, public std::enable_shared_from_this<WorkerStream> {
 public:
  WorkerStream(ServerHub& hub, Acceptor& acceptor, grpc::ServerGenericBidiReactor* reactor,
               grpc::GenericCallbackServerContext* context)
      : hub_(hub),
        acceptor_(acceptor),
        reactor_(reactor),
        context_(context),
        peer_(Acceptor::readable(context->peer())),
        opened_(SteadyClock::now()) {}

  void send(const Frame& frame, const Blob& payload) override {
    const std::lock_guard lock(mutex_);
    if (!reactor_ || refusal_) return;
    queue_.push_back(to_buffer(frame, payload));
    out_ += queue_.back().Length();
    waiting_ += queue_.back().Length();
    if (!writing_) write_next();
  }

  void refuse(Refusal why, const std::string& words) override {
    const std::lock_guard lock(mutex_);
    if (!reactor_ || refusal_) return;
    refusal_ = grpc::Status(code_of(why), words);
    // The message that is on its way goes first. A worker that does not take it is cut off by the sweep.
    if (writing_) {
      write_began_ = SteadyClock::now();
      while (queue_.size() > 1) queue_.pop_back();
    } else {
      finish();
    }
  }
  std::string peer() const override { return peer_; }
  uint64_t bytes_in() const override { return in_; }
  uint64_t bytes_out() const override { return out_; }

  void read_next() {
    const std::lock_guard lock(mutex_);
    if (!reactor_ || finished_) return;
    if (queue_.size() > kMostWaiting || waiting_ > kMostBytes) {  // it asks, but does not read the answers
      paused_ = true;
      return;
    }
    reactor_->StartRead(&incoming_);
  }
  void read_done(bool ok) {
    if (!ok) {
      const std::lock_guard lock(mutex_);
      if (!refusal_) refusal_ = grpc::Status::OK;  // the worker has closed its half, or is gone
      if (!writing_) finish();
      return;
    }
    Blob payload;
    Frame frame;
    try {
      in_ += incoming_.Length();
      frame = from_buffer(incoming_, payload);
    } catch (const Error& error) {
      hub_.count_refusal(error.field() == "protocol"   ? "version"
                         : error.field() == "oversize" ? "oversize"
                                                       : "corrupt",
                         peer_, error.what());
      refuse(error.field() == "protocol" ? Refusal::protocol : Refusal::malformed, error.what());
      return;
    }
    if (!greeted_ && payload->size() > kMaxText) {
      const std::string words =
          fmt::format("bad frame: it has {} bytes; a hello has at most {}", payload->size(), kMaxText);
      hub_.count_refusal("oversize", peer_, words);
      return refuse(Refusal::malformed, words);
    }
    const bool first = frame.kind == FrameKind::hello && !greeted_.exchange(true);
    // The next frame is read before this call returns, so the connection is vouched for first.
    if (first) vouch();
    hub_.received(shared_from_this(), frame, std::move(payload), [self = shared_from_this()] { self->read_next(); });
    if (first && refused()) withdraw();
  }
  void write_done(bool ok) {
    const std::lock_guard lock(mutex_);
    writing_ = false;
    if (!queue_.empty()) {
      waiting_ -= queue_.front().Length();
      queue_.pop_front();
    }
    if (!ok) {
      queue_.clear();
      if (!refusal_) refusal_ = grpc::Status(grpc::StatusCode::UNAVAILABLE, "the connection is gone");
    }
    if (refusal_) return finish();
    if (!queue_.empty()) write_next();
    if (paused_ && queue_.size() <= kMostWaiting / 2 && waiting_ <= kMostBytes / 2) {
      paused_ = false;
      reactor_->StartRead(&incoming_);
    }
  }
  void done() {
    {
      const std::lock_guard lock(mutex_);
      reactor_ = nullptr;
      queue_.clear();
    }
    withdraw();
    hub_.vanished(this);
  }
  // Called now and then by the thread that watches all streams.
  void sweep(double hello_s, double stall_s) {
    if (!greeted_ && seconds_since(opened_) > hello_s)
      return refuse(Refusal::slow, fmt::format("no hello within {:.0f} s", hello_s));
    const std::lock_guard lock(mutex_);
    if (reactor_ && writing_ && seconds_since(write_began_) > (refusal_ ? 5 : stall_s)) context_->TryCancel();
  }

 private:
  static constexpr size_t kMostWaiting = 4096, kMostBytes = size_t{32} << 20;  // answers, before more is read

  // The connection has a worker, and is not among those that are cut off to make room.
  void vouch() {
    if (!vouched_.exchange(true)) acceptor_.admit(peer_, 1);
  }
  void withdraw() {
    if (vouched_.exchange(false)) acceptor_.admit(peer_, -1);
  }
  bool refused() {
    const std::lock_guard lock(mutex_);
    return refusal_.has_value();
  }
  void write_next() {
    writing_ = true;
    write_began_ = SteadyClock::now();
    reactor_->StartWrite(&queue_.front());
  }
  void finish() {
    if (finished_ || !reactor_) return;
    finished_ = true;
    reactor_->Finish(*refusal_);
  }

  ServerHub& hub_;
  Acceptor& acceptor_;
  std::mutex mutex_;
  grpc::ServerGenericBidiReactor* reactor_;
  grpc::GenericCallbackServerContext* context_;
  std::string peer_;
  SteadyClock::time_point opened_, write_began_;
  std::atomic<bool> greeted_{false}, vouched_{false};
  std::deque<grpc::ByteBuffer> queue_;
  size_t waiting_ = 0;  // bytes in it
  bool writing_ = false, finished_ = false, paused_ = false;
  std::optional<grpc::Status> refusal_;
  grpc::ByteBuffer incoming_;
  std::atomic<uint64_t> in_{0}, out_{0};
};

class WorkReactor final : public grpc::ServerGenericBidiReactor {
 public:
  WorkReactor(ServerHub& hub, Acceptor& acceptor, grpc::GenericCallbackServerContext* context,
              std::function<void(WorkReactor*)> over)
      : hub_(hub), over_(std::move(over)), stream_(std::make_shared<WorkerStream>(hub, acceptor, this, context)) {
    hub_.count_connection(1);
    stream_->read_next();
  }
  void OnReadDone(bool ok) override { stream_->read_done(ok); }
  void OnWriteDone(bool ok) override { stream_->write_done(ok); }
  void OnDone() override {
    stream_->done();
    hub_.count_connection(-1);
    over_(this);
    delete this;
  }
  const std::shared_ptr<WorkerStream>& stream() const { return stream_; }

 private:
  ServerHub& hub_;
  std::function<void(WorkReactor*)> over_;
  std::shared_ptr<WorkerStream> stream_;
};

// Sends one message, or only a status, and ends.
class OneReply final : public grpc::ServerGenericBidiReactor {
 public:
  explicit OneReply(const grpc::Status& status) { Finish(status); }
  explicit OneReply(const nlohmann::json& text) : buffer_(to_buffer({.kind = FrameKind::notice}, text_blob(text))) {
    StartWriteAndFinish(&buffer_, grpc::WriteOptions(), grpc::Status::OK);
  }
  void OnDone() override { delete this; }

 private:
  grpc::ByteBuffer buffer_;
};

// Takes a time that does not depend on how much of the secret is right.
bool same_secret(const std::string& a, std::string_view b) {
  unsigned difference = a.size() == b.size() ? 0 : 1;
  for (size_t i = 0; i < a.size(); ++i) difference |= static_cast<unsigned char>(a[i] ^ (i < b.size() ? b[i] : 0));
  return difference == 0;
}

// Twice the connections of workers, so that those beyond the limit can be told so, as far as there are descriptors.
size_t most_sockets(const ListenOptions& options) {
  const uint64_t used = open_files() + options.spare_files, limit = file_limit();
  if (limit < used + kFewestSockets)
    throw Error(ErrorKind::usage,
                fmt::format("nofile is {}: {} descriptors are in use or kept for files, and at least {} are wanted for "
                            "connections; raise the limit of open files",
                            limit, used, kFewestSockets),
                "nofile");
  return std::min<uint64_t>(2 * static_cast<uint64_t>(options.max_connections) + kFewestSockets, limit - used);
}

std::shared_ptr<grpc::ServerCredentials> credentials_of(const Security& security) {
  if (!security.tls()) return grpc::InsecureServerCredentials();
  grpc::SslServerCredentialsOptions options(security.authority.empty()
                                                ? GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE
                                                : GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  if (security.certificate.empty())
    throw Error(ErrorKind::usage, "a server with tls-ca needs tls-cert and tls-key too", "tls-cert");
  options.pem_key_cert_pairs.push_back({read_pem(security.key, "tls-key"), read_pem(security.certificate, "tls-cert")});
  if (!keys_fit(options.pem_key_cert_pairs[0].cert_chain, options.pem_key_cert_pairs[0].private_key))
    throw Error(ErrorKind::io,
                fmt::format("listen: the key {} (tls-key) is not that of the certificate {} (tls-cert)", security.key,
                            security.certificate),
                "listen");
  if (!security.authority.empty()) options.pem_root_certs = read_pem(security.authority, "tls-ca");
  return grpc::SslServerCredentials(options);
}

}  // namespace

struct RpcListener::State final : public grpc::CallbackGenericService {
  State(ServerHub& given, const ListenOptions& told, size_t sockets)
      : hub(given),
        options(told),
        token(read_token(told.security.token_file)),
        acceptor(parse_address(told.address, "listen"), sockets, [this](const char* event, const std::string& words) {
          hub.log(event, {{"note", words}});
        }) {
    // Those beyond the limit are told so, for which they need a socket.
    options.max_connections = std::min(options.max_connections, static_cast<int>(sockets - sockets / 8));
  }

  grpc::ServerGenericBidiReactor* CreateReactor(grpc::GenericCallbackServerContext* context) override {
    if (!acceptor.began_call(context->peer())) {
      return refuse(*context, "calls", grpc::StatusCode::RESOURCE_EXHAUSTED, "too many calls on one connection");
    }
    if (!token.empty()) {
      const auto found = context->client_metadata().find(kTokenKey);
      if (found == context->client_metadata().end() ||
          !same_secret(token, {found->second.data(), found->second.size()})) {
        return refuse(*context, "token", grpc::StatusCode::UNAUTHENTICATED,
                      "the token is missing or wrong (--token-file)");
      }
    }
    if (context->method() == kStatusMethod) return new OneReply(hub.status());
    if (context->method() != kWorkMethod)
      return new OneReply(grpc::Status(grpc::StatusCode::UNIMPLEMENTED, "unknown method"));
    const std::lock_guard lock(mutex);
    if (stopping) return new OneReply(grpc::Status(grpc::StatusCode::UNAVAILABLE, "the server is stopping"));
    if (works.size() >= static_cast<size_t>(options.max_connections)) {
      return refuse(
          *context, "full", grpc::StatusCode::RESOURCE_EXHAUSTED,
          fmt::format("the server is full: it takes {} connections (--max-connections)", options.max_connections));
    }
    acceptor.trust(context->peer());
    auto* work = new WorkReactor(hub, acceptor, context, [this](WorkReactor* over) {
      const std::lock_guard lock(mutex);
      works.erase(over);
      idle.notify_all();
    });
    works.insert(work);
    return work;
  }

  OneReply* refuse(const grpc::GenericCallbackServerContext& context, const char* why, grpc::StatusCode code,
                   const std::string& words) {
    hub.count_refusal(why, Acceptor::readable(context.peer()), words);
    return new OneReply(grpc::Status(code, words));
  }

  void sweep() {
    std::unique_lock lock(mutex);
    while (!stopping) {
      idle.wait_for(lock, std::chrono::milliseconds(500));
      std::vector<std::shared_ptr<WorkerStream>> streams;
      for (WorkReactor* work : works) streams.push_back(work->stream());
      lock.unlock();
      for (const auto& stream : streams) stream->sweep(options.hello_s, options.stall_s);
      lock.lock();
    }
  }

  ServerHub& hub;
  ListenOptions options;
  std::string token;
  Acceptor acceptor;
  std::mutex mutex;
  std::condition_variable idle;
  std::set<WorkReactor*> works;
  bool stopping = false;
  std::unique_ptr<grpc::Server> server;
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> sockets;
  std::thread sweeper;
};

RpcListener::RpcListener(ServerHub& hub, const ListenOptions& options) {
  keep_grpc_quiet();
  const HostPort address = parse_address(options.address, "listen");
  check_security(options.security, address);
  const std::shared_ptr<grpc::ServerCredentials> credentials = credentials_of(options.security);
  state_ = std::make_unique<State>(hub, options, most_sockets(options));
  grpc::ServerBuilder builder;
  state_->sockets = builder.experimental().AddExternalConnectionAcceptor(
      grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD, credentials);
  builder.RegisterCallbackGenericService(state_.get());
  // What gRPC may keep for all connections together: beyond it, it ends calls. Honest ones never come near it, because
  // messages are taken from it as soon as they are whole.
  grpc::ResourceQuota quota("gradwire");
  quota.Resize(std::max<size_t>(kLeastQuota, machine_memory() / 4));
  builder.SetResourceQuota(quota);
  builder.SetMaxReceiveMessageSize(static_cast<int>(kFrameHead + kMaxFrame + 1024));
  builder.SetMaxSendMessageSize(-1);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 20000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 20000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 5000);
  builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, 10000);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS,
                             std::max(1000, static_cast<int>(1000 * options.hello_s)));  // of no call
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, 8);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_FRAME_SIZE, 1 << 20);
  builder.AddChannelArgument(GRPC_ARG_MAX_METADATA_SIZE, 8192);
  // All calls that were begun in what is read at once are there before the first of them can be counted.
  builder.AddChannelArgument(GRPC_ARG_TCP_MAX_READ_CHUNK_SIZE, 64 << 10);
  state_->server = builder.BuildAndStart();
  if (!state_->server)
    throw Error(ErrorKind::io,
                fmt::format("listen: {} cannot be had{}", options.address,
                            options.security.tls() ? ": gRPC cannot use tls-cert, tls-key or tls-ca" : ""),
                "listen");
  state_->sweeper = std::thread([this] { state_->sweep(); });
  state_->acceptor.start([state = state_.get()](int socket) {
    grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters given;
    given.fd = socket;
    state->sockets->HandleNewConnection(&given);
  });
}

RpcListener::~RpcListener() {
  {
    const std::lock_guard lock(state_->mutex);
    state_->stopping = true;
    state_->idle.notify_all();
  }
  state_->sweeper.join();
  state_->acceptor.stop();
  state_->server->Shutdown(std::chrono::system_clock::now() + std::chrono::seconds(2));
  state_->server->Wait();
  std::unique_lock lock(state_->mutex);
  state_->idle.wait(lock, [this] { return state_->works.empty(); });
}

int RpcListener::port() const { return state_->acceptor.port(); }
size_t RpcListener::sockets() const { return state_->acceptor.open(); }
uint64_t RpcListener::cut_off() const { return state_->acceptor.cut_off(); }
std::string RpcListener::trouble() const { return state_->acceptor.trouble(); }

}  // namespace gradwire::server
