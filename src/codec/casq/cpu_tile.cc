// SPDX-License-Identifier: Apache-2.0
// casq's tiles on the CPU: buckets by rank. A tile is sorted into one list per cluster. Every bucket is a run of such a
// list, so that finding the means is one walk over the lists, and decoding writes each mean as often as its bucket has
// elements and then merges the lists in the order of the codes. Everything stays in the thread's own memory.
#include <algorithm>

#include "codec/casq/cpu.h"
#include "codec/casq/cpu_unit.h"

namespace gradwire {
namespace {

// Vectors of a list may begin or end beyond it.
constexpr uint64_t kRoom = 64;

void grow(std::vector<float>& v, uint64_t size) {
  if (v.size() < size) v.resize(size);
}

// How the buckets of a tile are shared: clusters follow one another, and within a cluster the runs of its list.
struct BucketShares {
  uint32_t counts[kMaxClusters];   // elements of each cluster
  uint32_t buckets[kMaxClusters];  // its buckets,
  uint32_t first[kMaxClusters];    // and the number of the first of them
  uint32_t used = 0;               // buckets of all clusters
};

void share_buckets(const Scheme& scheme, const CasqUnit& u, BucketShares& shares) {  // counts are there
  uint8_t order[kMaxClusters];
  const uint32_t clusters = clusters_of(scheme);
  for (uint32_t i = 0; i < clusters; ++i) order[i] = static_cast<uint8_t>(cluster_word(scheme, i));
  shares.used = allocate_rank(shares.counts, order, clusters, static_cast<uint32_t>(u.buckets), shares.buckets);
  for (uint32_t k = 0, at = 0; k < clusters; at += shares.buckets[k++]) shares.first[k] = at;
}

// The loads of a cluster's buckets, from first to last. Bucket b of m holds the ranks from b * n / m, rounded up, on.
// The remainder of that quotient is carried from bucket to bucket, so that no bucket needs a division.
class BucketLoads {
 public:
  BucketLoads(uint32_t n, uint32_t m) : least_(n / m), rest_(n % m), m_(m) {}
  uint32_t next() {
    carry_ += static_cast<int32_t>(rest_);
    const bool more = carry_ > 0;
    carry_ -= more ? static_cast<int32_t>(m_) : 0;
    return least_ + more;
  }

