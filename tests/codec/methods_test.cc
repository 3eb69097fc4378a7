// SPDX-License-Identifier: Apache-2.0
// What the papers and our own derivations say about the methods, checked on the codecs as they are used. Mathematics
// without codecs is in levels_test, bits_test, clusters_test, mantissa_test and fft_test.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "codec/optquant/levels.h"
#include "codec/test_devices.h"
#include "gradwire/error.h"
#include "gradwire/learn.h"
#include "gradwire/message.h"

namespace gradwire::test {
namespace {

std::vector<float> laplace(uint64_t count, uint32_t seed = 1) {
  std::mt19937 generator(seed);
  std::exponential_distribution<float> exponential;
  std::vector<float> x(count);
  for (float& v : x) v = exponential(generator) * (generator() & 1 ? 0.01f : -0.01f);
  return x;
}

std::vector<float> gauss(uint64_t count, uint32_t seed = 1) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0, 0.01f);
  std::vector<float> x(count);
  for (float& v : x) v = normal(generator);
  return x;
}

std::vector<float> student(uint64_t count, uint32_t seed = 1) {
  std::mt19937 generator(seed);
  std::student_t_distribution<float> t(3);
  std::vector<float> x(count);
  for (float& v : x) v = t(generator) * 0.01f;
  return x;
}

std::vector<float> through(const Codec& codec, const std::vector<float>& x, const Stamp& stamp = {.seed = 1}) {
  const TestDevice device(Device{});
  const Plan plan({{"w", x.size(), DType::f32, codec}});
  return values_of(device.decode(plan, device.encode(plan, {raw_of(x)}, stamp))[0]);
}

std::vector<float> fitted_through(const std::string& spec, const std::vector<float>& x) {
  return through(fit(Codec::parse(spec), x.data(), x.size(), DType::f32), x);
}

double relative_error(const std::vector<float>& x, const std::vector<float>& y) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    error += std::pow(static_cast<double>(x[i]) - y[i], 2);
    norm += static_cast<double>(x[i]) * x[i];
  }
  return error / norm;
}

Codec levels(const std::string& spec, const std::vector<float>& values) {
  std::vector<uint32_t> table;
  for (float v : values) table.push_back(float_bits(v));
  return Codec::parse(spec).fitted(table);
}

// --- optquant ------------------------------------------------------------------------------------------------------

TEST(OptQuant, IsUnbiasedOver4096Seeds) {
  const std::vector<float> x = laplace(1024, 3);
  for (const char* spec : {"optquant:bits=2", "optquant:bits=3", "optquant:bits=4"}) {
    const Codec codec = fit(Codec::parse(spec), x.data(), x.size(), DType::f32);
    float top = 0;
    for (float v : x) top = std::max(top, std::fabs(v));
    std::vector<double> sum(x.size());
    constexpr int kSeeds = 4096;
    for (uint64_t seed = 0; seed < kSeeds; ++seed) {
      const std::vector<float> y = through(codec, x, {.seed = seed});
      for (size_t i = 0; i < x.size(); ++i) sum[i] += static_cast<double>(y[i]) - x[i];
    }
    double all = 0, variance = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      double low = -top, high = top;  // the levels around x
      for (uint32_t word : codec.table()) {
        const double level = static_cast<double>(bits_float(word)) * top;
        if (level <= x[i]) low = level;
        if (level >= x[i]) high = std::min(high, level);
      }
      const double sigma2 = kSeeds * (high - x[i]) * (x[i] - low);
      all += sum[i];
      variance += sigma2;
      // The chance is rounded to 2^-16, so the mean may be off by 2^-17 of a cell.
      EXPECT_LE(std::fabs(sum[i]), 5 * std::sqrt(sigma2) + kSeeds * (high - low) * 0x1p-16) << spec << " element " << i;
    }
    EXPECT_LE(std::fabs(all), 5 * std::sqrt(variance)) << spec;
  }
}

