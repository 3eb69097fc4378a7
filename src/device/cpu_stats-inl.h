// SPDX-License-Identifier: Apache-2.0
// The statistics that scales come from, on the CPU, for any lane L: of some rows of a block, and of the blocks of a
// span. Included once per target, after cpu_load-inl.h (no include guard). params.h says why the order of summation is
// free.

template <class L>
struct BlockStats {
  using F = typename L::F;
  using U = typename L::U;

  // --- statistics ----------------------------------------------------------------------------------------------

  static GW_BODY uint32_t rows_max(const float* x, uint32_t row0, uint32_t row1) {
    // Four chains, so that the maximum's latency does not bound the pass.
    const U mask = L::set_u(0x7fffffffu);
    U top0 = L::set_u(0), top1 = top0, top2 = top0, top3 = top0;
    uint32_t i = row0 * kLane;
    const uint32_t end = row1 * kLane;
    for (; i + 4 * L::kWidth <= end; i += 4 * L::kWidth) {
      top0 = L::max_u(top0, L::and_u(L::bits(L::load(x + i)), mask));
      top1 = L::max_u(top1, L::and_u(L::bits(L::load(x + i + L::kWidth)), mask));
      top2 = L::max_u(top2, L::and_u(L::bits(L::load(x + i + 2 * L::kWidth)), mask));
      top3 = L::max_u(top3, L::and_u(L::bits(L::load(x + i + 3 * L::kWidth)), mask));
    }
    for (; i < end; i += L::kWidth) top0 = L::max_u(top0, L::and_u(L::bits(L::load(x + i)), mask));
    return L::reduce_max(L::max_u(L::max_u(top0, top1), L::max_u(top2, top3)));
  }

  static uint32_t absmax(const Span& s, Scratch& scratch) {
    uint32_t top = 0;
    for (uint64_t block = s.begin; block < s.end; ++block) {
      const uint32_t here = rows_max(TensorAccess<L>::load(s, block, scratch.x), 0, kLane);
      top = here > top ? here : top;
    }
    return top;
  }

  // Padding is zero and adds nothing (zero counts as positive, and only negatives are counted).
  static GW_BODY void rows_sums(SumKind kind, const float* x, uint32_t row0, uint32_t row1, Grid grid, Sums& sums) {
    const F pre = L::set(grid.pre), scale = L::set(grid.grid);
    const U zero = L::set_u(0);
    U first = zero, second = zero, negative = zero;
    for (uint32_t i = row0 * kLane; i < row1 * kLane; i += L::kWidth) {
      const F t = L::mul(L::mul(L::load(x + i), pre), scale);
      if (kind == SumKind::squares || kind == SumKind::moments)
        second = L::add_u(second, L::as_u(L::round(L::mul(L::mul(t, t), L::set(kSquareScale)))));
      if (kind == SumKind::moments) first = L::add_u(first, L::as_u(L::round(L::mul(t, L::set(kSumScale)))));
      if (kind == SumKind::by_sign) {
        const U q = L::as_u(L::round(L::mul(t, L::set(kSumScale))));
        const typename L::M below = L::less(t, L::set(0.0f));
        first = L::add_u(first, L::select_u(below, zero, q));
        second = L::add_u(second, L::select_u(below, L::sub_u(zero, q), zero));
        negative = L::add_u(negative, L::select_u(L::less(L::load(x + i), L::set(0.0f)), L::set_u(1), zero));
      }
    }
    alignas(64) uint32_t lanes[L::kWidth];
    L::store_u(first, lanes);
    for (uint32_t lane : lanes) sums.first += static_cast<int32_t>(lane);
    sums.second += L::reduce_add(second);
    sums.negative += L::reduce_add(negative);
  }

  static void sums(const Span& s, uint32_t absmax, Scratch& scratch, Sums& sums) {
    if (absmax >= kInfBits) return;
    const Grid grid = grid_for(absmax);
    for (uint64_t block = s.begin; block < s.end; ++block)
      rows_sums(s.scheme->sums, TensorAccess<L>::load(s, block, scratch.x), 0, kLane, grid, sums);
  }
};
