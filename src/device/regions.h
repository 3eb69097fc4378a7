// SPDX-License-Identifier: Apache-2.0
// How many words a tensor takes in the body of a message, whatever its codec, and where they may begin.
#pragma once

#include "codec/body.h"
#include "codec/casq/sketch.h"
#include "codec/fft/fft.h"
#include "device/scheme.h"

namespace gradwire {

inline FftScheme fft_scheme(const Scheme& s) {
  return {s.unit, s.ratio, s.bits, static_cast<uint8_t>(s.steps), s.truncate};
}

// Tensors whose codes stand block after block; the others have words unit after unit.
inline bool in_blocks(const Scheme& s) { return s.body != Body::select && s.body != Body::fft; }

inline uint64_t region_words(const Scheme& s, uint64_t count) {
  if (count == 0) return 0;
  const uint64_t unit = unit_elements(s, count), full = count / unit, rest = count % unit;
  switch (s.body) {
    case Body::select:
      return full * selected_words(s, count, unit) + (rest ? selected_words(s, count, rest) : 0);
    case Body::clusters:
      return side_offset(s, count) + full * sketch_side_words(s, unit) + (rest ? sketch_side_words(s, rest) : 0);
    case Body::fft:
      return fft_region_words(fft_scheme(s), count);
    default:
      return side_offset(s, count) + unit_count(s, count) * s.scale_words;
  }
}

// Full blocks start at a row of the checksum and a sector of memory; small tensors stand word after word.
inline uint64_t region_alignment(const Scheme& s, uint64_t count) {
  return in_blocks(s) && count >= kBlock ? kLane : 1;
}

// Where no one could address the elements of a tensor.
inline bool too_many(const Scheme& s, uint64_t count) {
  return (s.body == Body::select || s.body == Body::clusters) && s.unit == 0 && count > 0xffffffffull;
}

}  // namespace gradwire
