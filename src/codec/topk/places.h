// SPDX-License-Identifier: Apache-2.0
// The places of the kept elements of a unit: k ascending indices below `elements`, written as index=raw, coded or
// bitmap say (layout.h).
//
// index=coded is the code of Elias and Fano, whose size follows from (elements, k) alone. With l low bits, the lower l
// bits of all indices stand one after another. Behind them, from a new word on, is a string of bits: index j sets bit
// (index >> l) + j, so the upper parts are the gaps between the bits that are set. That is less than l + 3 bits an
// index, and at most 0.56 above the least that a code of fixed size can have.
#pragma once

#include <bit>
#include <cstdint>

#include "codec/topk/layout.h"

namespace gradwire {

// `words` has topk_place_words() of them.
void write_places(const PlaceWords& p, const uint32_t* indices, uint32_t* words);

// Bits [at, at + bits) of a string, bits <= 16. Reads the word behind only where the bits reach into it.
GW_HD inline uint32_t string_bits(const uint32_t* words, uint64_t at, uint32_t bits) {
  uint64_t pair = words[at / 32];
  if (at % 32 + bits > 32) pair |= uint64_t{words[at / 32 + 1]} << 32;
  return static_cast<uint32_t>(pair >> (at % 32)) & ((1u << bits) - 1);
}

// Calls visit(j, index) for one place after another. False, at the first that is wrong, where the words are not those
// of k ascending indices below `elements`: the words may come from anywhere, and nothing beyond them is read.
template <class Visit>
bool for_places(const PlaceWords& p, const uint32_t* words, Visit visit) {
  uint64_t j = 0, least = 0;  // the least that the next index may be
  const auto take = [&](uint64_t index) {
    if (j >= p.k || index < least || index >= p.elements) return false;
    visit(j++, static_cast<uint32_t>(index));
    least = index + 1;
    return true;
  };
  // Calls next(bit) for each bit that is set in `count` words.
  const auto for_bits = [](const uint32_t* from, uint64_t count, const auto& next) {
    for (uint64_t w = 0; w < count; ++w)
      for (uint32_t left = from[w]; left; left &= left - 1)
        if (!next(w * 32 + static_cast<uint64_t>(std::countr_zero(left)))) return false;
    return true;
  };
  if (p.kind == kRawPlaces) {
    for (uint64_t i = 0; i < p.k; ++i)
      if (!take(words[i / 2] >> (i % 2 * 16) & 0xffffu)) return false;
    return p.k % 2 == 0 || words[p.k / 2] >> 16 == 0;
  }
  if (p.kind == kBitmapPlaces) return for_bits(words, div_up(p.elements, 32), take) && j == p.k;
  const uint32_t low = low_place_bits(p.elements, p.k);
  const uint64_t low_words = div_up(p.k * low, 32), used = p.k * low % 32;
  if (used && words[low_words - 1] >> used) return false;
  const uint64_t high = high_place_bits(p.elements, p.k);
  const auto next = [&](uint64_t bit) {
    if (j >= p.k || bit >= high) return false;
    return take((bit - j) << low | (low ? string_bits(words, j * low, low) : 0));
  };
  return for_bits(words + low_words, div_up(high, 32), next) && j == p.k;
}

}  // namespace gradwire
