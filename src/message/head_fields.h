// SPDX-License-Identifier: Apache-2.0
// What the writer and the reader of a head share: numbers at byte offsets, the stamp, and the error for a bad field.
#pragma once

#include <fmt/format.h>

#include <bit>
#include <cstring>
#include <span>
#include <string>

#include "gradwire/error.h"
#include "gradwire/plan.h"
#include "message/wire_offsets.h"

static_assert(std::endian::native == std::endian::little, "messages are little-endian; a big-endian host needs swaps");

namespace gradwire {

[[noreturn]] inline void refuse_field(const std::string& field, const std::string& words) {
  throw Error(ErrorKind::frame, fmt::format("bad message: {} {}", field, words), field);
}

template <class T>
T get_field(std::span<const std::byte> bytes, size_t at) {
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

template <class T>
void put_field(std::span<std::byte> bytes, size_t at, T value) {
  std::memcpy(bytes.data() + at, &value, sizeof value);
}

// The seed is no part of a message.
inline Stamp get_stamp(std::span<const std::byte> head) {
  return {.seed = 0,
          .step = get_field<uint64_t>(head, wire::header::step),
          .stage = get_field<uint32_t>(head, wire::header::stage),
          .rank = get_field<uint32_t>(head, wire::header::rank),
          .world = get_field<uint32_t>(head, wire::header::world)};
}

}  // namespace gradwire
