// SPDX-License-Identifier: Apache-2.0
// A file is written as a whole (core/file.h). A reader trusts no number before it has been checked against the size
// that the file really has.
#include "feedback/residual_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <tuple>

#include "core/file.h"
#include "gradwire/error.h"

namespace gradwire {
namespace {

static_assert(std::endian::native == std::endian::little, "files are little-endian; a big-endian host must swap");

constexpr char kMagic[8] = {'g', 'w', 'r', 'e', 's', 'i', 'd', '\n'};
constexpr uint32_t kVersion = 1;

struct FileHead {
  char magic[8];
  uint32_t version;
  uint32_t dtype;
  uint64_t entries;
  uint64_t table_bytes;
  uint64_t file_bytes;
  uint64_t head_check;
};
static_assert(sizeof(FileHead) == 48);

struct FileEntry {
  uint32_t direction;
  uint32_t name_bytes;
  uint64_t first;
  uint64_t count;
};
static_assert(sizeof(FileEntry) == 24);

constexpr uint64_t padded(uint64_t bytes) { return (bytes + 7) / 8 * 8; }

// The smallest number of file bytes that an entry of `count` elements can stand on, its check included.
constexpr uint64_t body_bytes(uint64_t count, DType dtype) { return padded(count * bytes_of(dtype)) + 8; }

uint64_t head_check(const FileHead& head, std::span<const std::byte> table) {
  const uint64_t parts[2] = {XXH64(&head, offsetof(FileHead, head_check), 0), XXH64(table.data(), table.size(), 0)};
  return XXH64(parts, sizeof parts, 0);
}

}  // namespace

void write_residual_file(const std::string& path, DType dtype, std::span<const ResidualEntry> entries,
                         const std::function<void(size_t entry, uint64_t offset, std::span<std::byte> chunk)>& fetch) {
  std::vector<std::byte> table;
  uint64_t bodies = 0;
  for (const ResidualEntry& entry : entries) {
    const FileEntry row{static_cast<uint32_t>(entry.direction), static_cast<uint32_t>(entry.name.size()), entry.first,
                        entry.count};
    const size_t at = table.size();
    table.resize(at + sizeof row + padded(entry.name.size()));
    std::memcpy(table.data() + at, &row, sizeof row);
    std::memcpy(table.data() + at + sizeof row, entry.name.data(), entry.name.size());
    bodies += body_bytes(entry.count, dtype);
  }
  FileHead head{};
  std::memcpy(head.magic, kMagic, sizeof kMagic);
  head.version = kVersion;
  head.dtype = static_cast<uint32_t>(dtype);
  head.entries = entries.size();
  head.table_bytes = table.size();
  head.file_bytes = sizeof head + table.size() + bodies;
  head.head_check = head_check(head, table);

  FileReplacement file(path);
  file.write(std::as_bytes(std::span(&head, 1)));
  file.write(table);
  std::vector<std::byte> chunk(kResidualChunk);
  for (size_t i = 0; i < entries.size(); ++i) {
    XXH64_state_t state;
    XXH64_reset(&state, 0);
    const uint64_t bytes = entries[i].count * bytes_of(dtype);
    for (uint64_t offset = 0; offset < bytes; offset += kResidualChunk) {
      const size_t n = static_cast<size_t>(std::min<uint64_t>(bytes - offset, kResidualChunk));
      fetch(i, offset, std::span(chunk).first(n));
      std::fill(chunk.begin() + static_cast<ptrdiff_t>(n), chunk.begin() + static_cast<ptrdiff_t>(padded(n)),
                std::byte{0});
      XXH64_update(&state, chunk.data(), padded(n));
      file.write(std::span(chunk).first(padded(n)));
    }
    const uint64_t check = XXH64_digest(&state);
    file.write(std::as_bytes(std::span(&check, 1)));
  }
  file.finish();
}

ResidualReader::ResidualReader(const std::string& path) : path_(path) {
  file_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file_ < 0) throw_errno(path_, "open", "path");
  try {
    struct stat info;
    if (::fstat(file_, &info) != 0) throw_errno(path_, "read its size", "path");
    if (!S_ISREG(info.st_mode)) refuse("path", "not a regular file");
    const auto size = static_cast<uint64_t>(info.st_size);

    FileHead head;
    if (size < sizeof head)
      refuse("file_bytes", fmt::format("{} bytes; a residual file has at least {}", size, sizeof head));
    read(std::as_writable_bytes(std::span(&head, 1)), "magic");
    if (std::memcmp(head.magic, kMagic, sizeof kMagic) != 0) refuse("magic", "not a residual file");
    if (head.version != kVersion) refuse("version", fmt::format("is {}; this build reads {}", head.version, kVersion));
    if (head.dtype != static_cast<uint32_t>(DType::f32) && head.dtype != static_cast<uint32_t>(DType::bf16))
      refuse("dtype", fmt::format("is {}; allowed are 0 (f32) and 2 (bf16)", head.dtype));
    dtype_ = static_cast<DType>(head.dtype);
    if (head.file_bytes != size) refuse("file_bytes", fmt::format("says {}, the file has {}", head.file_bytes, size));
    const uint64_t rest = size - sizeof head;
    if (head.table_bytes > rest || head.table_bytes % 8 != 0)
      refuse("table_bytes", fmt::format("is {}; allowed are multiples of 8 up to {}", head.table_bytes, rest));
    if (head.entries > head.table_bytes / sizeof(FileEntry))
      refuse("entries", fmt::format("is {}; a table of {} bytes holds at most {}", head.entries, head.table_bytes,
                                    head.table_bytes / sizeof(FileEntry)));
    std::vector<std::byte> table(head.table_bytes);
    read(table, "table");
    const uint64_t check = head_check(head, table);
    if (check != head.head_check)
      refuse("head_check",
             fmt::format("is {:016x}, computed {:016x}: head or table was altered", head.head_check, check));
    read_table(table, head.entries, rest - head.table_bytes);
  } catch (...) {
    ::close(file_);
    throw;
  }
}

