// SPDX-License-Identifier: Apache-2.0
// casq's units on the CPU: what tiles and whole tensors have in common, the checks of a message, and the codec's
// UnitOps.
#include "codec/casq/cpu.h"

#include <algorithm>

#include "codec/blocks.h"
#include "codec/casq/cpu_unit.h"

#if defined(GRADWIRE_HAS_CUDA)
#include "codec/casq/cuda.h"
#endif

namespace gradwire {

CasqUnit casq_unit(const Span& s, uint64_t number) {
  const Scheme& scheme = *s.scheme;
  const uint64_t size = unit_elements(scheme, s.count), begin = number * size, n = min_u64(size, s.count - begin);
  const uint64_t at = scales_offset(scheme, s.count) + number * casq_table_words(scheme, size);
  return {begin, n, buckets_of(scheme, n), s.region + at, s.region_index + at, casq_table_words(scheme, n)};
}

void store_casq_codes(const Kernels& kernels, const Span& s, uint64_t block, const uint32_t* codes, LaneSums& check) {
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

void load_casq_codes(const Kernels& kernels, const Span& s, uint64_t begin, uint64_t n, uint32_t* codes) {
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

namespace {

CasqThread this_thread(const Kernels& kernels, Scratch& scratch) {
  // Of the thread and not of a runner: a collective has a runner for every peer and bucket.
  static thread_local CasqMemory memory;
  return {kernels, casq_kernels(kernels), scratch, memory};
}

// The values of a tile with feedback added, and zeros behind them to the end of a block: the input itself where nothing
// has to be done, else scratch.x.
const float* load_tile(const Kernels& kernels, const Span& s, const CasqUnit& u, Scratch& scratch) {
  if (s.dtype == DType::f32 && !s.before && u.elements % kBlock == 0) return static_cast<const float*>(s.in) + u.begin;
  load_blocks(kernels, s, s.begin, s.end, scratch.x);
  return scratch.x;
}

// A marked unit: its first word says so, and everything else is zero.
void encode_marked(const Kernels& kernels, const Span& s, const CasqUnit& u, Scratch& scratch, LaneSums& check) {
  std::fill(u.table, u.table + u.table_words, 0);
  u.table[0] = kMarker;
  std::fill(scratch.codes, scratch.codes + kBlock, 0);
  for (uint64_t block = s.begin; block < s.end; ++block) store_casq_codes(kernels, s, block, scratch.codes, check);
  keep_residuals(kernels, s);
}

void encode_casq(const Kernels& kernels, const Span& span, uint64_t number, Scratch& scratch, LaneSums& check) {
  Span s = span;
  const CasqUnit u = casq_unit(s, number);
  s.begin = u.begin / kBlock;
  s.end = div_up(u.begin + u.elements, kBlock);
  // The statistics are taken of the unit as it is, or of a tile that is loaded once for all passes.
  Span values = s;
  const float* x = nullptr;
  if (!hashed(*s.scheme)) {
    x = load_tile(kernels, s, u, scratch);
    values = {.scheme = s.scheme, .count = (s.end - s.begin) * kBlock, .begin = 0, .end = s.end - s.begin, .in = x};
  }
  const uint32_t absmax = kernels.absmax(values, scratch);
  if (absmax >= kInfBits) {
    encode_marked(kernels, s, u, scratch, check);
  } else {
    Sums sums;
    kernels.sums(values, absmax, scratch, sums);
    const float rms = rms_of(absmax, sums, u.elements);
    float thresholds[kMaxClusters];
    for (uint32_t i = 0; i + 1 < clusters_of(*s.scheme); ++i) thresholds[i] = threshold_of(*s.scheme, rms, i);
    if (hashed(*s.scheme))
      encode_casq_hashed(this_thread(kernels, scratch), s, u, absmax, thresholds, check);
    else
      encode_casq_tile(this_thread(kernels, scratch), s, u, x, absmax, thresholds, check);
  }
  add_words(kernels, u.table, u.table_words, u.table_index, check);
}

void decode_casq(const Kernels& kernels, const Span& s, uint64_t number, Scratch& scratch) {
  const CasqUnit u = casq_unit(s, number);
  if (u.table[0] == kMarker) {
    std::fill(scratch.x, scratch.x + kBlock, bits_float(kMarker));
    for (uint64_t block = u.begin / kBlock; block < div_up(u.begin + u.elements, kBlock); ++block)
      kernels.put(s, block, scratch.x);
  } else if (hashed(*s.scheme)) {
    decode_casq_hashed(this_thread(kernels, scratch), s, u);
  } else {
    decode_casq_tile(this_thread(kernels, scratch), s, u);
  }
}

const char* bad_field(const Scheme& scheme, const CasqUnit& u) {
  const bool marked = u.table[0] == kMarker;
  if (!marked && u.table[0] >= kInfBits) return "scales";
  if (marked && std::any_of(u.table + 1, u.table + u.table_words, [](uint32_t w) { return w != 0; })) return "buckets";
  if (hashed(scheme)) {
    for (uint64_t b = 0; b < u.buckets; ++b)
      if (!finite_bits(u.table[1 + b])) return "buckets";
    return nullptr;
  }
  const uint16_t* means = reinterpret_cast<const uint16_t*>(u.table + 1);
  for (uint64_t b = 0; b < u.buckets; ++b)
    if (!mean_is_valid(means[b])) return "buckets";
  return u.buckets % 2 && means[u.buckets] != 0 ? "padding" : nullptr;
}

}  // namespace

UnitProblem check_casq(const Span& s, uint64_t unit) { return {bad_field(*s.scheme, casq_unit(s, unit)), unit}; }

const UnitOps kCasqUnits = {
    .codes_in_blocks = true,
    .words = casq_region_words,
    .tasks = unit_count,
    .encode = encode_casq,
    .check = check_casq,
    .decode = decode_casq,
#if defined(GRADWIRE_HAS_CUDA)
    .cuda = &kCasqCudaUnits,
#endif
};

}  // namespace gradwire