TEST(OptQuant, WhatIsSentHasTheErrorThatTheFitPredicts) {
  for (const auto& x : {laplace(1 << 19), gauss(1 << 19), student(1 << 19)})
    for (const char* spec : {"optquant:bits=2", "optquant:bits=3", "optquant:bits=4", "optquant:bits=3,mode=biased",
                             "optquant:bits=3,mode=biased,kappa=0.25"}) {
      const Codec codec = fit(Codec::parse(spec), x.data(), x.size(), DType::f32);
      std::vector<float> v;
      for (uint32_t word : codec.table()) v.push_back(bits_float(word));
      std::vector<double> t, weight;
      double norm = 0;
      for (size_t b = 0; b < x.size(); b += 1024) {
        double top = 0;
        for (size_t i = b; i < b + 1024; ++i) top = std::max<double>(top, std::fabs(x[i]));
        for (size_t i = b; i < b + 1024; ++i) {
          t.push_back(x[i] / top);
          weight.push_back(top * top);
          norm += static_cast<double>(x[i]) * x[i];
        }
      }
      const bool biased = codec.get("mode") == "biased";
      const LevelRule rule{biased, biased ? std::stod(codec.get("kappa")) : 0, 1};
      double total = 0;
      for (double w : weight) total += w;
      const double predicted = level_error(v, t, weight, rule) * total / norm,
                   sent = relative_error(x, through(codec, x));
      EXPECT_NEAR(sent, predicted, 0.02 * predicted) << spec;
    }
}

// Workers whose errors are independent: the mean over M has a variance of 1/M; nearest has none to average where all
// hold the same.
TEST(OptQuant, TheMeanOverWorkersIsAsDerived) {
  const int kCells = 8;
  std::vector<float> uniform;
  for (int i = 0; i <= kCells; ++i) uniform.push_back(-1 + 2.0f * static_cast<float>(i) / kCells);
  std::mt19937 generator(5);
  for (int workers : {2, 4, 8}) {
    const double kappa = 1.0 / (2 * workers), step = 2.0 / kCells;
    std::vector<float> table = uniform;
    table.resize(15);  // bits=4 wants 15 or 16 levels: the rest goes unused, just below the top
    for (int i = 0; i < 15; ++i) table[i] = i < 8 ? uniform[i] : 1 - static_cast<float>(14 - i) * 1e-3f;
    const Codec codec = levels("optquant:bits=4,mode=biased,kappa=" + std::to_string(kappa), table);
    // Positions evenly spread over the cells from -1 to 0.75; the largest magnitude is 1.
    const size_t n = 1 << 16;
    std::uniform_real_distribution<float> position(-1, 0.75f);
    std::vector<float> same(n);
    for (float& v : same) v = position(generator);
    for (size_t b = 0; b < n; b += 1024) same[b] = 1;
    std::vector<double> mean_same(n), mean_free(n), truth_free(n);
    for (int w = 0; w < workers; ++w) {
      const Stamp stamp{.seed = 9 + static_cast<uint64_t>(w)};  // the derivation is for independent draws
      std::vector<float> own(n);
      for (float& v : own) v = position(generator);
      for (size_t b = 0; b < n; b += 1024) own[b] = 1;
      const std::vector<float> y = through(codec, same, stamp), z = through(codec, own, stamp);
      for (size_t i = 0; i < n; ++i) {
        mean_same[i] += y[i] / workers;
        mean_free[i] += z[i] / workers;
        truth_free[i] += own[i] / workers;
      }
    }
    double error_same = 0, error_free = 0;
    for (size_t i = 0; i < n; ++i) {
      error_same += std::pow(mean_same[i] - same[i], 2) / n / (step * step);
      error_free += std::pow(mean_free[i] - truth_free[i], 2) / n / (step * step);
    }
    const double m = workers;
    EXPECT_NEAR(error_same, 1 / (6 * m) * (1 - 1 / (2 * m)), 0.03 / (6 * m)) << workers << " identical workers";
    EXPECT_NEAR(error_free, (1.0 / 12 + std::pow(0.5 - kappa, 2) / 3) / m, 0.03 / (6 * m))
        << workers << " independent workers";
  }
}

