// SPDX-License-Identifier: Apache-2.0
// A range float of a value, and its value, on any lane L. Included once per target (no include guard); GW_BODY is how
// that place spells "inline".

template <class L>
struct RangeLanes {
  using F = typename L::F;
  using U = typename L::U;

  static GW_BODY U encode(F x, const RangeFloat& f) {
    const U magnitude = L::and_u(L::bits(x), L::set_u(0x7fffffffu));
    const U pattern = L::max_u(L::shr_by(L::add_u(magnitude, L::set_u(f.half)), f.shift), L::set_u(f.base));
    const U number = L::sub_u(pattern, L::set_u(f.base - 1));
    const U code =
        L::select_u(L::less(x, L::set(0.0f)), L::add_u(L::min_u(number, L::set_u(f.negative)), L::set_u(f.positive)),
                    L::min_u(number, L::set_u(f.positive)));
    return L::select_u(L::less_u(magnitude, L::set_u(f.zero)), L::set_u(0), code);
  }

  // A code beyond the largest, which only a malformed message has, is the last negative number.
  static GW_BODY F decode(U code, const RangeFloat& f) {
    const typename L::M negative = L::less_u(L::set_u(f.positive), code);
    const U beyond = L::min_u(L::sub_u(code, L::set_u(f.positive)), L::set_u(f.negative));
    const U number = L::select_u(negative, beyond, code);
    const U pattern = L::shl_by(L::add_u(number, L::set_u(f.base - 1)), f.shift);
    const U sign = L::select_u(negative, L::set_u(0x80000000u), L::set_u(0));
    return L::from_bits(L::select_u(L::equal_u(code, L::set_u(0)), L::set_u(0), L::or_u(sign, pattern)));
  }
};
