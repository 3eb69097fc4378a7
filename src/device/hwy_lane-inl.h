// SPDX-License-Identifier: Apache-2.0
// The words of lane.h for Highway vectors. Included once per target, inside the target's namespace; no include guard.
// At most 16 lanes a vector, so that a row of 32 is a whole number of vectors.

struct VectorLane {
  using DF = hwy::HWY_NAMESPACE::CappedTag<float, 16>;
  using DU = hwy::HWY_NAMESPACE::CappedTag<uint32_t, 16>;
  using DI = hwy::HWY_NAMESPACE::CappedTag<int32_t, 16>;
  using F = hwy::HWY_NAMESPACE::Vec<DF>;
  using U = hwy::HWY_NAMESPACE::Vec<DU>;
  using I = hwy::HWY_NAMESPACE::Vec<DI>;
  using M = hwy::HWY_NAMESPACE::Mask<DF>;
  static constexpr uint32_t kWidth = hwy::HWY_NAMESPACE::MaxLanes(DF());

  static HWY_INLINE F set(float x) { return hn::Set(DF(), x); }
  static HWY_INLINE U set_u(uint32_t x) { return hn::Set(DU(), x); }
  static HWY_INLINE U iota(uint32_t from) { return hn::Iota(DU(), from); }

  static HWY_INLINE F add(F a, F b) { return hn::Add(a, b); }
  static HWY_INLINE F sub(F a, F b) { return hn::Sub(a, b); }
  static HWY_INLINE F mul(F a, F b) { return hn::Mul(a, b); }
  static HWY_INLINE F min(F a, F b) { return hn::Min(a, b); }
  static HWY_INLINE F max(F a, F b) { return hn::Max(a, b); }
  static HWY_INLINE M less(F a, F b) { return hn::Lt(a, b); }
  static HWY_INLINE F select(M m, F yes, F no) { return hn::IfThenElse(m, yes, no); }
  static HWY_INLINE I round(F x) {
    // Highway's NearestInt also repairs values beyond 2^31, which bodies never produce.
#if HWY_TARGET == HWY_AVX2
    return I{_mm256_cvtps_epi32(x.raw)};
#elif HWY_TARGET == HWY_AVX3
    return I{_mm512_cvtps_epi32(x.raw)};
#else
    return hn::NearestInt(x);
#endif
  }

  static HWY_INLINE U bits(F x) { return hn::BitCast(DU(), x); }
  static HWY_INLINE F from_bits(U x) { return hn::BitCast(DF(), x); }
  static HWY_INLINE U as_u(I x) { return hn::BitCast(DU(), x); }
  static HWY_INLINE I as_i(U x) { return hn::BitCast(DI(), x); }

  static HWY_INLINE U add_u(U a, U b) { return hn::Add(a, b); }
  static HWY_INLINE U sub_u(U a, U b) { return hn::Sub(a, b); }
  static HWY_INLINE U mul_u(U a, U b) { return hn::Mul(a, b); }
  static HWY_INLINE U and_u(U a, U b) { return hn::And(a, b); }
  static HWY_INLINE U or_u(U a, U b) { return hn::Or(a, b); }
  static HWY_INLINE U xor_u(U a, U b) { return hn::Xor(a, b); }
  static HWY_INLINE U max_u(U a, U b) { return hn::Max(a, b); }
  static HWY_INLINE U min_u(U a, U b) { return hn::Min(a, b); }
  static HWY_INLINE M less_u(U a, U b) { return hn::RebindMask(DF(), hn::Lt(as_i(a), as_i(b))); }
  static HWY_INLINE M not_less_u(U a, U b) { return hn::RebindMask(DF(), hn::Not(hn::Lt(as_i(a), as_i(b)))); }
  static HWY_INLINE M equal_u(U a, U b) { return hn::RebindMask(DF(), hn::Eq(a, b)); }
  static HWY_INLINE U select_u(M m, U yes, U no) { return hn::IfThenElse(hn::RebindMask(DU(), m), yes, no); }
  template <int N>
  static HWY_INLINE U shl(U x) {
    return hn::ShiftLeft<N>(x);
  }
  template <int N>
  static HWY_INLINE U shr(U x) {
    return hn::ShiftRight<N>(x);
  }

