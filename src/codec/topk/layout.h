// SPDX-License-Identifier: Apache-2.0
// The layout of topk's units, for host and GPU alike. A unit keeps k of its elements and is
//
//   [scales][values][places]
//
// values    bits=32: f32, one a word. bits=16: bf16, two a word. bits=1 to 8: codes of so many bits, a sign above the
//           number of a level; the levels follow from the scales. All in the order of their indices.
// scales    bits=1: the one level, f32. bits=2 to 8: the lowest level, and from there to the highest. Else none.
// places    index=raw: indices of 16 bits, two a word, or of 32 bits where units have more than 65536 elements.
//           index=coded: Elias-Fano, see places.h. index=bitmap: a bit an element.
//
// A unit that holds a NaN or an Inf is the marker followed by zeros, at the indices 0 to k - 1.
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

// How places are written: Scheme::steps.
enum : uint32_t { kRawPlaces, kCodedPlaces, kBitmapPlaces };

// Where the places of a unit are written, and how.
struct PlaceWords {
  uint32_t kind;  // kRawPlaces (of 16 bits), kCodedPlaces or kBitmapPlaces
  uint64_t elements, k;
};

// Whether anything but f32 values and raw indices is written. Such units are tiles.
GW_HD inline bool topk_packed(const Scheme& s) { return s.bits != 32 || s.steps != kRawPlaces; }

GW_HD inline uint64_t topk_scale_words(const Scheme& s) { return s.bits > 8 ? 0 : s.bits == 1 ? 1 : 2; }
GW_HD inline uint64_t topk_value_words(const Scheme& s, uint64_t k) { return div_up(k * s.bits, 32); }

// Elias-Fano: the bits of an index that are written as they are, floor(log2(elements / k)), and how many bits the rest
// of k indices takes.
GW_HD inline uint32_t low_place_bits(uint64_t elements, uint64_t k) {
  uint32_t bits = 0;
  while (k << (bits + 1) <= elements) ++bits;
  return bits;
}
GW_HD inline uint64_t high_place_bits(uint64_t elements, uint64_t k) {
  return k + ((elements - 1) >> low_place_bits(elements, k));
}

GW_HD inline uint64_t topk_place_words(const Scheme& s, uint64_t count, uint64_t elements, uint64_t k) {
  if (s.steps == kBitmapPlaces) return div_up(elements, 32);
  if (s.steps == kCodedPlaces)
    return div_up(k * low_place_bits(elements, k), 32) + div_up(high_place_bits(elements, k), 32);
  return wide_indices(s, count) ? k : div_up(k, 2);
}
GW_HD inline uint64_t topk_unit_words(const Scheme& s, uint64_t count, uint64_t elements) {
  const uint64_t k = topk_kept(s, elements);
  return topk_scale_words(s) + topk_value_words(s, k) + topk_place_words(s, count, elements, k);
}
inline uint64_t topk_region_words(const Scheme& s, uint64_t count) {
  const uint64_t unit = unit_elements(s, count), full = count / unit, rest = count % unit;
  return full * topk_unit_words(s, count, unit) + (rest ? topk_unit_words(s, count, rest) : 0);
}

}  // namespace gradwire
