// SPDX-License-Identifier: Apache-2.0
#include "message/sketch.h"

#include <algorithm>

#include "codec/casq/sketch.h"
#include "message/blocks.h"

namespace gradwire {
namespace {

struct Unit {
  uint64_t begin, elements, buckets;  // in the piece
  uint32_t* side;
  uint64_t side_index, side_words;  // index in the body
};

Unit unit_of(const Span& s, uint64_t number) {
  const Scheme& scheme = *s.scheme;
  const uint64_t size = unit_elements(scheme, s.count), begin = number * size, n = min_u64(size, s.count - begin);
  const uint64_t at = side_offset(scheme, s.count) + number * sketch_side_words(scheme, size);
  return {begin, n, buckets_of(scheme, n), s.region + at, s.region_index + at, sketch_side_words(scheme, n)};
}

// How the buckets of a tile are shared: clusters follow one another, and within one the stretches of its list.
struct Shares {
  uint32_t counts[kMaxClusters], buckets[kMaxClusters], first[kMaxClusters], used = 0;
};

void share_buckets(const Scheme& scheme, const Unit& u, Shares& shares) {  // counts are there
  uint8_t order[kMaxClusters];
  const uint32_t clusters = clusters_of(scheme);
  for (uint32_t i = 0; i < clusters; ++i) order[i] = static_cast<uint8_t>(cluster_word(scheme, i));
  shares.used = allocate_rank(shares.counts, order, clusters, static_cast<uint32_t>(u.buckets), shares.buckets);
  for (uint32_t k = 0, at = 0; k < clusters; at += shares.buckets[k++]) shares.first[k] = at;
}

// The loads of a cluster's buckets, from first to last: bucket b holds the ranks from b * n / m, rounded up, on. Stepped without dividing.
class Loads {
 public:
  Loads(uint32_t n, uint32_t m) : least_(n / m), rest_(n % m), m_(m) {}
  uint32_t next() {
    owed_ += static_cast<int32_t>(rest_);
    const bool more = owed_ > 0;
    owed_ -= more ? static_cast<int32_t>(m_) : 0;
    return least_ + more;
  }

