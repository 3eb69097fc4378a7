// SPDX-License-Identifier: Apache-2.0
// The predicted error of a range float against the format itself, run on the data, and the mantissa chosen by it.
#include "codec/rangefloat/mantissa.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "gradwire/error.h"

namespace gradwire {
namespace {

// x through the format and back. P = 2^(N-1) positive codes, one fewer negative.
struct ReferenceRangeFloat {
  int bits, mantissa;
  float max;
  bool truncate;

  // 0 or less: the range would reach beyond the least float, and the codes do not end at the maximum.
  int64_t pbase() const {
    return int64_t{std::bit_cast<uint32_t>(max) >> (23 - mantissa)} + 1 - (int64_t{1} << (bits - 1));
  }
  float through(float x) const {
    const int shift = 23 - mantissa;
    const int64_t positive = int64_t{1} << (bits - 1), base = std::max<int64_t>(1, pbase());
    const float magnitude = std::min(std::abs(x), max);
    const float eps = std::bit_cast<float>(static_cast<uint32_t>(base << shift));
    if (magnitude < (truncate ? eps : eps / 2)) return 0;
    uint32_t pattern = std::bit_cast<uint32_t>(magnitude);
    if (!truncate && shift > 0) pattern += 1u << (shift - 1);
    const int64_t code = std::clamp<int64_t>((pattern >> shift) - base + 1, 1, x < 0 ? positive - 1 : positive);
    return std::copysign(std::bit_cast<float>(static_cast<uint32_t>((code + base - 1) << shift)), x);
  }
};

double measured(const std::vector<float>& x, const ReferenceRangeFloat& format) {
  double error = 0, total = 0;
  for (const float v : x) {
    const double off = double(v) - format.through(v);
    error += off * off;
    total += double(v) * v;
  }
  return error / total;
}

enum class MantissaValues { gauss, laplace, lognormal };
std::vector<float> draw(MantissaValues data, size_t n, double scale) {
  std::mt19937_64 random(7);
  std::normal_distribution<double> gauss;
  std::exponential_distribution<double> magnitude;
  std::vector<float> x(n);
  for (float& v : x) {
    const double sign = random() & 1 ? 1 : -1;
    v = static_cast<float>(scale * (data == MantissaValues::gauss     ? gauss(random)
                                    : data == MantissaValues::laplace ? sign * magnitude(random)
                                                                      : sign * std::exp(1.5 * gauss(random))));
  }
  return x;
}
float largest(const std::vector<float>& x) {
  float most = 0;
  for (const float v : x) most = std::max(most, std::abs(v));
  return most;
}

TEST(Mantissa, TheFourRowsArePredicted) {
  // Range [-1, 1], Gaussian of deviation .05.
  auto x = draw(MantissaValues::gauss, 1 << 19, .05);
  MagnitudeHistogram h;
  h.add(x, 1);
  const struct {
    int bits, mantissa;
    double truncated, rounded;
  } rows[] = {{6, 2, 9.9e-3, 2.8e-3}, {8, 4, 8.2e-4, 2.1e-4}, {10, 5, 1.7e-4, 4.4e-5}, {10, 6, 1.8e-4, 4.4e-5}};
  for (const auto& row : rows) {
    for (const bool truncate : {false, true}) {
      const double real = measured(x, {row.bits, row.mantissa, 1, truncate});
      const double wanted = truncate ? row.truncated : row.rounded;
      EXPECT_NEAR(real, wanted, .05 * wanted) << row.bits << " " << row.mantissa << " " << truncate;
      EXPECT_NEAR(range_error(h, row.bits, row.mantissa, truncate), real, .15 * real)
          << row.bits << " " << row.mantissa;
    }
  }
}

TEST(Mantissa, TheChoiceIsWithinFivePercentOfTheBest) {
  for (const auto data : {MantissaValues::gauss, MantissaValues::laplace, MantissaValues::lognormal}) {
    for (const double scale : {1.0, .0137}) {
      const auto x = draw(data, 1 << 17, scale);
      const float max = largest(x);
      MagnitudeHistogram h;
      h.add(x, max);
      for (const int bits : {6, 8, 10, 16}) {
        for (const bool truncate : {false, true}) {
          double least = 1;
          std::string errors;
          for (int m = 1; m <= bits - 2; ++m) {
            const double real = measured(x, {bits, m, max, truncate}), guess = range_error(h, bits, m, truncate);
            least = std::min(least, real);
            char text[64];
            std::snprintf(text, sizeof text, " %d: %.3g (%.3g)", m, real, guess);
            errors += text;
            if (ReferenceRangeFloat{bits, m, max, truncate}.pbase() > 0) {
              EXPECT_NEAR(guess, real, .15 * real) << int(data) << " N " << bits << " m " << m << truncate;
            }
          }
          const int m = choose_mantissa(h, bits, truncate);
          EXPECT_LE(measured(x, {bits, m, max, truncate}), 1.05 * least)
              << int(data) << " N " << bits << " truncate " << truncate << " chose " << m << ":" << errors;
        }
      }
    }
  }
}

TEST(Mantissa, UnitsOfDifferentMaximaArePooled) {
  const auto x = draw(MantissaValues::laplace, 1 << 16, 1);
  MagnitudeHistogram pooled, other;
  double real = 0, total = 0;
  for (const float scale : {1.0f, .3f, 1.7e-3f, 900.0f}) {
    std::vector<float> y(x);
    for (float& v : y) v *= scale;
    const float max = largest(y);
    const double unit = std::exp2(std::ilogb(max));
    other.add(y, max);
    for (const float v : y) {
      const double off = (double(v) - ReferenceRangeFloat{8, 4, max, false}.through(v)) / unit;
      real += off * off;
      total += double(v) / unit * v / unit;
    }
  }
  pooled.merge(other);
  EXPECT_TRUE(std::equal(pooled.words().begin(), pooled.words().end(), other.words().begin()));
  EXPECT_NEAR(range_error(pooled, 8, 4, false), real / total, .05 * real / total);
}

TEST(Mantissa, WeightsCountAndOrderDoesNot) {
  const auto x = draw(MantissaValues::lognormal, 3000, 1);
  const std::span<const float> all(x);
  const float max = largest(x);
  MagnitudeHistogram whole, parts, tail, thrice;
  whole.add(x, max);
  tail.add(all.subspan(1000), max);
  parts.merge(tail);
  parts.add(all.first(1000), max);
  EXPECT_TRUE(std::equal(whole.words().begin(), whole.words().end(), parts.words().begin()));
  thrice.add(x, max, 3);
  parts.merge(whole);
  parts.merge(whole);
  EXPECT_TRUE(std::equal(thrice.words().begin(), thrice.words().end(), parts.words().begin()));
}

TEST(Mantissa, OddValuesAreHarmless) {
  MagnitudeHistogram h;
  const float inf = std::numeric_limits<float>::infinity();
  h.add(std::vector<float>{0, -0.0f, std::nanf(""), 1e-44f}, 1);
  h.add(std::vector<float>{1, 2}, 0);
  h.add(std::vector<float>{1, 2}, inf);
  h.add(std::vector<float>{1, 2}, std::nanf(""));
  EXPECT_TRUE(std::all_of(h.words().begin(), h.words().end(), [](int64_t w) { return w == 0; }));
  EXPECT_EQ(choose_mantissa(h, 8, false), 6);
  EXPECT_EQ(range_error(h, 8, 3, false), 0);
  h.add(std::vector<float>{-1, 1, 5, -inf}, 1);  // all at the maximum: precision is all that matters
  EXPECT_EQ(choose_mantissa(h, 8, false), 6);
  EXPECT_EQ(choose_mantissa(h, 32, false), 23);
  h.add(std::vector<float>{1e-44f, 1e-45f}, 1e-44f);
}

TEST(Mantissa, WidthsOutOfRangeAreRefused) {
  const MagnitudeHistogram h;
  EXPECT_THROW(range_error(h, 8, 0, false), Error);
  EXPECT_THROW(range_error(h, 8, 7, false), Error);
  EXPECT_THROW(range_error(h, 32, 24, false), Error);
  EXPECT_THROW(choose_mantissa(h, 2, false), Error);
  EXPECT_THROW(choose_mantissa(h, 33, false), Error);
}

}  // namespace
}  // namespace gradwire
