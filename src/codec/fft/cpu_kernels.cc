// SPDX-License-Identifier: Apache-2.0
// The codec `fft` on Highway vectors, compiled once per target as cpu_vector.cc is, and the reference loop. A file of
// its own, because the transform's butterflies take a while to compile.
#include <bit>
#include <cstring>

#include "codec/fft/kernels.h"
#include "codec/target_table.h"
#include "device/lane.h"

#if !defined(GW_UNROLL)
#define GW_QUOTIENT(a, b) ((a) / (b))
#if defined(__clang__)
#define GW_UNROLL _Pragma("unroll")
#else
#define GW_UNROLL _Pragma("GCC unroll 16")
#endif
#endif

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "codec/fft/cpu_kernels.cc"
#include "codec/targets.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
HWY_BEFORE_NAMESPACE();
namespace gradwire {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;
#undef GW_BODY
#define GW_BODY HWY_INLINE
// Each of these needs the ones before it.
// clang-format off
#include "device/hwy_lane-inl.h"
#include "codec/rangefloat/range_float-inl.h"
#include "codec/fft/transform-inl.h"
#include "codec/fft/cpu-inl.h"
// clang-format on

struct FftVectorLane : VectorLane {
  using D4 = hwy::HWY_NAMESPACE::FixedTag<float, 4>;

  static HWY_INLINE void load_pairs(const float* p, F& even, F& odd) { hn::LoadInterleaved2(DF(), p, even, odd); }
  static HWY_INLINE void store_pairs(F even, F odd, float* p) { hn::StoreInterleaved2(even, odd, DF(), p); }
  static HWY_INLINE F load_reversed(const float* p) { return hn::Reverse(DF(), load(p)); }
  static HWY_INLINE uint32_t mask_bits(M mask) {
    uint8_t bytes[8] = {};
    hn::StoreMaskBits(DF(), mask, bytes);
    uint32_t bits;
    std::memcpy(&bits, bytes, sizeof bits);
    return bits;
  }

  // Lane l of rows[k] to to[16 * l + k], l < count.
  static HWY_INLINE void store_rows(const F (&rows)[16], float* to, uint32_t count) {
    const hwy::HWY_NAMESPACE::RepartitionToWide<DF> d64;
    GW_UNROLL for (uint32_t k = 0; k < 16; k += 4) {
      // Four by four within every 128 bits.
      const auto a = hn::BitCast(d64, hn::InterleaveLower(DF(), rows[k], rows[k + 1]));
      const auto b = hn::BitCast(d64, hn::InterleaveLower(DF(), rows[k + 2], rows[k + 3]));
      const auto c = hn::BitCast(d64, hn::InterleaveUpper(DF(), rows[k], rows[k + 1]));
      const auto d = hn::BitCast(d64, hn::InterleaveUpper(DF(), rows[k + 2], rows[k + 3]));
      store_blocks(hn::BitCast(DF(), hn::InterleaveLower(d64, a, b)), to + k, 0, count);
      store_blocks(hn::BitCast(DF(), hn::InterleaveUpper(d64, a, b)), to + k, 1, count);
      store_blocks(hn::BitCast(DF(), hn::InterleaveLower(d64, c, d)), to + k, 2, count);
      store_blocks(hn::BitCast(DF(), hn::InterleaveUpper(d64, c, d)), to + k, 3, count);
    }
  }

 private:
  // Block b of v belongs to lane 4 b + lane.
  template <class V>
  static HWY_INLINE void store_blocks(V v, float* to, uint32_t lane, uint32_t count) {
    constexpr uint32_t kLanes = hwy::HWY_NAMESPACE::MaxLanes(hwy::HWY_NAMESPACE::DFromV<V>());
    if constexpr (kLanes == 4) {
      if (lane < count) hn::StoreU(v, D4(), to + 16 * lane);
    } else {
      const hwy::HWY_NAMESPACE::DFromV<V> d;
      const hwy::HWY_NAMESPACE::Half<decltype(d)> half;
      store_blocks(hn::LowerHalf(half, v), to, lane, count);
      store_blocks(hn::UpperHalf(half, v), to, lane + kLanes / 2, count);
    }
  }
};

}  // namespace

FftKernels make_fft_kernels() { return FftDriver<FftVectorLane>::kernels(hwy::TargetName(HWY_TARGET)); }

}  // namespace HWY_NAMESPACE
}  // namespace gradwire
HWY_AFTER_NAMESPACE();
#endif

#if HWY_ONCE
#include <vector>

namespace gradwire {
namespace {

#undef GW_BODY
#define GW_BODY inline
// Each of these needs the ones before it.
// clang-format off
#include "codec/rangefloat/range_float-inl.h"
#include "codec/fft/transform-inl.h"
#include "codec/fft/cpu-inl.h"
// clang-format on

struct FftScalarLane : ScalarLane {
  static void load_pairs(const float* p, F& even, F& odd) {
    even = p[0];
    odd = p[1];
  }
  static void store_pairs(F even, F odd, float* p) {
    p[0] = even;
    p[1] = odd;
  }
  static F load_reversed(const float* p) { return *p; }
  static uint32_t mask_bits(M mask) { return mask; }
  static void store_rows(const F (&rows)[16], float* to, uint32_t) { std::memcpy(to, rows, sizeof rows); }
};

}  // namespace

const FftKernels& fft_kernels(const Kernels& kernels) {
  static const std::vector<FftKernels> all =
      target_tables<FftKernels>({GW_EACH_TARGET(make_fft_kernels)}, {FftDriver<FftScalarLane>::kernels("scalar")});
  return table_of_target(all, kernels);
}

}  // namespace gradwire
#endif  // HWY_ONCE
