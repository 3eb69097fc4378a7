// SPDX-License-Identifier: Apache-2.0
// What cpu.cc, cpu_tile.cc and cpu_hash.cc share: one unit of casq, and the memory that a thread works in.
#pragma once

#include <vector>

#include "codec/casq/kernels.h"
#include "codec/casq/layout.h"

namespace gradwire {

// A thread's memory, which grows as needed.
struct CasqMemory {
  std::vector<int64_t> sums;     // mode=paper: of the buckets
  std::vector<uint32_t> counts;  // ... and how many elements they have
  std::vector<float> means;      // of the buckets
  std::vector<float> lists;      // tiles: the values of the clusters, list after list
};

// What a thread works with.
struct CasqThread {
  const Kernels& kernels;
  const CasqKernels& casq;
  Scratch& scratch;
  CasqMemory& memory;
};

struct CasqUnit {
  uint64_t begin, elements, buckets;  // begin: index of its first element in the span
  uint32_t* table;                    // its words behind the codes
  uint64_t table_index, table_words;  // index in the body
};
CasqUnit casq_unit(const Span& s, uint64_t number);

// Packs the codes of a block into the message.
void store_casq_codes(const Kernels& kernels, const Span& s, uint64_t block, const uint32_t* codes, LaneSums& check);

// Units without a NaN or an Inf. `x` are the values of a tile, loaded; with feedback they are in scratch.x.
void encode_casq_tile(const CasqThread& t, const Span& s, const CasqUnit& u, const float* x, uint32_t absmax,
                      const float* thresholds, LaneSums& check);
void decode_casq_tile(const CasqThread& t, const Span& s, const CasqUnit& u);
void encode_casq_hashed(const CasqThread& t, const Span& s, const CasqUnit& u, uint32_t absmax, const float* thresholds,
                        LaneSums& check);
void decode_casq_hashed(const CasqThread& t, const Span& s, const CasqUnit& u);

}  // namespace gradwire
