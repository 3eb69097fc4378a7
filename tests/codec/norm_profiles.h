// SPDX-License-Identifier: Apache-2.0
// Norms of gradients over a run, as trainings have them, for tests of rules that choose widths.
#pragma once

#include <cmath>
#include <functional>
#include <random>
#include <vector>

namespace gradwire::norms {

inline constexpr int kSteps = 1200;
inline constexpr double kScatter = 0.16;

struct NormProfile {
  const char* name;
  std::function<double(double step)> norm;
  double most_3, most_4_5;  // noise over that of fixed bits, at budgets 3 and 4.5
};

inline const std::vector<NormProfile>& profiles() {
  static const std::vector<NormProfile> all = {
      // The shape that the first steps of a small convolutional network have.
      {"burst", [](double n) { return n < 60 ? 2.4 * std::pow(10, n / 60) : 2.4 - 0.9 * (n - 60) / (kSteps - 60); },
       0.88, 0.70},
      {"steady", [](double) { return 1.0; }, 1.03, 0.90},
      {"rising", [](double n) { return std::pow(3, n / kSteps); }, 1.06, 0.90},
      {"rising, then halved", [](double n) { return n < kSteps / 2 ? std::pow(3, 2 * n / kSteps) : 1.5; }, 1.06, 0.90},
      {"falling", [](double n) { return std::pow(100, -n / kSteps); }, 1.0 + 1e-9, 0.90},
      {"rising at first", [](double n) { return n < 60 ? 0.24 * std::pow(10, n / 60) : 2.4; }, 1.06, 0.90},
  };
  return all;
}

inline std::vector<double> norms_of(const NormProfile& profile, int seed) {
  std::mt19937_64 random(static_cast<uint64_t>(seed) * 77 + 5);
  std::normal_distribution<double> normal;
  std::vector<double> norms(kSteps);
  for (int n = 0; n < kSteps; ++n) norms[n] = profile.norm(n) * std::exp(kScatter * normal(random));
  return norms;
}

inline double noise(double norm, int bits) {
  const double levels = std::exp2(bits - 1) - 1;
  return norm * norm / (levels * levels);
}

}  // namespace gradwire::norms
