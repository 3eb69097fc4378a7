// SPDX-License-Identifier: Apache-2.0
#include "server/certificates.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <openssl/ec.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/rand.h>
#include <openssl/x509v3.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <memory>

#include "gradwire/error.h"
#include "server/rpc/openssl_free.h"

namespace gradwire::app {
namespace {

constexpr long kSecondsPerDay = 86400, kDays = 3650;

using server::OpenSslFree;
using Key = std::unique_ptr<EVP_PKEY, OpenSslFree<EVP_PKEY_free>>;
using Certificate = std::unique_ptr<X509, OpenSslFree<X509_free>>;
using Memory = std::unique_ptr<BIO, OpenSslFree<BIO_free>>;

void check(bool good, const char* what) {
  if (!good) throw Error(ErrorKind::io, fmt::format("make-certificates: OpenSSL cannot {}", what), "make-certificates");
}

struct Identity {
  Key key;
  Certificate certificate;
};

void add_extension(X509* to, X509* issuer, int kind, const std::string& value) {
  X509V3_CTX context;
  X509V3_set_ctx_nodb(&context);
  X509V3_set_ctx(&context, issuer, to, nullptr, nullptr, 0);
  X509_EXTENSION* extension = X509V3_EXT_conf_nid(nullptr, &context, kind, value.c_str());
  check(extension != nullptr && X509_add_ext(to, extension, -1) == 1, "write an extension");
  X509_EXTENSION_free(extension);
}

// Signed by `by`; without it, an authority that has signed itself.
Identity make_identity(const std::string& name, const Identity* by, const std::string& alternative, const char* use) {
  Identity one{Key(EVP_EC_gen("P-256")), Certificate(X509_new())};
  check(one.key && one.certificate, "make a key");
  X509* certificate = one.certificate.get();
  std::array<unsigned char, 16> serial{};
  check(RAND_bytes(serial.data(), serial.size()) == 1, "make random bytes");
  serial[0] &= 0x7f;  // a serial number is positive
  BIGNUM* number = BN_bin2bn(serial.data(), serial.size(), nullptr);
  BN_to_ASN1_INTEGER(number, X509_get_serialNumber(certificate));
  BN_free(number);
  X509_set_version(certificate, X509_VERSION_3);
  X509_gmtime_adj(X509_getm_notBefore(certificate), -kSecondsPerDay);  // clocks differ
  X509_gmtime_adj(X509_getm_notAfter(certificate), kDays * kSecondsPerDay);
  X509_set_pubkey(certificate, one.key.get());
  X509_NAME_add_entry_by_txt(X509_get_subject_name(certificate), "CN", MBSTRING_UTF8,
                             reinterpret_cast<const unsigned char*>(name.c_str()), -1, -1, 0);
  X509* issuer = by ? by->certificate.get() : certificate;
  X509_set_issuer_name(certificate, X509_get_subject_name(issuer));
  add_extension(certificate, issuer, NID_basic_constraints, by ? "critical,CA:FALSE" : "critical,CA:TRUE,pathlen:0");
  add_extension(certificate, issuer, NID_key_usage, by ? "critical,digitalSignature" : "critical,keyCertSign,cRLSign");
  add_extension(certificate, issuer, NID_subject_key_identifier, "hash");
  add_extension(certificate, issuer, NID_authority_key_identifier, "keyid");
  if (use) add_extension(certificate, issuer, NID_ext_key_usage, use);
  if (!alternative.empty()) add_extension(certificate, issuer, NID_subject_alt_name, alternative);
  check(X509_sign(certificate, by ? by->key.get() : one.key.get(), EVP_sha256()) > 0, "sign a certificate");
  return one;
}

std::string text_of(const Memory& from) {
  char* data = nullptr;
  const long size = BIO_get_mem_data(from.get(), &data);
  return std::string(data, static_cast<size_t>(std::max(size, 0L)));
}

std::string pem_of(X509* certificate) {
  const Memory to(BIO_new(BIO_s_mem()));
  check(PEM_write_bio_X509(to.get(), certificate) == 1, "write a certificate");
  return text_of(to);
}

std::string pem_of(EVP_PKEY* key) {
  const Memory to(BIO_new(BIO_s_mem()));
  check(PEM_write_bio_PKCS8PrivateKey(to.get(), key, nullptr, nullptr, 0, nullptr, nullptr) == 1, "write a key");
  return text_of(to);
}

std::string write_new(const std::string& path, const std::string& text, mode_t mode) {
  const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, mode);
  const bool good =
      file >= 0 && ::write(file, text.data(), text.size()) == static_cast<ssize_t>(text.size()) && ::fsync(file) == 0;
  const int error = errno;
  if (file >= 0) ::close(file);
  if (!good)
    throw Error(ErrorKind::io, fmt::format("make-certificates: cannot write {}: {}", path, std::strerror(error)),
                "make-certificates");
  return path;
}

std::string alternative_names(const std::vector<std::string>& names) {
  std::string list;
  for (const std::string& name : names) {
    unsigned char number[16];
    const bool address =
        ::inet_pton(AF_INET, name.c_str(), number) == 1 || ::inet_pton(AF_INET6, name.c_str(), number) == 1;
    const bool plain = !name.empty() && name.size() < 254 &&
                       name.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-_*") ==
                           std::string::npos;
    if (!address && !plain)
      throw Error(ErrorKind::usage, fmt::format("names: '{}' is neither a host name nor an address", name), "names");
    list += fmt::format("{}{}:{}", list.empty() ? "" : ",", address ? "IP" : "DNS", name);
  }
  return list;
}

}  // namespace

std::vector<std::string> default_names() {
  std::vector<std::string> names = {"localhost", "127.0.0.1", "::1"};
  char host[256] = "";
  if (::gethostname(host, sizeof host - 1) == 0 && host[0] != '\0') names.push_back(host);
  return names;
}

MadeCertificates make_certificates(const std::string& folder, const std::vector<std::string>& names) {
  const std::string alternative = alternative_names(names);
  if (::mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST)
    throw Error(ErrorKind::io, fmt::format("make-certificates: cannot make {}: {}", folder, std::strerror(errno)),
                "make-certificates");
  const auto path = [&](const char* name) { return folder + "/" + name; };
  for (const char* name : {"ca.pem", "ca.key", "server.pem", "server.key", "worker.pem", "worker.key", "token"})
    if (::access(path(name).c_str(), F_OK) == 0)
      throw Error(ErrorKind::io, fmt::format("make-certificates: {} exists; nothing is replaced", path(name)),
                  "make-certificates");
  const Identity ca = make_identity("gradwire authority", nullptr, "", nullptr);
  const Identity server = make_identity("gradwire server", &ca, alternative, "serverAuth");
  const Identity worker = make_identity("gradwire worker", &ca, "", "clientAuth");
  std::array<unsigned char, 24> random{};
  check(RAND_bytes(random.data(), random.size()) == 1, "make random bytes");
  std::string token;
  for (unsigned char byte : random) token += fmt::format("{:02x}", byte);
  write_new(path("ca.key"), pem_of(ca.key.get()), 0600);
  return {.ca = write_new(path("ca.pem"), pem_of(ca.certificate.get()), 0644),
          .server = write_new(path("server.pem"), pem_of(server.certificate.get()), 0644),
          .server_key = write_new(path("server.key"), pem_of(server.key.get()), 0600),
          .worker = write_new(path("worker.pem"), pem_of(worker.certificate.get()), 0644),
          .worker_key = write_new(path("worker.key"), pem_of(worker.key.get()), 0600),
          .token = write_new(path("token"), token + "\n", 0600)};
}

}  // namespace gradwire::app
