// SPDX-License-Identifier: Apache-2.0
// casq's mode=paper on the CPU: the whole tensor is one unit, and a hash of an element's index says its bucket. Sums
// are gathered in one pass over the values; with feedback a second pass decodes and leaves the difference.
#include <algorithm>

#include "codec/casq/cpu.h"
#include "codec/casq/cpu_unit.h"

namespace gradwire {

void encode_casq_hashed(const CasqThread& t, const Span& s, const CasqUnit& u, uint32_t absmax, const float* thresholds,
                        LaneSums& check) {
  const Scheme& scheme = *s.scheme;
  const uint32_t clusters = clusters_of(scheme);
  const HashBuckets hash(s, u.buckets);
  const Grid grid = grid_for(absmax);
  uint32_t* const codes = t.scratch.codes;
  CasqMemory& memory = t.memory;
  memory.sums.assign(u.buckets, 0);
  memory.counts.assign(u.buckets, 0);
  for (uint64_t block = s.begin; block < s.end; ++block) {
    const float* x = t.kernels.load(s, block, t.scratch.x);
    t.casq.classify(x, kBlock, thresholds, clusters - 1, codes);
    int32_t* values = reinterpret_cast<int32_t*>(t.scratch.keys);
    t.casq.round(x, kBlock, grid, power_of_two(kHashDigits), values);
    for (uint64_t i = 0; i < s.elements_of(block); ++i) {
      const uint64_t b = hash(codes[i], block * kBlock + i);
      memory.sums[b] += values[i];
      ++memory.counts[b];
    }
    store_casq_codes(t.kernels, s, block, codes, check);
  }
  memory.means.resize(u.buckets);
  u.table[0] = absmax;
  for (uint64_t b = 0; b < u.buckets; ++b) {
    memory.means[b] = hash_mean(memory.sums[b], memory.counts[b], grid_step(absmax));
    u.table[1 + b] = float_bits(memory.means[b]);
    if (scheme.steps) u.table[1 + u.buckets + b] = memory.counts[b];
  }
  if (!s.before) return;
  const float unscale = s.unscale;
  for (uint64_t block = s.begin; block < s.end; ++block) {
    const float* x = t.kernels.load(s, block, t.scratch.x);
    t.casq.classify(x, kBlock, thresholds, clusters - 1, codes);
    float* rest = t.scratch.x + kBlock;
    for (uint64_t i = 0; i < s.elements_of(block); ++i)
      rest[i] = (x[i] - memory.means[hash(codes[i], block * kBlock + i)]) * unscale;
    t.kernels.put_residual(s, block, rest);
  }
}

void decode_casq_hashed(const CasqThread& t, const Span& s, const CasqUnit& u) {
  const HashBuckets hash(s, u.buckets);
  for (uint64_t block = 0; block * kBlock < u.elements; ++block) {
    const uint64_t n = s.elements_of(block);
    load_casq_codes(t.kernels, s, block * kBlock, n, t.scratch.codes);
    for (uint64_t i = 0; i < n; ++i)
      t.scratch.x[i] = bits_float(u.table[1 + hash(t.scratch.codes[i], block * kBlock + i)]);
    t.kernels.put(s, block, t.scratch.x);
  }
}

}  // namespace gradwire
