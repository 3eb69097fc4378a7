// SPDX-License-Identifier: Apache-2.0
#include "gradwire/merge.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>

#include "codec/body.h"
#include "codec/casq/sketch.h"
#include "core/float_mode.h"
#include "device/kernels.h"
#include "gradwire/error.h"
#include "gradwire/message.h"
#include "message/layout.h"
#include "message/sketch.h"

namespace gradwire {
namespace {

bool mergeable(const Scheme& s) { return s.body == Body::clusters && hashed(s) && s.steps; }

}  // namespace

bool can_merge(const Plan& plan) {
  return !plan.tensors().empty() && std::all_of(plan.tensors().begin(), plan.tensors().end(),
                                                [](const TensorSpec& t) { return mergeable(t.codec.scheme()); });
}

void decode_merged(const Plan& plan, std::span<const std::span<const std::byte>> messages,
                   std::span<float* const> out) {
  if (!can_merge(plan))
    throw Error(ErrorKind::usage, "merging takes tensors of casq:mode=paper,counts=on only", "codec");
  if (messages.empty()) throw Error(ErrorKind::usage, "merging takes one message or more", "messages");
  const FloatMode mode;
  const Layout& layout = plan.layout();
  const std::vector<std::byte> expected = make_head(layout, {});
  const Kernels& kernels = kernels_named("");
  const auto scratch = std::make_unique<Scratch>();
  std::vector<std::span<const uint32_t>> bodies;
  for (const auto& message : messages) {
    check_head(message, layout, expected, nullptr);
    verify_body(message, read_head(message));
    bodies.emplace_back(reinterpret_cast<const uint32_t*>(message.data() + layout.head_bytes), layout.body_words);
  }
  for (size_t t = 0; t < layout.tensors.size(); ++t) {
    const uint64_t count = layout.tensors[t].count;
    if (count == 0) continue;
    Span s;
    s.scheme = &layout.regions[t].scheme;
    s.count = count;
    s.first_block = layout.tensors[t].first / kBlock;
    const uint64_t buckets = buckets_of(*s.scheme, count);
    std::vector<double> sums(buckets), loads(buckets);
    bool marked = false;
    for (const auto& body : bodies) {
      s.region = const_cast<uint32_t*>(body.data()) + layout.regions[t].begin;  // only read
      if (const char* field = check_sketch(s, 0))
        throw Error(ErrorKind::frame,
                    fmt::format("bad message: {} of tensor[{}] ('{}') cannot come from an encoder", field, t,
                                layout.tensors[t].name),
                    field);
      const uint32_t* side = s.region + side_offset(*s.scheme, count);
      marked |= side[0] == kMarker;
      for (uint64_t b = 0; b < buckets; ++b) {
        const double load = side[1 + buckets + b];
        sums[b] += load * static_cast<double>(bits_float(side[1 + b]));
        loads[b] += load;
      }
    }
    if (marked) {
      std::fill(out[t], out[t] + count, bits_float(kMarker));
      continue;
    }
    for (uint64_t b = 0; b < buckets; ++b) sums[b] = loads[b] > 0 ? sums[b] / loads[b] : 0;
    const HashBuckets hash(s, buckets);
    std::vector<double> total(kBlock);
    for (uint64_t block = 0; block * kBlock < count; ++block) {
      const uint64_t n = s.elements_of(block);
      std::fill(total.begin(), total.end(), 0.0);
      for (const auto& body : bodies) {
        s.region = const_cast<uint32_t*>(body.data()) + layout.regions[t].begin;
        load_codes(kernels, s, block * kBlock, n, scratch->codes);
        for (uint64_t i = 0; i < n; ++i) total[i] += sums[hash(scratch->codes[i], block * kBlock + i)];
      }
      for (uint64_t i = 0; i < n; ++i)
        out[t][block * kBlock + i] = static_cast<float>(total[i] / static_cast<double>(messages.size()));
    }
  }
}

}  // namespace gradwire
