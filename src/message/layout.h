// SPDX-License-Identifier: Apache-2.0
// Where everything stands in a plan's message. docs/wire-format.md describes the same thing for a second decoder.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "device/scheme.h"
#include "gradwire/message.h"
#include "gradwire/plan.h"
#include "message/wire_offsets.h"

namespace gradwire {

// One tensor (or piece) in the body. Offsets are in words.
struct Region {
  Scheme scheme;
  uint64_t name_hash = 0;
  uint64_t begin = 0, words = 0;
  uint32_t spec = 0;  // index in Layout::specs
};

// A codec as the head has it: its spec, padded to words, and its table.
inline size_t spec_bytes(const Codec& codec) {
  return wire::spec::text + div_up(codec.str().size(), 4) * 4 + codec.table().size_bytes();
}
inline constexpr size_t kMaxTableBytes = 65532;

struct Layout {
  std::vector<TensorSpec> tensors;
  std::vector<Region> regions;
  std::vector<Codec> specs;  // each once, in the order of first use
  uint64_t elements = 0;
  uint64_t body_words = 0;
  size_t head_bytes = 0;

  size_t message_bytes() const { return head_bytes + body_words * 4; }
};

Layout make_layout(std::vector<TensorSpec> tensors);  // throws Error{usage} for what no message can hold

// The head with both checks; the body's own sum is not known yet, so body_check is 0.
std::vector<std::byte> make_head(const Layout& layout, const Stamp& stamp);
void set_stamp(std::span<std::byte> head, const Stamp& stamp);  // and the head's check with it
uint64_t head_check(std::span<const std::byte> head);
uint64_t head_body_check(std::span<const std::byte> head);
void set_body_check(std::span<std::byte> message, uint64_t check);

// Throws Error{frame} naming the field if `message` does not carry this layout (names, counts, pieces, codecs) or, where
// given, another stamp. Element types may differ: they only say what the sender had. `head` is make_head() of the layout.
void check_head(std::span<const std::byte> message, const Layout& layout, std::span<const std::byte> head,
                const Stamp* expected);

}  // namespace gradwire