// g = (1, a, ..., a) with a below kappa times the first level: without feedback nothing of a is ever sent.
TEST(OptQuant, TheDeadZoneNeedsFeedback) {
  const float a = 0.05625f;
  std::vector<float> g(1024, a);
  g[0] = 1;
  const auto spec = [](double kappa) { return "optquant:bits=3,mode=biased,kappa=" + std::to_string(kappa); };
  for (double kappa : {0.125, 0.5}) {
    const Codec codec = levels(spec(kappa), {-1, -0.75f, -0.5f, 0, 0.5f, 0.75f, 1});
    for (uint64_t step = 0; step < 50; ++step) {
      const std::vector<float> y = through(codec, g, {.seed = 1, .step = step});
      for (size_t i = 1; i < y.size(); ++i) ASSERT_EQ(y[i], 0.0f) << kappa;
    }
    // With feedback the sum of what was sent follows T g within half a cell.
    const TestDevice device(Device{});
    const Plan plan({{"w", g.size(), DType::f32, codec}});
    TestFeedback feedback{{raw_of(std::vector<float>(g.size()))}};
    std::vector<double> sent(g.size());
    const int steps = 200;
    for (int step = 0; step < steps; ++step) {
      std::vector<Raw> after;
      const Raw message =
          device.encode(plan, {raw_of(g)}, {.seed = 1, .step = static_cast<uint64_t>(step)}, &feedback, &after);
      const std::vector<float> y = values_of(device.decode(plan, message)[0]);
      for (size_t i = 0; i < y.size(); ++i) sent[i] += y[i];
      feedback.before = after;
    }
    for (size_t i = 1; i < g.size(); ++i)
      ASSERT_LE(std::fabs(sent[i] - steps * static_cast<double>(a)), 0.5) << kappa << " element " << i;
  }
  const Codec unbiased = levels("optquant:bits=3", {-1, -0.75f, -0.5f, 0, 0.5f, 0.75f, 1});
  double mean = 0;
  for (uint64_t step = 0; step < 500; ++step) {
    const std::vector<float> y = through(unbiased, g, {.seed = 1, .step = step});
    for (size_t i = 1; i < y.size(); ++i) mean += y[i] / 1023.0 / 500 / a;
  }
  EXPECT_NEAR(mean, 1.0, 0.01);
}

// --- casq ----------------------------------------------------------------------------------------------------------

// Against random rounding, on smooth distributions. Optimal levels are better, and on others so is plain rounding.
TEST(Casq, AtThreeBitsItBeatsRandomRoundingAndNotOptimalLevels) {
  for (const auto& x : {laplace(1 << 20), gauss(1 << 20), student(1 << 20)}) {
    const Codec casq = fit(Codec::parse("casq:bits=2"), x.data(), x.size(), DType::f32);
    EXPECT_LE(8.0 * static_cast<double>(bound(casq, x.size())) / static_cast<double>(x.size()), 3.03);
    const double ours = relative_error(x, through(casq, x));
    EXPECT_LE(ours, relative_error(x, fitted_through("qsgd:bits=3", x)));
    EXPECT_LE(ours, relative_error(x, fitted_through("terngrad", x)));
    // What we do not promise: optimal scalar levels at the same bits are better still.
    EXPECT_GE(ours, relative_error(x, fitted_through("optquant:bits=3,mode=biased", x)));
  }
}

TEST(Casq, OurBucketsAreAtLeastAsGoodAsThePapersAtTheSameBudget) {
  for (const auto& x : {laplace(1 << 18), gauss(1 << 18), student(1 << 18)})
    for (const char* bits : {"2", "3"}) {
      const std::string head = std::string("casq:bits=") + bits + ",budget=0.05";
      const double ours = relative_error(x, fitted_through(head, x));
      for (const char* rule : {"optimal", "density", "entropy", "outliers"})
        EXPECT_LE(ours, relative_error(x, fitted_through(head + ",mode=paper,rule=" + rule, x))) << bits << " " << rule;
    }
}

