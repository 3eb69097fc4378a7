// SPDX-License-Identifier: Apache-2.0
// Writing and reading the head of a message. A reader believes nothing: the head's checksum comes first, then every
// field against its range, then every length against what the fields imply, and no memory is taken on a count's word.
#include "gradwire/message.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <unordered_set>

#include "core/checksum.h"
#include "device/regions.h"
#include "gradwire/error.h"
#include "message/layout.h"
#include "message/wire_offsets.h"

static_assert(std::endian::native == std::endian::little, "messages are little-endian; a big-endian host needs swaps");

namespace gradwire {

using wire::kHeadAlign;
using wire::kMagic;
namespace header = wire::header;
namespace row = wire::row;

namespace {

[[noreturn]] void refuse(const std::string& field, const std::string& words) {
  throw Error(ErrorKind::frame, fmt::format("bad message: {} {}", field, words), field);
}

template <class T>
T get(std::span<const std::byte> bytes, size_t at) {
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

template <class T>
void put(std::span<std::byte> bytes, size_t at, T value) {
  std::memcpy(bytes.data() + at, &value, sizeof value);
}

Stamp read_stamp(std::span<const std::byte> head) {
  return {0, get<uint64_t>(head, header::step), get<uint32_t>(head, header::stage), get<uint32_t>(head, header::rank),
          get<uint32_t>(head, header::world)};
}

}  // namespace

uint64_t head_check(std::span<const std::byte> head) {
  // Everything but the two checks themselves.
  XXH64_state_t state;
  XXH64_reset(&state, 0);
  XXH64_update(&state, head.data(), header::head_check);
  XXH64_update(&state, head.data() + header::size, head.size() - header::size);
  return XXH64_digest(&state);
}

uint64_t head_body_check(std::span<const std::byte> head) { return get<uint64_t>(head, header::body_check); }
void set_body_check(std::span<std::byte> message, uint64_t check) { put(message, header::body_check, check); }

void set_stamp(std::span<std::byte> head, const Stamp& stamp) {
  put<uint64_t>(head, header::step, stamp.step);
  put<uint32_t>(head, header::stage, stamp.stage);
  put<uint32_t>(head, header::rank, stamp.rank);
  put<uint32_t>(head, header::world, stamp.world);
  put<uint64_t>(head, header::head_check, head_check(head));
}

std::vector<std::byte> make_head(const Layout& layout, const Stamp& stamp) {
  std::vector<std::byte> bytes(layout.head_bytes, std::byte{0});
  const std::span<std::byte> head(bytes);
  put<uint32_t>(head, header::magic, kMagic);
  put<uint16_t>(head, header::version, kWireVersion);
  put<uint64_t>(head, header::total_bytes, layout.message_bytes());
  put<uint32_t>(head, header::spec_count, static_cast<uint32_t>(layout.specs.size()));
  put<uint32_t>(head, header::tensor_count, static_cast<uint32_t>(layout.tensors.size()));
  put<uint32_t>(head, header::head_bytes, static_cast<uint32_t>(layout.head_bytes));
  size_t at = header::size;
  for (const Codec& codec : layout.specs) {
    const std::string text = codec.str();
    const auto table = std::as_bytes(codec.table());
    put<uint16_t>(head, at + wire::spec::length, static_cast<uint16_t>(text.size()));
    put<uint16_t>(head, at + wire::spec::table_bytes, static_cast<uint16_t>(table.size()));
    std::memcpy(bytes.data() + at + wire::spec::text, text.data(), text.size());
    at += spec_bytes(codec);
    std::copy(table.begin(), table.end(), bytes.begin() + static_cast<ptrdiff_t>(at - table.size()));
  }
  for (size_t i = 0; i < layout.tensors.size(); ++i, at += row::size) {
    const TensorSpec& t = layout.tensors[i];
    put<uint64_t>(head, at + row::name_hash, layout.regions[i].name_hash);
    put<uint64_t>(head, at + row::count, t.count);
    put<uint64_t>(head, at + row::first, t.first);
    put<uint64_t>(head, at + row::offset, layout.regions[i].begin * 4);
    put<uint16_t>(head, at + row::spec, static_cast<uint16_t>(layout.regions[i].spec));
    put<uint8_t>(head, at + row::dtype, static_cast<uint8_t>(t.dtype));
  }
  set_stamp(head, stamp);
  return bytes;
}

Head read_head(std::span<const std::byte> message, const Limits& limits) {
  if (message.size() < header::size)
    refuse("total_bytes",
           fmt::format("cannot be read: {} bytes are fewer than a header's {}", message.size(), header::size));
  if (get<uint32_t>(message, header::magic) != kMagic) refuse("magic", "is not GWIR: this is no gradwire message");
  Head head{};
  head.version = get<uint16_t>(message, header::version);
  if (head.version != kWireVersion)
    refuse("version", fmt::format("is {}; this library reads {}", head.version, kWireVersion));
  head.total_bytes = get<uint64_t>(message, header::total_bytes);
  if (head.total_bytes != message.size())
    refuse("total_bytes", fmt::format("is {} but {} bytes are here", head.total_bytes, message.size()));
  head.head_bytes = get<uint32_t>(message, header::head_bytes);
  if (head.head_bytes < header::size || head.head_bytes % kHeadAlign || head.head_bytes > message.size())
    refuse("head_bytes",
           fmt::format("is {}; expected a multiple of {} up to {}", head.head_bytes, kHeadAlign, message.size()));
  const auto bytes = message.first(head.head_bytes);
  head.head_check = get<uint64_t>(message, header::head_check);
  head.body_check = get<uint64_t>(message, header::body_check);
  if (head.head_check != head_check(bytes)) refuse("head_check", "does not match: the head was altered");
  if (get<uint16_t>(message, header::flags) != 0)
    refuse("flags", fmt::format("is {}; this version has none", get<uint16_t>(message, header::flags)));
  head.stamp = read_stamp(message);
  if (head.stamp.world == 0) refuse("world", "is 0");
  if (head.stamp.rank >= head.stamp.world)
    refuse("rank", fmt::format("is {} in a world of {}", head.stamp.rank, head.stamp.world));

  // Spec strings. Each takes at least 8 bytes, so their number is bounded by what is here before anything is stored.
  const uint32_t spec_count = get<uint32_t>(message, header::spec_count),
                 tensor_count = get<uint32_t>(message, header::tensor_count);
  if (spec_count > 0xffff || spec_count > tensor_count)
    refuse("spec_count", fmt::format("is {} for {} tensors", spec_count, tensor_count));
  if (tensor_count > limits.max_tensors)
    refuse("tensor_count", fmt::format("is {}; the limit is {}", tensor_count, limits.max_tensors));
  head.spec_count = spec_count;
  std::vector<Codec> specs;
  std::unordered_set<std::string> texts;
  size_t at = header::size;
  for (uint32_t i = 0; i < spec_count; ++i) {
    if (at + wire::spec::text > bytes.size()) refuse("spec", fmt::format("{} lies beyond the head", i));
    const uint16_t length = get<uint16_t>(bytes, at + wire::spec::length),
                   table = get<uint16_t>(bytes, at + wire::spec::table_bytes);
    if (table % 4 != 0)
      refuse("spec_table", fmt::format("of spec {} has {} bytes; expected a multiple of 4", i, table));
    const size_t padded = wire::spec::text + div_up(length, 4) * 4;
    if (at + padded + table > bytes.size()) refuse("spec", fmt::format("{} lies beyond the head", i));
    const std::string text(reinterpret_cast<const char*>(bytes.data()) + at + wire::spec::text, length);
    for (size_t p = at + wire::spec::text + length; p < at + padded; ++p)
      if (bytes[p] != std::byte{0}) refuse("spec", fmt::format("{} is not padded with zeros", i));
    try {
      specs.push_back(Codec::parse(text));
    } catch (const Error& e) {
      refuse("spec", fmt::format("{} is not usable: {}", i, e.what()));
    }
    if (specs.back().str() != text) refuse("spec", fmt::format("{} is not in canonical form", i));
    if (table) {
      std::vector<uint32_t> words(table / 4);
      std::memcpy(words.data(), bytes.data() + at + padded, table);
      try {
        specs.back() = specs.back().fitted(words);
      } catch (const Error& e) {
        refuse("spec_table", fmt::format("of spec {} is not usable: {}", i, e.what()));
      }
    }
    const std::string whole(reinterpret_cast<const char*>(bytes.data()) + at, padded + table);
    if (!texts.insert(whole).second) refuse("spec", fmt::format("{} stands there twice", i));
    at += padded + table;
  }
  if (div_up(at + uint64_t{tensor_count} * row::size, kHeadAlign) * kHeadAlign != bytes.size())
    refuse("head_bytes", fmt::format("is {} but {} specs and {} tensors take another size", head.head_bytes, spec_count,
                                     tensor_count));

  uint64_t elements = 0, word = 0;
  uint32_t next_spec = 0;
  for (uint32_t i = 0; i < tensor_count; ++i, at += row::size) {
    const auto field = [&](const char* name) { return fmt::format("tensor[{}].{}", i, name); };
    TensorSpec t;
    t.name_hash = get<uint64_t>(bytes, at + row::name_hash);
    t.count = get<uint64_t>(bytes, at + row::count);
    t.first = get<uint64_t>(bytes, at + row::first);
    const uint64_t offset = get<uint64_t>(bytes, at + row::offset);
    const uint16_t spec = get<uint16_t>(bytes, at + row::spec);
    const uint8_t dtype = get<uint8_t>(bytes, at + row::dtype);
    if (t.count > limits.max_elements || elements + t.count > limits.max_elements)
      refuse(field("count"),
             fmt::format("is {}; the limit for all tensors together is {}", t.count, limits.max_elements));
    if (t.first % kPieceGrain || t.first > (uint64_t{1} << 40))
      refuse(field("first"), fmt::format("is {}; expected a multiple of {} up to 2^40", t.first, kPieceGrain));
    if (spec >= specs.size()) refuse(field("spec"), fmt::format("is {} but there are {} specs", spec, specs.size()));
    // Specs stand in the order of first use: one message has one encoding.
    if (spec > next_spec) refuse(field("spec"), fmt::format("is {} before spec {} was used", spec, next_spec));
    if (spec == next_spec) ++next_spec;
    if (dtype > 2) refuse(field("dtype"), fmt::format("is {}; known are 0 (f32), 1 (f16) and 2 (bf16)", dtype));
    for (size_t p = at + row::reserved; p < at + row::size; ++p)
      if (bytes[p] != std::byte{0}) refuse(field("reserved"), "is not zero");
    t.dtype = static_cast<DType>(dtype);
    t.codec = specs[spec];
    const Scheme& scheme = t.codec.scheme();
    if (too_many(scheme, t.count))
      refuse(field("count"), fmt::format("is {}; {} on whole tensors takes at most 2^32 - 1", t.count, t.codec.name()));
    const uint64_t align = region_alignment(scheme, t.count);
    word = div_up(word, align) * align;
    if (offset != word * 4)
      refuse(field("offset"), fmt::format("is {} but the tensors before it end at {}", offset, word * 4));
    word += region_words(scheme, t.count);
    elements += t.count;
    head.body_offsets.push_back(offset);
    head.tensors.push_back(std::move(t));
  }
  if (next_spec != spec_count) refuse("spec_count", fmt::format("is {} but {} are used", spec_count, next_spec));
  for (; at < bytes.size(); ++at)
    if (bytes[at] != std::byte{0}) refuse("head_bytes", "is padded with something else than zeros");
  if (head.head_bytes + word * 4 != head.total_bytes)
    refuse("total_bytes",
           fmt::format("is {} but head and tensors take {}", head.total_bytes, head.head_bytes + word * 4));
  return head;
}

void verify_body(std::span<const std::byte> message, const Head& head) {
  const auto body = message.subspan(head.head_bytes);
  if (seal(body_sum(body.data(), body.size() / 4), body.size() / 4) != head.body_check)
    refuse("body_check", "does not match: the body was altered");
}

void reseal(std::span<std::byte> message) {
  if (message.size() < header::size) return;
  const uint32_t head_bytes = get<uint32_t>(message, header::head_bytes);
  if (head_bytes < header::size || head_bytes > message.size()) return;
  const auto body = message.subspan(head_bytes);
  set_body_check(message, seal(body_sum(body.data(), body.size() / 4), body.size() / 4));
  put<uint64_t>(message, header::head_check, head_check(message.first(head_bytes)));
}

static void check_tensors(const Head& head, const Layout& layout) {
  if (head.tensors.size() != layout.tensors.size())
    refuse("tensor_count", fmt::format("is {}; expected {}", head.tensors.size(), layout.tensors.size()));
  for (size_t i = 0; i < head.tensors.size(); ++i) {
    const TensorSpec &got = head.tensors[i], &want = layout.tensors[i];
    const auto field = [&](const char* name) { return fmt::format("tensor[{}].{}", i, name); };
    if (*got.name_hash != layout.regions[i].name_hash)
      refuse(field("name_hash"), fmt::format("is {:016x}; expected {:016x} ('{}')", *got.name_hash,
                                             layout.regions[i].name_hash, want.name));
    if (got.count != want.count)
      refuse(field("count"), fmt::format("is {}; expected {} ('{}')", got.count, want.count, want.name));
    if (got.first != want.first)
      refuse(field("first"), fmt::format("is {}; expected {} ('{}')", got.first, want.first, want.name));
    if (got.codec.str() == want.codec.str() && !(got.codec == want.codec))
      refuse(field("spec"),
             fmt::format("is {} with another table than expected ('{}'): what sender and receiver learned differs",
                         got.codec.str(), want.name));
    if (!(got.codec == want.codec))
      refuse(field("spec"), fmt::format("is {}; expected {} ('{}')", got.codec.str(), want.codec.str(), want.name));
  }
}

// The usual case costs no allocation: every byte is the one this layout gives, but for the stamp and the checks.
static bool same_but_stamp(std::span<const std::byte> message, std::span<const std::byte> head) {
  const auto same = [&](size_t from, size_t to) {
    return std::memcmp(message.data() + from, head.data() + from, to - from) == 0;
  };
  return message.size() >= head.size() && same(0, header::step) && same(header::spec_count, header::head_check) &&
         same(header::size, head.size()) && get<uint64_t>(head, header::total_bytes) == message.size() &&
         get<uint64_t>(message, header::head_check) == head_check(message.first(head.size()));
}

void check_head(std::span<const std::byte> message, const Layout& layout, std::span<const std::byte> head,
                const Stamp* expected) {
  if (!same_but_stamp(message, head)) check_tensors(read_head(message), layout);
  const Stamp stamp = read_stamp(message);
  if (stamp.world == 0 || stamp.rank >= stamp.world)
    refuse("rank", fmt::format("is {} in a world of {}", stamp.rank, stamp.world));
  if (!expected) return;
  if (stamp.step != expected->step) refuse("step", fmt::format("is {}; expected {}", stamp.step, expected->step));
  if (stamp.stage != expected->stage) refuse("stage", fmt::format("is {}; expected {}", stamp.stage, expected->stage));
  if (stamp.rank != expected->rank) refuse("rank", fmt::format("is {}; expected {}", stamp.rank, expected->rank));
  if (stamp.world != expected->world) refuse("world", fmt::format("is {}; expected {}", stamp.world, expected->world));
}

}  // namespace gradwire
