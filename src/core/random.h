// SPDX-License-Identifier: Apache-2.0
// Randomness is a function, not a state: the random bits of an element depend on (seed, step, stage, rank, hash of
// the tensor's name, index of the element in its tensor) and on nothing else, so every device, thread count and
// grouping draws the same ones.
//
// Ranks 2i and 2i + 1 share one draw per element, u, and the second takes the opposite, 1 - u (rank_mask). Each by
// itself rounds as with a draw of its own, so it is unbiased. But the chance that both round up is the least that any
// two draws could give, whatever the two values are, so that their errors partly cancel in the mean. Different pairs
// draw independently: whichever ranks take part, the mean is never worse than with a draw for each.
//
// A 64-bit key is made per block of 1024 elements (cheap, once a block). In the block, element (row, lane) of the 32 x
// 32 grid takes 16 bits: the low half of random_word(row / 2 * 32 + lane) in even rows, the high half in odd ones.
// With 16 bits the probability of rounding up is off by at most 2^-17.
#pragma once

#include "core/bits.h"

namespace gradwire {

inline constexpr uint32_t kWeyl = 0x9e3779b9u;

GW_HD inline uint64_t call_key(uint64_t seed, uint64_t step, uint32_t stage, uint32_t rank) {
  uint64_t key = mix64(seed + 0x9e3779b97f4a7c15ull);
  key = mix64(key ^ step);
  return mix64(key + (uint64_t{stage} << 32 | rank >> 1) + 1);  // by pairs
}

// The bits that a rank inverts in a random word: none, or all.
GW_HD inline uint32_t rank_mask(uint32_t rank) { return rank & 1 ? 0xffffffffu : 0; }

GW_HD inline uint64_t tensor_key(uint64_t call, uint64_t name_hash) { return mix64(call ^ name_hash); }

GW_HD inline uint64_t block_key(uint64_t tensor, uint64_t block) {
  return mix64(tensor + block * 0x9e3779b97f4a7c15ull);
}

// 32 random bits from a counter that the key's low half was added to, and its high half. With `last` 0 they are zeros:
// a loop that may have to round to nearest then needs no branch.
inline constexpr uint32_t kMixLast = 0x846ca68bu;
GW_HD inline uint32_t random_mix(uint32_t x, uint32_t key1, uint32_t last = kMixLast) {
  x ^= x >> 16;
  x = x * 0x7feb352du + key1;
  x ^= x >> 15;
  x *= last;
  return x ^ (x >> 16);
}

// ... for counter c (0..511) of a block, before a rank's mask; the form for vectors: device/cpu_driver-inl.h.
GW_HD inline uint32_t random_word(uint64_t key, uint32_t c) {
  return random_mix(c * kWeyl + static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32));
}

}  // namespace gradwire
