// SPDX-License-Identifier: Apache-2.0
// Reading. The header is checked whole when the file is opened (safetensors_header.h); data is read when it is asked
// for, from the same open file: one that is replaced meanwhile, as our own writing does, stays the one that was
// checked.
#include "io/safetensors.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <memory>

#include "core/bits.h"
#include "core/check.h"
#include "core/float_mode.h"
#include "gradwire/error.h"
#include "io/safetensors_header.h"

namespace gradwire::io {
namespace {

static_assert(std::endian::native == std::endian::little, "files are little-endian; a big-endian host must swap");

constexpr size_t kReadChunk = size_t{1} << 20;

[[noreturn]] void fail(const std::string& path, const char* what) {
  throw Error(ErrorKind::io, fmt::format("{}: cannot {}: {}", path, what, std::strerror(errno)), "path");
}

template <class T>
T element(const std::byte* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

}  // namespace

SafetensorsFile::SafetensorsFile(const std::string& path) : path_(path) {
  file_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // a pipe must not make us wait
  if (file_ < 0) fail(path_, "open");
  try {
    read_header();
  } catch (...) {
    ::close(file_);
    throw;
  }
}

SafetensorsFile::~SafetensorsFile() { ::close(file_); }

void SafetensorsFile::refuse(const std::string& field, const std::string& why) const {
  throw Error(ErrorKind::frame, fmt::format("{}: {}: {}", path_, field, why), field);
}

void SafetensorsFile::read_header() {
  struct stat info;
  if (::fstat(file_, &info) != 0) fail(path_, "read its size");
  if (!S_ISREG(info.st_mode)) throw Error(ErrorKind::io, path_ + ": cannot read: not a regular file", "path");
  const auto size = static_cast<uint64_t>(info.st_size);
  uint64_t header_bytes;
  if (size < sizeof header_bytes)
    refuse("file_bytes", fmt::format("is {}; a safetensors file has at least {}", size, sizeof header_bytes));
  read_at(0, std::as_writable_bytes(std::span(&header_bytes, 1)));
  const uint64_t most = std::min(size - sizeof header_bytes, kMaxHeaderBytes);
  if (header_bytes > most)
    refuse("header_bytes", fmt::format("is {}; at most {} is allowed in a file of {}", header_bytes, most, size));
  std::string text(header_bytes, '\0');
  read_at(sizeof header_bytes, std::as_writable_bytes(std::span(text)));
  data_ = sizeof header_bytes + header_bytes;
  data_bytes_ = size - data_;
  Header header = parse_header(path_, text, data_bytes_);
  tensors_ = std::move(header.tensors);
  metadata_ = std::move(header.metadata);
}

void SafetensorsFile::read_at(uint64_t offset, std::span<std::byte> to) const {
  while (!to.empty()) {
    const ssize_t n =
        ::pread(file_, to.data(), std::min<size_t>(to.size(), size_t{1} << 30), static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail(path_, "read");
    if (n == 0) refuse("file_bytes", fmt::format("the file now ends at {}: it was cut while it was read", offset));
    to = to.subspan(static_cast<size_t>(n));
    offset += static_cast<uint64_t>(n);
  }
}

const StoredTensor* SafetensorsFile::find(std::string_view name) const {
  const auto at = std::find_if(tensors_.begin(), tensors_.end(), [&](const StoredTensor& t) { return t.name == name; });
  return at == tensors_.end() ? nullptr : &*at;
}

std::vector<std::byte> SafetensorsFile::read(const StoredTensor& tensor) const {
  GW_CHECK(tensor.first <= data_bytes_ && tensor.bytes <= data_bytes_ - tensor.first);
  std::vector<std::byte> bytes(tensor.bytes);
  read_at(data_ + tensor.first, bytes);
  return bytes;
}

bool SafetensorsFile::is_float(const StoredTensor& tensor) {
  return tensor.dtype == "F32" || tensor.dtype == "F16" || tensor.dtype == "BF16" || tensor.dtype == "F64";
}

std::vector<float> SafetensorsFile::read_f32(const StoredTensor& tensor) const {
  GW_CHECK(tensor.first <= data_bytes_ && tensor.bytes <= data_bytes_ - tensor.first);
  if (!is_float(tensor))
    throw Error(ErrorKind::unsupported,
                fmt::format("{}: dtype: of {} is {}; F32, F16, BF16 and F64 can be read as float", path_,
                            shown(tensor.name), tensor.dtype),
                "dtype");
  const size_t width = element_bytes(tensor.dtype);
  std::vector<float> values(tensor.bytes / width);
  if (tensor.dtype == "F32") {
    read_at(data_ + tensor.first, std::as_writable_bytes(std::span(values)));
    return values;
  }
  const FloatMode mode;
  std::vector<std::byte> chunk(std::min<uint64_t>(tensor.bytes, kReadChunk));
  size_t i = 0;
  for (uint64_t offset = 0; offset < tensor.bytes; offset += kReadChunk) {
    const std::span<std::byte> part = std::span(chunk).first(std::min<uint64_t>(tensor.bytes - offset, kReadChunk));
    read_at(data_ + tensor.first + offset, part);
    for (size_t at = 0; at < part.size(); at += width, ++i) {
      if (tensor.dtype == "F16") {
        values[i] = f16_to_f32(element<uint16_t>(&part[at]));
      } else if (tensor.dtype == "BF16") {
        values[i] = bf16_to_f32(element<uint16_t>(&part[at]));
      } else {
        const double wide = element<double>(&part[at]);
        values[i] = static_cast<float>(wide);
        if (std::isinf(values[i]) && !std::isinf(wide))
          refuse("data",
                 fmt::format("of {}: element {} is {}; a float holds up to 3.4e38", shown(tensor.name), i, wide));
      }
    }
  }
  return values;
}

uint64_t SafetensorsFile::hash(uint64_t bytes) const {
  GW_CHECK(bytes <= file_bytes());
  const std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> state(XXH3_createState(), &XXH3_freeState);
  if (!state) throw std::bad_alloc();
  XXH3_64bits_reset(state.get());
  std::vector<std::byte> chunk(std::min<uint64_t>(bytes, kReadChunk));
  for (uint64_t offset = 0; offset < bytes; offset += kReadChunk) {
    const std::span<std::byte> part = std::span(chunk).first(std::min<uint64_t>(bytes - offset, kReadChunk));
    read_at(offset, part);
    XXH3_64bits_update(state.get(), part.data(), part.size());
  }
  return XXH3_64bits_digest(state.get());
}

}  // namespace gradwire::io
