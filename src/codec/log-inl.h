// SPDX-License-Identifier: Apache-2.0
// Powers of two of a norm, and zero (Chen et al., Quantized Adam, 2021): the nearest in value. Half a binade is added
// to the pattern, so that the exponent rounds where the middle between two powers is. Scheme::steps says how many
// powers there are below the norm. What a body is: codec/body.h. Included by bodies.def, so it has no include guard.

struct LogBody : NormScale {
  static constexpr int kCodeBits = 0;
  static constexpr bool kRandom = false, kLifts = true, kClips = false, kTwoParams = false;
  static constexpr uint32_t kTableFloats = 0;

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

  static GW_BODY UnitParams make_params(const Scheme& s, const uint32_t* scales) {
    UnitParams p;
    p.a = bits_float(scales[0]);
    p.base = 127 - s.steps;                             // the exponent of the least power
    p.top = s.steps + 1;                                // codes above zero
    if (scales[0] == kMarker || p.a == 0.0f) return p;  // scale 0: a marked unit is encoded as zeros
    scale_to_levels(p.a, 1.0f, 1.0f, p);
    return p;
  }
};

template <class Call>
GW_DISPATCH auto with_log(const Scheme&, Call& call) {
  return call.template run<LogBody>();
}