ResidualReader::~ResidualReader() { ::close(file_); }

void ResidualReader::refuse(const std::string& field, const std::string& why) const {
  throw Error(ErrorKind::io, fmt::format("{}: {}: {}", path_, field, why), field);
}

void ResidualReader::read(std::span<std::byte> bytes, const char* field) {
  while (!bytes.empty()) {
    const ssize_t n = ::read(file_, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw_errno(path_, "read", field);
    if (n == 0) refuse(field, "the file ends here");  // it was cut after its size was taken
    bytes = bytes.subspan(static_cast<size_t>(n));
  }
}

void ResidualReader::read_table(std::span<const std::byte> table, uint64_t entries, uint64_t body_rest) {
  for (uint64_t i = 0; i < entries; ++i) {
    FileEntry row;
    if (table.size() < sizeof row) refuse("entries", fmt::format("is {}; the table ends after {}", entries, i));
    std::memcpy(&row, table.data(), sizeof row);
    table = table.subspan(sizeof row);
    if (row.direction > 2)
      refuse("direction",
             fmt::format("of entry {} is {}; allowed are 0 (up), 1 (down) and 2 (extra state)", i, row.direction));
    const Direction direction{static_cast<uint8_t>(row.direction)};
    if (direction == kExtra &&
        (row.first != 0 || row.count > (uint64_t{1} << 32) || row.count * bytes_of(dtype_) % 8 != 0))
      refuse("count", fmt::format("of entry {} is {}, first {}; extra state begins at 0 and has a multiple of 8 bytes",
                                  i, row.count, row.first));
    if (padded(row.name_bytes) > table.size())
      refuse("name_bytes", fmt::format("of entry {} is {}; the table has {} left", i, row.name_bytes, table.size()));
    ResidualEntry entry{direction, std::string(reinterpret_cast<const char*>(table.data()), row.name_bytes), row.first,
                        row.count};
    for (size_t p = row.name_bytes; p < padded(row.name_bytes); ++p)
      if (table[p] != std::byte{0}) refuse("name", fmt::format("of entry {}: padding is not zero", i));
    table = table.subspan(padded(row.name_bytes));
    if (row.count > body_rest / bytes_of(dtype_) || body_bytes(row.count, dtype_) > body_rest)
      refuse("count",
             fmt::format("of entry {} ('{}') is {}; the file has {} bytes left", i, entry.name, row.count, body_rest));
    body_rest -= body_bytes(row.count, dtype_);
    if (row.first > UINT64_MAX - row.count)
      refuse("first",
             fmt::format("of entry {} ('{}') is {}, count {}: past 2^64", i, entry.name, row.first, row.count));
    if (!entries_.empty()) {
      const ResidualEntry& last = entries_.back();
      const bool same = std::tie(last.direction, last.name) == std::tie(entry.direction, entry.name);
      if (same ? entry.first <= last.first || entry.first - last.first < last.count
               : std::tie(last.direction, last.name) > std::tie(entry.direction, entry.name))
        refuse("first",
               fmt::format("of entry {} ('{}', {}): entries must ascend and not overlap", i, entry.name, row.first));
    }
    entries_.push_back(std::move(entry));
  }
  if (!table.empty()) refuse("table_bytes", fmt::format("{} bytes stand after the last entry", table.size()));
  if (body_rest != 0) refuse("file_bytes", fmt::format("{} bytes stand after the last body", body_rest));
}

void ResidualReader::read_bodies(
    const std::function<void(size_t entry, uint64_t offset, std::span<const std::byte> chunk)>& store) {
  std::vector<std::byte> chunk;
  for (size_t i = 0; i < entries_.size(); ++i) {
    XXH64_state_t state;
    XXH64_reset(&state, 0);
    const uint64_t bytes = entries_[i].count * bytes_of(dtype_);
    for (uint64_t offset = 0; offset < bytes; offset += kResidualChunk) {
      const size_t n = static_cast<size_t>(std::min<uint64_t>(bytes - offset, kResidualChunk));
      if (chunk.size() < padded(n)) chunk.resize(padded(n));
      read(std::span(chunk).first(padded(n)), "body");
      XXH64_update(&state, chunk.data(), padded(n));
      store(i, offset, std::span<const std::byte>(chunk).first(n));
    }
    uint64_t check;
    read(std::as_writable_bytes(std::span(&check, 1)), "body_check");
    const uint64_t computed = XXH64_digest(&state);
    if (check != computed)
      refuse("body_check", fmt::format("of entry {} ('{}') is {:016x}, computed {:016x}: the body was altered", i,
                                       entries_[i].name, check, computed));
  }
}

}  // namespace gradwire