 private:
  uint32_t least_, rest_, m_;
  int32_t owed_ = 0;
};

// Vectors of a list may begin or end beyond it.
constexpr uint64_t kRoom = 64;

void grow(std::vector<float>& v, uint64_t size) {
  if (v.size() < size) v.resize(size);
}

// For each cluster, where the values of its elements stand in order: each bucket's mean, as often as the bucket has elements.
void repeat_means(const Scheme& scheme, const Shares& shares, SketchMemory& memory, const float** lists) {
  const uint32_t clusters = clusters_of(scheme);
  grow(memory.lists, kTile + clusters * kRoom);
  float* to = memory.lists.data();
  for (uint32_t k = 0; k < clusters; ++k) {
    const uint32_t n = shares.counts[k], m = shares.buckets[k];
    const float* means = memory.means.data() + shares.first[k];
    lists[k] = means;
    if (m == n) continue;
    lists[k] = to;
    if (m == 1) {
      std::fill(to, to + n, *means);
    } else {
      Loads loads(n, m);
      float* at = to;
      for (uint32_t b = 0; b < m; ++b) {
        const uint32_t load = loads.next();
        for (uint32_t i = 0; i < load; i += 8)
          std::fill(at + i, at + i + 8, means[b]);  // what is too much is overwritten
        at += load;
      }
    }
    to += n + kRoom;
  }
}

// The means of a tile's buckets, as floats in units of the grid's step.
void find_means(const Kernels& kernels, const Scheme& scheme, const Shares& shares, Grid grid,
                const float* const* lists, int32_t* values, float* means) {
  for (uint32_t k = 0; k < clusters_of(scheme); ++k) {
    const uint32_t n = shares.counts[k], m = shares.buckets[k], digits = sum_digits(n, m);
    if (n == 0) continue;
    kernels.round(lists[k], n, grid, power_of_two(digits), values);
    const float unit = 1.0f / power_of_two(digits);
    float* to = means + shares.first[k];
    if (m == n) {
      for (uint32_t b = 0; b < m; ++b) to[b] = static_cast<float>(values[b]) * unit;
      continue;
    }
    Loads loads(n, m);
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

void store_codes(const Kernels& kernels, const Span& s, uint64_t block, const uint32_t* codes, LaneSums& check) {
  const Scheme& scheme = *s.scheme;
  uint32_t* words = s.region + block * kLane * scheme.bits;
  if (s.elements_of(block) == kBlock) {
    kernels.pack(scheme.bits, codes, words);
    kernels.sum_rows(words, scheme.bits, s.region_index / kLane + block * scheme.bits, check);
    return;
  }
  kernels.pack_tail(codes, s.elements_of(block), scheme.bits, words);
  for (uint64_t i = 0; i < tail_words(scheme, s.count); ++i)
    check.add_word(words[i], s.region_index + full_words(scheme, s.count) + i);
}

// The values of a unit up to a tile, feedback added, zeros behind them to the end of a block: where they are, or in scratch.x.
const float* stage_tile(const Kernels& kernels, const Span& s, const Unit& u, Scratch& scratch) {
  if (s.dtype == DType::f32 && !s.before && u.elements % kBlock == 0) return static_cast<const float*>(s.in) + u.begin;
  stage_blocks(kernels, s, s.begin, s.end, scratch.x);
  return scratch.x;
}

// A tile, staged as x: codes, lists and means stay in the thread's own memory; so do the residuals, in place of x, until they are put.
void encode_tile(const Kernels& kernels, const Span& s, const Unit& u, const float* x, uint32_t absmax,
                 const float* thresholds, Scratch& scratch, SketchMemory& memory, LaneSums& check) {
  const Scheme& scheme = *s.scheme;
  const uint32_t clusters = clusters_of(scheme);
  const uint64_t padded = div_up(u.elements, kLane) * kLane;
  grow(memory.lists, clusters * (kTile + kRoom));
  float *lists[kMaxClusters], *ends[kMaxClusters];
  for (uint32_t k = 0; k < clusters; ++k) ends[k] = lists[k] = memory.lists.data() + k * (kTile + kRoom);
  kernels.split(scheme.bits, x, padded, thresholds, scratch.codes, ends);
  Shares shares;
  for (uint32_t k = 0; k < clusters; ++k) shares.counts[k] = static_cast<uint32_t>(ends[k] - lists[k]);
  shares.counts[scratch.codes[padded - 1]] -=
      static_cast<uint32_t>(padded - u.elements);  // the padding is at its list's end
  share_buckets(scheme, u, shares);

  grow(memory.means, u.buckets + kRoom);
  find_means(kernels, scheme, shares, grid_for(absmax), lists, reinterpret_cast<int32_t*>(scratch.keys),
             memory.means.data());
  uint16_t* means = reinterpret_cast<uint16_t*>(u.side + 1);
  std::fill(u.side, u.side + u.side_words, 0);
  u.side[0] = absmax;
  kernels.narrow_means(memory.means.data(), shares.used, means);
  for (uint64_t block = s.begin; block < s.end; ++block)
    store_codes(kernels, s, block, scratch.codes + (block * kBlock - u.begin), check);
  if (!s.before) return;

  const float unscale = 1.0f / s.loss_scale;
  kernels.widen_means(means, shares.used, static_cast<float>(grid_step(absmax)), memory.means.data());
  const float* values[kMaxClusters];
  repeat_means(scheme, shares, memory, values);
  alignas(64) float decoded[kBlock];
  for (uint64_t block = s.begin; block < s.end; ++block) {
    const uint64_t at = block * kBlock - u.begin, n = s.elements_of(block);
    kernels.merge(scheme.bits, scratch.codes + at, div_up(n, kLane) * kLane, values, decoded, false);
    float* rest = scratch.x + at;
    for (uint64_t i = 0; i < n; ++i) rest[i] = (rest[i] - decoded[i]) * unscale;
    kernels.put_residual(s, block, rest);
  }
}

void encode_hashed(const Kernels& kernels, const Span& s, const Unit& u, uint32_t absmax, const float* thresholds,
                   Scratch& scratch, SketchMemory& memory, LaneSums& check) {
  const Scheme& scheme = *s.scheme;
  const uint32_t clusters = clusters_of(scheme);
  const HashBuckets hash(s, u.buckets);
  const Grid grid = grid_for(absmax);
  memory.sums.assign(u.buckets, 0);
  memory.counts.assign(u.buckets, 0);
  for (uint64_t block = s.begin; block < s.end; ++block) {
    const float* x = kernels.stage(s, block, scratch.x);
    kernels.classify(x, kBlock, thresholds, clusters - 1, scratch.codes);
    int32_t* values = reinterpret_cast<int32_t*>(scratch.keys);
    kernels.round(x, kBlock, grid, power_of_two(kHashDigits), values);
    for (uint64_t i = 0; i < s.elements_of(block); ++i) {
      const uint64_t b = hash(scratch.codes[i], block * kBlock + i);
      memory.sums[b] += values[i];
      ++memory.counts[b];
    }
    store_codes(kernels, s, block, scratch.codes, check);
  }
  memory.means.resize(u.buckets);
  u.side[0] = absmax;
  for (uint64_t b = 0; b < u.buckets; ++b) {
    memory.means[b] = hash_mean(memory.sums[b], memory.counts[b], grid_step(absmax));
    u.side[1 + b] = float_bits(memory.means[b]);
    if (scheme.steps) u.side[1 + u.buckets + b] = memory.counts[b];
  }
  if (!s.before) return;
  const float unscale = 1.0f / s.loss_scale;
  for (uint64_t block = s.begin; block < s.end; ++block) {
    const float* x = kernels.stage(s, block, scratch.x);
    kernels.classify(x, kBlock, thresholds, clusters - 1, scratch.codes);
    float* rest = scratch.x + kBlock;
    for (uint64_t i = 0; i < s.elements_of(block); ++i)
      rest[i] = (x[i] - memory.means[hash(scratch.codes[i], block * kBlock + i)]) * unscale;
    kernels.put_residual(s, block, rest);
  }
}

}  // namespace

void load_codes(const Kernels& kernels, const Span& s, uint64_t begin, uint64_t n, uint32_t* codes) {
  const Scheme& scheme = *s.scheme;
  for (uint64_t block = begin / kBlock; block * kBlock < begin + n; ++block) {
    uint32_t* to = codes + (block * kBlock - begin);
    const uint64_t here = s.elements_of(block);
    if (here == kBlock)
      kernels.unpack(scheme.bits, s.region + block * kLane * scheme.bits, to);
    else
      kernels.unpack_tail(s.region + full_words(scheme, s.count), here, scheme.bits, to);
  }
}

void encode_sketch(const Kernels& kernels, Span s, uint64_t number, Scratch& scratch, SketchMemory& memory,
                   LaneSums& check) {
  const Unit u = unit_of(s, number);
  s.begin = u.begin / kBlock;
  s.end = div_up(u.begin + u.elements, kBlock);
  Span values = s;  // what the statistics are of: the unit as it is, or a tile that is staged once for all passes
  const float* x = nullptr;
  if (!hashed(*s.scheme)) {
    x = stage_tile(kernels, s, u, scratch);
    values = {.scheme = s.scheme, .count = (s.end - s.begin) * kBlock, .begin = 0, .end = s.end - s.begin, .in = x};
  }
  const uint32_t absmax = kernels.absmax(values, scratch);
  if (absmax >= kInfBits) {  // marked: everything else is zero
    std::fill(u.side, u.side + u.side_words, 0);
    u.side[0] = kMarker;
    std::fill(scratch.codes, scratch.codes + kBlock, 0);
    for (uint64_t block = s.begin; block < s.end; ++block) store_codes(kernels, s, block, scratch.codes, check);
    keep_residuals(kernels, s);
  } else {
    Sums sums;
    kernels.sums(values, absmax, scratch, sums);
    const float rms = rms_of(absmax, sums, u.elements);
    float thresholds[kMaxClusters];
    for (uint32_t i = 0; i + 1 < clusters_of(*s.scheme); ++i) thresholds[i] = threshold_of(*s.scheme, rms, i);
    if (hashed(*s.scheme))
      encode_hashed(kernels, s, u, absmax, thresholds, scratch, memory, check);
    else
      encode_tile(kernels, s, u, x, absmax, thresholds, scratch, memory, check);
  }
  add_words(kernels, u.side, u.side_words, u.side_index, check);
}

const char* check_sketch(const Span& s, uint64_t number) {
  const Unit u = unit_of(s, number);
  const Scheme& scheme = *s.scheme;
  const bool marked = u.side[0] == kMarker;
  if (!marked && u.side[0] >= kInfBits) return "scales";
  if (marked && std::any_of(u.side + 1, u.side + u.side_words, [](uint32_t w) { return w != 0; })) return "buckets";
  if (hashed(scheme)) {
    for (uint64_t b = 0; b < u.buckets; ++b)
      if (!finite_bits(u.side[1 + b])) return "buckets";
    return nullptr;
  }
  const uint16_t* means = reinterpret_cast<const uint16_t*>(u.side + 1);
  for (uint64_t b = 0; b < u.buckets; ++b)
    if (!mean_is_valid(means[b])) return "buckets";
  return u.buckets % 2 && means[u.buckets] != 0 ? "padding" : nullptr;
}

void decode_sketch(const Kernels& kernels, Span s, uint64_t number, Scratch& scratch, SketchMemory& memory) {
  const Unit u = unit_of(s, number);
  const Scheme& scheme = *s.scheme;
  const uint64_t begin = u.begin / kBlock, end = div_up(u.begin + u.elements, kBlock);
  if (u.side[0] == kMarker) {
    std::fill(scratch.x, scratch.x + kBlock, bits_float(kMarker));
    for (uint64_t block = begin; block < end; ++block) kernels.put(s, block, scratch.x);
    return;
  }
  if (hashed(scheme)) {
    const HashBuckets hash(s, u.buckets);
    for (uint64_t block = begin; block < end; ++block) {
      const uint64_t n = s.elements_of(block);
      load_codes(kernels, s, block * kBlock, n, scratch.codes);
      for (uint64_t i = 0; i < n; ++i)
        scratch.x[i] = bits_float(u.side[1 + hash(scratch.codes[i], block * kBlock + i)]);
      kernels.put(s, block, scratch.x);
    }
    return;
  }
  load_codes(kernels, s, u.begin, u.elements, scratch.codes);
  std::fill(scratch.codes + u.elements, scratch.codes + div_up(u.elements, kLane) * kLane, 0);
  Shares shares;
  kernels.count(scheme.bits, scratch.codes, u.elements, shares.counts);
  share_buckets(scheme, u, shares);
  grow(memory.means, u.buckets + kRoom);
  kernels.widen_means(reinterpret_cast<const uint16_t*>(u.side + 1), shares.used,
                      static_cast<float>(grid_step(u.side[0])), memory.means.data());
  const float* lists[kMaxClusters];
  repeat_means(scheme, shares, memory, lists);

  uint64_t block = begin;
  if (s.dtype == DType::f32 && !s.add) {  // straight to where they go
    float* out = static_cast<float*>(s.out) + u.begin;
    block += u.elements / kBlock;
    kernels.merge(scheme.bits, scratch.codes, u.elements / kBlock * kBlock, lists, out,
                  s.stream && reinterpret_cast<uintptr_t>(out) % 64 == 0);
  }
  for (; block < end; ++block) {
    kernels.merge(scheme.bits, scratch.codes + (block * kBlock - u.begin), div_up(s.elements_of(block), kLane) * kLane,
                  lists, scratch.x, false);
    kernels.put(s, block, scratch.x);
  }
}

}  // namespace gradwire
