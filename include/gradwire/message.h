// SPDX-License-Identifier: Apache-2.0
// Reading the head of a message: every field is checked before anything relies on it. The format is described in
// docs/wire-format.md.
//
// Threads: these functions keep nothing between calls. Any number of threads may call them at once, also for the same
// message, as long as none writes to it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "gradwire/plan.h"

namespace gradwire {

inline constexpr uint16_t kWireVersion = 2;

// All tensors of one message together hold at most this many elements, whatever limit a reader gives.
inline constexpr uint64_t kMaxElements = uint64_t{1} << 40;

// What a reader is ready to accept. A head that asks for more is refused before memory is allocated.
struct Limits {
  uint64_t max_elements = kMaxElements;  // of all tensors together
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
  std::vector<TensorSpec> tensors;     // a message carries name_hash in place of the name, and no learning parameters
  std::vector<uint64_t> body_offsets;  // bytes from the start of the body
};

// Checks every field of the head, and that the sizes add up to the size of `message`; throws Error{frame}, which names
// the field. The checksum of the body is checked by Runner::decode and by verify_body().
Head read_head(std::span<const std::byte> message, const Limits& limits = {});

// Throws Error{frame, "body_check"} when the body was altered.
void verify_body(std::span<const std::byte> message, const Head& head);

}  // namespace gradwire
