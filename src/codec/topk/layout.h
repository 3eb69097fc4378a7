// SPDX-License-Identifier: Apache-2.0
// The layout of topk's units, for host and GPU alike. In a message a unit is k values (f32) in the order of their
// indices, then the k indices: two of 16 bits per word, or one of 32 bits where units have more than 65536 elements. A
// unit that holds a NaN or an Inf is the marker followed by zeros, at the indices 0 to k - 1.
#pragma once

#include <cstdint>

#include "device/scheme.h"

namespace gradwire {

// How many elements of a unit are kept: the share, rounded up, and at least one.
GW_HD inline uint64_t topk_kept(const Scheme& s, uint64_t elements) {
  if (elements == 0) return 0;
  const double want = s.ratio * static_cast<double>(elements);
  uint64_t k = static_cast<uint64_t>(want);
  if (static_cast<double>(k) < want) ++k;
  return k < 1 ? 1 : k > elements ? elements : k;
}
GW_HD inline bool wide_indices(const Scheme& s, uint64_t count) { return unit_elements(s, count) > 65536; }
GW_HD inline uint64_t topk_unit_words(const Scheme& s, uint64_t count, uint64_t elements) {
  const uint64_t k = topk_kept(s, elements);
  return k + (wide_indices(s, count) ? k : div_up(k, 2));
}
inline uint64_t topk_region_words(const Scheme& s, uint64_t count) {
  const uint64_t unit = unit_elements(s, count), full = count / unit, rest = count % unit;
  return full * topk_unit_words(s, count, unit) + (rest ? topk_unit_words(s, count, rest) : 0);
}

}  // namespace gradwire
