// SPDX-License-Identifier: Apache-2.0
#include "codec/topk/packed.h"

#include <algorithm>
#include <cstring>

#include "codec/topk/kernels.h"
#include "codec/topk/level_fit.h"
#include "device/params.h"

namespace gradwire {
namespace {

// The magnitudes that the levels of a unit stand for.
struct LevelTable {
  float of[128];
  LevelTable(const PackedUnit& u) {
    const float low = bits_float(u.scales[0]), rise = u.bits > 1 ? bits_float(u.scales[1]) : 0.0f;
    for (uint32_t i = 0; i <= u.top(); ++i) of[i] = level_magnitude(i, u.top(), low, rise);
  }
};

bool any(const uint32_t* words, uint64_t count) {
  return std::any_of(words, words + count, [](uint32_t word) { return word != 0; });
}

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
  const LevelTable levels(u);
  for (uint64_t j = 0; j < u.k; ++j) sent[j] = level_value(levels.of, codes[j], u.bits);
}

void encode_packed_marked(const PackedUnit& u, uint32_t* indices) {
  for (uint64_t j = 0; j < u.k; ++j) indices[j] = static_cast<uint32_t>(j);
  std::fill(u.scales, u.places, 0);
  u.scales[0] = u.marker();  // or the first value, where there are no scales
  write_places(u.form, indices, u.places);
}

const char* packed_problem(const PackedUnit& u) {
  const bool is_marked = u.marked();
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
  if (u.marked()) return true;
  if (u.bits == 32) {
    std::memcpy(values, u.values, u.k * sizeof(float));
  } else if (u.bits == 16) {
    for (uint64_t j = 0; j < u.k; ++j) values[j] = bits_float((u.values[j / 2] >> (j % 2 * 16) & 0xffffu) << 16);
  } else {
    kernels.unpack_tail(u.values, u.k, static_cast<int>(u.bits), indices);
    const LevelTable levels(u);
    for (uint64_t j = 0; j < u.k; ++j) values[j] = level_value(levels.of, indices[j], u.bits);
  }
  for_places(u.form, u.places, [&](uint64_t j, uint32_t index) { indices[j] = index; });
  return false;
}

}  // namespace gradwire
