// SPDX-License-Identifier: Apache-2.0
// The operations a codec body may use, for one element at a time: the reference loop on the host, and one thread of a
// GPU. hwy_lane-inl.h gives the same words for vectors. Each is one IEEE operation or integer arithmetic modulo 2^32,
// so every lane computes the same bits; nothing here may be contracted into a fused multiply-add.
//
// F floats, U unsigned, I signed, M a mask.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/bits.h"
#include "core/random.h"

namespace gradwire {

struct ScalarLane {
  using F = float;
  using U = uint32_t;
  using I = int32_t;
  using M = bool;
  static constexpr uint32_t kWidth = 1;

  GW_HD static F set(float x) { return x; }
  GW_HD static U set_u(uint32_t x) { return x; }
  GW_HD static U iota(uint32_t from) { return from; }

  GW_HD static F add(F a, F b) { return a + b; }
  GW_HD static F sub(F a, F b) { return a - b; }
  GW_HD static F mul(F a, F b) { return a * b; }
  GW_HD static F min(F a, F b) { return a < b ? a : b; }
  GW_HD static F max(F a, F b) { return a > b ? a : b; }
  GW_HD static M less(F a, F b) { return a < b; }
  GW_HD static F select(M m, F yes, F no) { return m ? yes : no; }
  GW_HD static I round(F x) {  // to nearest even; |x| < 2^31
#if defined(__CUDA_ARCH__)
    return __float2int_rn(x);
#else
    return static_cast<I>(std::nearbyint(x));
#endif
  }

  GW_HD static U bits(F x) { return float_bits(x); }
  GW_HD static F from_bits(U x) { return bits_float(x); }
  GW_HD static U as_u(I x) { return static_cast<U>(x); }
  GW_HD static I as_i(U x) { return static_cast<I>(x); }

  GW_HD static U add_u(U a, U b) { return a + b; }
  GW_HD static U sub_u(U a, U b) { return a - b; }
  GW_HD static U mul_u(U a, U b) { return a * b; }
  GW_HD static U and_u(U a, U b) { return a & b; }
  GW_HD static U or_u(U a, U b) { return a | b; }
  GW_HD static U xor_u(U a, U b) { return a ^ b; }
  GW_HD static U max_u(U a, U b) { return a > b ? a : b; }
  GW_HD static U min_u(U a, U b) { return a < b ? a : b; }
  GW_HD static M less_u(U a, U b) { return a < b; }  // both below 2^31
  GW_HD static M not_less_u(U a, U b) { return a >= b; }
  GW_HD static M equal_u(U a, U b) { return a == b; }
  GW_HD static U select_u(M m, U yes, U no) { return m ? yes : no; }
  template <int N>
  GW_HD static U shl(U x) {
    return x << N;
  }
  template <int N>
  GW_HD static U shr(U x) {
    return x >> N;
  }

  GW_HD static U shr_by(U x, uint32_t n) { return x >> n; }
  GW_HD static U shl_by(U x, uint32_t n) { return x << n; }
  // table[index], index < kSize; the table has at least 16 floats.
  template <int kSize>
  GW_HD static F lookup(const float* table, U index) {
    return table[index];
  }

  // Memory, on the host.
  static F load(const float* p) { return *p; }
  static U load_u(const uint32_t* p) { return *p; }
  static U load_16(const uint16_t* p) { return *p; }
  static void store(F x, float* p) { *p = x; }
  static void store_u(U x, uint32_t* p) { *p = x; }
  static void store_16(U x, uint16_t* p) { *p = static_cast<uint16_t>(x); }
  static void stream(F x, float* p) { *p = x; }
  static uint32_t reduce_max(U x) { return x; }
  static uint64_t reduce_add(U x) { return x; }
  static void add_products(const uint32_t* words, uint32_t weight, uint64_t* sums) {
    *sums += uint64_t{*words} * weight;
  }
  // counts + 1 where a < b, a >= b, a == b.
  GW_HD static U count_less(U counts, F a, F b) { return counts + (a < b); }
  GW_HD static U count_not_less(U counts, F a, F b) { return counts + (a >= b); }
  GW_HD static U count_equal(U counts, U a, U b) { return counts + (a == b); }
  static size_t count(M mask) { return mask; }
  // The lanes of `mask`, moved together, to `out`; returns how many. And the reverse: floats from `from` on to the
  // lanes of `mask`.
  static size_t compress(F x, M mask, float* out) {
    *out = x;
    return mask;
  }
  static F expand(const float* from, M mask) { return mask ? *from : 0.0f; }
  // Appends the indices from + i of the lanes i of `mask`; returns how many.
  static size_t compress_indices(M mask, uint32_t from, uint32_t* out) {
    *out = from;
    return mask;
  }
};

}  // namespace gradwire
