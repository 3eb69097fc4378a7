// SPDX-License-Identifier: Apache-2.0
// Randomness is a function, not a state: the random bits of an element depend on (seed, step, stage, rank, hash of
// the tensor's name, index of the element in its tensor) and on nothing else, so every device, thread count and
// grouping draws the same ones.
//
// Ranks share one draw per element, of which each inverts bits of its own (rank_mask). Every rank by itself rounds as
// with a draw of its own, so it is unbiased; but where one rank rounds up another rather rounds down, and the errors of
// the ranks partly cancel in their mean (correlated quantization, Suresh et al. 2022, with masks for permutations).
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
  return mix64(key + (uint64_t{stage} << 32 | rank >> 16) + 1);  // there are 2^16 masks
}

// The bits that a rank inverts in a random word, the same in both halves. Bit k of the rank inverts the lower 16 - k
// bits. So ranks 2i and 2i + 1 have opposite draws, u and 1 - u, for which the chance that both round up is the least
// that any two draws could have, whatever the two values are. And the first 2^k ranks differ in their k upper bits: one
// has its draw in each 2^k-th part of the range. The number of ranks is not used, for the workers of a parameter server
// do not know it.
GW_HD inline uint32_t rank_mask(uint32_t rank) {
  uint32_t mask = 0;
  for (int k = 0; k < 16; ++k)
    if (rank >> k & 1) mask ^= 0xffffu >> k;
  return mask << 16 | mask;
}

GW_HD inline uint64_t tensor_key(uint64_t call, uint64_t name_hash) { return mix64(call ^ name_hash); }

GW_HD inline uint64_t block_key(uint64_t tensor, uint64_t block) {
  return mix64(tensor + block * 0x9e3779b97f4a7c15ull);
}

// 32 random bits from a counter that the key's low half was added to, and its high half.
GW_HD inline uint32_t random_mix(uint32_t x, uint32_t key1) {
  x ^= x >> 16;
  x = x * 0x7feb352du + key1;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ (x >> 16);
}

// ... for counter c (0..511) of a block, before a rank's mask; the form for vectors: device/cpu_driver-inl.h.
GW_HD inline uint32_t random_word(uint64_t key, uint32_t c) {
  return random_mix(c * kWeyl + static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32));
}

}  // namespace gradwire
