// SPDX-License-Identifier: Apache-2.0
// casq's units on the CPU: clusters, buckets, tables. device/sketch.h has the layout and the rules.
#pragma once

#include <span>
#include <vector>

#include "codec/casq/sketch.h"
#include "device/kernels.h"

namespace gradwire {

// A thread's memory, which grows as needed: the buckets of mode=paper; means; lists of the clusters of a tile.
struct SketchMemory {
  std::vector<int64_t> sums;
  std::vector<uint32_t> counts;
  std::vector<float> means, lists;
};
// One unit (number `unit` of the piece).
void encode_sketch(const Kernels& kernels, Span s, uint64_t unit, Scratch& scratch, SketchMemory& memory,
                   LaneSums& check);
const char* check_sketch(const Span& s, uint64_t unit);  // the field that is wrong, or null
void decode_sketch(const Kernels& kernels, Span s, uint64_t unit, Scratch& scratch, SketchMemory& memory);

// The codes of n elements from `begin` on, a multiple of 1024, one a word.
void load_codes(const Kernels& kernels, const Span& s, uint64_t begin, uint64_t n, uint32_t* codes);

// mode=paper: a hash of the index says the bucket, over the whole tensor.
struct HashBuckets {
  uint64_t buckets[kMaxClusters], start[kMaxClusters];
  uint64_t first;  // of the piece in its tensor
  HashBuckets(const Span& s, uint64_t total) : first(s.first_block * kBlock) {
    hash_buckets(*s.scheme, total, buckets);
    uint64_t at = 0;
    for (uint32_t k = 0; k < clusters_of(*s.scheme); ++k) {
      start[k] = at;
      at += buckets[k];
    }
  }
  uint64_t operator()(uint32_t k, uint64_t i) const {
    return start[k] + bkdr(static_cast<uint32_t>(first + i)) % buckets[k];
  }
};

}  // namespace gradwire
