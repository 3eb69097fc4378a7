// SPDX-License-Identifier: Apache-2.0
#include "codec/levels.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

namespace gradwire {

void set_levels(std::span<const float> levels, double kappa, Scheme& s, std::vector<float>& floats) {
  const size_t size = s.bits <= 4 ? size_t{1} << s.bits : 256;  // as the body has it
  const double ramp = 65536 / (1 - 2 * kappa);
  floats.assign((size > 16 ? 3 : 2) * size, HUGE_VALF);
  std::copy(levels.begin(), levels.end(), floats.begin());
  for (size_t step = 1; size > 16 && step < size; step *= 2)  // a bisection's first, second, ... step
    for (size_t i = 0; i < step; ++i) floats[2 * size + step + i] = floats[(2 * i + 1) * (size / 2 / step)];
  for (size_t i = 0; i < size; ++i) {
    const double gap = i + 1 < levels.size() ? static_cast<double>(levels[i + 1]) - levels[i] : 0;
    // An infinite slope times a distance of zero would be NaN. The bound only matters in cells below 2^-83 of the norm.
    floats[size + i] = gap > 0 ? static_cast<float>(std::min(ramp / gap, 1e30)) : 0;
  }
  s.limit = floats[size / 2];
  s.offset = static_cast<float>(-kappa * ramp);
  s.top = static_cast<uint32_t>(levels.size());
}

std::vector<std::string> describe_levels(std::span<const float> levels, bool fitted) {
  std::vector<std::string> shown;
  for (float level : levels) shown.push_back(fmt::format("{:.5g}", level));
  return {fmt::format("levels{}: {}", fitted ? "" : " (not fitted)", fmt::join(shown, " "))};
}

}  // namespace gradwire
