// SPDX-License-Identifier: Apache-2.0
// How many words a tensor takes in the body of a message, whatever its codec, and where they may begin.
#pragma once

#include "codec/define.h"
#include "codec/unit.h"
#include "device/scheme.h"
#include "gradwire/codec.h"

namespace gradwire {

// Whether the codes of a tensor stand block after block.
inline bool in_blocks(const UnitOps* unit) { return !unit || unit->codes_in_blocks; }

inline uint64_t region_words(const Scheme& s, const UnitOps* unit, uint64_t count) {
  if (count == 0) return 0;
  return unit ? unit->words(s, count) : scales_offset(s, count) + unit_count(s, count) * s.scale_words;
}
inline uint64_t region_words(const Codec& codec, uint64_t count) {
  return region_words(scheme_of(codec), unit_ops_of(codec), count);
}

// Full blocks start at a row of the checksum and a sector of memory; small tensors stand word after word.
inline uint64_t region_alignment(const Codec& codec, uint64_t count) {
  return in_blocks(unit_ops_of(codec)) && count >= kBlock ? kLane : 1;
}

// Codecs with units of their own number the elements of a unit by 32 bits, so a unit that is a whole tensor has a
// limit.
inline bool too_many(const Codec& codec, uint64_t count) {
  return unit_ops_of(codec) && scheme_of(codec).unit == 0 && count > 0xffffffffull;
}

}  // namespace gradwire
