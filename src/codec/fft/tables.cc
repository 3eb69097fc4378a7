// SPDX-License-Identifier: Apache-2.0
// The table of the transform. Sine and cosine come from their series on an eighth of a turn, in plain double
// arithmetic, and by symmetry beyond it: the same floats on every host, and exactly opposite values where mathematics
// has them.
#include <array>
#include <memory>

#include "codec/fft/fft.h"

namespace gradwire {
namespace {

struct Turn {
  double cos, sin;
};

Turn eighth(double x) {  // 0 <= x <= pi / 4
  double cos = 0, sin = 0;
  // From the smallest terms on; x^20 / 20! is below 1e-20.
  for (int n = 10; n >= 1; --n) {
    cos = (1 + cos) * (-x * x / ((2.0 * n - 1) * (2.0 * n)));
    sin = (1 + sin) * (-x * x / ((2.0 * n) * (2.0 * n + 1)));
  }
  return {1 + cos, x * (1 + sin)};
}

Turn turn(uint32_t part, uint32_t of) {  // 2 pi part / of; of a multiple of 8
  constexpr double kPi = 3.14159265358979323846;
  const uint32_t quarter = of / 4, quadrant = part % of / quarter, rest = part % quarter;
  const bool mirrored = rest > quarter / 2;
  const Turn t = eighth(2 * kPi * (mirrored ? quarter - rest : rest) / of);
  const double c = mirrored ? t.sin : t.cos, s = mirrored ? t.cos : t.sin;
  switch (quadrant) {
    case 0:
      return {c, s};
    case 1:
      return {-s, c};
    case 2:
      return {-c, -s};
    default:
      return {s, -c};
  }
}

}  // namespace

const FftTable& fft_table() {
  static const std::unique_ptr<const FftTable> table = [] {
    auto made = std::make_unique<FftTable>(FftTable{});
    for (uint32_t bins = 32; bins <= 2048; bins *= 2) {
      const FftPlan plan = fft_plan(bins);
      uint32_t left = bins;
      for (uint32_t i = 0; i + 1 < plan.passes; ++i) {
        const uint32_t apart = left / plan.radix[i];
        for (uint32_t k = 1; k < plan.radix[i]; ++k)
          for (uint32_t p = 0; p < apart; ++p) {
            const Turn t = turn(p * k, left);
            const uint32_t at = plan.at[i] + (k - 1) * apart + p;
            made->re[at] = static_cast<float>(t.cos);
            made->im[at] = static_cast<float>(-t.sin);
          }
        left = apart;
      }
      for (uint32_t j = 0; j < bins; ++j) {
        const Turn t = turn(j, 2 * bins);
        made->re[plan.split + j] = static_cast<float>(t.cos);
        made->im[plan.split + j] = static_cast<float>(t.sin);
      }
    }
    return made;
  }();
  return *table;
}

const FftPlan& fft_plan_of(uint32_t bins) {
  static constexpr std::array<FftPlan, kFftSizes> kPlans = {fft_plan(32),  fft_plan(64),   fft_plan(128), fft_plan(256),
                                                            fft_plan(512), fft_plan(1024), fft_plan(2048)};
  uint32_t i = 0;
  while (kPlans[i].bins < bins) ++i;
  return kPlans[i];
}

}  // namespace gradwire
