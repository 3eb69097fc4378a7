// SPDX-License-Identifier: Apache-2.0
// Where everything stands in the message of a plan. docs/wire-format.md describes the same for readers who write a
// decoder of their own.
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

struct UnitOps;  // codec/unit.h

// The part of the body that one tensor, or one piece of a tensor, takes. Offsets are in words of 4 bytes.
struct Region {
  Scheme scheme;
  const UnitOps* unit = nullptr;  // codecs with units of their own; on the host only
  uint64_t name_hash = 0;
  uint64_t begin = 0, words = 0;
  uint32_t spec = 0;  // index in Layout::specs
};

// Bytes of a codec in the head: its spec, padded to words, and its table.
inline size_t spec_bytes(const Codec& codec) {
  return wire::spec::text + div_up(codec.wire_spec().size(), 4) * 4 + codec.table().size_bytes();
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

// Empty where a shape fits its count, or is empty; else what is wrong with it, in words.
std::string shape_problem(std::span<const uint64_t> shape, uint64_t count);

const Layout& layout_of(const Plan& plan);
// Whether everything stands at the same place in both, and no codec has units of its own: only values of tables, and
// what follows from them, differ.
bool differ_in_tables(const Layout& a, const Layout& b);
Layout make_layout(std::vector<TensorSpec> tensors);  // throws Error{usage} for what no message can hold

// The head with its check. body_check is 0: it is set once the body is encoded.
std::vector<std::byte> make_head(const Layout& layout, const Stamp& stamp);
void set_stamp(std::span<std::byte> head, const Stamp& stamp);  // updates the check of the head as well
uint64_t head_check(std::span<const std::byte> head);
uint64_t head_body_check(std::span<const std::byte> head);
void set_body_check(std::span<std::byte> message, uint64_t check);
// Makes both checks right again, so that tests reach what stands behind them with malformed messages.
void reseal(std::span<std::byte> message);

// Throws Error{frame}, which names the field, if `message` does not carry this layout: names, counts, pieces, codecs
// (without what says how they learn) and shapes. With `expected`, it also throws if the message has another stamp.
// Element types may differ, since they only say what the sender had. `head` is make_head() of the layout.
void check_head(std::span<const std::byte> message, const Layout& layout, std::span<const std::byte> head,
                const Stamp* expected);

}  // namespace gradwire
