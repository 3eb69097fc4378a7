// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/probe.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netdb.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <thread>

#include "server/endpoint.h"
#include "server/rpc/openssl_free.h"

namespace gradwire::server {
namespace {

constexpr timeval kPatience{2, 0};  // for each step
constexpr std::string_view kPreface("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0", 33);

class ProbeSocket {
 public:
  explicit ProbeSocket(const HostPort& to) {
    addrinfo hints{}, *found = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    if (::getaddrinfo(to.host.c_str(), std::to_string(to.port).c_str(), &hints, &found) != 0) return;
    const std::unique_ptr<addrinfo, void (*)(addrinfo*)> addresses(found, ::freeaddrinfo);
    for (const addrinfo* one = found; one && fd_ < 0; one = one->ai_next) {
      fd_ = ::socket(one->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
      if (fd_ < 0) continue;
      ::setsockopt(fd_, SOL_SOCKET, SO_SNDTIMEO, &kPatience, sizeof kPatience);  // of connect() too
      ::setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &kPatience, sizeof kPatience);
      if (::connect(fd_, one->ai_addr, one->ai_addrlen) == 0) return;
      ::close(fd_);
      fd_ = -1;
    }
  }
  ~ProbeSocket() {
    if (fd_ >= 0) ::close(fd_);
  }
  ProbeSocket(const ProbeSocket&) = delete;
  ProbeSocket& operator=(const ProbeSocket&) = delete;
  int fd() const { return fd_; }

  // The first bytes of the answer; empty if none came.
  std::string ask(std::string_view bytes) const {
    if (::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL) < 0) return {};
    char answer[16];
    const ssize_t count = ::recv(fd_, answer, sizeof answer, 0);
    return count > 0 ? std::string(answer, static_cast<size_t>(count)) : std::string();
  }

