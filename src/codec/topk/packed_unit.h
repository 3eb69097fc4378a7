// SPDX-License-Identifier: Apache-2.0
// Where the parts of a packed unit of topk stand, for host and GPU alike. Packed is every form but f32 values with raw
// indices; such units are tiles. layout.h has the sizes.
#pragma once

#include "codec/topk/layout.h"

namespace gradwire {

struct PackedUnit {
  // `words` are those of the unit, of `elements` elements; read only when decoding.
  GW_HD PackedUnit(const Scheme& s, uint64_t elements, uint32_t* words)
      : bits(s.bits),
        k(topk_kept(s, elements)),
        scale_count(topk_scale_words(s)),
        value_count(topk_value_words(s, k)),
        place_count(topk_place_words(s, elements, elements, k)),
        scales(words),
        values(words + scale_count),
        places(values + value_count),
        form{s.steps, elements, k} {}

  // What a marked unit begins with, and where: among the scales, or in place of the first value.
  GW_HD uint32_t marker() const { return bits == 16 ? kMarkerBf16 : kMarker; }
  GW_HD bool marked() const {
    return (bits == 16 ? values[0] & 0xffffu : bits == 32 ? values[0] : scales[0]) == marker();
  }
  GW_HD uint32_t top() const { return (1u << (bits - 1)) - 1; }  // bits=1 to 8: the number of the highest level

  uint32_t bits;  // of a value
  uint64_t k, scale_count, value_count, place_count;
  uint32_t *scales, *values, *places;
  PlaceWords form;
};

}  // namespace gradwire