  static HWY_INLINE U shr_by(U x, uint32_t n) { return hn::ShiftRightSame(x, static_cast<int>(n)); }
  static HWY_INLINE U shl_by(U x, uint32_t n) { return hn::ShiftLeftSame(x, static_cast<int>(n)); }
  // table[index], index < kSize; the table has at least 16 floats. Tables of one or two vectors stay in registers.
  template <int kSize>
  static HWY_INLINE F lookup(const float* table, U index) {
    if constexpr (kSize <= static_cast<int>(kWidth)) {
      return hn::TableLookupLanes(load(table), hn::IndicesFromVec(DF(), index));
    } else if constexpr (kSize == 2 * static_cast<int>(kWidth)) {
      const U low = and_u(index, set_u(kWidth - 1));
      const auto lanes = hn::IndicesFromVec(DF(), low);
      return select(less_u(index, set_u(kWidth)), hn::TableLookupLanes(load(table), lanes), hn::TableLookupLanes(load(table + kWidth), lanes));
    } else {
      return hn::GatherIndex(DF(), table, as_i(index));
    }
  }

  // Memory. Pointers need no alignment, except for stream().
  static HWY_INLINE F load(const float* p) { return hn::LoadU(DF(), p); }
  static HWY_INLINE U load_u(const uint32_t* p) { return hn::LoadU(DU(), p); }
  static HWY_INLINE U load_16(const uint16_t* p) {
    return hn::PromoteTo(DU(), hn::LoadU(hwy::HWY_NAMESPACE::Rebind<uint16_t, DU>(), p));
  }
  static HWY_INLINE void store(F x, float* p) { hn::StoreU(x, DF(), p); }
  static HWY_INLINE void store_u(U x, uint32_t* p) { hn::StoreU(x, DU(), p); }
  static HWY_INLINE void store_16(U x, uint16_t* p) {
    const hwy::HWY_NAMESPACE::Rebind<uint16_t, DI> d16;
    hn::StoreU(hn::DemoteTo(d16, as_i(x)), d16, p);
  }
  static HWY_INLINE void stream(F x, float* p) { hn::Stream(x, DF(), p); }
  static HWY_INLINE uint32_t reduce_max(U x) {
    alignas(64) uint32_t lanes[kWidth];
    hn::Store(x, DU(), lanes);
    uint32_t top = 0;
    for (uint32_t lane : lanes) top = lane > top ? lane : top;
    return top;
  }
  static HWY_INLINE uint64_t reduce_add(U x) {
    alignas(64) uint32_t lanes[kWidth];
    hn::Store(x, DU(), lanes);
    uint64_t sum = 0;
    for (uint32_t lane : lanes) sum += lane;
    return sum;
  }
  // sums[i] += words[i] * weight, in 64 bits, for kWidth words.
  static HWY_INLINE void add_products(const uint32_t* words, uint32_t weight, uint64_t* sums) {
    const hwy::HWY_NAMESPACE::RepartitionToWide<DU> d64;
    constexpr uint32_t kHalf = kWidth / 2;
    const auto weights = set_u(weight);
    const auto lower = hn::LoadU(hwy::HWY_NAMESPACE::Half<DU>(), words);
    const auto upper = hn::LoadU(hwy::HWY_NAMESPACE::Half<DU>(), words + kHalf);
    const auto a = hn::MulEven(hn::BitCast(DU(), hn::PromoteTo(d64, lower)), weights);
    const auto b = hn::MulEven(hn::BitCast(DU(), hn::PromoteTo(d64, upper)), weights);
    hn::StoreU(hn::Add(hn::LoadU(d64, sums), a), d64, sums);
    hn::StoreU(hn::Add(hn::LoadU(d64, sums + kHalf), b), d64, sums + kHalf);
  }
  // Appends the indices from + i of the lanes i of `mask`; returns how many. `out` has room for a whole vector.
  static HWY_INLINE size_t compress_indices(M mask, uint32_t from, uint32_t* out) {
    if (HWY_LIKELY(hn::AllFalse(DF(), mask))) return 0;
    return hn::CompressStore(iota(from), hn::RebindMask(DU(), mask), DU(), out);
  }
};
