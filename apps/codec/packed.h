// SPDX-License-Identifier: Apache-2.0
// Messages in files may be entropy-coded: a Zstandard frame around the whole message. Codes whose values are not equally frequent (casq's clusters,
// onebit's signs of sparse tensors) shrink; a message itself keeps its fixed size, which is what collectives need.
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

// A file's message, unpacked if it was packed. What a packed file claims to hold is believed up to `most` bytes.
std::vector<std::byte> read_message(const std::string& path, uint64_t most = uint64_t{1} << 34);

}  // namespace gradwire::app
