// SPDX-License-Identifier: Apache-2.0
// Writing the head of a message, and comparing the head of a message that arrives with that of a plan. read_head.cc
// reads the head of a message whose plan is not known.
#include "gradwire/message.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <xxhash.h>

#include <algorithm>
#include <cstring>

#include "codec/regions.h"
#include "core/checksum.h"
#include "gradwire/error.h"
#include "message/head_fields.h"
#include "message/layout.h"

namespace gradwire {

namespace header = wire::header;
namespace row = wire::row;

uint64_t head_check(std::span<const std::byte> head) {
  // The two checks themselves are left out.
  XXH64_state_t state;
  XXH64_reset(&state, 0);
  XXH64_update(&state, head.data(), header::head_check);
  XXH64_update(&state, head.data() + header::size, head.size() - header::size);
  return XXH64_digest(&state);
}

uint64_t head_body_check(std::span<const std::byte> head) { return get_field<uint64_t>(head, header::body_check); }
void set_body_check(std::span<std::byte> message, uint64_t check) { put_field(message, header::body_check, check); }

void set_stamp(std::span<std::byte> head, const Stamp& stamp) {
  put_field<uint64_t>(head, header::step, stamp.step);
  put_field<uint32_t>(head, header::stage, stamp.stage);
  put_field<uint32_t>(head, header::rank, stamp.rank);
  put_field<uint32_t>(head, header::world, stamp.world);
  put_field<uint64_t>(head, header::head_check, head_check(head));
}

std::vector<std::byte> make_head(const Layout& layout, const Stamp& stamp) {
  std::vector<std::byte> bytes(layout.head_bytes, std::byte{0});
  const std::span<std::byte> head(bytes);
  put_field<uint32_t>(head, header::magic, wire::kMagic);
  put_field<uint16_t>(head, header::version, kWireVersion);
  put_field<uint64_t>(head, header::total_bytes, layout.message_bytes());
  put_field<uint32_t>(head, header::spec_count, static_cast<uint32_t>(layout.specs.size()));
  put_field<uint32_t>(head, header::tensor_count, static_cast<uint32_t>(layout.tensors.size()));
  put_field<uint32_t>(head, header::head_bytes, static_cast<uint32_t>(layout.head_bytes));
  size_t at = header::size;
  for (const Codec& codec : layout.specs) {
    const std::string text = codec.wire_spec();
    const auto table = std::as_bytes(codec.table());
    put_field<uint16_t>(head, at + wire::spec::length, static_cast<uint16_t>(text.size()));
    put_field<uint16_t>(head, at + wire::spec::table_bytes, static_cast<uint16_t>(table.size()));
    std::memcpy(bytes.data() + at + wire::spec::text, text.data(), text.size());
    at += spec_bytes(codec);
    std::copy(table.begin(), table.end(), bytes.begin() + static_cast<ptrdiff_t>(at - table.size()));
  }
  for (size_t i = 0; i < layout.tensors.size(); ++i, at += row::size) {
    const TensorSpec& t = layout.tensors[i];
    put_field<uint64_t>(head, at + row::name_hash, layout.regions[i].name_hash);
    put_field<uint64_t>(head, at + row::count, t.count);
    put_field<uint64_t>(head, at + row::first, t.first);
    put_field<uint64_t>(head, at + row::offset, layout.regions[i].begin * 4);
    put_field<uint16_t>(head, at + row::spec, static_cast<uint16_t>(layout.regions[i].spec));
    put_field<uint8_t>(head, at + row::dtype, static_cast<uint8_t>(t.dtype));
    put_field<uint8_t>(head, at + row::dims, static_cast<uint8_t>(t.shape.size()));
  }
  for (const TensorSpec& t : layout.tensors)
    for (size_t d = 0; d < t.shape.size(); ++d, at += wire::kExtentBytes) put_field<uint64_t>(head, at, t.shape[d]);
  set_stamp(head, stamp);
  return bytes;
}

void verify_body(std::span<const std::byte> message, const Head& head) {
  const auto body = message.subspan(head.head_bytes);
  if (seal(body_sum(body.data(), body.size() / 4), body.size() / 4) != head.body_check)
    refuse_field("body_check", "does not match: the body was altered");
}

void reseal(std::span<std::byte> message) {
  if (message.size() < header::size) return;
  const uint32_t head_bytes = get_field<uint32_t>(message, header::head_bytes);
  if (head_bytes < header::size || head_bytes > message.size()) return;
  const auto body = message.subspan(head_bytes);
  set_body_check(message, seal(body_sum(body.data(), body.size() / 4), body.size() / 4));
  put_field<uint64_t>(message, header::head_check, head_check(message.first(head_bytes)));
}

static void check_tensors(const Head& head, const Layout& layout) {
  if (head.tensors.size() != layout.tensors.size())
    refuse_field("tensor_count", fmt::format("is {}; expected {}", head.tensors.size(), layout.tensors.size()));
  for (size_t i = 0; i < head.tensors.size(); ++i) {
    const TensorSpec &got = head.tensors[i], &want = layout.tensors[i];
    const auto field = [&](const char* name) { return fmt::format("tensor[{}].{}", i, name); };
    if (*got.name_hash != layout.regions[i].name_hash)
      refuse_field(field("name_hash"), fmt::format("is {:016x}; expected {:016x} ('{}')", *got.name_hash,
                                                   layout.regions[i].name_hash, want.name));
    if (got.count != want.count)
      refuse_field(field("count"), fmt::format("is {}; expected {} ('{}')", got.count, want.count, want.name));
    if (got.first != want.first)
      refuse_field(field("first"), fmt::format("is {}; expected {} ('{}')", got.first, want.first, want.name));
    if (got.codec.wire_spec() != want.codec.wire_spec())
      refuse_field(field("spec"),
                   fmt::format("is {}; expected {} ('{}')", got.codec.wire_spec(), want.codec.wire_spec(), want.name));
    if (!std::ranges::equal(got.codec.table(), want.codec.table()))
      refuse_field(
          field("spec"),
          fmt::format("is {} with another table than expected ('{}'): what sender and receiver learned differs",
                      got.codec.wire_spec(), want.name));
    if (got.shape != want.shape)
      refuse_field(field("shape"), fmt::format("is ({}); expected ({}) ('{}')", fmt::join(got.shape, ", "),
                                               fmt::join(want.shape, ", "), want.name));
  }
}

// The usual case needs no allocation: every byte but the stamp and the checks is the one that this layout gives.
static bool same_but_stamp(std::span<const std::byte> message, std::span<const std::byte> head) {
  const auto same = [&](size_t from, size_t to) {
    return std::memcmp(message.data() + from, head.data() + from, to - from) == 0;
  };
  return message.size() >= head.size() && same(0, header::step) && same(header::spec_count, header::head_check) &&
         same(header::size, head.size()) && get_field<uint64_t>(head, header::total_bytes) == message.size() &&
         get_field<uint64_t>(message, header::head_check) == head_check(message.first(head.size()));
}

void check_head(std::span<const std::byte> message, const Layout& layout, std::span<const std::byte> head,
                const Stamp* expected) {
  if (!same_but_stamp(message, head)) check_tensors(read_head(message), layout);
  const Stamp stamp = get_stamp(message);
  if (stamp.world == 0 || stamp.rank >= stamp.world)
    refuse_field("rank", fmt::format("is {} in a world of {}", stamp.rank, stamp.world));
  if (!expected) return;
  if (stamp.step != expected->step) refuse_field("step", fmt::format("is {}; expected {}", stamp.step, expected->step));
  if (stamp.stage != expected->stage)
    refuse_field("stage", fmt::format("is {}; expected {}", stamp.stage, expected->stage));
  if (stamp.rank != expected->rank) refuse_field("rank", fmt::format("is {}; expected {}", stamp.rank, expected->rank));
  if (stamp.world != expected->world)
    refuse_field("world", fmt::format("is {}; expected {}", stamp.world, expected->world));
}

}  // namespace gradwire
