// SPDX-License-Identifier: Apache-2.0
// How the loaders find and read files that they do not trust. A DataPlace is where a task's files should be and the
// sentence that tells a user how to get them; that sentence ends every message. What a file claims about itself is
// compared with the bytes that it has before memory is taken for it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace gradwire::train {

struct DataPlace {
  std::string directory;
  std::vector<std::string> folders;  // the usual names of a folder inside it that holds the files
  std::string advice;                // how to get the data
};

[[noreturn]] void missing(const DataPlace& place, const std::string& path, const std::string& expected);   // Error{io}
[[noreturn]] void unreadable(const DataPlace& place, const std::string& path, const std::string& reason);  // Error{io}
// Error{frame}: "path: field is found; expected ...; advice".
[[noreturn]] void damaged(const DataPlace& place, const std::string& path, const std::string& field,
                          const std::string& found, const std::string& expected);

// The first of `names` that is a file in the directory, or in one of its folders.
std::string find_file(const DataPlace& place, const std::vector<std::string>& names);

constexpr uint64_t kMostFileBytes = uint64_t{1} << 30;  // that a loader reads at once

// A whole file of at most `most` bytes.
std::vector<uint8_t> read_file(const DataPlace& place, const std::string& path, uint64_t most);

// The bytes of a file that is plain or gzip, from front to back.
class ByteStream {
 public:
  ByteStream(const DataPlace& place, const std::string& path);
  ~ByteStream();
  ByteStream(const ByteStream&) = delete;
  ByteStream& operator=(const ByteStream&) = delete;

  uint64_t most() const { return most_; }     // the stream cannot hold more bytes than these
  std::vector<uint8_t> read(uint64_t bytes);  // exactly so many; memory grows as they arrive
  uint32_t read_big_endian();                 // four bytes
  void expect_end();                          // nothing may follow; checks gzip's checksum

 private:
  size_t fill(std::span<uint8_t> out);  // fewer at the end

  const DataPlace& place_;
  std::string path_;
  void* file_ = nullptr;  // gzFile
  uint64_t most_ = 0, done_ = 0;
};

}  // namespace gradwire::train
