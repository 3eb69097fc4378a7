// SPDX-License-Identifier: Apache-2.0
// The rules of casq that encoder and decoder, host and GPU must apply alike: how many buckets a cluster gets, and which
// bucket an element uses. Its cluster is the number of thresholds at or below it; the middle one is 0, so zeros of
// either sign count as positive.
//
// Rank buckets: the j-th of the n elements of a cluster with m buckets uses bucket j * m / n, so that loads differ by
// at most one. Unlike a hash this wastes nothing: the expected error of a cluster is variance * (n - m), linear in m,
// and the best allocation for one message is greedy. For what that means under error feedback see cluster_table.h. Hash
// buckets are the paper's: BKDR over the bytes of the element's index.
#pragma once

#include <cstdint>

#include "core/bits.h"

namespace gradwire {

// Every cluster with elements gets one bucket; then the clusters, strongest first, are filled up to a bucket an element
// while the budget lasts. Returns the buckets used: at most `budget`, unless there are more clusters than that.
GW_HD inline uint32_t allocate_rank(const uint32_t* counts, const uint8_t* order, uint32_t clusters, uint32_t budget,
                                    uint32_t* buckets) {
  uint32_t used = 0;
  for (uint32_t k = 0; k < clusters; ++k) used += buckets[k] = counts[k] ? 1 : 0;
  for (uint32_t i = 0; i < clusters && used < budget; ++i) {
    const uint32_t k = order[i], room = budget - used;
    if (counts[k] < 2) continue;
    const uint32_t more = counts[k] - 1 < room ? counts[k] - 1 : room;
    buckets[k] += more;
    used += more;
  }
  return used;
}

// The paper's hash of an index: its four bytes, the lowest first, as signed characters.
GW_HD inline uint32_t bkdr(uint32_t index) {
  uint32_t h = 0;
  for (int i = 0; i < 4; ++i) h = h * 131u + static_cast<uint32_t>(static_cast<int8_t>(index >> 8 * i & 0xffu));
  return h & 0x7fffffffu;
}

}  // namespace gradwire
