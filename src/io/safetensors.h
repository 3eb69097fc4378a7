// SPDX-License-Identifier: Apache-2.0
// safetensors files: named tensors that Python and C++ both read. A file is
//
//   8 bytes   the header's length, little-endian
//   header    JSON: {"__metadata__": {text: text}, "name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
//   ...} data      the tensors' bytes one after another, without holes; offsets count from the first byte of data
//
// Reading takes the file for hostile: whatever the header says is borne out by the file's size before it is believed,
// and tensors are copied out with reads, never mapped, so that a file that shrinks meanwhile is an error and not a
// signal. Writing is atomic: a temporary file in the same folder (the path + ".tmp") is filled, flushed to the disk and
// renamed; until then, and after any error, the path holds what it held. The weights are streamed from where they are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace gradwire::io {

inline constexpr uint64_t kMaxHeaderBytes = 100'000'000;
inline constexpr size_t kMaxDimensions = 64;

using Metadata = std::map<std::string, std::string>;

struct StoredTensor {
  std::string name;
  std::string dtype;
  std::vector<int64_t> shape;
  uint64_t first = 0;  // offset in the data
  uint64_t bytes = 0;
};

// Bytes an element of a dtype of the format ("F32", "BF16", "U8", ...) takes; 0 for a dtype that is unknown.
size_t element_bytes(std::string_view dtype);

// How an error message shows a foreign name: quoted, escaped, shortened.
std::string shown(std::string_view name);

class SafetensorsFile {
 public:
  // Error{io} if the file cannot be read, Error{frame} with the field at fault if it is malformed.
  explicit SafetensorsFile(const std::string& path);
  ~SafetensorsFile();
  SafetensorsFile(const SafetensorsFile&) = delete;
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;

  const std::string& path() const { return path_; }
  const std::vector<StoredTensor>& tensors() const { return tensors_; }  // in the order of their data
  const Metadata& metadata() const { return metadata_; }
  const StoredTensor* find(std::string_view name) const;  // nullptr: there is none
  uint64_t file_bytes() const { return data_ + data_bytes_; }

  // `tensor` is one of tensors().
  std::vector<std::byte> read(const StoredTensor& tensor) const;
  // F32 bit for bit, F16 and BF16 exactly, F64 rounded to nearest. Error{unsupported} for another dtype, Error{frame}
  // if a finite F64 has no finite float beside it.
  std::vector<float> read_f32(const StoredTensor& tensor) const;
  static bool is_float(const StoredTensor& tensor);  // read_f32 takes it

  // XXH3_64 of the first `bytes` of the file.
  uint64_t hash(uint64_t bytes) const;

 private:
  [[noreturn]] void refuse(const std::string& field, const std::string& why) const;
  void read_header();
  void read_at(uint64_t offset, std::span<std::byte> to) const;

  std::string path_;
  int file_ = -1;
  uint64_t data_ = 0;        // where data begins in the file
  uint64_t data_bytes_ = 0;  // and how much of it there is
  std::vector<StoredTensor> tensors_;
  Metadata metadata_;
};

struct TensorBytes {
  std::string name;
  std::string dtype;
  std::vector<int64_t> shape;
  std::span<const std::byte> bytes;
};

// Called when a stage of writing is complete: "opened", "half" (of the bytes), "written", "synced", "linked" (if a
// former file is kept), "renamed", "kept" (likewise). Tests end the process there.
using WriteHook = std::function<void(const char* stage)>;

struct WriteOptions {
  std::string check;  // not empty: the name of a last tensor, U8 [8], XXH3_64 (little-endian) of the file before it
  // The file that was at the path is at path + ".old" afterwards. It gets a second name before the new file takes its
  // place, and takes the place of the older one after that: the path holds a whole file at every instant. A file system
  // without hard links keeps no former file.
  bool keep_former = false;
  WriteHook hook;
};

// Tensors of wide elements are stored before those of narrow ones, otherwise in the order given: all are aligned, as
// torch wants them. Error{usage} for tensors that cannot be stored, Error{io} with path and reason if the file system
// fails or another writer is at work on the same path.
void write_safetensors(const std::string& path, std::span<const TensorBytes> tensors, const Metadata& metadata = {},
                       const WriteOptions& options = {});

}  // namespace gradwire::io
