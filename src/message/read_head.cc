// SPDX-License-Identifier: Apache-2.0
// Reading the head of a message that may come from anywhere. The checksum of the head is compared first, then every
// field is checked against its range, then every length against what the fields imply. Memory is allocated only for
// entries that are known to lie within the head. The order of the checks is that of docs/wire-format.md, section 9.
#include <algorithm>
#include <unordered_set>

#include "codec/regions.h"
#include "gradwire/message.h"
#include "message/head_fields.h"
#include "message/layout.h"

namespace gradwire {
namespace {

namespace header = wire::header;
namespace row = wire::row;

class HeadReader {
 public:
  HeadReader(std::span<const std::byte> message, const Limits& limits)
      : message_(message),
        max_elements_(std::min(limits.max_elements, kMaxElements)),  // so that no sum below can wrap
        max_tensors_(limits.max_tensors) {}

  Head read() {
    read_sizes();
    read_header();
    read_specs();
    find_shapes();
    for (uint32_t i = 0; i < tensor_count_; ++i) read_row(i);
    finish();
    return std::move(head_);
  }

 private:
  // What must hold before the head can be hashed.
  void read_sizes() {
    if (message_.size() < header::size)
      refuse_field("total_bytes",
                   fmt::format("cannot be read: {} bytes are fewer than a header's {}", message_.size(), header::size));
    if (get_field<uint32_t>(message_, header::magic) != wire::kMagic)
      refuse_field("magic", "is not GWIR: this is no gradwire message");
    head_.version = get_field<uint16_t>(message_, header::version);
    if (head_.version != kWireVersion)
      refuse_field("version", fmt::format("is {}; this library reads {}", head_.version, kWireVersion));
    head_.total_bytes = get_field<uint64_t>(message_, header::total_bytes);
    if (head_.total_bytes != message_.size())
      refuse_field("total_bytes", fmt::format("is {} but {} bytes are here", head_.total_bytes, message_.size()));
    head_.head_bytes = get_field<uint32_t>(message_, header::head_bytes);
    if (head_.head_bytes < header::size || head_.head_bytes % wire::kHeadAlign || head_.head_bytes > message_.size())
      refuse_field("head_bytes", fmt::format("is {}; expected a multiple of {} up to {}", head_.head_bytes,
                                             wire::kHeadAlign, message_.size()));
    bytes_ = message_.first(head_.head_bytes);
  }

  void read_header() {
    head_.head_check = get_field<uint64_t>(bytes_, header::head_check);
    head_.body_check = get_field<uint64_t>(bytes_, header::body_check);
    if (head_.head_check != head_check(bytes_)) refuse_field("head_check", "does not match: the head was altered");
    const uint16_t flags = get_field<uint16_t>(bytes_, header::flags);
    if (flags != 0) refuse_field("flags", fmt::format("is {}; this version has none", flags));
    head_.stamp = get_stamp(bytes_);
    if (head_.stamp.world == 0) refuse_field("world", "is 0");
    if (head_.stamp.rank >= head_.stamp.world)
      refuse_field("rank", fmt::format("is {} in a world of {}", head_.stamp.rank, head_.stamp.world));
    head_.spec_count = get_field<uint32_t>(bytes_, header::spec_count);
    tensor_count_ = get_field<uint32_t>(bytes_, header::tensor_count);
    if (head_.spec_count > 0xffff || head_.spec_count > tensor_count_)
      refuse_field("spec_count", fmt::format("is {} for {} tensors", head_.spec_count, tensor_count_));
    if (tensor_count_ > max_tensors_)
      refuse_field("tensor_count", fmt::format("is {}; the limit is {}", tensor_count_, max_tensors_));
  }

  // A spec is stored only once it is known to lie within the head, so their number needs no other bound.
  void read_specs() {
    std::unordered_set<std::string> seen;
    at_ = header::size;
    for (uint32_t i = 0; i < head_.spec_count; ++i) {
      const size_t begin = at_;
      read_spec(i);
      const std::string entry(reinterpret_cast<const char*>(bytes_.data()) + begin, at_ - begin);
      if (!seen.insert(entry).second) refuse_field("spec", fmt::format("{} stands there twice", i));
    }
  }

  void read_spec(uint32_t i) {
    if (at_ + wire::spec::text > bytes_.size()) refuse_field("spec", fmt::format("{} lies beyond the head", i));
    const uint16_t length = get_field<uint16_t>(bytes_, at_ + wire::spec::length),
                   table_bytes = get_field<uint16_t>(bytes_, at_ + wire::spec::table_bytes);
    if (table_bytes % 4 != 0)
      refuse_field("spec_table", fmt::format("of spec {} has {} bytes; expected a multiple of 4", i, table_bytes));
    const size_t text_at = at_ + wire::spec::text, table_at = text_at + div_up(length, 4) * 4;
    if (table_at + table_bytes > bytes_.size()) refuse_field("spec", fmt::format("{} lies beyond the head", i));
    require_zeros(text_at + length, table_at, "spec", fmt::format("{} is not padded with zeros", i));
    const std::string text(reinterpret_cast<const char*>(bytes_.data()) + text_at, length);
    try {
      specs_.push_back(Codec::parse_wire(text));
    } catch (const Error& e) {
      refuse_field("spec", fmt::format("{} is not usable: {}", i, e.what()));
    }
    if (specs_.back().wire_spec() != text) refuse_field("spec", fmt::format("{} is not in canonical form", i));
    at_ = table_at + table_bytes;
    if (table_bytes == 0) return;
    std::vector<uint32_t> words(table_bytes / 4);
    std::memcpy(words.data(), bytes_.data() + table_at, table_bytes);
    try {
      specs_.back() = specs_.back().fitted(words);
    } catch (const Error& e) {
      refuse_field("spec_table", fmt::format("of spec {} is not usable: {}", i, e.what()));
    }
  }