TEST(Casq, ABucketKeepsItsSum) {  // so the squared norms add up: |v|^2 = |Q|^2 + |v - Q|^2, up to f32 means
  const std::vector<float> x = laplace(1 << 16);
  const std::vector<float> y = fitted_through("casq:bits=2,mode=paper,budget=0.05", x);
  double v = 0, q = 0, rest = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    v += static_cast<double>(x[i]) * x[i];
    q += static_cast<double>(y[i]) * y[i];
    rest += std::pow(static_cast<double>(x[i]) - y[i], 2);
  }
  EXPECT_NEAR((q + rest) / v, 1, 1e-6);
}

// mode=paper applies its thresholds in units of the rms of the tensor, so that where the values stand does not matter,
// and they are fitted in these units.
TEST(Casq, ThePapersThresholdsDoNotDependOnWhereValuesStand) {
  std::vector<float> layers = laplace(1 << 18);
  for (size_t i = 0; i < layers.size(); ++i) layers[i] *= std::pow(100.0f, static_cast<float>(i >> 16) / 3);
  std::vector<float> mixed = layers;
  std::shuffle(mixed.begin(), mixed.end(), std::mt19937(1));
  for (const char* spec : {"casq:bits=2,mode=paper", "casq:bits=3,mode=paper,rule=entropy"}) {
    const Codec a = fit(Codec::parse(spec), layers.data(), layers.size(), DType::f32);
    const Codec b = fit(Codec::parse(spec), mixed.data(), mixed.size(), DType::f32);
    for (size_t i = 0; i < (a.table().size() - 1) / 2; ++i)
      EXPECT_NEAR(bits_float(a.table()[i]), bits_float(b.table()[i]), 0.01f * std::fabs(bits_float(b.table()[i])))
          << spec;
    EXPECT_LT(relative_error(layers, through(a, layers)), 1.01 * relative_error(layers, through(b, layers))) << spec;
  }
}

TEST(Casq, ThePapersFormIsFittedMoreOften) {
  const auto refit = [](const char* spec) { return Codec::parse(spec).get("refit"); };
  EXPECT_EQ(refit("casq"), "100");
  EXPECT_EQ(refit("casq:mode=paper"), "10");
  EXPECT_EQ(refit("casq:refit=50,mode=paper"), "50");
  EXPECT_EQ(refit("casq:mode=tile,refit=7"), "7");
}

// --- rangefloat ------------------------------------------------------------------------------------------------------

TEST(RangeFloat, ThePapersExampleComesOutExactly) {
  // m = 3, range [-2, 2], eps = 0.125: 0.256 has code 9 and decodes to 0.25.
  const Codec codec = Codec::parse("rangefloat:bits=8,mantissa=3,min=-2,max=2,eps=0.125,mode=paper");
  const std::vector<float> x = {0.256f, -0.256f, 2, 2.5f, -2, 0.124f, 0.125f, 0};
  const TestDevice device(Device{});
  const Plan plan({{"w", x.size(), DType::f32, codec}});
  const Raw message = device.encode(plan, {raw_of(x)}, {});
  const Head head = read_head(message);
  EXPECT_EQ(static_cast<int>(message[head.head_bytes]), 9);
  EXPECT_EQ(static_cast<int>(message[head.head_bytes + 1]), 33 + 9);  // 33 positive codes, then the negative ones
  EXPECT_EQ(values_of(device.decode(plan, message)[0]), (std::vector<float>{0.25f, -0.25f, 2, 2, -2, 0, 0.125f, 0}));
}

TEST(RangeFloat, TheLargestNegativeHasNoCodeWhenHalfOfAllArePositive) {
  const Codec codec = Codec::parse("rangefloat:bits=8,mantissa=4,max=1,mode=paper");
  const std::vector<float> y = through(codec, {1.0f, -1.0f, 0.999f});
  EXPECT_EQ(y, (std::vector<float>{1.0f, -0.96875f, 0.96875f}));
}

