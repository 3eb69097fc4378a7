// SPDX-License-Identifier: Apache-2.0
// Where every field of a message's head stands: the one table that host code, kernels, tests and the fuzzer use. It
// holds plain constants and includes nothing of the project, so that a kernel can include it as well.
// docs/wire-format.md describes the same fields for readers who write a decoder of their own.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gradwire::wire {

inline constexpr uint32_t kMagic = 0x52495747u;  // "GWIR", little-endian

// The body begins at a multiple of this many bytes.
inline constexpr uint32_t kHeadAlign = 32;

// The list of shapes follows the tensor table: `dims` extents of every tensor that has a shape, each a u64.
inline constexpr uint32_t kExtentBytes = 8;

// The header: byte offsets from the start of the message.
namespace header {
inline constexpr uint32_t magic = 0;          // u32
inline constexpr uint32_t version = 4;        // u16
inline constexpr uint32_t flags = 6;          // u16
inline constexpr uint32_t total_bytes = 8;    // u64
inline constexpr uint32_t step = 16;          // u64; the stamp reaches from here ...
inline constexpr uint32_t stage = 24;         // u32
inline constexpr uint32_t rank = 28;          // u32
inline constexpr uint32_t world = 32;         // u32
inline constexpr uint32_t spec_count = 36;    // u32; ... to here
inline constexpr uint32_t tensor_count = 40;  // u32
inline constexpr uint32_t head_bytes = 44;    // u32
inline constexpr uint32_t head_check = 48;    // u64; head_check covers neither itself nor body_check
inline constexpr uint32_t body_check = 56;    // u64
inline constexpr uint32_t size = 64;
}  // namespace header

// A spec: byte offsets from the start of its entry. The entries follow the header.
namespace spec {
inline constexpr uint32_t length = 0;       // u16: bytes of the text
inline constexpr uint32_t table_bytes = 2;  // u16: bytes of the table
inline constexpr uint32_t text = 4;         // the text, padded to a multiple of 4 bytes; the table follows
}  // namespace spec

// A row of the tensor table: byte offsets from the start of the row. The rows follow the specs.
namespace row {
inline constexpr uint32_t name_hash = 0;  // u64
inline constexpr uint32_t count = 8;      // u64
inline constexpr uint32_t first = 16;     // u64
inline constexpr uint32_t offset = 24;    // u64
inline constexpr uint32_t spec = 32;      // u16
inline constexpr uint32_t dtype = 34;     // u8
inline constexpr uint32_t dims = 35;      // u8: how many extents the tensor has in the list of shapes; 0 for none
inline constexpr uint32_t reserved = 36;  // zeros up to the end of the row
inline constexpr uint32_t size = 40;
}  // namespace row

}  // namespace gradwire::wire
