// SPDX-License-Identifier: Apache-2.0
// Messages in files may be entropy-coded: the file is then a Zstandard frame around the whole message. Codes whose
// values are not equally frequent shrink, such as the clusters of casq. A message itself keeps its fixed size, which is
// what collectives need.
//
// A file may come from anywhere. Its header, unpacked if need be, is checked before the rest is read: the magic, the
// version, and that the size which it claims is the size that is there and is not beyond the limit.
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

// Throws Error{frame} if the message has more bytes than any codec needs for `max_elements`, or more than half of the
// memory of this machine.
MessageFile read_message(const std::string& path, uint64_t max_elements);

}  // namespace gradwire::app