  // Rows have a fixed size and shapes do not: the shapes stand behind the table, and the rows say how long they are.
  void find_shapes() {
    shape_at_ = at_ + size_t{tensor_count_} * row::size;
    uint64_t extents = 0;
    const bool fits = shape_at_ <= bytes_.size();
    for (uint32_t i = 0; fits && i < tensor_count_; ++i) {
      const uint8_t dims = get_field<uint8_t>(bytes_, at_ + i * row::size + row::dims);
      if (dims > kMaxDims)
        refuse_field(name_of(i, "dims"), fmt::format("is {}; allowed is at most {}", dims, kMaxDims));
      extents += dims;
    }
    const uint64_t end = shape_at_ + extents * wire::kExtentBytes;
    if (!fits || div_up(end, wire::kHeadAlign) * wire::kHeadAlign != bytes_.size())
      refuse_field("head_bytes",
                   fmt::format("is {} but {} specs, {} tensors and their shapes take {}", bytes_.size(),
                               head_.spec_count, tensor_count_, div_up(end, wire::kHeadAlign) * wire::kHeadAlign));
  }

  void read_row(uint32_t i) {
    TensorSpec t;
    t.name_hash = get_field<uint64_t>(bytes_, at_ + row::name_hash);
    t.count = get_field<uint64_t>(bytes_, at_ + row::count);
    t.first = get_field<uint64_t>(bytes_, at_ + row::first);
    const uint64_t offset = get_field<uint64_t>(bytes_, at_ + row::offset);
    const uint16_t spec = get_field<uint16_t>(bytes_, at_ + row::spec);
    const uint8_t dtype = get_field<uint8_t>(bytes_, at_ + row::dtype),
                  dims = get_field<uint8_t>(bytes_, at_ + row::dims);
    if (t.count > max_elements_ - elements_)
      refuse_field(name_of(i, "count"),
                   fmt::format("is {}; the limit for all tensors together is {}", t.count, max_elements_));
    if (t.first % kTileElements || t.first > kMaxElements)
      refuse_field(name_of(i, "first"),
                   fmt::format("is {}; expected a multiple of {} up to 2^40", t.first, kTileElements));
    if (spec >= specs_.size())
      refuse_field(name_of(i, "spec"), fmt::format("is {} but there are {} specs", spec, specs_.size()));
    // Specs stand in the order of first use, so that one list of tensors has one encoding.
    if (spec > next_spec_)
      refuse_field(name_of(i, "spec"), fmt::format("is {} before spec {} was used", spec, next_spec_));
    if (spec == next_spec_) ++next_spec_;
    if (dtype > 2)
      refuse_field(name_of(i, "dtype"), fmt::format("is {}; known are 0 (f32), 1 (f16) and 2 (bf16)", dtype));
    require_zeros(at_ + row::reserved, at_ + row::size, name_of(i, "reserved"), "is not zero");
    for (uint8_t d = 0; d < dims; ++d, shape_at_ += wire::kExtentBytes)
      t.shape.push_back(get_field<uint64_t>(bytes_, shape_at_));
    if (const std::string problem = shape_problem(t.shape, t.count); !problem.empty())
      refuse_field(name_of(i, "shape"), problem);
    t.dtype = static_cast<DType>(dtype);
    t.codec = specs_[spec];
    place(i, t, offset);
    at_ += row::size;
    elements_ += t.count;
    head_.body_offsets.push_back(offset);
    head_.tensors.push_back(std::move(t));
  }

  // A tensor's region begins where the regions before it end, up to alignment.
  void place(uint32_t i, const TensorSpec& t, uint64_t offset) {
    if (too_many(t.codec, t.count))
      refuse_field(name_of(i, "count"),
                   fmt::format("is {}; {} on whole tensors takes at most 2^32 - 1", t.count, t.codec.name()));
    const uint64_t align = region_alignment(t.codec, t.count);
    body_words_ = div_up(body_words_, align) * align;
    if (offset != body_words_ * 4)
      refuse_field(name_of(i, "offset"),
                   fmt::format("is {} but the tensors before it end at {}", offset, body_words_ * 4));
    body_words_ += region_words(t.codec, t.count);
  }

  void finish() {
    if (next_spec_ != head_.spec_count)
      refuse_field("spec_count", fmt::format("is {} but {} are used", head_.spec_count, next_spec_));
    require_zeros(shape_at_, bytes_.size(), "head_bytes", "is padded with something else than zeros");
    const uint64_t total = head_.head_bytes + body_words_ * 4;
    if (total != head_.total_bytes)
      refuse_field("total_bytes", fmt::format("is {} but head and tensors take {}", head_.total_bytes, total));
  }

  static std::string name_of(uint32_t tensor, const char* field) { return fmt::format("tensor[{}].{}", tensor, field); }

  void require_zeros(size_t from, size_t to, const std::string& field, const std::string& words) const {
    for (; from < to; ++from)
      if (bytes_[from] != std::byte{0}) refuse_field(field, words);
  }

  std::span<const std::byte> message_, bytes_;  // the whole message; its head
  const uint64_t max_elements_;
  const uint32_t max_tensors_;
  Head head_{};
  uint32_t tensor_count_ = 0, next_spec_ = 0;
  std::vector<Codec> specs_;
  size_t at_ = 0, shape_at_ = 0;  // where the next spec or row, and the next shape, stand
  uint64_t elements_ = 0, body_words_ = 0;
};

}  // namespace

Head read_head(std::span<const std::byte> message, const Limits& limits) { return HeadReader(message, limits).read(); }

}  // namespace gradwire
