// SPDX-License-Identifier: Apache-2.0
// Uniform levels with up to 16 bits, clipped at the norm. As in uniform-inl.h, but on a grid of 2^-8 of a level, which
// is what the 24 bits of a float leave beside 15 bits of level: the chance of rounding up is off by at most 2^-9. What
// a body is: codec/body.h. Included by bodies.def, so it has no include guard.

struct WideBody : NormScale {
  static constexpr int kCodeBits = 0;
  static constexpr bool kRandom = true, kLifts = true, kClips = true, kTwoParams = false;
  static constexpr uint32_t kTableFloats = 0;

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

  static GW_BODY UnitParams make_params(const Scheme& s, const uint32_t* scales) {
    UnitParams p;
    p.a = bits_float(scales[0]);
    p.top = levels(s);
    if (scales[0] == kMarker || p.a == 0.0f) return p;  // scale 0: a marked unit is encoded as zeros
    p.limit = p.a;
    scale_to_levels(p.limit, static_cast<float>(p.top), 256.0f, p);
    return p;
  }
};

template <class Call>
GW_DISPATCH auto with_wide(const Scheme&, Call& call) {
  return call.template run<WideBody>();
}
