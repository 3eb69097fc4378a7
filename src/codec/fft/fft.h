// SPDX-License-Identifier: Apache-2.0
// The codec `fft` as plain data: what a unit of it is, how many words it takes, and how its transform is cut in passes.
// Host and GPU read this alike.
//
// A unit is a chunk of `size` reals (a power of two; the last chunk of a tensor is padded with zeros to a size of its
// own). Its real transform has size / 2 bins: bin 0 holds the two real ones (constant and alternating) as its parts,
// bin j the complex number j. The strongest of them travel:
//
//   [bitmap: bin j is bit j % 32 of word j / 32]
//   [parts of the kept bins, re before im, in codes of `bits` bits]
//   [scale, f32]
//
// The transform of size / 2 complex numbers runs in two or three passes (Stockham: no reordering), the first of radix
// 16, so that the numbers of 16 neighbours lie together from then on, whatever the vector's width. Every pass
// multiplies what it has by numbers of one table. Which operation meets which operands is the same everywhere, and so
// are the bytes.
#pragma once

#include <bit>
#include <cstdint>

#include "codec/rangefloat/range_float.h"
#include "core/bits.h"
#include "device/scheme.h"

namespace gradwire {

struct FftScheme {
  uint32_t chunk = 1024;  // reals: a power of two, 256 to 4096
  double keep = 1;        // the share of the bins that is kept: 1 - theta
  uint8_t bits = 10;      // of a code: 4 to 16; 32: the parts as f32
  uint8_t mantissa = 5;   // bits of the codes' mantissa, below `bits`
  bool truncate = false;  // cut mantissas off instead of rounding
};

GW_HD inline FftScheme fft_scheme(const Scheme& s) {
  return {s.unit, s.ratio, s.bits, static_cast<uint8_t>(s.steps), s.truncate};
}

inline constexpr uint32_t kFftLeastChunk = 256, kFftMostChunk = 4096;
inline constexpr uint32_t kFftLeastSize = 64;  // of a padded last chunk

// --- layout ------------------------------------------------------------------------------------------------------

GW_HD constexpr uint32_t fft_size(uint32_t chunk, uint64_t elements) {
  if (elements >= chunk) return chunk;
  uint32_t size = kFftLeastSize;
  while (size < elements) size *= 2;
  return size;
}

// Bins that are kept: the nearest integer to the share, at least one.
GW_HD inline uint32_t fft_kept(const FftScheme& s, uint32_t bins) {
  const double want = s.keep * static_cast<double>(bins) + 0.5;
  if (!(want >= 1)) return 1;
  return want >= static_cast<double>(bins) ? bins : static_cast<uint32_t>(want);
}
GW_HD inline uint32_t fft_code_words(const FftScheme& s, uint32_t kept) { return (2 * kept * s.bits + 31) / 32; }
GW_HD inline uint32_t fft_size_words(const FftScheme& s, uint32_t size) {
  return size / 64 + fft_code_words(s, fft_kept(s, size / 2)) + 1;
}
GW_HD inline uint64_t fft_unit_words(const FftScheme& s, uint64_t elements) {
  return elements == 0 ? 0 : fft_size_words(s, fft_size(s.chunk, elements));
}
GW_HD inline uint64_t fft_region_words(const FftScheme& s, uint64_t count) {
  return count / s.chunk * fft_unit_words(s, s.chunk) + fft_unit_words(s, count % s.chunk);
}
GW_HD inline uint64_t fft_units(const FftScheme& s, uint64_t count) { return count / s.chunk + (count % s.chunk != 0); }

// --- passes and their table --------------------------------------------------------------------------------------

inline constexpr uint32_t kFftSizes = 7;  // 32 to 2048 complex numbers
inline constexpr uint32_t kFftMostPasses = 3;

struct FftPlan {
  uint32_t bins = 0;  // complex numbers
  uint32_t passes = 0;
  uint32_t radix[kFftMostPasses] = {};
  uint32_t at[kFftMostPasses] = {};  // entries of the table that the pass multiplies by: [radix - 1][left / radix]
  uint32_t split = 0;                // [bins] of cos and sin of 2 pi j / (2 bins), between complex and real
  uint32_t end = 0;
};

GW_HD constexpr FftPlan fft_plan(uint32_t bins) {
  FftPlan plan;
  for (uint32_t m = 32; m <= bins; m *= 2) {
    const uint32_t begin = plan.end;
    plan = FftPlan{};
    plan.bins = m;
    plan.passes = m <= 256 ? 2 : 3;
    plan.radix[0] = 16;
    plan.radix[1] = m <= 256 ? m / 16 : m == 512 ? 8 : 16;
    plan.radix[2] = m <= 256 ? 0 : m == 2048 ? 8 : 4;
    uint32_t at = begin, left = m;
    for (uint32_t i = 0; i + 1 < plan.passes; ++i) {
      plan.at[i] = at;
      at += (plan.radix[i] - 1) * (left / plan.radix[i]);
      left /= plan.radix[i];
    }
    plan.split = at;
    plan.end = at + m;
  }
  return plan;
}

inline constexpr uint32_t kFftEntries = fft_plan(2048).end;

struct FftTable {
  // Entry e is re[e] + i im[e]: powers of exp(-2 pi i / left) in the passes; (cos, sin) for the split. Vectors may read
  // past the end.
  alignas(64) float re[kFftEntries + 16], im[kFftEntries + 16];
};
const FftTable& fft_table();                // computed once, in double, without the C library's sine
const FftPlan& fft_plan_of(uint32_t bins);  // as fft_plan(), looked up

GW_HD inline double fft_power_of_two(int exponent) {  // of a normal double
  const uint64_t bits = static_cast<uint64_t>(1023 + exponent) << 52;
#if defined(__CUDA_ARCH__)
  return __longlong_as_double(static_cast<long long>(bits));
#else
  return std::bit_cast<double>(bits);
#endif
}

// The floats of the kept parts, which are on [-1, 1].
GW_HD inline RangeFloat range_float_of(const FftScheme& s) {
  return s.bits == 32 ? RangeFloat{} : range_float_below(s.bits, s.mantissa, 1.0f, s.truncate);
}

}  // namespace gradwire
