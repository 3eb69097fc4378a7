// SPDX-License-Identifier: Apache-2.0
// Packing and unpacking messages with Zstandard: see packed.h.
#include "codec/packed.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "cli/files.h"
#include "core/machine.h"
#include "gradwire/error.h"
#include "gradwire/message.h"
#include "message/head_fields.h"
#if defined(GRADWIRE_HAS_ZSTD)
#include <zstd.h>
#endif

namespace gradwire::app {
namespace {

constexpr uint32_t kPackedMagic = 0xfd2fb528u;  // of a Zstandard frame, little-endian

bool is_packed(std::span<const std::byte> file) {
  uint32_t magic = 0;
  if (file.size() >= sizeof magic) std::memcpy(&magic, file.data(), sizeof magic);
  return magic == kPackedMagic;
}

// What the first bytes of a message say, before there is memory for the rest.
[[maybe_unused]] void check_header(std::span<const std::byte> first, std::optional<uint64_t> bytes, uint64_t most) {
  namespace header = wire::header;
  if (first.size() < header::size || get_field<uint32_t>(first, header::magic) != wire::kMagic ||
      get_field<uint16_t>(first, header::version) != kWireVersion)
    read_head(first.first(std::min<size_t>(first.size(), header::size)));  // refuses it, and says why
  const auto total = get_field<uint64_t>(first, header::total_bytes);
  if (bytes && total != *bytes) refuse_field("total_bytes", fmt::format("is {} but {} bytes are here", total, *bytes));
  if (total > most) refuse_field("total_bytes", fmt::format("is {}; the limit is {}", total, most));
}

#if !defined(GRADWIRE_HAS_ZSTD)
[[noreturn]] void refuse() {
  throw Error(ErrorKind::unsupported, "packed messages need Zstandard, which this build did not find (libzstd-dev)",
              "pack");
}
#endif

}  // namespace

#if defined(GRADWIRE_HAS_ZSTD)

bool packing_built() { return true; }

std::vector<std::byte> pack(std::span<const std::byte> message) {
  std::vector<std::byte> out(ZSTD_compressBound(message.size()));
  const size_t bytes = ZSTD_compress(out.data(), out.size(), message.data(), message.size(), 3);
  if (ZSTD_isError(bytes))
    throw Error(ErrorKind::io, fmt::format("packing failed: {}", ZSTD_getErrorName(bytes)), "pack");
  out.resize(bytes);
  return out;
}

// The size that a packed file claims to unpack to.
static uint64_t claimed_bytes(std::span<const std::byte> file, uint64_t most) {
  const unsigned long long claimed = ZSTD_getFrameContentSize(file.data(), file.size());
  if (claimed == ZSTD_CONTENTSIZE_ERROR || claimed == ZSTD_CONTENTSIZE_UNKNOWN)
    refuse_field("packed size", "is not there: the file was cut or altered");
  if (claimed > most) refuse_field("packed size", fmt::format("is {}; the limit is {}", claimed, most));
  return claimed;
}

namespace {

// Unpacks a file piece by piece, so that memory grows with what comes out and not with what the file claims.
class Unpacker {
 public:
  explicit Unpacker(std::span<const std::byte> file)
      : stream_(ZSTD_createDStream()), in_{file.data(), file.size(), 0} {}
  ~Unpacker() { ZSTD_freeDStream(stream_); }
  Unpacker(const Unpacker&) = delete;
  Unpacker& operator=(const Unpacker&) = delete;

  // The number of bytes that came out; fewer than `to` has if the file ends.
  size_t next(std::span<std::byte> to) {
    ZSTD_outBuffer out{to.data(), to.size(), 0};
    while (out.pos < out.size && left_ != 0) {
      const size_t before = out.pos, taken = in_.pos;
      left_ = ZSTD_decompressStream(stream_, &out, &in_);
      if (ZSTD_isError(left_)) refuse_field("packed bytes", fmt::format("are damaged: {}", ZSTD_getErrorName(left_)));
      if (out.pos == before && in_.pos == taken) break;  // nothing more comes
    }
    return out.pos;
  }
  bool ended() const { return left_ == 0 && in_.pos == in_.size; }

 private:
  ZSTD_DStream* stream_;
  ZSTD_inBuffer in_;
  size_t left_ = 1;
};

}  // namespace

static std::vector<std::byte> unpack(std::span<const std::byte> file, uint64_t most) {
  const uint64_t claimed = claimed_bytes(file, most);
  Unpacker unpacker(file);
  std::vector<std::byte> out;
  for (bool more = true; more && out.size() <= claimed;) {
    const size_t at = out.size(), piece = std::min<uint64_t>(uint64_t{1} << 20, claimed - at + 1);
    out.resize(at + piece);
    const size_t came = unpacker.next(std::span(out).subspan(at));
    out.resize(at + came);
    more = came == piece;
  }
  if (!unpacker.ended() || out.size() != claimed)
    refuse_field("packed bytes", fmt::format("end early or late: {} of {} came out", out.size(), claimed));
  return out;
}

// Checks the header inside a packed file of which only the first bytes are known.
static void look_inside(std::span<const std::byte> first, uint64_t most) {
  const uint64_t claimed = claimed_bytes(first, most);
  std::byte header[wire::header::size];
  const size_t came = Unpacker(first).next(header);
  check_header(std::span(header).first(came), claimed, most);
}

#else

bool packing_built() { return false; }
std::vector<std::byte> pack(std::span<const std::byte>) { refuse(); }
static std::vector<std::byte> unpack(std::span<const std::byte>, uint64_t) { refuse(); }
static void look_inside(std::span<const std::byte>, uint64_t) { refuse(); }

#endif

MessageFile read_message(const std::string& path, uint64_t max_elements) {
  // No codec takes more than 5 bytes an element; heads are small.
  const uint64_t needed = std::min(max_elements, kMaxElements) * 5 + (uint64_t{1} << 26);
  const uint64_t most = std::min(needed, machine_memory() / 2);
  const auto look = [&](std::span<const std::byte> first, std::optional<uint64_t> size) {
    named(path, [&] {
      if (is_packed(first)) {
        look_inside(first, most);
      } else {
        check_header(first, size, most);
      }
    });
  };
  std::vector<std::byte> file = read_file(path, look);
  const uint64_t bytes = file.size();
  if (!is_packed(file)) return {std::move(file), bytes, false};
  return {named(path, [&] { return unpack(file, most); }), bytes, true};
}

}  // namespace gradwire::app
