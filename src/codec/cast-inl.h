// SPDX-License-Identifier: Apache-2.0
// Casts to f32, f16 and bf16. Each element is a unit of its own: what is not finite, or does not fit, becomes the
// format's marker. What a body is: codec/body.h. Included by bodies.def, so it has no include guard.

struct Cast32Body : NoScales {
  static constexpr int kCodeBits = 32;
  static constexpr bool kRandom = false, kLifts = false, kClips = false, kTwoParams = true;
  static constexpr uint32_t kTableFloats = 0;

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
    const typename L::U wrong = L::select_u(L::less_u(magnitude, L::set_u(kInfBits)), L::set_u(0), L::set_u(1));
    return L::max_u(seen, L::select_u(L::equal_u(code, L::set_u(kMarker)), L::set_u(0), wrong));
  }
  static GW_BODY bool bad(uint32_t seen, const Scheme&) { return seen != 0; }
};

// Rounds to nearest even by integer arithmetic, the same on every target (core/bits.h has the form for one element).
struct Cast16Body : NoScales {
  static constexpr int kCodeBits = 16;
  static constexpr bool kRandom = false, kLifts = false, kClips = false, kTwoParams = true;
  static constexpr uint32_t kTableFloats = 0;

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
    const typename L::U wrong = L::select_u(L::less_u(magnitude, L::set_u(0x7c00u)), L::set_u(0), L::set_u(1));
    return L::max_u(seen, L::select_u(L::equal_u(code, L::set_u(kMarkerF16)), L::set_u(0), wrong));
  }
  static GW_BODY bool bad(uint32_t seen, const Scheme&) { return seen != 0; }
};

struct CastB16Body : NoScales {
  static constexpr int kCodeBits = 16;
  static constexpr bool kRandom = false, kLifts = false, kClips = false, kTwoParams = true;
  static constexpr uint32_t kTableFloats = 0;

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
    const typename L::U wrong = L::select_u(L::less_u(magnitude, L::set_u(0x7f80u)), L::set_u(0), L::set_u(1));
    return L::max_u(seen, L::select_u(L::equal_u(code, L::set_u(kMarkerBf16)), L::set_u(0), wrong));
  }
  static GW_BODY bool bad(uint32_t seen, const Scheme&) { return seen != 0; }
};

template <class Call>
GW_DISPATCH auto with_cast32(const Scheme&, Call& call) {
  return call.template run<Cast32Body>();
}
template <class Call>
GW_DISPATCH auto with_cast16(const Scheme&, Call& call) {
  return call.template run<Cast16Body>();
}
template <class Call>
GW_DISPATCH auto with_castb16(const Scheme&, Call& call) {
  return call.template run<CastB16Body>();
}
