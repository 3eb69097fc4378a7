// SPDX-License-Identifier: Apache-2.0
#include "message/select.h"

#include <array>

#include "message/blocks.h"

namespace gradwire {
namespace {

struct Unit {
  uint64_t begin, elements, k;  // in the piece
  uint64_t words;               // offset in the region
  bool wide;
};

Unit unit_of(const Span& s, uint64_t number) {
  const uint64_t size = unit_elements(*s.scheme, s.count), begin = number * size;
  const uint64_t elements = min_u64(size, s.count - begin);
  return {begin, elements, kept(*s.scheme, elements), number * selected_words(*s.scheme, s.count, size),
          wide_indices(*s.scheme, s.count)};
}

uint32_t index_at(const uint32_t* indices, bool wide, uint64_t j) {
  return wide ? indices[j] : (indices[j / 2] >> (j % 2 * 16)) & 0xffffu;
}

// Writes one kept element after another, in the order of their indices.
struct Writer {
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

// Calls visit(block in piece, values, elements) for the blocks of a unit; units begin at blocks.
template <class Visit>
void for_blocks(const Kernels& kernels, const Span& s, const Unit& u, float* x, Visit visit) {
  for (uint64_t block = u.begin / kBlock; block * kBlock < u.begin + u.elements; ++block)
    visit(block, kernels.stage(s, block, x), s.elements_of(block));
}

// The magnitude (bit pattern) of the k-th strongest value, and how many of exactly that magnitude are kept.
struct Threshold {
  uint32_t magnitude;
  uint64_t equals;
};
Threshold radix_threshold(const Kernels& kernels, const Span& s, const Unit& u, float* x) {
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

}  // namespace

void encode_selected(const Kernels& kernels, Span s, uint64_t number, Scratch& scratch, LaneSums& check) {
  const Unit u = unit_of(s, number);
  uint32_t* words = s.region + u.words;
  Writer write{words, words + u.k, u.wide};
  s.begin = u.begin / kBlock;
  s.end = div_up(u.begin + u.elements, kBlock);

  const bool tile = u.elements <= kTile;
  const bool direct = tile && s.dtype == DType::f32 && !s.before;
  const float* x = direct ? static_cast<const float*>(s.in) + u.begin : scratch.x;
  // absmax() uses the start of scratch.x, so it comes before the tile is staged there.
  const bool finite = kernels.absmax(s, scratch) < kInfBits;
  if (finite && tile && !direct) stage_blocks(kernels, s, s.begin, s.end, scratch.x);

  if (!finite) {
    for (uint64_t j = 0; j < u.k; ++j) write(j == 0 ? kMarker : 0, static_cast<uint32_t>(j));
    keep_residuals(kernels, s);
  } else if (tile) {
    uint32_t* chosen = scratch.codes;
    kernels.select(x, static_cast<uint32_t>(u.elements), static_cast<uint32_t>(u.k), chosen, scratch);
    for (uint64_t j = 0; j < u.k; ++j) write(float_bits(x[chosen[j]]), chosen[j]);
    if (s.before) {
      const float unscale = 1.0f / s.loss_scale;
      for (uint64_t j = 0; j < u.k; ++j) scratch.x[chosen[j]] = 0;
      for (uint64_t i = 0; i < u.elements; ++i) scratch.x[i] *= unscale;
      for (uint64_t block = s.begin; block < s.end; ++block)
        kernels.put_residual(s, block, scratch.x + (block * kBlock - u.begin));
    }
  } else {
    Threshold threshold = radix_threshold(kernels, s, u, scratch.x);
    const float unscale = 1.0f / s.loss_scale;
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
  add_words(kernels, words, selected_words(*s.scheme, s.count, u.elements), s.region_index + u.words, check);
}

const char* check_selected(const Span& s, uint64_t number) {
  const Unit u = unit_of(s, number);
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

void decode_selected(const Kernels& kernels, Span s, uint64_t number, Scratch& scratch) {
  const Unit u = unit_of(s, number);
  const uint32_t *values = s.region + u.words, *indices = values + u.k;
  const bool marked = values[0] == kMarker;
  uint64_t j = 0;
  for (uint64_t block = u.begin / kBlock; block * kBlock < u.begin + u.elements; ++block) {
    const uint64_t at = block * kBlock - u.begin, n = s.elements_of(block);
    const float fill = marked ? bits_float(kMarker) : 0.0f;
    for (uint64_t i = 0; i < n; ++i) scratch.x[i] = fill;
    if (!marked)
      for (uint32_t index; j < u.k && (index = index_at(indices, u.wide, j)) < at + n; ++j)
        scratch.x[index - at] = bits_float(values[j]);
    kernels.put(s, block, scratch.x);
  }
}

}  // namespace gradwire
