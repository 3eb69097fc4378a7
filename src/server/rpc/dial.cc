// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/dial.h"

#include <fmt/format.h>
#include <grpcpp/channel.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/support/channel_arguments.h>

#include <atomic>
#include <cctype>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>

#include "gradwire/error.h"
#include "server/rpc/frame_buffer.h"
#include "server/rpc/probe.h"

namespace gradwire::server {
namespace {

// What a connection needs; its files are read once.
struct Contact {
  std::string address, token;
  std::shared_ptr<grpc::ChannelCredentials> credentials;
  TlsTexts tls;
};

// The error that ends all attempts, if another attempt is of no use.
std::optional<Error> final_word(const grpc::Status& status) {
  const std::string words = status.error_message();
  switch (status.error_code()) {
    case grpc::StatusCode::UNAUTHENTICATED:
    case grpc::StatusCode::PERMISSION_DENIED:
      return Error(ErrorKind::mismatch, "the server refuses this worker: " + words, "token");
    case grpc::StatusCode::FAILED_PRECONDITION:
      return Error(ErrorKind::mismatch, "the server refuses this worker: " + words, "signature");
    case grpc::StatusCode::UNIMPLEMENTED:
      return Error(ErrorKind::mismatch, "the server speaks another protocol: " + words, "protocol");
    case grpc::StatusCode::RESOURCE_EXHAUSTED:
      return Error(ErrorKind::mismatch, "the server refuses this worker: " + words, "full");
    case grpc::StatusCode::ABORTED:
      return Error(ErrorKind::mismatch, "the server has dropped this worker: " + words, "worker");
    default:
      break;
  }
  // The words are those of the TLS library, of which there are two kinds: "certificate verify failed",
  // "CERTIFICATE_VERIFY_FAILED".
  std::string plain = words;
  for (char& c : plain) c = c == '_' ? ' ' : static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  if (plain.find("handshake failed") == std::string::npos) return std::nullopt;
  if (plain.find("certificate verify failed") != std::string::npos)
    return Error(ErrorKind::mismatch, "the server's certificate is not to be trusted (--tls-ca): " + words, "tls-ca");
  if (plain.find("wrong version number") != std::string::npos)
    return Error(ErrorKind::mismatch, "the server does not speak TLS: " + words, "tls-ca");
  return std::nullopt;
}

// One call on a connection of its own. It ends in the thread that made it, never in one of gRPC's, which a channel must
// not be destroyed in. Writes begin in any thread, so the call is held until nothing can be read any more: gRPC's side
// of it is gone before OnDone is called.
class RpcCall final : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  RpcCall(const Contact& contact, const char* method) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL,
                     1);  // a connection of its own, without the memory of failed ones
    arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 10000);
    arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10000);
    arguments.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
    arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
    arguments.SetInt(GRPC_ARG_HTTP2_MAX_FRAME_SIZE, 1 << 20);
    arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
    arguments.SetMaxReceiveMessageSize(static_cast<int>(kFrameHead + kMaxFrame + 1024));
    arguments.SetMaxSendMessageSize(-1);
    channel_ = grpc::CreateCustomChannel(contact.address, contact.credentials, arguments);
    stub_ = std::make_unique<grpc::GenericStub>(channel_);
    if (!contact.token.empty()) context_.AddMetadata(kTokenKey, contact.token);
    stub_->PrepareBidiStreamingCall(&context_, method, {}, this);
    StartRead(&incoming_);
    AddHold();
    StartCall();
  }

  void OnReadDone(bool ok) override {
    {
      const std::lock_guard lock(mutex_);
      if (ok && take()) {
        StartRead(&incoming_);
        wake_.notify_all();
        return;
      }
      over_ = true;
    }
    RemoveHold();  // not under the lock: it may end the call
  }
  void OnWriteDone(bool ok) override {
    const std::lock_guard lock(mutex_);
    writing_ = false;
    if (!queue_.empty()) queue_.pop_front();
    if (ok && !over_ && !queue_.empty()) write_next();
  }
  void OnDone(const grpc::Status& status) override {
    const std::lock_guard lock(mutex_);
    status_ = status;
    queue_.clear();
    wake_.notify_all();
  }

  void send(const Frame& frame, const Blob& payload) {
    const std::lock_guard lock(mutex_);
    if (status_) fail();
    if (over_) return;  // why is not known yet; who listens will hear of it
    queue_.push_back(to_buffer(frame, payload));
    if (!writing_) write_next();
  }
  bool receive(Frame& frame, Blob& payload, std::chrono::milliseconds patience) {
    std::unique_lock lock(mutex_);
    wake_.wait_for(lock, patience, [this] { return status_ || !received_.empty(); });
    if (!received_.empty()) {
      std::tie(frame, payload) = std::move(received_.front());
      received_.pop_front();
      return true;
    }
    if (status_) fail();
    return false;
  }
  // False if gRPC still holds on to it: it must not be destroyed then.
  bool cancel() {
    context_.TryCancel();
    std::unique_lock lock(mutex_);
    return wake_.wait_for(lock, std::chrono::seconds(10), [this] { return status_.has_value(); });
  }

 private:
  bool take() {
    Blob payload;
    try {
      const Frame frame = from_buffer(incoming_, payload);
      received_.emplace_back(frame, std::move(payload));
      return true;
    } catch (const Error& error) {
      broken_ = error.what();
      context_.TryCancel();
      return false;
    }
  }
  void write_next() {
    writing_ = true;
    StartWrite(&queue_.front());
  }
  [[noreturn]] void fail() const {
    if (!broken_.empty()) throw LinkLost(broken_);
    if (const std::optional<Error> word = final_word(*status_)) throw *word;
    throw LinkLost(status_->error_message().empty() ? "the connection was closed" : status_->error_message());
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<grpc::GenericStub> stub_;
  grpc::ClientContext context_;
  grpc::ByteBuffer incoming_;
  std::deque<std::pair<Frame, Blob>> received_;
  std::deque<grpc::ByteBuffer> queue_;
  bool writing_ = false, over_ = false;  // over: nothing more will be read
  std::optional<grpc::Status> status_;
  std::string broken_;
};

