// SPDX-License-Identifier: Apache-2.0
// topk's units on the CPU. The strongest values of a tile are chosen by a vector kernel; those of a whole tensor by
// counting the magnitudes digit by digit, in three passes and without further memory. What is written of f32 values
// with raw indices stands here, all other forms in packed.h.
#include "codec/topk/cpu.h"

#include <array>
#include <new>

#include "codec/blocks.h"
#include "codec/topk/kernels.h"
#include "codec/topk/layout.h"
#include "codec/topk/packed.h"

#if defined(GRADWIRE_HAS_CUDA)
#include "codec/topk/cuda.h"
#endif

namespace gradwire {
namespace {

struct TopkUnit {
  uint64_t begin, elements, k;  // begin: index of its first element in the span
  uint64_t words;               // offset in the region
  bool wide;
};

TopkUnit topk_unit(const Span& s, uint64_t number) {
  const uint64_t size = unit_elements(*s.scheme, s.count), begin = number * size;
  const uint64_t elements = min_u64(size, s.count - begin);
  return {begin, elements, topk_kept(*s.scheme, elements), number * topk_unit_words(*s.scheme, s.count, size),
          wide_indices(*s.scheme, s.count)};
}

uint32_t index_at(const uint32_t* indices, bool wide, uint64_t j) {
  return wide ? indices[j] : (indices[j / 2] >> (j % 2 * 16)) & 0xffffu;
}

// Writes one kept element after another, in the order of their indices.
struct KeptWriter {
  uint32_t* values;
  uint32_t* indices;
  bool wide;
  uint64_t j = 0;
  void operator()(uint32_t value, uint32_t index) {
    values[j] = value;
    if (wide)
      indices[j] = index;
    else if (j % 2 == 0)
      indices[j / 2] = index;
    else
      indices[j / 2] |= index << 16;
    ++j;
  }
};

// Calls visit(block, values, elements) for the blocks of a unit; units begin at blocks.
template <class Visit>
void for_blocks(const Kernels& kernels, const Span& s, const TopkUnit& u, float* x, Visit visit) {
  for (uint64_t block = u.begin / kBlock; block * kBlock < u.begin + u.elements; ++block)
    visit(block, kernels.load(s, block, x), s.elements_of(block));
}

// The magnitude (bit pattern) of the k-th strongest value, and how many of exactly that magnitude are kept.
struct KeptThreshold {
  uint32_t magnitude;
  uint64_t equals;
};
KeptThreshold radix_threshold(const Kernels& kernels, const Span& s, const TopkUnit& u, float* x) {
  // The magnitude is found from its highest digit on. `prefix` are the digits that are known, `known` the bits they
  // take, and `left` is how many of the values with that prefix are still to be kept.
  uint32_t prefix = 0, known = 0;
  uint64_t left = u.k;
  for (const int shift : {20, 10, 0}) {
    const uint32_t width = shift == 20 ? 11 : 10;
    std::array<uint64_t, 2048> histogram{};
    for_blocks(kernels, s, u, x, [&](uint64_t, const float* values, uint64_t n) {
      for (uint64_t i = 0; i < n; ++i) {
        const uint32_t magnitude = float_bits(values[i]) & 0x7fffffffu;
        if ((magnitude & known) == prefix) ++histogram[(magnitude >> shift) & ((1u << width) - 1)];
      }
    });
    uint32_t digit = (1u << width) - 1;
    while (histogram[digit] < left) left -= histogram[digit--];
    prefix |= digit << shift;
    known |= ((1u << width) - 1) << shift;
  }
  return {prefix, left};
}

// The keys of the choice are of no use once it is made. Their memory then holds the values of what was chosen, or of
// what was received, and room for their codes.
struct KeptMemory {
  float* values;
  uint32_t* codes;
  explicit KeptMemory(Scratch& scratch)
      : values(new (scratch.keys) float[kTile]), codes(new (scratch.keys + kTile / 2) uint32_t[kTile]) {}
};

void encode_marked(const Kernels& kernels, const Span& s, const TopkUnit& u, uint32_t* words, Scratch& scratch) {
  KeptWriter write{words, words + u.k, u.wide};
  if (topk_packed(*s.scheme))
    encode_packed_marked(PackedUnit(*s.scheme, u.elements, words), scratch.codes);
  else
    for (uint64_t j = 0; j < u.k; ++j) write(j == 0 ? kMarker : 0, static_cast<uint32_t>(j));
  keep_residuals(kernels, s);
}

void encode_tile(const Kernels& kernels, const Span& s, const TopkUnit& u, uint32_t* words, uint32_t absmax,
                 Scratch& scratch) {
  const float* x = scratch.x;
  if (s.dtype == DType::f32 && !s.before)
    x = static_cast<const float*>(s.in) + u.begin;
  else
    load_blocks(kernels, s, s.begin, s.end, scratch.x);
  uint32_t* chosen = scratch.codes;
  topk_kernels(kernels).select(x, static_cast<uint32_t>(u.elements), static_cast<uint32_t>(u.k), chosen, scratch);
  const float* sent = nullptr;  // null: the values themselves
  if (topk_packed(*s.scheme)) {
    const KeptMemory kept(scratch);
    encode_packed(kernels, PackedUnit(*s.scheme, u.elements, words), x, absmax, chosen, kept.values, kept.codes);
    sent = kept.values;
  } else {
    KeptWriter write{words, words + u.k, u.wide};
    for (uint64_t j = 0; j < u.k; ++j) write(float_bits(x[chosen[j]]), chosen[j]);
  }
  if (!s.before) return;
  // The residual is what is left when what is sent is taken away: of the chosen values nothing, or what packing cost.
  const float unscale = s.unscale;
  for (uint64_t j = 0; j < u.k; ++j) scratch.x[chosen[j]] = sent ? x[chosen[j]] - sent[j] : 0;
  for (uint64_t i = 0; i < u.elements; ++i) scratch.x[i] *= unscale;
  for (uint64_t block = s.begin; block < s.end; ++block)
    kernels.put_residual(s, block, scratch.x + (block * kBlock - u.begin));
}

void encode_whole(const Kernels& kernels, const Span& s, const TopkUnit& u, KeptWriter write, Scratch& scratch) {
  KeptThreshold threshold = radix_threshold(kernels, s, u, scratch.x);
  const float unscale = s.unscale;
  for_blocks(kernels, s, u, scratch.x, [&](uint64_t block, const float* values, uint64_t n) {
    float* rest = scratch.x + kBlock;
    for (uint64_t i = 0; i < n; ++i) {
      const uint32_t bits = float_bits(values[i]), magnitude = bits & 0x7fffffffu;
      const bool keep = magnitude > threshold.magnitude || (magnitude == threshold.magnitude && threshold.equals > 0);
      if (magnitude == threshold.magnitude && keep) --threshold.equals;
      if (keep) write(bits, static_cast<uint32_t>(block * kBlock + i - u.begin));
      rest[i] = keep ? 0.0f : values[i] * unscale;
    }
    if (s.before) kernels.put_residual(s, block, rest);
  });
}

void encode_topk(const Kernels& kernels, const Span& span, uint64_t number, Scratch& scratch, LaneSums& check) {
  Span s = span;
  const TopkUnit u = topk_unit(s, number);
  s.begin = u.begin / kBlock;
  s.end = div_up(u.begin + u.elements, kBlock);
  uint32_t* words = s.region + u.words;
  const uint32_t absmax = kernels.absmax(s, scratch);
  if (absmax >= kInfBits)
    encode_marked(kernels, s, u, words, scratch);
  else if (u.elements <= kTile)
    encode_tile(kernels, s, u, words, absmax, scratch);
  else
    encode_whole(kernels, s, u, {words, words + u.k, u.wide}, scratch);
  add_words(kernels, words, topk_unit_words(*s.scheme, s.count, u.elements), s.region_index + u.words, check);
}

const char* bad_field(const Span& s, const TopkUnit& u) {
  if (topk_packed(*s.scheme)) return packed_problem(PackedUnit(*s.scheme, u.elements, s.region + u.words));
  const uint32_t *values = s.region + u.words, *indices = values + u.k;
  const bool marked = values[0] == kMarker;
  for (uint64_t j = 0; j < u.k; ++j) {
    if (marked ? (j > 0 && values[j] != 0) : !finite_bits(values[j])) return "values";
    const uint32_t index = index_at(indices, u.wide, j);
    if (marked ? index != j : index >= u.elements || (j > 0 && index <= index_at(indices, u.wide, j - 1)))
      return "indices";
  }
  if (!u.wide && u.k % 2 && indices[u.k / 2] >> 16) return "indices";  // padding
  return nullptr;
}

UnitProblem check_topk(const Span& s, uint64_t number) { return {bad_field(s, topk_unit(s, number)), number}; }

void decode_topk(const Kernels& kernels, const Span& s, uint64_t number, Scratch& scratch) {
  const TopkUnit u = topk_unit(s, number);
  // Values as patterns, with raw indices where they stand in the message; of packed units as they are decoded.
  const uint32_t *values = s.region + u.words, *indices = values + u.k;
  const float* kept = nullptr;
  bool marked = false;
  if (topk_packed(*s.scheme)) {
    const KeptMemory memory(scratch);
    marked = decode_packed(kernels, PackedUnit(*s.scheme, u.elements, s.region + u.words), memory.values, memory.codes);
    kept = memory.values;
    indices = memory.codes;
  } else {
    marked = values[0] == kMarker;
  }
  const bool wide = u.wide || kept;
  uint64_t j = 0;
  for (uint64_t block = u.begin / kBlock; block * kBlock < u.begin + u.elements; ++block) {
    const uint64_t at = block * kBlock - u.begin, n = s.elements_of(block);
    const float fill = marked ? bits_float(kMarker) : 0.0f;
    for (uint64_t i = 0; i < n; ++i) scratch.x[i] = fill;
    if (!marked)
      for (uint32_t index; j < u.k && (index = index_at(indices, wide, j)) < at + n; ++j)
        scratch.x[index - at] = kept ? kept[j] : bits_float(values[j]);
    kernels.put(s, block, scratch.x);
  }
}

}  // namespace

const UnitOps kTopkUnits = {
    .words = topk_region_words,
    .tasks = unit_count,
    .encode = encode_topk,
    .check = check_topk,
    .decode = decode_topk,
#if defined(GRADWIRE_HAS_CUDA)
    .cuda = &kTopkCudaUnits,
#endif
};

}  // namespace gradwire
