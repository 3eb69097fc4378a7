// SPDX-License-Identifier: Apache-2.0
// Every element body. Included once per vector target (inside its namespace), once for the reference loop and once for
// CUDA, so it has no include guard; GW_BODY is how that place spells "inline", GW_DISPATCH the same for host code. A body is a struct of static templates
// over a lane L (device/lane.h): `encode` makes the code of a value, `decode` the value of a code, `check` folds codes
// into a word from which `bad` tells whether any of them cannot come from an honest encoder.
//
// `rnd` holds 16 random bits a lane, or 0x8000 when rounding to nearest. kTiny: the unit may be so small that its values
// must be lifted by p.pre first.

// Uniform levels -s..s (QSGD, Alistarh et al. 2017; TernGrad, Wen et al. 2017, is s = 1). The value is brought to a grid of
// 2^-16 level, the random bits are added and the fraction is cut off: up with a probability equal to the fraction.
template <int kBits, bool kClip>
struct UniformBody {
  static constexpr int kCodeBits = kBits;
  static constexpr bool kRandom = true;
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
};

// The sign, with a mean for each (1-bit SGD, Seide et al. 2014). Zero counts as positive.
struct SignBody {
  static constexpr int kCodeBits = 1;
  static constexpr bool kRandom = false;

  template <class L, bool>
  static GW_BODY typename L::U encode(typename L::F x, const UnitParams&, typename L::U) {
    return L::select_u(L::less(x, L::set(0.0f)), L::set_u(1), L::set_u(0));
  }
  template <class L>
  static GW_BODY typename L::F decode(typename L::U code, const UnitParams& p) {
    return L::select(L::equal_u(code, L::set_u(0)), L::set(p.a), L::set(p.b));
  }
  template <class L>
  static GW_BODY typename L::U check(typename L::U seen, typename L::U) {
    return seen;
  }
  static GW_BODY bool bad(uint32_t, const Scheme&) { return false; }
};

// Casts. Each element is a unit of its own: what is not finite, or does not fit, becomes the format's marker.
struct Cast32Body {
  static constexpr int kCodeBits = 32;
  static constexpr bool kRandom = false;

  template <class L, bool>
  static GW_BODY typename L::U encode(typename L::F x, const UnitParams&, typename L::U) {
    const typename L::U bits = L::bits(x), magnitude = L::and_u(bits, L::set_u(0x7fffffffu));
    return L::select_u(L::less_u(magnitude, L::set_u(kInfBits)), bits, L::set_u(kMarker));
  }
  template <class L>
  static GW_BODY typename L::F decode(typename L::U code, const UnitParams&) {
    return L::from_bits(code);
  }
  template <class L>
  static GW_BODY typename L::U check(typename L::U seen, typename L::U code) {
    const typename L::U magnitude = L::and_u(code, L::set_u(0x7fffffffu));
    const typename L::U lie = L::select_u(L::less_u(magnitude, L::set_u(kInfBits)), L::set_u(0), L::set_u(1));
    return L::max_u(seen, L::select_u(L::equal_u(code, L::set_u(kMarker)), L::set_u(0), lie));
  }
  static GW_BODY bool bad(uint32_t seen, const Scheme&) { return seen != 0; }
};

// Rounds to nearest even by integer arithmetic, the same on every target (see core/bits.h for the one-element form).
struct Cast16Body {
  static constexpr int kCodeBits = 16;
  static constexpr bool kRandom = false;