struct EndCall {
  void operator()(RpcCall* call) const {
    if (call->cancel()) delete call;
  }
};
using CallPointer = std::unique_ptr<RpcCall, EndCall>;

// Until a server has said something, a connection that is lost may be one that can never be had.
class CallLink final : public Link {
 public:
  CallLink(std::shared_ptr<const Contact> contact, std::shared_ptr<std::atomic<bool>> heard)
      : contact_(std::move(contact)), heard_(std::move(heard)), call_(new RpcCall(*contact_, kWorkMethod)) {}
  void send(const Frame& frame, const Blob& payload) override {
    explained([&] { call_->send(frame, payload); });
  }
  bool receive(Frame& frame, Blob& payload, std::chrono::milliseconds patience) override {
    bool came = false;
    explained([&] { came = call_->receive(frame, payload, patience); });
    if (came) *heard_ = true;
    return came;
  }

 private:
  template <class Work>
  void explained(const Work& work) {
    try {
      work();
    } catch (const LinkLost&) {
      if (*heard_) throw;
      if (const std::optional<Error> why = explain_failure(contact_->address, contact_->tls)) throw *why;
      throw;
    }
  }

  std::shared_ptr<const Contact> contact_;
  std::shared_ptr<std::atomic<bool>> heard_;
  CallPointer call_;
};

Contact contact_of(const DialOptions& options) {
  keep_grpc_quiet();
  const HostPort address = parse_address(options.address, "server");
  check_security(options.security, address);
  Contact contact{options.address, read_token(options.security.token_file), grpc::InsecureChannelCredentials(), {}};
  if (options.security.tls()) {
    grpc::SslCredentialsOptions ssl;
    if (!options.security.authority.empty()) ssl.pem_root_certs = read_pem(options.security.authority, "tls-ca");
    if (!options.security.certificate.empty()) {
      ssl.pem_cert_chain = read_pem(options.security.certificate, "tls-cert");
      ssl.pem_private_key = read_pem(options.security.key, "tls-key");
    }
    contact.credentials = grpc::SslCredentials(ssl);
    contact.tls = {true, ssl.pem_root_certs, ssl.pem_cert_chain, ssl.pem_private_key};
  }
  return contact;
}

}  // namespace

Dialer make_dialer(const DialOptions& options) {
  return [contact = std::make_shared<const Contact>(contact_of(options)),
          heard = std::make_shared<std::atomic<bool>>(false)] { return std::make_unique<CallLink>(contact, heard); };
}

nlohmann::json fetch_status(const DialOptions& options, double patience_s) {
  const Contact contact = contact_of(options);
  const CallPointer call(new RpcCall(contact, kStatusMethod));
  Frame frame;
  Blob payload;
  try {
    if (call->receive(frame, payload, std::chrono::milliseconds(static_cast<int64_t>(1000 * patience_s))))
      return read_text(*payload);
  } catch (const LinkLost& failure) {
    if (const std::optional<Error> why = explain_failure(contact.address, contact.tls)) throw *why;
    throw Error(ErrorKind::engine, fmt::format("{} does not answer: {}", options.address, failure.what()), "server");
  }
  throw Error(ErrorKind::engine, fmt::format("{} does not answer within {:.0f} s", options.address, patience_s),
              "server");
}

}  // namespace gradwire::server
