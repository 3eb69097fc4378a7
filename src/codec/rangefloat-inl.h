// SPDX-License-Identifier: Apache-2.0
// Range floats (Wang et al., HPDC 2020): floats without their lower mantissa bits, counted from the pattern of the
// least magnitude on. Codes 1.. are the positive numbers from the least to the largest, then come the negative ones.
// kRound: to nearest, and to zero below half of the least; else cut off, as published. p.base is the pattern of the
// least magnitude, p.top and p.bottom the numbers of codes above and below zero, p.shift the mantissa bits that are
// dropped. What a body is: codec/body.h. Included by bodies.def, so it has no include guard.

template <bool kRound>
struct RangeBody : NormScale {
  static constexpr int kCodeBits = 0;
  static constexpr bool kRandom = false, kLifts = false, kClips = false, kTwoParams = false;
  static constexpr uint32_t kTableFloats = 0;

  template <class L, bool>
  static GW_BODY typename L::U encode(typename L::F x, const UnitParams& p, typename L::U) {
    using U = typename L::U;
    const U magnitude = L::and_u(L::bits(x), L::set_u(0x7fffffffu));
    const uint32_t least = p.base << p.shift, half = kRound && p.shift ? 1u << (p.shift - 1) : 0;
    const U pattern = L::max_u(L::shr_by(L::add_u(magnitude, L::set_u(half)), p.shift), L::set_u(p.base));
    const U size = L::sub_u(pattern, L::set_u(p.base - 1));
    const U code = L::select_u(L::less(x, L::set(0.0f)), L::add_u(L::min_u(size, L::set_u(p.bottom)), L::set_u(p.top)),
                               L::min_u(size, L::set_u(p.top)));
    // Half of a normal number has the exponent below; of a subnormal, half the pattern.
    const uint32_t zero = !kRound               ? least
                          : least >= 0x1000000u ? least - 0x800000u
                                                : float_bits(bits_float(least) * 0.5f);
    const typename L::M small = L::less_u(magnitude, L::set_u(zero > 1 ? zero : 1));
    return L::select_u(small, L::set_u(0), code);
  }
  template <class L>
  static GW_BODY typename L::F decode(typename L::U code, const UnitParams& p) {
    using U = typename L::U;
    const typename L::M negative = L::less_u(L::set_u(p.top), code);
    const U size = L::select_u(negative, L::min_u(L::sub_u(code, L::set_u(p.top)), L::set_u(p.bottom)), code);
    const U pattern = L::shl_by(L::add_u(size, L::set_u(p.base - 1)), p.shift);
    const U sign = L::select_u(negative, L::set_u(0x80000000u), L::set_u(0));
    const U value = L::select_u(L::equal_u(code, L::set_u(0)), L::set_u(0), L::or_u(sign, pattern));
    // Nothing is scaled, so the not-a-number of a marked unit comes in by hand.
    return p.a != p.a ? L::set(bits_float(kMarker)) : L::from_bits(value);
  }
  template <class L>
  static GW_BODY typename L::U check(typename L::U seen, typename L::U code) {
    return L::max_u(seen, code);
  }
  static GW_BODY bool bad(uint32_t seen, const Scheme& s) { return s.norm == Norm::fixed && seen > s.top + s.bottom; }

  // Where the least magnitude is not given, it is the one with which the positive codes take half of all.
  static GW_BODY UnitParams make_params(const Scheme& s, const uint32_t* scales) {
    UnitParams p;
    p.a = bits_float(scales[0]);
    if (scales[0] == kMarker) return p;
    p.shift = 23 - s.steps;
    if (s.norm == Norm::fixed) {
      p.base = s.base;
      p.top = s.top;
      p.bottom = s.bottom;
      return p;
    }
    const uint32_t half = 1u << (s.bits - 1), top = float_bits(p.a) >> p.shift;
    p.base = top + 1 > half ? top + 1 - half : 0;
    p.top = top + 1 - p.base;
    p.bottom = p.top < half ? p.top : half - 1;
    return p;
  }
};

template <class Call>
GW_DISPATCH auto with_range(const Scheme& s, Call& call) {
  return s.truncate ? call.template run<RangeBody<false>>() : call.template run<RangeBody<true>>();
}