 private:
  uint32_t least_, rest_, m_;
  int32_t carry_ = 0;
};

// For each cluster, where the decoded values of its elements stand in order: each bucket's mean, as often as the bucket
// has elements.
void repeat_means(const Scheme& scheme, const BucketShares& shares, CasqMemory& memory, const float** lists) {
  const uint32_t clusters = clusters_of(scheme);
  grow(memory.lists, kTile + clusters * kRoom);
  float* to = memory.lists.data();
  for (uint32_t k = 0; k < clusters; ++k) {
    const uint32_t n = shares.counts[k], m = shares.buckets[k];
    const float* means = memory.means.data() + shares.first[k];
    lists[k] = means;
    if (m == n) continue;  // a bucket per element: the means are the list
    lists[k] = to;
    if (m == 1) {
      std::fill(to, to + n, *means);
    } else {
      BucketLoads loads(n, m);
      float* at = to;
      for (uint32_t b = 0; b < m; ++b) {
        const uint32_t load = loads.next();
        // Eight at a time, whatever the load is: the next bucket overwrites what is too much.
        for (uint32_t i = 0; i < load; i += 8) std::fill(at + i, at + i + 8, means[b]);
        at += load;
      }
    }
    to += n + kRoom;
  }
}

// The means of a tile's buckets, as floats in units of the grid's step. Each cluster has a grid of its own, as fine as
// the sums of its buckets allow in 32 bits.
void find_means(const CasqThread& t, const Scheme& scheme, const BucketShares& shares, Grid grid,
                const float* const* lists) {
  int32_t* values = reinterpret_cast<int32_t*>(t.scratch.keys);
  for (uint32_t k = 0; k < clusters_of(scheme); ++k) {
    const uint32_t n = shares.counts[k], m = shares.buckets[k], digits = sum_digits(n, m);
    if (n == 0) continue;
    t.casq.round(lists[k], n, grid, power_of_two(digits), values);
    const float unit = 1.0f / power_of_two(digits);
    float* to = t.memory.means.data() + shares.first[k];
    if (m == n) {
      for (uint32_t b = 0; b < m; ++b) to[b] = static_cast<float>(values[b]) * unit;
      continue;
    }
    BucketLoads loads(n, m);
    const int32_t* at = values;
    for (uint32_t b = 0; b < m; ++b) {
      const uint32_t load = loads.next();
      int32_t sum = 0;
      for (uint32_t i = 0; i < load; ++i) sum += at[i];
      at += load;
      to[b] = static_cast<float>(static_cast<double>(sum) / static_cast<double>(load) * static_cast<double>(unit));
    }
  }
}

// Decodes what was just encoded, block by block, and leaves the difference.
void leave_residuals(const CasqThread& t, const Span& s, const CasqUnit& u, const BucketShares& shares,
                     uint32_t absmax) {
  const float unscale = s.unscale;
  const uint16_t* means = reinterpret_cast<const uint16_t*>(u.table + 1);
  t.casq.widen_means(means, shares.used, static_cast<float>(grid_step(absmax)), t.memory.means.data());
  const float* values[kMaxClusters];
  repeat_means(*s.scheme, shares, t.memory, values);
  alignas(64) float decoded[kBlock];
  for (uint64_t block = s.begin; block < s.end; ++block) {
    const uint64_t at = block * kBlock - u.begin, n = s.elements_of(block);
    t.casq.merge(s.scheme->bits, t.scratch.codes + at, div_up(n, kLane) * kLane, values, decoded, false);
    float* rest = t.scratch.x + at;
    for (uint64_t i = 0; i < n; ++i) rest[i] = (rest[i] - decoded[i]) * unscale;
    t.kernels.put_residual(s, block, rest);
  }
}

}  // namespace

void encode_casq_tile(const CasqThread& t, const Span& s, const CasqUnit& u, const float* x, uint32_t absmax,
                      const float* thresholds, LaneSums& check) {
  const Scheme& scheme = *s.scheme;
  const uint32_t clusters = clusters_of(scheme);
  const uint64_t padded = div_up(u.elements, kLane) * kLane;
  grow(t.memory.lists, clusters * (kTile + kRoom));
  float *lists[kMaxClusters], *ends[kMaxClusters];
  for (uint32_t k = 0; k < clusters; ++k) ends[k] = lists[k] = t.memory.lists.data() + k * (kTile + kRoom);
  t.casq.split(scheme.bits, x, padded, thresholds, t.scratch.codes, ends);
  BucketShares shares;
  for (uint32_t k = 0; k < clusters; ++k) shares.counts[k] = static_cast<uint32_t>(ends[k] - lists[k]);
  // The zeros behind the last element are all in one cluster, at the end of its list.
  shares.counts[t.scratch.codes[padded - 1]] -= static_cast<uint32_t>(padded - u.elements);
  share_buckets(scheme, u, shares);

  grow(t.memory.means, u.buckets + kRoom);
  find_means(t, scheme, shares, grid_for(absmax), lists);
  std::fill(u.table, u.table + u.table_words, 0);
  u.table[0] = absmax;
  t.casq.narrow_means(t.memory.means.data(), shares.used, reinterpret_cast<uint16_t*>(u.table + 1));
  for (uint64_t block = s.begin; block < s.end; ++block)
    store_casq_codes(t.kernels, s, block, t.scratch.codes + (block * kBlock - u.begin), check);
  if (s.before) leave_residuals(t, s, u, shares, absmax);
}

void decode_casq_tile(const CasqThread& t, const Span& s, const CasqUnit& u) {
  const Scheme& scheme = *s.scheme;
  uint32_t* const codes = t.scratch.codes;
  load_casq_codes(t.kernels, s, u.begin, u.elements, codes);
  std::fill(codes + u.elements, codes + div_up(u.elements, kLane) * kLane, 0);
  BucketShares shares;
  t.casq.count(scheme.bits, codes, u.elements, shares.counts);
  share_buckets(scheme, u, shares);
  grow(t.memory.means, u.buckets + kRoom);
  t.casq.widen_means(reinterpret_cast<const uint16_t*>(u.table + 1), shares.used,
                     static_cast<float>(grid_step(u.table[0])), t.memory.means.data());
  const float* lists[kMaxClusters];
  repeat_means(scheme, shares, t.memory, lists);

  uint64_t block = u.begin / kBlock;
  if (s.dtype == DType::f32 && !s.add) {  // full blocks go straight to the output
    float* out = static_cast<float*>(s.out) + u.begin;
    block += u.elements / kBlock;
    t.casq.merge(scheme.bits, codes, u.elements / kBlock * kBlock, lists, out,
                 s.stream && reinterpret_cast<uintptr_t>(out) % 64 == 0);
  }
  for (; block < div_up(u.begin + u.elements, kBlock); ++block) {
    t.casq.merge(scheme.bits, codes + (block * kBlock - u.begin), div_up(s.elements_of(block), kLane) * kLane, lists,
                 t.scratch.x, false);
    t.kernels.put(s, block, t.scratch.x);
  }
}

}  // namespace gradwire
