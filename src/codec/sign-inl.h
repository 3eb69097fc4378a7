// SPDX-License-Identifier: Apache-2.0
// The sign, with a mean for the values of each (1-bit SGD, Seide et al. 2014). Zero counts as positive. The two scales
// of a unit are the mean of the values that are not negative and the mean of those that are.
// What a body is: codec/body.h. Included by bodies.def, so it has no include guard.

struct SignBody {
  static constexpr int kCodeBits = 1;
  static constexpr bool kRandom = false, kLifts = false, kClips = false, kTwoParams = true;
  static constexpr uint32_t kTableFloats = 0;

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

  // The grid of the sums may round values up, and the mean of the largest floats past what a float can hold.
  static GW_BODY float mean(double sum, double step, uint64_t count) {
    constexpr double kLargest = 0x1.fffffep127;
    if (count == 0) return 0.0f;
    const double value = sum / kSumScale * step / static_cast<double>(count);
    return static_cast<float>(value < kLargest ? value : kLargest);
  }

  // Both means, from sums of integers. An empty side has mean 0, written as +0 so that equal tensors give equal bytes.
  static GW_BODY void make_scales(const Scheme&, uint32_t absmax, const Sums& sums, uint64_t n, uint32_t* scales) {
    if (absmax >= kInfBits) {
      scales[0] = scales[1] = kMarker;
      return;
    }
    const double step = grid_step(absmax);
    const float first = mean(static_cast<double>(sums.first), step, n - sums.negative);
    const float second = -mean(static_cast<double>(sums.second), step, sums.negative);
    scales[0] = float_bits(first);
    scales[1] = float_bits(second) == 0x80000000u ? 0u : float_bits(second);
  }
  static GW_BODY bool scales_valid(const Scheme&, const uint32_t* scales) {
    if (scales[0] == kMarker || scales[1] == kMarker) return scales[0] == scales[1];
    return scales[0] < kInfBits && (scales[1] == 0 || (scales[1] > 0x80000000u && finite_bits(scales[1])));
  }
  static GW_BODY UnitParams make_params(const Scheme&, const uint32_t* scales) {
    UnitParams p;
    p.a = bits_float(scales[0]);
    p.b = bits_float(scales[1]);
    return p;
  }
};

template <class Call>
GW_DISPATCH auto with_sign(const Scheme&, Call& call) {
  return call.template run<SignBody>();
}
