// SPDX-License-Identifier: Apache-2.0
// Messages in files may be entropy-coded: the file is then a Zstandard frame around the whole message. Codes whose
// values are not equally frequent shrink, such as the clusters of casq. A message itself keeps its fixed size, which is
// what collectives need.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace gradwire::app {

bool packing_built();
std::vector<std::byte> pack(
    std::span<const std::byte> message);  // throws Error{unsupported} in builds without Zstandard

struct MessageFile {
  std::vector<std::byte> message;  // unpacked
  uint64_t file_bytes = 0;
  bool packed = false;
};

// Reads the message of a file. A packed file that claims to hold more than `most` bytes is refused.
MessageFile read_message(const std::string& path, uint64_t most = uint64_t{1} << 34);

}  // namespace gradwire::app