  template <class L, bool>
  static GW_BODY typename L::U encode(typename L::F x, const UnitParams&, typename L::U) {
    using U = typename L::U;
    const U bits = L::bits(x), magnitude = L::and_u(bits, L::set_u(0x7fffffffu));
    const U sign = L::and_u(L::template shr<16>(bits), L::set_u(0x8000u));
    const U odd = L::and_u(L::template shr<13>(magnitude), L::set_u(1));
    const U normal =
        L::template shr<13>(L::sub_u(L::add_u(L::add_u(magnitude, L::set_u(0xfffu)), odd), L::set_u(0x38000000u)));
    const U small = L::sub_u(L::bits(L::add(L::from_bits(magnitude), L::set(0.5f))), L::set_u(0x3f000000u));
    const U half = L::or_u(sign, L::select_u(L::less_u(magnitude, L::set_u(0x38800000u)), small, normal));
    // 65520 and above round to 2^16, which f16 does not have.
    return L::select_u(L::less_u(magnitude, L::set_u(0x477ff000u)), half, L::set_u(kMarkerF16));
  }
  template <class L>
  static GW_BODY typename L::F decode(typename L::U code, const UnitParams&) {
    using U = typename L::U;
    const U sign = L::template shl<16>(L::and_u(code, L::set_u(0x8000u)));
    const U magnitude = L::and_u(code, L::set_u(0x7fffu));
    const U value = L::bits(L::mul(L::from_bits(L::template shl<13>(magnitude)), L::set(0x1p112f)));
    return L::from_bits(L::select_u(L::less_u(magnitude, L::set_u(0x7c00u)), L::or_u(sign, value), L::set_u(kMarker)));
  }
  template <class L>
  static GW_BODY typename L::U check(typename L::U seen, typename L::U code) {
    const typename L::U magnitude = L::and_u(code, L::set_u(0x7fffu));
    const typename L::U lie = L::select_u(L::less_u(magnitude, L::set_u(0x7c00u)), L::set_u(0), L::set_u(1));
    return L::max_u(seen, L::select_u(L::equal_u(code, L::set_u(kMarkerF16)), L::set_u(0), lie));
  }
  static GW_BODY bool bad(uint32_t seen, const Scheme&) { return seen != 0; }
};

struct CastB16Body {
  static constexpr int kCodeBits = 16;
  static constexpr bool kRandom = false;

  template <class L, bool>
  static GW_BODY typename L::U encode(typename L::F x, const UnitParams&, typename L::U) {
    using U = typename L::U;
    const U bits = L::bits(x), magnitude = L::and_u(bits, L::set_u(0x7fffffffu));
    const U odd = L::and_u(L::template shr<16>(bits), L::set_u(1));
    const U rounded = L::template shr<16>(L::add_u(L::add_u(bits, L::set_u(0x7fffu)), odd));
    return L::select_u(L::less_u(magnitude, L::set_u(0x7f7f8000u)), rounded, L::set_u(kMarkerBf16));
  }
  template <class L>
  static GW_BODY typename L::F decode(typename L::U code, const UnitParams&) {
    return L::from_bits(L::template shl<16>(code));
  }
  template <class L>
  static GW_BODY typename L::U check(typename L::U seen, typename L::U code) {
    const typename L::U magnitude = L::and_u(code, L::set_u(0x7fffu));
    const typename L::U lie = L::select_u(L::less_u(magnitude, L::set_u(0x7f80u)), L::set_u(0), L::set_u(1));
    return L::max_u(seen, L::select_u(L::equal_u(code, L::set_u(kMarkerBf16)), L::set_u(0), lie));
  }
  static GW_BODY bool bad(uint32_t seen, const Scheme&) { return seen != 0; }
};

// Calls call.template run<Body>() with the body that a scheme names.
template <class Call>
GW_DISPATCH auto with_body(const Scheme& s, Call& call) {
  switch (s.body) {
    case Body::uniform:
      if (s.stat == Stat::clip) return call.template run<UniformBody<2, true>>();
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
        default:
          return call.template run<UniformBody<8, false>>();
      }
    case Body::sign:
      return call.template run<SignBody>();
    case Body::cast16:
      return call.template run<Cast16Body>();
    case Body::castb16:
      return call.template run<CastB16Body>();
    default:
      return call.template run<Cast32Body>();
  }
}
