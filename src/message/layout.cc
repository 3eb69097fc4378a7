// SPDX-License-Identifier: Apache-2.0
// From a list of tensors to the layout of their message: where each region stands, and which specs the head carries.
#include "message/layout.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <xxhash.h>

#include <algorithm>
#include <unordered_map>

#include "codec/regions.h"
#include "gradwire/error.h"

namespace gradwire {

static_assert(kTileElements == kTile);

uint64_t hash_name(std::string_view name) { return XXH64(name.data(), name.size(), 0); }

std::string shape_problem(std::span<const uint64_t> shape, uint64_t count) {
  if (shape.empty()) return {};
  // Zeros are left out of the bound, so that it does not depend on the order of the extents.
  uint64_t product = 1;
  bool empty = false;
  for (const uint64_t extent : shape) {
    empty |= extent == 0;
    if (extent > kMaxElements || (extent > 0 && product > kMaxElements / extent))
      return fmt::format("is ({}); the extents other than 0 multiply to more than 2^40", fmt::join(shape, ", "));
    product *= std::max<uint64_t>(extent, 1);
  }
  if ((empty ? 0 : product) == count) return {};
  return fmt::format("is ({}), {} elements, but count is {}", fmt::join(shape, ", "), empty ? 0 : product, count);
}

static void check_shape(const TensorSpec& t) {
  if (t.shape.size() > kMaxDims)
    throw Error(
        ErrorKind::usage,
        fmt::format("shape of tensor '{}' has {} dimensions; allowed are at most {}", t.name, t.shape.size(), kMaxDims),
        "shape");
  if (const std::string problem = shape_problem(t.shape, t.count); !problem.empty())
    throw Error(ErrorKind::usage, fmt::format("shape of tensor '{}' {}", t.name, problem), "shape");
}

Layout make_layout(std::vector<TensorSpec> tensors) {
  Layout layout;
  size_t head_bytes = wire::header::size + tensors.size() * wire::row::size;
  std::unordered_map<std::string, uint32_t> numbers;  // of the specs; a plan read from a message may have thousands
  for (const TensorSpec& t : tensors) {
    if (t.count > kMaxElements - layout.elements)  // the bound keeps every sum below from overflowing
      throw Error(ErrorKind::usage, fmt::format("tensor '{}' brings the message beyond 2^40 elements", t.name),
                  "count");
    if (t.first % kTileElements != 0)
      throw Error(ErrorKind::usage, fmt::format("first is {}; allowed are multiples of {}", t.first, kTileElements),
                  "first");
    if (t.first > kMaxElements)
      throw Error(ErrorKind::usage, fmt::format("first is {}; allowed is at most 2^40", t.first), "first");
    check_shape(t);
    head_bytes += t.shape.size() * wire::kExtentBytes;
    Region region;
    region.scheme = scheme_of(t.codec);
    region.unit = unit_ops_of(t.codec);
    if (too_many(t.codec, t.count))
      throw Error(ErrorKind::usage,
                  fmt::format("tensor '{}' has {} elements; {} on whole tensors takes at most 2^32 - 1", t.name,
                              t.count, t.codec.name()),
                  "count");
    region.name_hash = t.name_hash ? *t.name_hash : hash_name(t.name);
    const Codec& codec = t.codec;
    std::string key = codec.wire_spec();  // codecs that differ in how they learn alone share a spec
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
    const uint64_t align = region_alignment(codec, t.count);
    region.begin = div_up(layout.body_words, align) * align;
    region.words = region_words(codec, t.count);
    layout.body_words = region.begin + region.words;
    layout.elements += t.count;
    layout.regions.push_back(region);
  }
  if (layout.specs.size() > 0xffff)
    throw Error(ErrorKind::usage, "a message holds at most 65535 different specs", "specs");
  if (tensors.size() > Limits{}.max_tensors)
    throw Error(ErrorKind::usage, fmt::format("a message holds at most {} tensors", Limits{}.max_tensors), "tensors");
  layout.head_bytes = div_up(head_bytes, wire::kHeadAlign) * wire::kHeadAlign;
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
const Layout& layout_of(const Plan& plan) { return *plan.layout_; }

bool differ_in_tables(const Layout& a, const Layout& b) {
  if (a.head_bytes != b.head_bytes || a.body_words != b.body_words || a.regions.size() != b.regions.size())
    return false;
  for (size_t i = 0; i < a.regions.size(); ++i) {
    const Region &x = a.regions[i], &y = b.regions[i];
    if (x.unit || y.unit || x.name_hash != y.name_hash || x.begin != y.begin || x.words != y.words || x.spec != y.spec)
      return false;
    if (a.tensors[i].count != b.tensors[i].count || a.tensors[i].dtype != b.tensors[i].dtype ||
        a.tensors[i].first != b.tensors[i].first)
      return false;
    const Scheme &s = x.scheme, &t = y.scheme;
    if (s.body != t.body || s.norm != t.norm || s.sums != t.sums || s.bits != t.bits || s.nearest != t.nearest ||
        s.scale_words != t.scale_words || s.unit != t.unit || s.table_size != t.table_size)
      return false;
  }
  return true;
}

size_t bound(const Codec& codec, uint64_t count) {
  return make_layout({{"", count, DType::f32, codec}}).message_bytes();
}

}  // namespace gradwire
