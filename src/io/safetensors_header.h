// SPDX-License-Identifier: Apache-2.0
// The header of a safetensors file as text, both ways. Parsing reads the JSON event by event (a header of 100 MB must
// not become a tree of gigabytes) and knows nothing of the file but how many bytes of data it has; what it returns is
// sorted by offset and covers the data without overlap or hole.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/safetensors.h"

namespace gradwire::io {

struct Header {
  std::vector<StoredTensor> tensors;
  Metadata metadata;
};

// Error{frame}; messages begin with the path.
Header parse_header(const std::string& path, std::string_view text, uint64_t data_bytes);

// Padded with spaces to a multiple of 8 bytes. Error{usage} if a name is not UTF-8.
std::string header_text(const std::string& path, std::span<const StoredTensor> tensors, const Metadata& metadata);

// The bytes of a tensor: false if their number, or that of its elements, does not fit in 63 bits.
bool tensor_bytes(std::span<const int64_t> shape, size_t element_bytes, uint64_t& bytes);

}  // namespace gradwire::io
