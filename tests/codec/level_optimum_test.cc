// SPDX-License-Identifier: Apache-2.0
// Fitted levels against the best there are for the raw values, of any shape. The best symmetric levels are the rival:
// they must miss the same bounds wherever many values are exactly zero or the two signs differ.
#include <gtest/gtest.h>

#include <cstdio>

#include "codec/level_reference.h"
#include "codec/optquant/levels.h"

namespace gradwire::test {
namespace {

const LevelRule kUnbiased{};
const LevelRule kNearestRule{.biased = true, .kappa = 0.5, .workers = 1};

double bound_of(int bits) { return bits <= 4 ? 1.01 : 1.02; }

struct LevelProfile {
  const char* kind;
  int symmetric_fails;  // from so many bits on, up to 4
};

class OnProfile : public testing::TestWithParam<LevelProfile> {};

TEST_P(OnProfile, UnbiasedLevelsAreTheBestOfAnyShape) {
  for (uint64_t seed : {1, 2, 3}) {
    const LevelSample data = level_sample(GetParam().kind, 32, seed);
    const LevelOptima best = level_optima(data, 8, 4);
    for (int bits = 2; bits <= 8; ++bits) {
      const LevelFit fit = fit_levels(data.histogram, bits, kUnbiased);
      const double error = level_error(fit.levels, data.t, data.weight, kUnbiased);
      std::printf("%-9s seed %d, %d bits: error %.6g, over the best %.6f", GetParam().kind, static_cast<int>(seed),
                  bits, error, error / best.unbiased[bits]);
      EXPECT_LE(error, bound_of(bits) * best.unbiased[bits]) << bits;
      EXPECT_GE(error, 0.99999 * best.unbiased[bits]) << "the reference is no optimum";
      EXPECT_NEAR(fit.error, error, (bits < 8 ? 0.005 : 0.02) * error);
      if (bits <= 4) {
        const double rival = best.symmetric[bits] / best.unbiased[bits];
        std::printf(", best symmetric levels %.4f", rival);
        EXPECT_GE(rival, 0.99999);
        if (bits >= GetParam().symmetric_fails) {
          EXPECT_GT(rival, bound_of(bits)) << "symmetric levels would do";
        }
      }
      std::printf("\n");
    }
  }
}

TEST_P(OnProfile, NearestLevelsAreTheBestOfAnyShape) {
  const LevelSample data = level_sample(GetParam().kind, 32, 4);
  std::vector<std::pair<double, double>> points;
  for (size_t i = 0; i < data.t.size(); ++i) points.emplace_back(data.t[i], data.weight[i]);
  const std::vector<double> best = programme_of(points, {}).nearest(256);
  for (int bits = 2; bits <= 8; ++bits) {
    const LevelFit fit = fit_levels(data.histogram, bits, kNearestRule);
    const double error = level_error(fit.levels, data.t, data.weight, kNearestRule), least = best[size_t{1} << bits];
    std::printf("%-9s nearest, %d bits: error %.6g, over the best %.6f\n", GetParam().kind, bits, error, error / least);
    EXPECT_LE(error, bound_of(bits) * least) << bits;
    EXPECT_GE(error, 0.99999 * least) << "the reference is no optimum";
  }
}

INSTANTIATE_TEST_SUITE_P(Levels, OnProfile,
                         testing::Values(LevelProfile{"laplace", 9}, LevelProfile{"laplace33", 3},
                                         LevelProfile{"laplace60", 2}, LevelProfile{"laplace81", 2},
                                         LevelProfile{"skewed", 2}, LevelProfile{"onesided", 2},
                                         LevelProfile{"layers", 3}, LevelProfile{"student", 9},
                                         LevelProfile{"gauss", 9}, LevelProfile{"lognormal", 9}),
                         [](const auto& info) { return std::string(info.param.kind); });

// Zeros that decode to something else would make a sparse gradient dense. Four levels that round to nearest can have a
// zero only at a price, and are exempt.
TEST(Levels, ManyZerosStayZeros) {
  for (const char* kind : {"laplace60", "laplace81"})
    for (int bits = 2; bits <= 8; ++bits)
      for (const LevelRule& rule : {kUnbiased, kNearestRule, LevelRule{true, 0.25, 2}}) {
        if (rule.biased && bits == 2) continue;
        const std::vector<float> levels = fit_levels(level_sample(kind, 8).histogram, bits, rule).levels;
        EXPECT_TRUE(std::binary_search(levels.begin(), levels.end(), 0.0f)) << kind << " " << bits << " " << rule.kappa;
      }
}

}  // namespace
}  // namespace gradwire::test
