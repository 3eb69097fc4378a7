// SPDX-License-Identifier: Apache-2.0
// Any levels of a norm: 2^kDepth of them in p.table, ascending within [-1, 1], unused ones at infinity (codec/levels.h
// makes the table). Behind them come as many slopes; and behind those, where there are many levels, the levels once
// more in the order in which a bisection may meet them. The cell is found by bisection (p.limit is the middle level);
// in it, the chance of rounding up rises from 0 to 2^16 with the slope, from p.b on. What a body is: codec/body.h.
// Included by bodies.def, so it has no include guard.

template <int kDepth>
struct LevelsBody : NormScale {
  // Up to 4 bits the depth is the width, and codes are packed as they are made.
  static constexpr int kCodeBits = kDepth <= 4 ? kDepth : 0;
  static constexpr bool kRandom = true, kLifts = true, kClips = false, kTwoParams = false;
  static constexpr uint32_t kTableFloats = 2 << kDepth;
  static constexpr int kSize = 1 << kDepth;

  template <class L>
  struct Cell {
    typename L::U number;
    typename L::F level;
  };

  template <class L>
  static GW_BODY Cell<L> bisect(typename L::F t, const UnitParams& p) {
    using U = typename L::U;
    U cell = L::select_u(L::less(t, L::set(p.limit)), L::set_u(0), L::set_u(kSize / 2));
    for (int half = kSize / 4; half > 0; half /= 2) {
      const U next = L::add_u(cell, L::set_u(half));
      cell = L::select_u(L::less(t, L::template lookup<kSize>(p.table, next)), cell, next);
    }
    return {cell, L::template lookup<kSize>(p.table, cell)};
  }
  // The same for a single value: four times the number of the cell, so that a level lies so many bytes behind the
  // first.
  static GW_BODY uint32_t walk(float t, const UnitParams& p) {
    uint32_t at = t < p.limit ? 0 : 4 * kSize / 2;
#if defined(__CUDACC__)
#pragma unroll
#endif
    for (uint32_t half = kSize / 4; half > 0; half /= 2)
      if (!(t < at_bytes(p.table + half, at))) at += 4 * half;
    return at;
  }
  static GW_BODY float at_bytes(const float* table, uint32_t bytes) {
    return *reinterpret_cast<const float*>(reinterpret_cast<const char*>(table) + bytes);
  }
  // Step d of the same bisection reads one of 2^d levels only. For a vector these are few enough to be looked up in
  // registers, except in the last steps; the level of the cell is the last one that was not above.
  template <class L, int... kStep>
  static GW_BODY Cell<L> descend(typename L::F t, const UnitParams& p, std::integer_sequence<int, kStep...>) {
    Cell<L> cell{L::set_u(0), L::set(p.table[0])};
    step<L>(t, L::set(p.limit), cell);
    (step<L>(t, L::template lookup<(2 << kStep)>(p.table + 2 * kSize + (2 << kStep), cell.number), cell), ...);
    return cell;
  }
  template <class L>
  static GW_BODY void step(typename L::F t, typename L::F level, Cell<L>& cell) {
    cell.number = L::count_not_less(L::add_u(cell.number, cell.number), t, level);
    cell.level = L::select(L::less(t, level), cell.level, level);
  }

  template <class L, bool kTiny>
  static GW_BODY typename L::U encode(typename L::F x, const UnitParams& p, typename L::U rnd) {
    using F = typename L::F;
    if constexpr (kTiny) x = L::mul(x, L::set(p.pre));
    const F t = L::mul(x, L::set(p.scale));
    if constexpr (L::kWidth == 1) {
      const uint32_t at = walk(t, p);
      const float chance = (t - at_bytes(p.table, at)) * at_bytes(p.table + kSize, at) + p.b;
      return (at + (bits_float(rnd | 0x4b000000u) < chance + 8388608.0f ? 4 : 0)) / 4;
    }
    Cell<L> cell;
    if constexpr (kCodeBits == 0 && L::kWidth > 1)
      cell = descend<L>(t, p, std::make_integer_sequence<int, kDepth - 1>());
    else
      cell = bisect<L>(t, p);
    const F slope = L::template lookup<kSize>(p.table + kSize, cell.number);
    const F chance = L::add(L::mul(L::sub(t, cell.level), slope), L::set(p.b));
    // Adding 2^23 rounds the chance to an integer; the random bits are brought beside it without a conversion.
    return L::count_less(cell.number, L::from_bits(L::or_u(rnd, L::set_u(0x4b000000u))),
                         L::add(chance, L::set(8388608.0f)));
  }
  template <class L>
  static GW_BODY typename L::F decode(typename L::U code, const UnitParams& p) {
    return L::mul(L::template lookup<kSize>(p.table, L::and_u(code, L::set_u(kSize - 1))), L::set(p.a));
  }
  template <class L>
  static GW_BODY typename L::U check(typename L::U seen, typename L::U code) {
    return L::max_u(seen, code);
  }
  static GW_BODY bool bad(uint32_t seen, const Scheme& s) { return seen >= s.top; }

  static GW_BODY UnitParams make_params(const Scheme& s, const uint32_t* scales) {
    UnitParams p;
    p.a = bits_float(scales[0]);
    p.table = s.table;
    p.limit = s.limit;
    p.b = s.offset;
    if (scales[0] == kMarker || p.a == 0.0f) return p;  // scale 0: a marked unit is encoded as zeros
    scale_to_levels(p.a, 1.0f, 1.0f, p);                // values are brought to [-1, 1], where the levels are
    return p;
  }
};

// From 5 to 8 bits one body serves all, with 256 levels of which the last are at infinity.
template <class Call>
GW_DISPATCH auto with_levels(const Scheme& s, Call& call) {
  switch (s.bits) {
    case 2:
      return call.template run<LevelsBody<2>>();
    case 3:
      return call.template run<LevelsBody<3>>();
    case 4:
      return call.template run<LevelsBody<4>>();
    case 5:
    case 6:
    case 7:
    case 8:
      return call.template run<LevelsBody<8>>();
  }
  refuse_body(s);
}
