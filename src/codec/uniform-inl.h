// SPDX-License-Identifier: Apache-2.0
// Uniform levels -s..s of a norm (QSGD, Alistarh et al. 2017; TernGrad, Wen et al. 2017, has s = 1 and clips). The
// value is brought to a grid of 2^-16 of a level, the random bits are added and the fraction is cut off: a value goes
// up with a probability equal to its fraction. What a body is: codec/body.h. Included by bodies.def, so it has no
// include guard.

template <int kBits, bool kClip>
struct UniformBody : NormScale {
  static constexpr int kCodeBits = kBits;
  static constexpr bool kRandom = true, kLifts = true, kClips = kClip, kTwoParams = true;
  static constexpr uint32_t kTableFloats = 0;
  static constexpr uint32_t kTop = (1u << (kBits - 1)) - 1;

  template <class L, bool kTiny>
  static GW_BODY typename L::U encode(typename L::F x, const UnitParams& p, typename L::U rnd) {
    if constexpr (kClip) x = L::min(L::max(x, L::set(-p.limit)), L::set(p.limit));
    if constexpr (kTiny) x = L::mul(x, L::set(p.pre));
    x = L::mul(x, L::set(p.scale));
    if constexpr (kTop * 65536 <= 1u << 22) {
      // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits: one addition instead of a conversion.
      const typename L::U y = L::bits(L::add(x, L::set(12582912.0f)));
      return L::template shr<16>(L::add_u(L::add_u(y, rnd), L::set_u((kTop << 16) - 0x4b400000u)));
    } else {
      return L::template shr<16>(L::add_u(L::add_u(L::as_u(L::round(x)), rnd), L::set_u(kTop << 16)));
    }
  }
  template <class L>
  static GW_BODY typename L::F decode(typename L::U code, const UnitParams& p) {
    // The same the other way: 2^23 + code as a float, less 2^23 + top, is code - top exactly.
    const typename L::F level = L::sub(L::from_bits(L::or_u(code, L::set_u(0x4b000000u))), L::set(8388608.0f + kTop));
    return L::mul(level, L::set(p.a));
  }
  template <class L>
  static GW_BODY typename L::U check(typename L::U seen, typename L::U code) {
    return L::max_u(seen, code);
  }
  static GW_BODY bool bad(uint32_t seen, const Scheme&) { return seen > 2 * kTop; }

  static GW_BODY UnitParams make_params(const Scheme& s, const uint32_t* scales) {
    UnitParams p;
    p.a = bits_float(scales[0]);
    if (scales[0] == kMarker || p.a == 0.0f) return p;  // scale 0: a marked unit is encoded as zeros
    p.limit = p.a;
    scale_to_levels(p.limit, static_cast<float>(levels(s)), 65536.0f, p);
    return p;
  }
};

template <class Call>
GW_DISPATCH auto with_uniform(const Scheme& s, Call& call) {
  if (s.norm == Norm::clipped && s.bits == 2) return call.template run<UniformBody<2, true>>();
  if (s.norm == Norm::clipped || s.norm == Norm::fixed) refuse_body(s);  // values beyond the norm need kClip
  switch (s.bits) {
    case 2:
      return call.template run<UniformBody<2, false>>();
    case 3:
      return call.template run<UniformBody<3, false>>();
    case 4:
      return call.template run<UniformBody<4, false>>();
    case 5:
      return call.template run<UniformBody<5, false>>();
    case 6:
      return call.template run<UniformBody<6, false>>();
    case 7:
      return call.template run<UniformBody<7, false>>();
    case 8:
      return call.template run<UniformBody<8, false>>();
  }
  refuse_body(s);
}