TEST(RangeFloat, RoundingErrorsAreThoseOfTheTable) {
  std::mt19937 generator(2);
  std::normal_distribution<float> normal(0, 0.05f);
  std::vector<float> x(1 << 20);
  for (float& v : x) v = std::clamp(normal(generator), -1.0f, 1.0f);
  const struct {
    const char* spec;
    double round, cut;
  } rows[] = {{"bits=6,mantissa=2", 2.8e-3, 9.9e-3},
              {"bits=8,mantissa=4", 2.1e-4, 8.2e-4},
              {"bits=10,mantissa=5", 4.4e-5, 1.7e-4},
              {"bits=10,mantissa=6", 4.4e-5, 1.8e-4}};
  for (const auto& row : rows) {
    const std::string spec = std::string("rangefloat:max=1,") + row.spec;
    EXPECT_NEAR(relative_error(x, through(Codec::parse(spec), x)), row.round, 0.05 * row.round) << spec;
    EXPECT_NEAR(relative_error(x, through(Codec::parse(spec + ",mode=paper"), x)), row.cut, 0.05 * row.cut) << spec;
  }
}

TEST(RangeFloat, TheFittedMantissaIsTheBest) {
  for (const auto& x : {laplace(1 << 18), gauss(1 << 18), student(1 << 18)})
    for (int bits : {6, 8, 10}) {
      const std::string head = "rangefloat:bits=" + std::to_string(bits);
      double best = HUGE_VAL;
      for (int m = 1; m <= bits - 2; ++m)
        best = std::min(best, relative_error(x, through(Codec::parse(head + ",mantissa=" + std::to_string(m)), x)));
      EXPECT_LE(relative_error(x, fitted_through(head, x)), 1.05 * best) << bits;
    }
}

// --- fft -------------------------------------------------------------------------------------------------------------

TEST(Fft, TheMessageHasItsHonestSize) {
  // 0.15 * 10 + 0.5 bits an element, and a scale a chunk; whole bins and words.
  const Codec codec = Codec::parse("fft:theta=0.85,bits=10,chunk=4096");
  EXPECT_EQ(codec.bytes(4096), 4u * (2048 / 32 + (2 * 307 * 10 + 31) / 32 + 1));
  EXPECT_NEAR(8.0 * static_cast<double>(codec.bytes(1 << 20)) / (1 << 20), 2.0, 0.01);
  // The bitmap is counted: the paper's 21.3 does not.
  EXPECT_LT(32.0 / (8.0 * static_cast<double>(codec.bytes(1 << 20)) / (1 << 20)), 16.0);
}

TEST(Fft, WinsWhereGradientsAreCorrelatedAndLosesWhereTheyAreWhite) {
  const auto correlated = [](double rho) {
    std::mt19937 generator(4);
    std::normal_distribution<double> normal;
    std::vector<float> x(1 << 18);
    double state = 0;
    for (float& v : x)
      v = static_cast<float>(0.01 * (state = rho * state + std::sqrt(1 - rho * rho) * normal(generator)));
    return x;
  };
  const auto topk_at = [](double bits) {  // 48 bits a kept element
    return "topk:ratio=" + std::to_string(bits / 48);
  };
  const Codec fft = Codec::parse("fft:theta=0.85,chunk=4096");
  const double bits = 8.0 * static_cast<double>(fft.bytes(1 << 18)) / (1 << 18);
  for (double rho : {0.5, 0.9, 0.99}) {
    const std::vector<float> x = correlated(rho);
    EXPECT_LT(relative_error(x, fitted_through(fft.str(), x)), relative_error(x, fitted_through(topk_at(bits), x)))
        << rho;
  }
  const std::vector<float> white = correlated(0);
  const double kept = relative_error(white, fitted_through(fft.str(), white));
  EXPECT_NEAR(kept, 0.566, 0.01);
  EXPECT_GT(kept, relative_error(white, fitted_through("topk:ratio=0.15", white)))
      << "at an equal share, topk keeps more of white noise";
}

}  // namespace
}  // namespace gradwire::test
