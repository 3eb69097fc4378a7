// SPDX-License-Identifier: Apache-2.0
// Uniform levels with up to 16 bits, clipped at the norm. Rounded at random, as in uniform-inl.h, but on a grid of
// 2^-8 of a level, which is what the 24 bits of a float leave beside 15 bits of level: the chance of rounding up is off
// by at most 2^-9. Rounded to nearest, the code is the one whose value is nearest. What a body is: codec/body.h.
// Included by bodies.def, so it has no include guard.

template <bool kNearest>
struct WideBody : NormScale {
  static constexpr int kCodeBits = 0;
  static constexpr bool kRandom = !kNearest, kLifts = true, kClips = true, kTwoParams = false;
  static constexpr uint32_t kTableFloats = 0;

  template <class L, bool kTiny>
  static GW_BODY typename L::U encode(typename L::F x, const UnitParams& p, typename L::U rnd) {
    x = L::min(L::max(x, L::set(-p.limit)), L::set(p.limit));
    if constexpr (kNearest) return nearest<L, kTiny>(x, p);
    if constexpr (kTiny) x = L::mul(x, L::set(p.pre));
    const typename L::U y = L::as_u(L::round(L::mul(x, L::set(p.scale))));
    return L::template shr<8>(L::add_u(L::add_u(y, L::template shr<8>(rnd)), L::set_u(p.top << 8)));
  }

  // Both a product with the scale and the values of codes are rounded, which at 16 bits is up to 2^-8 of a level. The
  // level that a product rounds to is therefore corrected by how far off its value is, a difference that is exact. Up
  // to 8 bits one more product is precise enough. Beyond, the next level on the other side of x is tried. Nothing here
  // knows a sign: Q(-x) is -Q(x).
  template <class L, bool kTiny>
  static GW_BODY typename L::U nearest(typename L::F x, const UnitParams& p) {
    using F = typename L::F;
    const F large = L::set(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, which the low bits then hold
    F y = x;
    if constexpr (kTiny) y = L::mul(y, L::set(p.pre));
    const F rounded = L::add(L::mul(y, L::set(p.scale)), large), level = L::sub(rounded, large);
    const F value = L::from_bits(L::set_u(p.base)), off = L::sub(x, L::mul(level, value));
    if (p.top <= 127) {
      const F correction = L::add(L::mul(off, L::set(p.b)), large);
      return L::add_u(L::add_u(L::bits(rounded), L::bits(correction)), L::set_u(p.top - 2 * 0x4b400000u));
    }
    const F towards = L::from_bits(L::or_u(L::and_u(L::bits(off), L::set_u(0x80000000u)), L::set_u(0x3f800000u)));
    const F next = L::add(level, towards), next_off = L::sub(x, L::mul(next, value));
    const F best = L::select(L::less(magnitude<L>(next_off), magnitude<L>(off)), next, level);
    return L::add_u(L::bits(L::add(best, large)), L::set_u(p.top - 0x4b400000u));
  }
  template <class L>
  static GW_BODY typename L::F magnitude(typename L::F x) {
    return L::from_bits(L::and_u(L::bits(x), L::set_u(0x7fffffffu)));
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
    scale_to_levels(p.limit, static_cast<float>(p.top), kNearest ? 1.0f : 256.0f, p);
    // For the correction: the value of a level, and back. Both stay 0 in a unit that is marked. So they do in a lifted
    // unit, whose values may come lifted already, and where a step may be a few of the smallest floats.
    if (p.pre == 1.0f) {
      p.base = float_bits(p.a);
      p.b = p.scale;
    }
    return p;
  }
};

template <class Call>
GW_DISPATCH auto with_wide(const Scheme& s, Call& call) {
  if (s.nearest) return call.template run<WideBody<true>>();
  return call.template run<WideBody<false>>();
}
