// SPDX-License-Identifier: Apache-2.0
// Range floats (Wang et al., HPDC 2020): floats without their lower mantissa bits, counted from the pattern of the
// least magnitude on. Codes 1.. are the positive numbers from the least to the largest, then come the negative ones.
// kRound: to nearest, and to zero below half of the least; else cut off, as published. p.base is the pattern of the
// least magnitude, p.top and p.bottom the numbers of codes above and below zero, p.shift the mantissa bits that are
// dropped. What a body is: codec/body.h. Included by bodies.def, so it has no include guard.

#include "codec/rangefloat/range_float-inl.h"

template <bool kRound>
struct RangeBody : NormScale {
  static constexpr int kCodeBits = 0;
  static constexpr bool kRandom = false, kLifts = false, kClips = false, kTwoParams = false;
  static constexpr uint32_t kTableFloats = 0;

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
  static GW_BODY bool bad(uint32_t seen, const Scheme& s) { return s.norm == Norm::fixed && seen > s.top + s.bottom; }

  // Where the least magnitude is not given, it is the one with which the positive codes take half of all.
  static GW_BODY UnitParams make_params(const Scheme& s, const uint32_t* scales) {
    UnitParams p;
    p.a = bits_float(scales[0]);
    if (scales[0] == kMarker) return p;
    p.shift = 23 - s.steps;
    p.base = s.base;
    p.top = s.top;
    p.bottom = s.bottom;
    if (s.norm == Norm::fixed) return p;
    const RangeFloat f = range_float_below(s.bits, s.steps, p.a, !kRound);
    p.base = f.base;
    p.top = f.positive;
    p.bottom = f.negative;
    return p;
  }
};

template <class Call>
GW_DISPATCH auto with_range(const Scheme& s, Call& call) {
  return s.truncate ? call.template run<RangeBody<false>>() : call.template run<RangeBody<true>>();
}
