// SPDX-License-Identifier: Apache-2.0
#include "codec/topk/packed.h"

#include <algorithm>
#include <cstring>

#include "codec/topk/kernels.h"
#include "device/params.h"

namespace gradwire {
namespace {

constexpr uint32_t kLargestBits = kInfBits - 1;  // of a finite float

// The nearest finite bf16, ties to even: a value that would become an infinity takes the largest one.
uint32_t nearest_bf16(float x) {
  const uint32_t h = f32_to_bf16(x);
  return (h & 0x7fffu) == 0x7f80u ? h - 1 : h;
}

// The magnitudes that codes of `bits` bits stand for: squares are what the tail of a distribution wants, many levels
// where most of the kept values are and few towards the largest.
struct LevelTable {
  float of[128];
  LevelTable(uint32_t bits, const uint32_t* scales) {
    const uint32_t top = (1u << (bits - 1)) - 1;
    const float low = bits_float(scales[0]);
    of[0] = low;
    for (uint32_t i = 1; i <= top; ++i) {
      const float share = static_cast<float>(i * i) / static_cast<float>(top * top);
      const float rise = bits_float(scales[1]) * share;
      of[i] = std::min(low + rise, bits_float(kLargestBits));
    }
  }
  float value(uint32_t code, uint32_t bits) const {
    const uint32_t sign = code >> (bits - 1);
    return bits_float(float_bits(of[code & ((1u << (bits - 1)) - 1)]) | sign << 31);
  }
};

bool any(const uint32_t* words, uint64_t count) {
  return std::any_of(words, words + count, [](uint32_t word) { return word != 0; });
}

uint32_t first_marker(uint32_t bits) { return bits == 16 ? kMarkerBf16 : kMarker; }
// The word that a marker stands in, less the neighbour that shares it.
uint32_t first_word(const PackedUnit& u) {
  return u.bits == 16 ? u.values[0] & 0xffffu : u.bits == 32 ? u.values[0] : u.scales[0];
}
bool marked(const PackedUnit& u) { return first_word(u) == first_marker(u.bits); }

}  // namespace

void write_places(const PlaceWords& p, const uint32_t* indices, uint32_t* words) {
  if (p.kind == kRawPlaces) {
    for (uint64_t j = 0; j + 1 < p.k; j += 2) words[j / 2] = indices[j] | indices[j + 1] << 16;
    if (p.k % 2) words[p.k / 2] = indices[p.k - 1];
    return;
  }
  if (p.kind == kBitmapPlaces) {
    std::fill(words, words + div_up(p.elements, 32), 0);
    for (uint64_t j = 0; j < p.k; ++j) words[indices[j] / 32] |= 1u << (indices[j] % 32);
    return;
  }
  const uint32_t low = low_place_bits(p.elements, p.k), mask = (1u << low) - 1;
  uint64_t buffer = 0, filled = 0;
  uint32_t* to = words;
  for (uint64_t j = 0; j < p.k; ++j) {
    buffer |= uint64_t{indices[j] & mask} << filled;
    filled += low;
    if (filled >= 32) {
      *to++ = static_cast<uint32_t>(buffer);
      buffer >>= 32;
      filled -= 32;
    }
  }
  if (filled) *to++ = static_cast<uint32_t>(buffer);
  std::fill(to, to + div_up(high_place_bits(p.elements, p.k), 32), 0);
  for (uint64_t j = 0; j < p.k; ++j) {
    const uint64_t bit = (indices[j] >> low) + j;
    to[bit / 32] |= 1u << (bit % 32);
  }
}

PackedUnit::PackedUnit(const Scheme& s, uint64_t elements, uint32_t* words)
    : bits(s.bits),
      k(topk_kept(s, elements)),
      scale_count(topk_scale_words(s)),
      value_count(topk_value_words(s, k)),
      place_count(topk_place_words(s, elements, elements, k)),
      scales(words),
      values(words + scale_count),
      places(values + value_count),
      form{s.steps, elements, k} {}

void encode_packed(const Kernels& kernels, const PackedUnit& u, const float* x, uint32_t absmax,
                   const uint32_t* indices, float* sent, uint32_t* codes) {
  write_places(u.form, indices, u.places);
  if (u.bits == 32) {
    for (uint64_t j = 0; j < u.k; ++j) u.values[j] = float_bits(sent[j] = x[indices[j]]);
    return;
  }
  if (u.bits == 16) {
    u.values[u.value_count - 1] = 0;
    for (uint64_t j = 0; j < u.k; ++j) {
      const uint32_t half = nearest_bf16(x[indices[j]]);
      sent[j] = bits_float(half << 16);
      u.values[j / 2] = j % 2 ? u.values[j / 2] | half << 16 : half;
    }
    return;
  }
  topk_kernels(kernels).level_codes(x, indices, static_cast<uint32_t>(u.k), u.bits, absmax, u.scales, sent, codes);
  kernels.pack_tail(codes, u.k, static_cast<int>(u.bits), u.values);
  const LevelTable levels(u.bits, u.scales);
  for (uint64_t j = 0; j < u.k; ++j) sent[j] = levels.value(codes[j], u.bits);
}

void encode_packed_marked(const PackedUnit& u, uint32_t* indices) {
  for (uint64_t j = 0; j < u.k; ++j) indices[j] = static_cast<uint32_t>(j);
  std::fill(u.scales, u.places, 0);
  u.scales[0] = first_marker(u.bits);  // or the first value, where there are no scales
  write_places(u.form, indices, u.places);
}

const char* packed_problem(const PackedUnit& u) {
  const bool is_marked = marked(u);
  for (uint64_t i = is_marked; i < u.scale_count; ++i)
    if (is_marked ? u.scales[i] != 0 : u.scales[i] >= kInfBits) return "scales";
  if (is_marked) {
    const uint32_t rest = u.bits == 16 ? u.values[0] >> 16 : u.bits == 32 ? 0 : u.values[0];
    if (rest || any(u.values + 1, u.value_count - 1)) return "values";
  } else if (u.bits == 32) {
    for (uint64_t j = 0; j < u.k; ++j)
      if (!finite_bits(u.values[j])) return "values";
  } else if (u.bits == 16) {
    for (uint64_t j = 0; j < u.k; ++j)
      if ((u.values[j / 2] >> (j % 2 * 16) & 0x7fffu) >= 0x7f80u) return "values";
  }
  const uint64_t used = u.k * u.bits % 32;
  if (used && u.values[u.value_count - 1] >> used) return "padding";
  bool as_marked = true;
  if (!for_places(u.form, u.places, [&](uint64_t j, uint32_t index) { as_marked &= index == j; })) return "indices";
  return is_marked && !as_marked ? "indices" : nullptr;
}

bool decode_packed(const Kernels& kernels, const PackedUnit& u, float* values, uint32_t* indices) {
  if (marked(u)) return true;
  if (u.bits == 32) {
    std::memcpy(values, u.values, u.k * sizeof(float));
  } else if (u.bits == 16) {
    for (uint64_t j = 0; j < u.k; ++j) values[j] = bits_float((u.values[j / 2] >> (j % 2 * 16) & 0xffffu) << 16);
  } else {
    kernels.unpack_tail(u.values, u.k, static_cast<int>(u.bits), indices);
    const LevelTable levels(u.bits, u.scales);
    for (uint64_t j = 0; j < u.k; ++j) values[j] = levels.value(indices[j], u.bits);
  }
  for_places(u.form, u.places, [&](uint64_t j, uint32_t index) { indices[j] = index; });
  return false;
}

}  // namespace gradwire
