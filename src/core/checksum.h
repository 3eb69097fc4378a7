// SPDX-License-Identifier: Apache-2.0
// The checksum of a message's body is a sum, so that blocks, vectors and GPU threads can add their parts in any order.
// The body is seen as 32-bit words in rows of 32: word i stands in row i / 32, lane i % 32, and
//
//     H = sum over words of  word * row_weight(row) * lane_weight(lane)   (mod 2^64)
//
// Both weights are odd, so a change of any single word always changes H; the weights of different rows and lanes are
// unrelated, so swapped, moved or zeroed stretches change it too. It guards against damage, not against a forger.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/bits.h"

namespace gradwire {

GW_HD inline uint32_t row_weight(uint32_t row) { return mix32(row) | 1u; }
GW_HD inline uint64_t lane_weight(uint32_t lane) { return mix64(uint64_t{lane} + 1) | 1u; }

// One word's part of H.
GW_HD inline uint64_t word_part(uint32_t word, uint64_t index) {
  return uint64_t{word} * row_weight(static_cast<uint32_t>(index >> 5)) *
         lane_weight(static_cast<uint32_t>(index & 31));
}

GW_HD inline uint64_t seal(uint64_t h, uint64_t words) { return mix64(h + words * 0x9e3779b97f4a7c15ull); }

// Partial sums per lane, to be multiplied by the lanes' weights at the end; the fast path over whole rows.
struct LaneSums {
  alignas(64) uint64_t lane[32] = {};
  uint64_t loose = 0;  // parts of words outside whole rows, weights included

  void add_word(uint32_t word, uint64_t index) { loose += word_part(word, index); }
  uint64_t total() const {
    uint64_t h = loose;
    for (uint32_t l = 0; l < 32; ++l) h += lane[l] * lane_weight(l);
    return h;
  }
};

// H of `words` words that start at `index`; the plain form.
inline uint64_t body_sum(const void* data, uint64_t words, uint64_t index = 0) {
  uint64_t h = 0;
  for (uint64_t i = 0; i < words; ++i) {
    uint32_t word;
    std::memcpy(&word, static_cast<const char*>(data) + i * 4, 4);
    h += word_part(word, index + i);
  }
  return h;
}

}  // namespace gradwire
