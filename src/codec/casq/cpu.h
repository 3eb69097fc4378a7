// SPDX-License-Identifier: Apache-2.0
// casq's units on the CPU. layout.h has the layout and the rules.
#pragma once

#include <span>

#include "codec/casq/layout.h"
#include "codec/unit.h"

namespace gradwire {

extern const UnitOps kCasqUnits;

// The codes of n elements from `begin` on, a multiple of 1024, one per word.
void load_casq_codes(const Kernels& kernels, const Span& s, uint64_t begin, uint64_t n, uint32_t* codes);

UnitProblem check_casq(const Span& s, uint64_t unit);

// mode=paper: a hash of the index says the bucket, over the whole tensor.
struct HashBuckets {
  uint64_t buckets[kMaxClusters], start[kMaxClusters];
  uint64_t first;  // index of the span's first element in its tensor: a shard must hash as the whole tensor does
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
