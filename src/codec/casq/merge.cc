// SPDX-License-Identifier: Apache-2.0
// CASQ's "merge": the tables of several senders are averaged bucket by bucket, weighted by their counts, and every
// element takes the mean over the senders of the average of the bucket that it has there (merge.h says what this is
// good for).
#include <algorithm>
#include <memory>
#include <vector>

#include "codec/casq/cpu.h"

namespace gradwire {

bool casq_mergeable(const Scheme& s) { return hashed(s) && s.steps; }

UnitProblem merge_casq(const Span& span, std::span<const uint32_t* const> regions, float* out) {
  const uint64_t count = span.count, buckets = buckets_of(*span.scheme, count);
  Span s = span;
  const auto use = [&](const uint32_t* region) { s.region = const_cast<uint32_t*>(region); };  // only read
  std::vector<double> means(buckets), loads(buckets);
  bool marked = false;
  for (const uint32_t* region : regions) {
    use(region);
    if (const UnitProblem problem = check_casq(s, 0); problem.field) return problem;
    const uint32_t* table = region + scales_offset(*s.scheme, count);
    marked |= table[0] == kMarker;
    for (uint64_t b = 0; b < buckets; ++b) {
      const double load = table[1 + buckets + b];
      means[b] += load * static_cast<double>(bits_float(table[1 + b]));
      loads[b] += load;
    }
  }
  if (marked) {
    std::fill(out, out + count, bits_float(kMarker));
    return {};
  }
  for (uint64_t b = 0; b < buckets; ++b) means[b] = loads[b] > 0 ? means[b] / loads[b] : 0;

  const Kernels& kernels = kernels_named("");
  const auto scratch = std::make_unique<Scratch>();
  const HashBuckets hash(s, buckets);
  std::vector<double> total(kBlock);
  for (uint64_t block = 0; block * kBlock < count; ++block) {
    const uint64_t n = s.elements_of(block);
    std::fill(total.begin(), total.end(), 0.0);
    for (const uint32_t* region : regions) {
      use(region);
      load_casq_codes(kernels, s, block * kBlock, n, scratch->codes);
      for (uint64_t i = 0; i < n; ++i) total[i] += means[hash(scratch->codes[i], block * kBlock + i)];
    }
    for (uint64_t i = 0; i < n; ++i)
      out[block * kBlock + i] = static_cast<float>(total[i] / static_cast<double>(regions.size()));
  }
  return {};
}

}  // namespace gradwire
