// SPDX-License-Identifier: Apache-2.0
// The file that residuals are saved to. Little-endian, every part a multiple of 8 bytes (padded with zeros):
//
//   head    magic "gwresid\n", version u32, dtype u32, entries u64, table_bytes u64, file_bytes u64, head_check u64
//   table   per entry: direction u32 (0 up, 1 down, 2 extra state), name_bytes u32, first u64, count u64, the name
//   bodies  per entry, in the table's order: `count` elements, then body_check u64
//
// head_check is the XXH64 of head (itself left out) and table, body_check that of the padded body. Entries ascend by
// (direction, name, first) and do not overlap. A reader allocates memory only after it has checked the number against
// the size that the file really has.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "gradwire/feedback.h"

namespace gradwire {

struct ResidualEntry {
  Direction direction;
  std::string name;
  uint64_t first;
  uint64_t count;
};

// The direction of an entry that is not a residual but extra state: `count` times the element's size is its bytes, a
// multiple of 8.
inline constexpr Direction kExtra{2};

// Bodies pass in chunks of at most this many bytes, a multiple of 8.
inline constexpr size_t kResidualChunk = size_t{1} << 20;

// fetch(entry, offset, chunk) fills `chunk` with the bytes of the entry's body from `offset` on. The new file replaces
// the old one when it is complete and on the disk; on any failure the old one stays. Throws Error{io}.
void write_residual_file(const std::string& path, DType dtype, std::span<const ResidualEntry> entries,
                         const std::function<void(size_t entry, uint64_t offset, std::span<std::byte> chunk)>& fetch);

class ResidualReader {
 public:
  explicit ResidualReader(const std::string& path);  // head and table are read and checked
  ~ResidualReader();
  ResidualReader(const ResidualReader&) = delete;
  ResidualReader& operator=(const ResidualReader&) = delete;

  DType dtype() const { return dtype_; }
  const std::vector<ResidualEntry>& entries() const { return entries_; }
  // The bodies, in order; throws after the last chunk of a body whose checksum is wrong.
  void read_bodies(const std::function<void(size_t entry, uint64_t offset, std::span<const std::byte> chunk)>& store);

 private:
  [[noreturn]] void refuse(const std::string& field, const std::string& why) const;
  void read(std::span<std::byte> bytes, const char* field);
  void read_table(std::span<const std::byte> table, uint64_t entries, uint64_t body_bytes);

  std::string path_;
  int file_ = -1;
  DType dtype_ = DType::f32;
  std::vector<ResidualEntry> entries_;
};

}  // namespace gradwire
