// SPDX-License-Identifier: Apache-2.0
// The element bodies of the five methods, written like those of bodies-inl.h. Most differ in one thing: kCodeBits is 0,
// the number of bits of a code is the scheme's, and the driver packs the codes of a block after they are made. So a body
// is compiled once, not once per width.

// Any levels (optquant): 2^kDepth of them in p.table, ascending from -1 to 1 or less, unused ones at infinity; behind them as many slopes, and behind
// those of many levels, the levels once more, in the order in which a bisection may meet them. The cell is found by bisection (p.limit is the
// middle level); in it, the chance of rounding up rises from 0 to 2^16 with the slope, from p.b on.
template <int kDepth>
struct LevelsBody {
  static constexpr int kCodeBits =
      kDepth <= 4 ? kDepth : 0;  // up to 4 the depth is the width, and codes are packed as they are made
  static constexpr bool kRandom = true;
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
  // Step d of the same bisection looks at one of 2^d levels only. For a vector these are few enough to be looked up in registers but in the last
  // steps; the level of the cell is the last one that was not above.
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
};

// Powers of two of the largest magnitude, and zero (Chen et al., Quantized Adam, 2021): the nearest in value. Half a binade
// is added to the pattern, so that the exponent rounds where the middle between two powers is.
struct LogBody {
  static constexpr int kCodeBits = 0;
  static constexpr bool kRandom = false;

  template <class L, bool kTiny>
  static GW_BODY typename L::U encode(typename L::F x, const UnitParams& p, typename L::U) {
    using U = typename L::U;
    if constexpr (kTiny) x = L::mul(x, L::set(p.pre));
    const U magnitude = L::and_u(L::bits(L::mul(x, L::set(p.scale))), L::set_u(0x7fffffffu));
    const U exponent = L::max_u(L::template shr<23>(L::add_u(magnitude, L::set_u(0x400000u))), L::set_u(p.base));
    const U rank = L::sub_u(L::min_u(exponent, L::set_u(127)), L::set_u(p.base - 1));
    const U size = L::select_u(L::less_u(magnitude, L::set_u((p.base - 1) << 23)), L::set_u(0),
                               rank);  // below half of the least power
    return L::select_u(L::less(x, L::set(0.0f)), L::sub_u(L::set_u(p.top), size), L::add_u(L::set_u(p.top), size));
  }
  template <class L>
  static GW_BODY typename L::F decode(typename L::U code, const UnitParams& p) {
    using U = typename L::U;
    const typename L::M negative = L::less_u(code, L::set_u(p.top));
    const U size = L::select_u(negative, L::sub_u(L::set_u(p.top), code), L::sub_u(code, L::set_u(p.top)));
    const U power = L::template shl<23>(L::add_u(size, L::set_u(p.base - 1)));
    const U sign = L::select_u(negative, L::set_u(0x80000000u), L::set_u(0));
    return L::mul(L::from_bits(L::select_u(L::equal_u(size, L::set_u(0)), L::set_u(0), L::or_u(sign, power))),
                  L::set(p.a));
  }
  template <class L>
  static GW_BODY typename L::U check(typename L::U seen, typename L::U code) {
    return L::max_u(seen, code);
  }
  static GW_BODY bool bad(uint32_t seen, const Scheme& s) { return seen > 2 * (s.steps + 1); }
};

// Range floats (Wang et al., HPDC 2020): codes 1.. are the patterns of positive numbers from the least to the largest with a
// short mantissa, then those of negative ones. kRound: to nearest, zero below half of the least; else cut off, as published.
template <bool kRound>
struct RangeBody {
  static constexpr int kCodeBits = 0;
  static constexpr bool kRandom = false;

  static GW_BODY RangeFloat format(const UnitParams& p) {
    return range_float(p.shift, p.base, p.top, p.bottom, !kRound);
  }
  template <class L, bool>
  static GW_BODY typename L::U encode(typename L::F x, const UnitParams& p, typename L::U) {
    return RangeLanes<L>::encode(x, format(p));
  }
  template <class L>
  static GW_BODY typename L::F decode(typename L::U code, const UnitParams& p) {
    // Nothing is scaled, so the not-a-number of a marked unit comes in by hand.
    return p.a != p.a ? L::set(bits_float(kMarker)) : RangeLanes<L>::decode(code, format(p));
  }
  template <class L>
  static GW_BODY typename L::U check(typename L::U seen, typename L::U code) {
    return L::max_u(seen, code);
  }
  static GW_BODY bool bad(uint32_t seen, const Scheme& s) { return s.stat == Stat::fixed && seen > s.top + s.bottom; }
};

// Uniform levels with up to 16 bits (unigrid; wide steps of dqsgd), clipped at the limit. As UniformBody, but on a grid of 2^-8 level,
// which is what the float's 24 bits leave beside 15 bits of level: rounding is off by at most 2^-9.
struct WideBody {
  static constexpr int kCodeBits = 0;
  static constexpr bool kRandom = true;

  template <class L, bool kTiny>
  static GW_BODY typename L::U encode(typename L::F x, const UnitParams& p, typename L::U rnd) {
    x = L::min(L::max(x, L::set(-p.limit)), L::set(p.limit));
    if constexpr (kTiny) x = L::mul(x, L::set(p.pre));
    const typename L::U y = L::as_u(L::round(L::mul(x, L::set(p.scale))));
    return L::template shr<8>(L::add_u(L::add_u(y, L::template shr<8>(rnd)), L::set_u(p.top << 8)));
  }
  template <class L>
  static GW_BODY typename L::F decode(typename L::U code, const UnitParams& p) {
    const typename L::F level =
        L::sub(L::from_bits(L::or_u(code, L::set_u(0x4b000000u))), L::set(8388608.0f + static_cast<float>(p.top)));
    return L::mul(level, L::set(p.a));
  }
  template <class L>
  static GW_BODY typename L::U check(typename L::U seen, typename L::U code) {
    return L::max_u(seen, code);
  }
  static GW_BODY bool bad(uint32_t seen, const Scheme& s) { return seen > 2 * levels(s); }
};

// Nothing is sent, and zero arrives.
struct NoneBody {
  static constexpr int kCodeBits = 0;
  static constexpr bool kRandom = false;

  template <class L, bool>
  static GW_BODY typename L::U encode(typename L::F, const UnitParams&, typename L::U) {
    return L::set_u(0);
  }
  template <class L>
  static GW_BODY typename L::F decode(typename L::U, const UnitParams&) {
    return L::set(0.0f);
  }
  template <class L>
  static GW_BODY typename L::U check(typename L::U seen, typename L::U) {
    return seen;
  }
  static GW_BODY bool bad(uint32_t, const Scheme&) { return false; }
};

// Calls call.template run<Body>() with the body that a scheme names.
template <class Call>
GW_DISPATCH auto with_method(const Scheme& s, Call& call) {
  switch (s.body) {
    case Body::levels:
      switch (s.bits) {
        case 2:
          return call.template run<LevelsBody<2>>();
        case 3:
          return call.template run<LevelsBody<3>>();
        case 4:
          return call.template run<LevelsBody<4>>();
        default:
          return call.template run<LevelsBody<8>>();
      }
    case Body::log:
      return call.template run<LogBody>();
    case Body::range:
      return s.truncate ? call.template run<RangeBody<false>>() : call.template run<RangeBody<true>>();
    case Body::wide:
      return call.template run<WideBody>();
    default:
      return call.template run<NoneBody>();
  }
}
