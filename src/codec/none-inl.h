// SPDX-License-Identifier: Apache-2.0
// Nothing is sent, and zeros arrive.
// What a body is: codec/body.h. Included by bodies.def, so it has no include guard.

struct NoneBody : NoScales {
  static constexpr int kCodeBits = 0;
  static constexpr bool kRandom = false, kLifts = false, kClips = false, kTwoParams = false;
  static constexpr uint32_t kTableFloats = 0;

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

template <class Call>
GW_DISPATCH auto with_none(const Scheme&, Call& call) {
  return call.template run<NoneBody>();
}
