// SPDX-License-Identifier: Apache-2.0
#include "message/bounded.h"

#include "codec/regions.h"
#include "codec/stats.h"
#include "message/layout.h"

namespace gradwire {
namespace {

constexpr uint32_t kBoundBits = (127u + 96u) << 23;  // 2^96

bool bounded_by_scales(const Region& region, uint64_t count, const uint32_t* body) {
  const Scheme& scheme = region.scheme;
  if (region.unit || scheme.scale_words == 0 || scheme.norm == Norm::fixed) return false;
  const uint32_t* scales = body + region.begin + scales_offset(scheme, count);
  const uint64_t words = unit_count(scheme, count) * scheme.scale_words;
  bool large = false;  // without a branch, so that the loop is vectorised
  for (uint64_t i = 0; i < words; ++i) large |= (scales[i] & 0x7fffffffu) > kBoundBits;
  return !large;
}

}  // namespace

void keep_bounded(const Plan& plan, std::span<const std::byte> message, std::vector<uint8_t>& bounded) {
  const Layout& layout = layout_of(plan);
  const uint32_t* body = reinterpret_cast<const uint32_t*>(message.data() + layout.head_bytes);
  for (size_t i = 0; i < layout.regions.size(); ++i)
    if (bounded[i]) bounded[i] = bounded_by_scales(layout.regions[i], layout.tensors[i].count, body);
}

}  // namespace gradwire
