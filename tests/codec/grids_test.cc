// SPDX-License-Identifier: Apache-2.0
// The two grids of Quantized Adam: how far loggrid contracts, and that unigrid rounds to nearest, without a drift and
// with the same magnitude for both signs.
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "codec/test_devices.h"

namespace gradwire::test {
namespace {

std::vector<float> through_grid(const std::string& spec, const std::vector<float>& x) {
  const TestDevice device(Device{});
  const Plan plan({{"w", x.size(), DType::f32, Codec::parse(spec)}});
  return values_of(device.decode(plan, device.encode(plan, {raw_of(x)}, {.seed = 1}))[0]);
}

// |u - Q(u)|^2 / |u|^2
double contraction(int k, const std::vector<float>& u) {
  const std::vector<float> q = through_grid("loggrid:scale=tensor,k=" + std::to_string(k), u);
  double lost = 0, size = 0;
  for (size_t i = 0; i < u.size(); ++i) {
    lost += std::pow(static_cast<double>(u[i]) - q[i], 2);
    size += static_cast<double>(u[i]) * u[i];
  }
  return lost / size;
}

// With the largest entry at 1, an entry v that is off by e(v) adds e^2 to the numerator and v^2 to the denominator. For
// a given value s of the quotient every entry should maximise e^2 - s v^2, which is convex between a level and a middle
// of two levels: so all entries lie at one and the same middle. Below the least level that is e = v = 2^-(k+1); between
// 2^-(j+1) and 2^-j it is v = 3 e, e = 2^-(j+2), which is worst for j = 0.
double contraction_bound(int k, size_t d) {
  const auto others = static_cast<double>(d - 1);
  return std::max(others / (std::pow(4.0, k + 1) + others), others / (16 + 9 * others));
}

TEST(LogGrid, ContractsAsDerived) {
  std::mt19937_64 random(11);
  std::uniform_real_distribution<double> uniform;
  for (int k = 0; k <= 10; ++k) {
    for (size_t d : {2, 3, 5, 10, 100, 1024}) {
      const double bound = contraction_bound(k, d);
      double worst = 0;
      for (double middle : {std::ldexp(1.0, -k - 1), 0.75}) {
        std::vector<float> u(d, std::nextafter(static_cast<float>(middle), 0.0f));
        u[0] = 1;
        worst = std::max(worst, contraction(k, u));
      }
      EXPECT_NEAR(worst, bound, 1e-5 * bound) << k << " " << d;
      for (int round = 0; round < 60; ++round) {
        // Magnitudes of all sizes; in two rounds of three they are close to middles, or to few of them.
        std::vector<float> u(d);
        const int few = 1 + static_cast<int>(random() % (k + 1));
        for (float& v : u) {
          const int j = static_cast<int>(random() % (round % 3 == 1 ? k + 1 : few));
          const double middle = j == k ? std::ldexp(1.0, -k - 1) : 0.75 * std::ldexp(1.0, -j);
          const double size = round % 3 == 0 ? std::exp2(-(k + 3) * uniform(random)) : middle;
          v = static_cast<float>(size * (1 + 1e-3 * (uniform(random) - 0.5)) * (random() & 1 ? 1 : -1));
        }
        u[random() % d] = 1;
        ASSERT_LE(contraction(k, u), bound * (1 + 1e-6)) << k << " " << d << " " << round;
      }
    }
  }
}

class UniGridWidths : public testing::TestWithParam<int> {
 public:
  std::string spec(const char* range) const {
    return "unigrid:scale=tensor,bits=" + std::to_string(GetParam()) + ",range=" + range;
  }
  int top() const { return (1 << (GetParam() - 1)) - 1; }
};

std::vector<float> draw_weights(bool positive) {
  std::mt19937_64 random(7);
  std::normal_distribution<float> normal(0, 0.02f);
  std::uniform_real_distribution<float> uniform(0, 0.3f);
  std::vector<float> x(1 << 20);
  for (float& v : x) v = positive ? uniform(random) : normal(random);
  return x;
}

std::vector<float> weights(bool positive, size_t count) {
  static const std::vector<float> all[] = {draw_weights(false), draw_weights(true)};
  return {all[positive].begin(), all[positive].begin() + static_cast<ptrdiff_t>(count)};
}

double limit_of(const std::vector<float>& x, const char* range) {
  double limit = static_cast<float>(std::stod(range));
  if (limit == 0)
    for (float v : x) limit = std::max<double>(limit, std::fabs(v));
  return limit;
}

// Half a step, and what single precision adds: 2^-16 of a step up to 8 bits. Beyond, the values of codes are floats
// that are themselves off by up to 2^-24 of the range.
TEST_P(UniGridWidths, NothingIsFurtherOffThanHalfAStepAndNoOtherCodeIsNearer) {
  for (bool positive : {false, true})
    for (const char* range : {"0", "0.03"}) {
      const std::vector<float> x = weights(positive, 1 << 16), y = through_grid(spec(range), x);
      const double limit = limit_of(x, range), step = limit / top();
      const double allowed = step * (0.5 + 0x1p-16) + (GetParam() > 8 ? limit * 0x1p-23 : 0);
      const float a = static_cast<float>(limit) / static_cast<float>(top());
      for (size_t i = 0; i < x.size(); ++i) {
        const double v = std::clamp<double>(x[i], -limit, limit), error = std::fabs(y[i] - v);
        ASSERT_LE(error, allowed) << spec(range) << " " << x[i];
        const long code = std::lround(y[i] / a);
        for (long other : {code - 1, code + 1})
          if (std::labs(other) <= top()) {
            const double there = std::fabs(static_cast<float>(other) * a - v);
            ASSERT_LE(error, there + (GetParam() > 8 ? 0 : step * 0x1p-16)) << spec(range) << " " << x[i];
          }
      }
    }
}

TEST_P(UniGridWidths, TheMeanErrorIsZero) {
  for (bool positive : {false, true}) {
    const std::vector<float> x = weights(positive, 1 << 20), y = through_grid(spec("0"), x);
    double sum = 0, squares = 0;
    const double step = limit_of(x, "0") / top(), n = static_cast<double>(x.size());
    for (size_t i = 0; i < x.size(); ++i) {
      const double error = (static_cast<double>(y[i]) - x[i]) / step;
      sum += error, squares += error * error;
    }
    EXPECT_LE(std::fabs(sum), 5 * std::sqrt(squares)) << spec("0") << ": " << sum / n << " of a step";
  }
}

TEST_P(UniGridWidths, BothSignsHaveTheSameMagnitude) {
  for (bool positive : {false, true})
    for (const char* range : {"0", "0.03"}) {
      std::vector<float> x = weights(positive, 1 << 16);
      x[0] = limit_of(x, range);
      for (int k = 0; k < std::min(top(), 1000); ++k)  // ties, and their neighbours
        for (int ulp : {-1, 0, 1}) {
          const auto tie = static_cast<float>((k + 0.5) * limit_of(x, range) / top());
          x[1 + 3 * k + 1 + ulp] = std::nextafter(tie, ulp < 0 ? 0.0f : ulp > 0 ? 1.0f : tie);
        }
      const std::vector<float> y = through_grid(spec(range), x);
      for (float& v : x) v = -v;
      const std::vector<float> mirrored = through_grid(spec(range), x);
      for (size_t i = 0; i < x.size(); ++i) ASSERT_EQ(mirrored[i], -y[i]) << spec(range) << " " << x[i];
    }
}

INSTANTIATE_TEST_SUITE_P(UniGrid, UniGridWidths, testing::Range(2, 17));

// Where a step is no more than a few of the smallest floats, codes must still be codes.
TEST(UniGrid, TinyUnitsStayWithinTheRange) {
  for (int bits : {2, 3, 8, 12, 16})
    for (float top : {1e-45f, 7e-45f, 1.3e-43f, 2.5e-43f, 3.1e-41f, 9e-39f, 3e-37f}) {
      std::vector<float> x(65);
      for (int i = 0; i < 65; ++i) x[i] = top * static_cast<float>(i - 32) / 32;
      const std::vector<float> y = through_grid("unigrid:bits=" + std::to_string(bits), x);
      for (size_t i = 0; i < x.size(); ++i) EXPECT_LE(std::fabs(y[i]), 1.5f * top + 3e-45f) << bits << " " << top;
    }
}

}  // namespace
}  // namespace gradwire::test
