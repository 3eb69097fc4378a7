// SPDX-License-Identifier: Apache-2.0
// The words of lane.h for Highway vectors. Included once per target, inside the target's namespace; no include guard.
// At most 16 lanes a vector, so that a row of 32 is a whole number of vectors.

// For each set of up to eight lanes: where in the vector its members stand, one after the other; and how many of them
// stand before each lane.
struct LanePlaces {
  uint8_t members[256][8], before[256][8];
  constexpr LanePlaces() : members(), before() {
    for (int set = 0; set < 256; ++set)
      for (int lane = 0, count = 0; lane < 8; ++lane) {
        before[set][lane] = static_cast<uint8_t>(count & 7);
        if (set >> lane & 1) members[set][count++] = static_cast<uint8_t>(lane);
      }
  }
};
[[maybe_unused]] inline constexpr LanePlaces kPlaces;

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
  // table[index], index < kSize; the table has at least 16 floats. Up to many vectors it is looked up vector by vector
  // and chosen by the bits of the index: that is soon known, where a chain of gathers waits long for each. Beyond, and
  // alone, a gather does no less.
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX2
  static constexpr int kMostLookups = 128;
#else
  static constexpr int kMostLookups = 2 * static_cast<int>(kWidth);
#endif
  template <int kSize>
  static HWY_INLINE F lookup(const float* table, U index) {
    if constexpr (kSize > kMostLookups)
      return hn::GatherIndex(DF(), table, as_i(index));
    else
      return lookup_part<kSize>(table, index);
  }
  template <int kSize>
  static HWY_INLINE F lookup_part(const float* table, U index) {  // by the lower bits of the index
    if constexpr (kSize <= static_cast<int>(kWidth)) {
#if HWY_TARGET == HWY_AVX3
      return F{_mm512_permutexvar_ps(index.raw, load(table).raw)};
#elif HWY_TARGET == HWY_AVX2
      return F{_mm256_permutevar8x32_ps(load(table).raw, index.raw)};
#else
      return hn::TableLookupLanes(load(table), hn::IndicesFromVec(DF(), and_u(index, set_u(kWidth - 1))));
#endif
#if HWY_TARGET == HWY_AVX3
    } else if constexpr (kSize == 32) {
      return F{_mm512_permutex2var_ps(load(table).raw, index.raw, load(table + 16).raw)};
#endif
    } else {
      constexpr int kTop = 31 - std::countr_zero(static_cast<uint32_t>(kSize / 2));
      const F low = lookup_part<kSize / 2>(table, index), high = lookup_part<kSize / 2>(table + kSize / 2, index);
      return hn::IfNegativeThenElse(from_bits(shl<kTop>(index)), high, low);
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
  // counts + 1 where a < b, a >= b, a == b. Where masks are vectors one is all ones, and subtracting it does that.
  static HWY_INLINE U count_if(U counts, M mask) {
#if HWY_TARGET == HWY_AVX3
    return U{_mm512_mask_add_epi32(counts.raw, mask.raw, counts.raw, set_u(1).raw)};
#else
    return hn::Sub(counts, bits(hn::VecFromMask(DF(), mask)));
#endif
  }
  static HWY_INLINE U count_less(U counts, F a, F b) { return count_if(counts, less(a, b)); }
  static HWY_INLINE U count_not_less(U counts, F a, F b) { return count_if(counts, hn::Ge(a, b)); }
  static HWY_INLINE U count_equal(U counts, U a, U b) { return count_if(counts, equal_u(a, b)); }
  static HWY_INLINE size_t count(M mask) { return hn::CountTrue(DF(), mask); }
  // x[places[mask][i]] in lane i.
  static HWY_INLINE F permute(F x, const uint8_t (&places)[256][8], M mask) {
    static_assert(kWidth <= 8 || HWY_TARGET == HWY_AVX3);
    uint8_t set[8] = {};
    hn::StoreMaskBits(DF(), mask, set);
    const U index = hn::PromoteTo(DU(), hn::LoadU(hwy::HWY_NAMESPACE::Rebind<uint8_t, DU>(), places[set[0]]));
    return hn::TableLookupLanes(x, hn::IndicesFromVec(DF(), index));
  }
  // The lanes of `mask`, moved together, to the front of the vector at `out`; returns how many. What is behind them is
  // not defined. Neither Highway's Compress(), which copies its table to the stack, nor CompressStore(), which takes
  // some processors a hundred cycles.
  static HWY_INLINE size_t compress(F x, M mask, float* out) {
#if HWY_TARGET == HWY_AVX3
    store(F{_mm512_maskz_compress_ps(mask.raw, x.raw)}, out);
#else
    store(permute(x, kPlaces.members, mask), out);
#endif
    return count(mask);
  }
  // The reverse: floats from `from` on to the lanes of `mask`, zero to the others. Reads a whole vector.
  static HWY_INLINE F expand(const float* from, M mask) {
#if HWY_TARGET == HWY_AVX3
    return F{_mm512_maskz_expand_ps(mask.raw, load(from).raw)};
#else
    return hn::IfThenElseZero(mask, permute(load(from), kPlaces.before, mask));
#endif
  }
  // Appends the indices from + i of the lanes i of `mask`; returns how many. `out` has room for a whole vector.
  static HWY_INLINE size_t compress_indices(M mask, uint32_t from, uint32_t* out) {
    if (HWY_LIKELY(hn::AllFalse(DF(), mask))) return 0;
    return hn::CompressStore(iota(from), hn::RebindMask(DU(), mask), DU(), out);
  }
};
