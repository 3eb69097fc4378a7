// SPDX-License-Identifier: Apache-2.0
// Packing and unpacking messages with Zstandard: see packed.h.
#include "codec/packed.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "cli/files.h"
#include "gradwire/error.h"
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

// Memory grows with what really comes out, and not with what the file claims.
static std::vector<std::byte> unpack(std::span<const std::byte> file, uint64_t most) {
  const unsigned long long claimed = ZSTD_getFrameContentSize(file.data(), file.size());
  if (claimed == ZSTD_CONTENTSIZE_ERROR || claimed == ZSTD_CONTENTSIZE_UNKNOWN)
    throw Error(ErrorKind::frame, "bad message: packed size is not there: the file was cut or altered", "packed");
  if (claimed > most)
    throw Error(ErrorKind::frame, fmt::format("bad message: packed size is {}; the limit is {}", claimed, most),
                "packed");
  ZSTD_DStream* const stream = ZSTD_createDStream();
  struct Free {
    ZSTD_DStream* stream;
    ~Free() { ZSTD_freeDStream(stream); }
  } free{stream};
  std::vector<std::byte> out;
  ZSTD_inBuffer in{file.data(), file.size(), 0};
  size_t left = 1;
  while (left != 0 && in.pos <= in.size) {
    const size_t at = out.size();
    if (at > claimed) break;
    out.resize(at + std::min<uint64_t>(uint64_t{1} << 20, claimed - at + 1));
    ZSTD_outBuffer to{out.data() + at, out.size() - at, 0};
    left = ZSTD_decompressStream(stream, &to, &in);
    if (ZSTD_isError(left))
      throw Error(ErrorKind::frame, fmt::format("bad message: packed bytes are damaged: {}", ZSTD_getErrorName(left)),
                  "packed");
    out.resize(at + to.pos);
    if (to.pos == 0 && in.pos == in.size) break;
  }
  if (left != 0 || out.size() != claimed || in.pos != in.size)
    throw Error(ErrorKind::frame,
                fmt::format("bad message: packed bytes end early or late: {} of {} came out", out.size(), claimed),
                "packed");
  return out;
}

#else

bool packing_built() { return false; }
std::vector<std::byte> pack(std::span<const std::byte>) { refuse(); }
static std::vector<std::byte> unpack(std::span<const std::byte>, uint64_t) { refuse(); }

#endif

MessageFile read_message(const std::string& path, uint64_t most) {
  std::vector<std::byte> file = read_file(path);
  const uint64_t bytes = file.size();
  if (!is_packed(file)) return {std::move(file), bytes, false};
  return {named(path, [&] { return unpack(file, most); }), bytes, true};
}

}  // namespace gradwire::app
