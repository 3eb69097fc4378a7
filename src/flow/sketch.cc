// SPDX-License-Identifier: Apache-2.0
#include "flow/sketch.h"

#include <algorithm>
#include <cstring>

#include "device/sketch.h"

namespace gradwire {
namespace {

struct Unit {
  uint64_t begin, elements, buckets;  // in the piece
  uint32_t* side;
  uint64_t side_index, side_words;    // index in the body
};

Unit unit_of(const Span& s, uint64_t number) {
  const Scheme& scheme = *s.scheme;
  const uint64_t size = unit_elements(scheme, s.count), begin = number * size, n = min_u64(size, s.count - begin);
  const uint64_t at = side_offset(scheme, s.count) + number * sketch_side_words(scheme, size);
  return {begin, n, buckets_of(scheme, n), s.region + at, s.region_index + at, sketch_side_words(scheme, n)};
}

// Where the next element of each cluster goes: rank * buckets / count, stepped without dividing.
struct Ranks {
  uint32_t bucket[kMaxClusters], carry[kMaxClusters] = {}, buckets[kMaxClusters], counts[kMaxClusters];
  uint32_t next(uint32_t k) {
    const uint32_t here = bucket[k];
    const uint32_t sum = carry[k] + buckets[k];
    const uint32_t full = sum >= counts[k];
    carry[k] = full ? sum - counts[k] : sum;
    bucket[k] = here + full;
    return here;
  }
};

// Buckets of every cluster of a tile, one cluster's after the other's.
Ranks rank_buckets(const Scheme& scheme, const Unit& u, const uint32_t* counts, uint32_t* digits) {
  Ranks ranks;
  uint8_t order[kMaxClusters];
  const uint32_t clusters = clusters_of(scheme);
  for (uint32_t i = 0; i < clusters; ++i) order[i] = static_cast<uint8_t>(cluster_word(scheme, i));
  allocate_rank(counts, order, clusters, static_cast<uint32_t>(u.buckets), ranks.buckets);
  uint32_t at = 0;
  for (uint32_t k = 0; k < clusters; ++k) {
    ranks.bucket[k] = at;
    ranks.counts[k] = counts[k];
    at += ranks.buckets[k];
    digits[k] = sum_digits(counts[k], ranks.buckets[k]);
  }
  return ranks;
}

void count_codes(const uint32_t* codes, uint64_t n, uint32_t* counts) {
  uint32_t four[4][kMaxClusters] = {};  // side by side, so that equal neighbours do not wait for each other
  uint64_t i = 0;
  for (; i + 4 <= n; i += 4)
    for (uint32_t j = 0; j < 4; ++j) ++four[j][codes[i + j]];
  for (; i < n; ++i) ++four[0][codes[i]];
  for (uint32_t k = 0; k < kMaxClusters; ++k) counts[k] = four[0][k] + four[1][k] + four[2][k] + four[3][k];
}

// The codes of a unit of a tile, from the message.
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

void store_codes(const Kernels& kernels, const Span& s, uint64_t block, const uint32_t* codes, LaneSums& check) {
  const Scheme& scheme = *s.scheme;
  uint32_t* words = s.region + block * kLane * scheme.bits;
  if (s.elements_of(block) == kBlock) {
    kernels.pack(scheme.bits, codes, words);
    kernels.sum_rows(words, scheme.bits, s.region_index / kLane + block * scheme.bits, check);
    return;
  }
  kernels.pack_tail(codes, s.elements_of(block), scheme.bits, words);
  for (uint64_t i = 0; i < tail_words(scheme, s.count); ++i) check.add_word(words[i], s.region_index + full_words(scheme, s.count) + i);
}

void keep_residuals(const Kernels& kernels, const Span& s) {
  if (!s.before) return;
  alignas(64) float marked[kBlock];
  std::fill(marked, marked + kBlock, bits_float(kMarker));
  for (uint64_t block = s.begin; block < s.end; ++block) kernels.put_residual(s, block, marked);
}

// A tile: codes, counts, sums and means stay in the thread's own memory.
void encode_tile(const Kernels& kernels, const Span& s, const Unit& u, uint32_t absmax, float rms, Scratch& scratch, LaneSums& check) {
  const Scheme& scheme = *s.scheme;
  const uint32_t clusters = clusters_of(scheme);
  float thresholds[kMaxClusters];
  for (uint32_t i = 0; i + 1 < clusters; ++i) thresholds[i] = threshold_of(scheme, rms, i);
  const bool direct = s.dtype == DType::f32 && !s.before && u.elements % kBlock == 0;
  const float* x = direct ? static_cast<const float*>(s.in) + u.begin : scratch.x;
  if (!direct)
    for (uint64_t block = s.begin; block < s.end; ++block) {
      float* to = scratch.x + (block * kBlock - u.begin);
      const float* values = kernels.stage(s, block, to);
      if (values != to) std::memcpy(to, values, kBlock * sizeof(float));
    }
  uint32_t counts[kMaxClusters];
  kernels.classify(x, div_up(u.elements, kLane) * kLane, thresholds, clusters - 1, scratch.codes);
  count_codes(scratch.codes, u.elements, counts);

  uint32_t digits[kMaxClusters];
  Ranks ranks = rank_buckets(scheme, u, counts, digits);
  const Ranks start = ranks;
  const Grid grid = grid_for(absmax);
  float scale[kMaxClusters];
  for (uint32_t k = 0; k < clusters; ++k) scale[k] = power_of_two(digits[k]);
  int32_t* sums = reinterpret_cast<int32_t*>(scratch.keys);
  std::fill(sums, sums + u.buckets, 0);
  uint16_t* where = reinterpret_cast<uint16_t*>(sums + u.buckets);  // the bucket of every element, for the residuals
  for (uint64_t i = 0; i < u.elements; ++i) {
    const uint32_t k = scratch.codes[i], bucket = ranks.next(k);
    sums[bucket] += static_cast<int32_t>(std::nearbyint(x[i] * grid.pre * grid.grid * scale[k]));
    if (s.before) where[i] = static_cast<uint16_t>(bucket);
  }

  // The means. Loads of a cluster's buckets follow from rank * buckets / count.
  uint16_t* means = reinterpret_cast<uint16_t*>(u.side + 1);
  std::fill(u.side, u.side + u.side_words, 0);
  u.side[0] = absmax;
  for (uint32_t k = 0; k < clusters; ++k) {
    const uint64_t n = counts[k], m = ranks.buckets[k];
    for (uint64_t b = 0; b < m; ++b) {
      const uint32_t load = static_cast<uint32_t>(div_up((b + 1) * n, m) - div_up(b * n, m));
      means[start.bucket[k] + b] = mean_code(sums[start.bucket[k] + b], load, digits[k]);
    }
  }
  for (uint64_t block = s.begin; block < s.end; ++block) store_codes(kernels, s, block, scratch.codes + (block * kBlock - u.begin), check);
  if (!s.before) return;
  const double step = grid_step(absmax);
  const float unscale = 1.0f / s.loss_scale;
  float* values = reinterpret_cast<float*>(sums);  // the sums are done with
  for (uint64_t b = 0; b < u.buckets; ++b) values[b] = mean_value(means[b], step);
  for (uint64_t i = 0; i < u.elements; ++i) scratch.x[i] = (scratch.x[i] - values[where[i]]) * unscale;
  for (uint64_t block = s.begin; block < s.end; ++block) kernels.put_residual(s, block, scratch.x + (block * kBlock - u.begin));
}

// mode=paper: a hash of the index says the bucket, over the whole tensor.
struct Hash {
  uint64_t buckets[kMaxClusters], start[kMaxClusters];
  uint64_t first;  // of the piece in its tensor
  Hash(const Span& s, uint64_t total) : first(s.first_block * kBlock) {
    hash_buckets(*s.scheme, total, buckets);
    uint64_t at = 0;
    for (uint32_t k = 0; k < clusters_of(*s.scheme); ++k) {
      start[k] = at;
      at += buckets[k];
    }
  }
  uint64_t operator()(uint32_t k, uint64_t i) const { return start[k] + bkdr(static_cast<uint32_t>(first + i)) % buckets[k]; }
};

void encode_hashed(const Kernels& kernels, const Span& s, const Unit& u, uint32_t absmax, float rms, Scratch& scratch, SketchMemory& memory, LaneSums& check) {
  const Scheme& scheme = *s.scheme;
  const uint32_t clusters = clusters_of(scheme);
  float thresholds[kMaxClusters];
  for (uint32_t i = 0; i + 1 < clusters; ++i) thresholds[i] = threshold_of(scheme, rms, i);
  const Hash hash(s, u.buckets);
  const Grid grid = grid_for(absmax);
  memory.sums.assign(u.buckets, 0);
  memory.counts.assign(u.buckets, 0);
  for (uint64_t block = s.begin; block < s.end; ++block) {
    const float* x = kernels.stage(s, block, scratch.x);
    kernels.classify(x, kBlock, thresholds, clusters - 1, scratch.codes);
    for (uint64_t i = 0; i < s.elements_of(block); ++i) {
      const uint64_t b = hash(scratch.codes[i], block * kBlock + i);
      memory.sums[b] += static_cast<int32_t>(std::nearbyint(x[i] * grid.pre * grid.grid * power_of_two(kHashDigits)));
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
    for (uint64_t i = 0; i < s.elements_of(block); ++i) rest[i] = (x[i] - memory.means[hash(scratch.codes[i], block * kBlock + i)]) * unscale;
    kernels.put_residual(s, block, rest);
  }
}

}  // namespace

void encode_sketch(const Kernels& kernels, Span s, uint64_t number, Scratch& scratch, SketchMemory& memory, LaneSums& check) {
  const Unit u = unit_of(s, number);
  s.begin = u.begin / kBlock;
  s.end = div_up(u.begin + u.elements, kBlock);
  const uint32_t absmax = kernels.absmax(s, scratch);
  if (absmax >= kInfBits) {  // marked: everything else is zero
    std::fill(u.side, u.side + u.side_words, 0);
    u.side[0] = kMarker;
    std::fill(scratch.codes, scratch.codes + kBlock, 0);
    for (uint64_t block = s.begin; block < s.end; ++block) store_codes(kernels, s, block, scratch.codes, check);
    keep_residuals(kernels, s);
  } else {
    Sums sums;
    kernels.sums(s, absmax, scratch, sums);
    const float rms = rms_of(absmax, sums, u.elements);
    if (hashed(*s.scheme))
      encode_hashed(kernels, s, u, absmax, rms, scratch, memory, check);
    else
      encode_tile(kernels, s, u, absmax, rms, scratch, check);
  }
  for (uint64_t w = 0; w < u.side_words; ++w) check.add_word(u.side[w], u.side_index + w);
}

const char* check_sketch(const Span& s, uint64_t number) {
  const Unit u = unit_of(s, number);
  const Scheme& scheme = *s.scheme;
  const bool marked = u.side[0] == kMarker;
  if (!marked && u.side[0] >= kInfBits) return "side";
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
    const Hash hash(s, u.buckets);
    for (uint64_t block = begin; block < end; ++block) {
      const uint64_t n = s.elements_of(block);
      load_codes(kernels, s, block * kBlock, n, scratch.codes);
      for (uint64_t i = 0; i < n; ++i) scratch.x[i] = bits_float(u.side[1 + hash(scratch.codes[i], block * kBlock + i)]);
      kernels.put(s, block, scratch.x);
    }
    return;
  }
  const double step = grid_step(u.side[0]);
  const uint16_t* means = reinterpret_cast<const uint16_t*>(u.side + 1);
  memory.means.resize(u.buckets);
  for (uint64_t b = 0; b < u.buckets; ++b) memory.means[b] = mean_value(means[b], step);
  load_codes(kernels, s, u.begin, u.elements, scratch.codes);
  uint32_t counts[kMaxClusters], digits[kMaxClusters];
  count_codes(scratch.codes, u.elements, counts);
  Ranks ranks = rank_buckets(scheme, u, counts, digits);
  for (uint64_t block = begin; block < end; ++block) {
    const uint32_t* codes = scratch.codes + (block * kBlock - u.begin);
    const uint64_t n = s.elements_of(block);
    for (uint64_t i = 0; i < n; ++i) scratch.x[i] = memory.means[ranks.next(codes[i])];
    kernels.put(s, block, scratch.x);
  }
}

}  // namespace gradwire
