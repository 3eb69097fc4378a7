// SPDX-License-Identifier: Apache-2.0
#include "message/layout.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <unordered_map>

#include "device/regions.h"
#include "gradwire/error.h"

namespace gradwire {

uint64_t hash_name(std::string_view name) { return XXH64(name.data(), name.size(), 0); }

Layout make_layout(std::vector<TensorSpec> tensors) {
  // Beyond this a message could not be addressed; also keeps every sum below from overflowing.
  constexpr uint64_t kMaxElements = uint64_t{1} << 40;
  Layout layout;
  size_t head_bytes = wire::header::size;
  std::unordered_map<std::string, uint32_t> numbers;  // of the specs: a hostile message may hold thousands
  for (const TensorSpec& t : tensors) {
    if (t.count > kMaxElements || layout.elements + t.count > kMaxElements)
      throw Error(ErrorKind::usage, fmt::format("tensor '{}' brings the message beyond 2^40 elements", t.name),
                  "count");
    if (t.first % kPieceGrain != 0)
      throw Error(ErrorKind::usage, fmt::format("first is {}; allowed are multiples of {}", t.first, kPieceGrain),
                  "first");
    if (t.first > kMaxElements)
      throw Error(ErrorKind::usage, fmt::format("first is {}; allowed is at most 2^40", t.first), "first");
    Region region;
    region.scheme = t.codec.scheme();
    if (too_many(region.scheme, t.count))
      throw Error(ErrorKind::usage,
                  fmt::format("tensor '{}' has {} elements; {} on whole tensors takes at most 2^32 - 1", t.name,
                              t.count, t.codec.name()),
                  "count");
    region.name_hash = t.name_hash ? *t.name_hash : hash_name(t.name);
    const Codec& codec = t.codec;
    std::string key = codec.str();
    key.push_back('\0');
    key.append(reinterpret_cast<const char*>(codec.table().data()), codec.table().size_bytes());
    const auto [found, added] = numbers.try_emplace(std::move(key), static_cast<uint32_t>(layout.specs.size()));
    region.spec = found->second;
    if (added) {
      if (codec.table().size_bytes() > kMaxTableBytes)
        throw Error(ErrorKind::usage,
                    fmt::format("table of {} has {} bytes; a message holds {}", codec.name(),
                                codec.table().size_bytes(), kMaxTableBytes),
                    "table");
      layout.specs.push_back(codec);
      head_bytes += spec_bytes(codec);
    }
    const uint64_t align = region_alignment(region.scheme, t.count);
    region.begin = div_up(layout.body_words, align) * align;
    region.words = region_words(region.scheme, t.count);
    layout.body_words = region.begin + region.words;
    layout.elements += t.count;
    layout.regions.push_back(region);
  }
  if (layout.specs.size() > 0xffff)
    throw Error(ErrorKind::usage, "a message holds at most 65535 different specs", "specs");
  if (tensors.size() > Limits{}.max_tensors)
    throw Error(ErrorKind::usage, fmt::format("a message holds at most {} tensors", Limits{}.max_tensors), "tensors");
  layout.head_bytes = div_up(head_bytes + tensors.size() * wire::row::size, wire::kHeadAlign) * wire::kHeadAlign;
  layout.tensors = std::move(tensors);
  return layout;
}

Plan::Plan(std::vector<TensorSpec> tensors) : layout_(std::make_unique<Layout>(make_layout(std::move(tensors)))) {}
Plan::~Plan() = default;
Plan::Plan(Plan&&) noexcept = default;
Plan& Plan::operator=(Plan&&) noexcept = default;
const std::vector<TensorSpec>& Plan::tensors() const { return layout_->tensors; }
uint64_t Plan::elements() const { return layout_->elements; }
size_t Plan::message_bytes() const { return layout_->message_bytes(); }
const Layout& Plan::layout() const { return *layout_; }

size_t bound(const Codec& codec, uint64_t count) {
  return make_layout({{"", count, DType::f32, codec}}).message_bytes();
}

}  // namespace gradwire
