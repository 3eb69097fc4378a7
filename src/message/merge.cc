// SPDX-License-Identifier: Apache-2.0
#include "message/merge.h"

#include <fmt/format.h>

#include <algorithm>

#include "codec/define.h"
#include "codec/unit.h"
#include "core/float_mode.h"
#include "gradwire/error.h"
#include "gradwire/message.h"
#include "message/layout.h"

namespace gradwire {
namespace {

bool mergeable(const Codec& codec) {
  const UnitOps* unit = unit_ops_of(codec);
  return unit && unit->merge && unit->mergeable(scheme_of(codec));
}

}  // namespace

bool can_merge(const Plan& plan) {
  return !plan.tensors().empty() && std::all_of(plan.tensors().begin(), plan.tensors().end(),
                                                [](const TensorSpec& t) { return mergeable(t.codec); });
}

void decode_merged(const Plan& plan, std::span<const std::span<const std::byte>> messages,
                   std::span<float* const> out) {
  if (plan.tensors().empty()) throw Error(ErrorKind::usage, "merging takes one tensor or more", "codec");
  for (const TensorSpec& t : plan.tensors())
    if (!mergeable(t.codec))
      throw Error(ErrorKind::usage,
                  fmt::format("tensor '{}' is of {}, whose messages cannot be merged", t.name, t.codec.str()), "codec");
  if (messages.empty()) throw Error(ErrorKind::usage, "merging takes one message or more", "messages");
  const FloatMode mode;
  const Layout& layout = layout_of(plan);
  const std::vector<std::byte> expected = make_head(layout, {});
  for (const auto& message : messages) {
    check_head(message, layout, expected, nullptr);
    verify_body(message, read_head(message));
  }
  std::vector<const uint32_t*> regions(messages.size());
  for (size_t i = 0; i < layout.tensors.size(); ++i) {
    const TensorSpec& t = layout.tensors[i];
    if (t.count == 0) continue;
    for (size_t m = 0; m < messages.size(); ++m)
      regions[m] = reinterpret_cast<const uint32_t*>(messages[m].data() + layout.head_bytes) + layout.regions[i].begin;
    const Span span{.scheme = &layout.regions[i].scheme, .count = t.count, .first_block = t.first / kBlock};
    if (const UnitProblem problem = unit_ops_of(t.codec)->merge(span, regions, out[i]); problem.field)
      throw Error(
          ErrorKind::frame,
          fmt::format("bad message: {} of tensor[{}] ('{}') cannot come from an encoder", problem.field, i, t.name),
          problem.field);
  }
}

}  // namespace gradwire