 private:
  int fd_ = -1;
};

enum class Speaks { nothing, http2, web, tls };

Speaks plain_answer(const HostPort& to) {
  const ProbeSocket socket(to);
  if (socket.fd() < 0) return Speaks::nothing;
  const std::string answer = socket.ask(kPreface);
  if (answer.starts_with("HTTP/")) return Speaks::web;
  if (answer.size() >= 2 && answer[0] == 0x15 && answer[1] == 3) return Speaks::tls;
  return answer.size() >= 4 && answer[3] == 4 ? Speaks::http2 : Speaks::nothing;
}

using Context = std::unique_ptr<SSL_CTX, OpenSslFree<SSL_CTX_free>>;
using Connection = std::unique_ptr<SSL, OpenSslFree<SSL_free>>;
using Memory = std::unique_ptr<BIO, OpenSslFree<BIO_free>>;

Memory memory_of(const std::string& text) {
  return Memory(BIO_new_mem_buf(text.data(), static_cast<int>(text.size())));
}

// Everything that a worker would use, but it looks before it judges.
Context context_of(const TlsTexts& tls) {
  Context context(SSL_CTX_new(TLS_client_method()));
  if (!context) return nullptr;
  SSL_CTX_set_verify(context.get(), SSL_VERIFY_NONE, nullptr);
  if (!tls.authority.empty()) {
    const Memory from = memory_of(tls.authority);
    while (X509* one = PEM_read_bio_X509(from.get(), nullptr, nullptr, nullptr)) {
      X509_STORE_add_cert(SSL_CTX_get_cert_store(context.get()), one);
      X509_free(one);
    }
  }
  if (!tls.certificate.empty()) {
    const Memory from = memory_of(tls.certificate), key = memory_of(tls.key);
    if (X509* own = PEM_read_bio_X509(from.get(), nullptr, nullptr, nullptr)) {
      SSL_CTX_use_certificate(context.get(), own);
      X509_free(own);
    }
    while (X509* more = PEM_read_bio_X509(from.get(), nullptr, nullptr, nullptr))
      if (!SSL_CTX_add_extra_chain_cert(context.get(), more)) X509_free(more);
    if (EVP_PKEY* one = PEM_read_bio_PrivateKey(key.get(), nullptr, nullptr, nullptr)) {
      SSL_CTX_use_PrivateKey(context.get(), one);
      EVP_PKEY_free(one);
    }
  }
  static const unsigned char kHttp2[] = {2, 'h', '2'};
  SSL_CTX_set_alpn_protos(context.get(), kHttp2, sizeof kHttp2);
  return context;
}

// OpenSSL writes to sockets without asking for no signal, and a server may have closed its end.
class NoBrokenPipe {
 public:
  NoBrokenPipe() {
    sigemptyset(&pipe_);
    sigaddset(&pipe_, SIGPIPE);
    sigset_t pending;
    sigpending(&pending);
    was_pending_ = sigismember(&pending, SIGPIPE) == 1;
    pthread_sigmask(SIG_BLOCK, &pipe_, &before_);
  }
  ~NoBrokenPipe() {
    const timespec at_once{};
    while (!was_pending_ && sigtimedwait(&pipe_, nullptr, &at_once) >= 0) {
    }
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  NoBrokenPipe(const NoBrokenPipe&) = delete;
  NoBrokenPipe& operator=(const NoBrokenPipe&) = delete;

 private:
  sigset_t pipe_, before_;
  bool was_pending_;
};

struct TlsAnswer {
  bool connected = false, shook = false, answered = false, alert = false;
  std::string reason;    // of the TLS library
  std::string distrust;  // what is wrong with the server's certificate
};

// Whether the certificate is of this host, as a worker would check it.
bool is_for(X509* certificate, const std::string& host) {
  unsigned char number[16];
  const bool address =
      ::inet_pton(AF_INET, host.c_str(), number) == 1 || ::inet_pton(AF_INET6, host.c_str(), number) == 1;
  return (address ? X509_check_ip_asc(certificate, host.c_str(), 0)
                  : X509_check_host(certificate, host.data(), host.size(), 0, nullptr)) == 1;
}

TlsAnswer tls_answer(const HostPort& to, const TlsTexts& tls) {
  TlsAnswer answer;
  const NoBrokenPipe quiet;
  const ProbeSocket socket(to);
  const Context context = context_of(tls);
  const Connection connection(context ? SSL_new(context.get()) : nullptr);
  if (socket.fd() < 0 || !connection) return answer;
  answer.connected = true;
  SSL_set_fd(connection.get(), socket.fd());
  SSL_set_tlsext_host_name(connection.get(), to.host.c_str());
  const auto reason = [&] {
    const unsigned long code = ERR_peek_last_error();
    const char* words = code ? ERR_reason_error_string(code) : nullptr;
    answer.reason = words ? words : "";
    answer.alert = answer.reason.find("alert") != std::string::npos;
  };
  ERR_clear_error();
  answer.shook = SSL_connect(connection.get()) == 1;
  if (answer.shook) {
    X509* certificate = SSL_get1_peer_certificate(connection.get());
    const long verdict = SSL_get_verify_result(connection.get());
    if (verdict != X509_V_OK)
      answer.distrust = X509_verify_cert_error_string(verdict);
    else if (certificate && !is_for(certificate, to.host))
      answer.distrust = fmt::format("it is not for the name '{}'", to.host);
    X509_free(certificate);
    SSL_write(connection.get(), kPreface.data(), static_cast<int>(kPreface.size()));
    char byte;
    // A server that accepts this worker says so; one that does not closes the connection.
    answer.answered = SSL_read(connection.get(), &byte, 1) == 1;
  }
  if (!answer.answered) reason();
  ERR_clear_error();
  return answer;
}

std::optional<Error> explain_once(const std::string& address, const HostPort& to, const TlsTexts& tls) {
  const auto refusal = [](const std::string& words, const char* field) {
    return Error(ErrorKind::mismatch, words, field);
  };
  const Speaks plain = plain_answer(to);
  if (plain == Speaks::web)
    return refusal(fmt::format("{} is the port of a web server, such as the watch page of a server (serve --watch); "
                               "workers and status use the port of serve --listen",
                               address),
                   "server");
  if (!tls.on) {
    if (plain == Speaks::http2) return std::nullopt;
    const TlsAnswer answer = tls_answer(to, tls);
    if (plain != Speaks::tls && !answer.shook && !answer.alert) return std::nullopt;
    return refusal(fmt::format("{} speaks TLS: give --tls-ca, and --tls-cert and --tls-key if it wants to know its "
                               "workers",
                               address),
                   "tls-ca");
  }
  if (plain == Speaks::http2)
    return refusal(fmt::format("{} does not speak TLS; this worker was given --tls-ca or --tls-cert", address),
                   "tls-ca");
  const TlsAnswer answer = tls_answer(to, tls);
  if (!answer.connected || answer.answered) {
    if (answer.distrust.empty()) return std::nullopt;
    return refusal(fmt::format("the certificate of {} is not to be trusted (--tls-ca): {}", address, answer.distrust),
                   "tls-ca");
  }
  if (!answer.distrust.empty())
    return refusal(fmt::format("the certificate of {} is not to be trusted (--tls-ca): {}", address, answer.distrust),
                   "tls-ca");
  if (!answer.shook && !answer.alert) return std::nullopt;
  const std::string said = answer.reason.empty() ? "it closes the connection" : answer.reason;
  if (tls.certificate.empty())
    return refusal(fmt::format("{} wants a certificate of this worker (--tls-cert and --tls-key): {}", address, said),
                   "tls-cert");
  return refusal(fmt::format("{} does not accept the certificate of this worker (--tls-cert): {}", address, said),
                 "tls-cert");
}

}  // namespace

bool keys_fit(const std::string& certificate, const std::string& key) {
  const Memory one = memory_of(certificate), other = memory_of(key);
  X509* read = PEM_read_bio_X509(one.get(), nullptr, nullptr, nullptr);
  EVP_PKEY* own = PEM_read_bio_PrivateKey(other.get(), nullptr, nullptr, nullptr);
  const bool fit = read && own && X509_check_private_key(read, own) == 1;
  X509_free(read);
  EVP_PKEY_free(own);
  ERR_clear_error();
  return fit;
}

std::optional<Error> explain_failure(const std::string& address, const TlsTexts& tls) {
  const HostPort to = parse_address(address, "server");
  const std::optional<Error> first = explain_once(address, to, tls);
  if (!first) return std::nullopt;
  // A server that stops, or has no room, can look like one of another kind. Only what is seen twice is believed.
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  const std::optional<Error> second = explain_once(address, to, tls);
  return second && second->field() == first->field() ? first : std::nullopt;
}

}  // namespace gradwire::server
