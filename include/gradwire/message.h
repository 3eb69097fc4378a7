// SPDX-License-Identifier: Apache-2.0
// Reading a message's head: what it says of itself, checked before anything is believed. The format is
// docs/wire-format.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "gradwire/plan.h"

namespace gradwire {

inline constexpr uint16_t kWireVersion = 1;

// What a reader is ready to accept; a head that asks for more is refused before memory is taken.
struct Limits {
  uint64_t max_elements = uint64_t{1} << 40;  // of all tensors together
  uint32_t max_tensors = 1u << 20;
};

struct Head {
  uint16_t version;
  uint64_t total_bytes;
  Stamp stamp;  // seed is 0: it does not travel
  uint32_t head_bytes;
  uint64_t head_check;
  uint64_t body_check;
  uint32_t spec_count;                 // different codecs, each with its table
  std::vector<TensorSpec> tensors;     // names unknown: name_hash is set
  std::vector<uint64_t> body_offsets;  // bytes from the start of the body
};

// Throws Error{frame}. Checks every field of the head, and that the sizes add up to `message`; not the body's
// checksum (Runner::decode does, and verify_body).
Head read_head(std::span<const std::byte> message, const Limits& limits = {});

// Throws Error{frame, "body_check"} when the body was altered.
void verify_body(std::span<const std::byte> message, const Head& head);

// Recomputes both checksums in place: for tests that throw lies at the checks behind the checksums.
void reseal(std::span<std::byte> message);

}  // namespace gradwire
