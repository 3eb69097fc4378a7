// SPDX-License-Identifier: Apache-2.0
// The bit controller against the experiment it was derived from: gradient descent on F = |x|^2 / 2 with gradient noise
// and stochastic rounding, where bits are worth more at the end, and the bounds that the two forms promise.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <vector>

#include "codec/dqsgd/budget.h"
#include "gradwire/error.h"

namespace gradwire {
namespace {

// A fast stream with Gaussians, so that 24 seeds of the full experiment stay within seconds.
class RandomStream {
 public:
  explicit RandomStream(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15ull + 1) {}
  uint64_t word() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
  }
  double uniform() { return static_cast<double>(word() >> 11) * 0x1p-53; }
  // The sum of 16-bit pieces of three words less its mean: near enough to a Gaussian for a noise in 1024 dimensions.
  double gauss() {
    int64_t sum = 0;
    for (int i = 0; i < 3; ++i) {
      const uint64_t w = word();
      sum += static_cast<int64_t>((w & 0xffff) + (w >> 16 & 0xffff) + (w >> 32 & 0xffff) + (w >> 48));
    }
    return static_cast<double>(sum - 12 * 65535 / 2) / 65536;
  }

 private:
  uint64_t state_;
};

struct SimulatedDescent {
  size_t dimension = 1024;
  double eta = .02;
  uint64_t steps = 600;
  double noise = 1;      // norm of the gradient noise
  bool largest = false;  // scale by the largest magnitude, not by the L2 norm
  int workers = 1;       // that round the same gradient independently
};
using Width = std::function<int(uint64_t step, double norm)>;

// F(x_N) of one seed.
double descend(const SimulatedDescent& d, uint64_t seed, const Width& width) {
  RandomStream random(seed), rounding(seed + 1000);
  const double root = std::sqrt(static_cast<double>(d.dimension));
  std::vector<double> x(d.dimension), g(d.dimension);
  double length = 0;
  for (double& v : x) v = random.gauss();
  for (const double v : x) length += v * v;
  for (double& v : x) v *= 10 / std::sqrt(length);
  for (uint64_t n = 0; n < d.steps; ++n) {
    double norm = 0;
    for (size_t i = 0; i < d.dimension; ++i) {
      g[i] = x[i] + (d.noise > 0 ? d.noise / root * random.gauss() : 0);
      norm = d.largest ? std::max(norm, std::abs(g[i])) : norm + g[i] * g[i];
    }
    if (!d.largest) norm = std::sqrt(norm);
    const int bits = width(n, norm);
    const double s = std::exp2(bits - 1) - 1, step = norm / s;
    for (size_t i = 0; i < d.dimension; ++i) {
      double sent = g[i];
      if (bits < 32) {
        sent = 0;
        for (int w = 0; w < d.workers; ++w) sent += step * std::floor(g[i] / step + rounding.uniform());
        sent /= d.workers;
      }
      x[i] -= d.eta * sent;
    }
  }
  double loss = 0;
  for (double v : x) loss += v * v / 2;
  return loss;
}

BitRule convex_budget(const SimulatedDescent& d, double budget) {
  BitRule rule;
  rule.convex = true;
  rule.budget = budget;
  rule.steps = d.steps;
  rule.alpha = (1 - d.eta) * (1 - d.eta);
  return rule;
}

double fixed_loss(const SimulatedDescent& d, int bits, int seeds) {
  double sum = 0;
  for (int s = 0; s < seeds; ++s) sum += descend(d, s + 1, [&](uint64_t, double) { return bits; });
  return sum / seeds;
}

double controlled_loss(const SimulatedDescent& d, double budget, int seeds) {
  double sum = 0;
  for (int s = 0; s < seeds; ++s) {
    BitController controller(convex_budget(d, budget));
    sum += descend(d, s + 1, [&](uint64_t n, double norm) {
      const int bits = controller.decide(n, norm);
      controller.spent(bits);
      return bits;
    });
    EXPECT_LE(controller.mean_bits(), budget + 1e-12);
    EXPECT_GE(controller.mean_bits(), .99 * budget);
  }
  return sum / seeds;
}

TEST(Bits, ThreeMeanBitsBeatFiveFixedOnes) {
  const SimulatedDescent d;
  const double expected[] = {172.7, 46.9, 18.95, 8.87, 5.93, 5.20};
  double fixed[8] = {};
  for (int bits = 2; bits <= 7; ++bits) {
    fixed[bits] = 1e3 * fixed_loss(d, bits, 12);
    EXPECT_NEAR(fixed[bits], expected[bits - 2], .15 * expected[bits - 2]) << bits;
    RecordProperty("fixed" + std::to_string(bits), std::to_string(fixed[bits]));
  }
  const double budgets[] = {2.5, 3, 4}, wanted[] = {10.1, 5.61, 5.02};
  for (int i = 0; i < 3; ++i) {
    const double loss = 1e3 * controlled_loss(d, budgets[i], 24);
    EXPECT_NEAR(loss, wanted[i], .15 * wanted[i]) << budgets[i];
    RecordProperty("mean" + std::to_string(budgets[i]), std::to_string(loss));
    if (budgets[i] == 3) {
      EXPECT_LT(loss, fixed[3] / 4);
      EXPECT_LT(loss, fixed[5]);
    }
  }
}

TEST(Bits, TheQuickFormComesNearFullPrecision) {
  SimulatedDescent d;
  d.dimension = 256, d.eta = .05, d.steps = 300;
  const double full = fixed_loss(d, 32, 12);
  const double wanted[] = {17.4, 4.49, 1.82, 1.21, 1.07};
  for (int bits = 2; bits <= 6; ++bits) {
    EXPECT_NEAR(fixed_loss(d, bits, 12) / full, wanted[bits - 2], .15 * wanted[bits - 2]) << bits;
  }
  EXPECT_NEAR(controlled_loss(d, 3, 12) / full, 1.02, .1);
}

TEST(Bits, WithoutNoiseFixedBitsAreTied) {
  SimulatedDescent d;
  d.dimension = 256, d.noise = 0;
  for (const bool largest : {false, true}) {
    d.largest = largest;
    for (int bits = 3; bits <= 5; ++bits) {
      EXPECT_NEAR(controlled_loss(d, bits, 8) / fixed_loss(d, bits, 8), 1, .1) << bits << " " << largest;
    }
  }
}

// The exact variance of stochastic rounding of a Gaussian vector whose largest magnitude is 1, with s levels a side.
double variance(const std::vector<double>& x, int bits) {
  const double s = std::exp2(bits - 1) - 1;
  double sum = 0;
  for (const double v : x) {
    const double p = std::abs(v) * s - std::floor(std::abs(v) * s);
    sum += p * (1 - p) / (s * s);
  }
  return sum;
}

// Total squared error of fixed bits over that of the controller; norms fall geometrically by `fall` in all, which it
// is told.
double non_convex_gain(int bits, double fall, double scatter, double* mean = nullptr) {
  RandomStream random(5);
  std::vector<double> x(1024);
  double largest = 0;
  for (double& v : x) largest = std::max(largest, std::abs(v = random.gauss()));
  for (double& v : x) v /= largest;
  BitRule rule;
  rule.budget = bits;
  rule.steps = 400;
  rule.fall = fall;
  BitController controller(rule);
  double fixed = 0, ours = 0;
  for (int n = 0; n < 400; ++n) {
    const double norm = std::pow(fall, -n / 399.0) * std::exp(scatter * random.gauss());
    const int width = controller.decide(n, norm);
    controller.spent(width);
    fixed += norm * norm * variance(x, bits);
    ours += norm * norm * variance(x, width);
  }
  if (mean) *mean = controller.mean_bits();
  return fixed / ours;
}

TEST(Bits, NormsThatFallAHundredfoldGiveTheNonConvexGain) {
  double mean = 0;
  EXPECT_NEAR(non_convex_gain(4, 100, 0, &mean), 7.7, .15 * 7.7);
  EXPECT_LE(mean, 4);
  EXPECT_GE(mean, .99 * 4);
  EXPECT_NEAR(non_convex_gain(5, 100, 0), 8.7, .15 * 8.7);
  EXPECT_GT(non_convex_gain(4, 100, .2), 5);
  EXPECT_GT(non_convex_gain(4, 10, .1), 1.4);
  EXPECT_GT(non_convex_gain(4, 1, 0), .99);  // nothing to gain
}

TEST(Bits, TheBudgetIsNeverOverspentAndUsedTo99Percent) {
  RandomStream random(9);
  for (int trial = 0; trial < 400; ++trial) {
    BitRule rule;
    rule.convex = trial & 1;
    rule.alpha = 1 - .2 * random.uniform() * random.uniform();
    rule.steps = 1 + random.word() % (trial % 10 ? 300 : 2000);
    rule.least = 2 + static_cast<int>(random.word() % 2);
    rule.most = 8 + static_cast<int>(random.word() % 9);
    rule.budget = rule.least + (rule.most - rule.least) * random.uniform();
    BitController controller(rule);
    const double fall = 12 * (random.uniform() - .3), scatter = random.uniform();
    uint64_t total = 0;
    for (uint64_t n = 0; n < rule.steps; ++n) {
      const double part = static_cast<double>(n) / static_cast<double>(rule.steps);
      const int bits = controller.decide(n, std::exp(20 - fall * part + scatter * random.gauss()));
      ASSERT_GE(bits, rule.least);
      ASSERT_LE(bits, rule.most);
      controller.spent(bits);
      total += static_cast<uint64_t>(bits);
    }
    const double all = rule.budget * static_cast<double>(rule.steps);
    EXPECT_LE(static_cast<double>(total), all + 1e-6) << trial;
    EXPECT_GE(static_cast<double>(total), std::min(.99 * all, std::floor(all))) << trial;
  }
}

TEST(Bits, AnUnknownLengthKeepsTheMeanAfterEveryStep) {
  RandomStream random(3);
  BitRule rule;
  rule.budget = 3.3;
  BitController controller(rule);
  for (uint64_t n = 0; n < 6000; ++n) {
    controller.spent(controller.decide(n, std::exp(.5 * random.gauss()) * (n < 2000 ? 1 : 3)));
    ASSERT_LE(controller.mean_bits(), 3.3 + 1e-12) << n;
  }
  EXPECT_GE(controller.mean_bits(), .99 * 3.3);
}

TEST(Bits, WidthsOfLouderStepsAreLarger) {
  BitRule rule;
  rule.budget = 4;
  rule.steps = 1000;
  BitController controller(rule);
  RandomStream random(1);
  int quiet = 0, loud = 0;
  for (uint64_t n = 0; n < 1000; ++n) {
    const bool big = random.uniform() < .1;
    const int bits = controller.decide(n, big ? 16 : 1);
    controller.spent(bits);
    if (n >= 200 && n < 800) (big ? loud : quiet) = std::max(big ? loud : quiet, bits);
  }
  EXPECT_GE(loud, quiet + 3);
}

TEST(Bits, AZeroStepIsFreeAndItsBitsGoToTheOthers) {
  BitRule rule;
  rule.budget = 3;
  rule.steps = 300;
  BitController controller(rule);
  uint64_t total = 0;
  for (uint64_t n = 0; n < 300; ++n) {
    const int bits = controller.decide(n, n % 3 == 1 ? 0 : 1);
    EXPECT_EQ(bits == 0, n % 3 == 1);
    controller.spent(bits);
    total += static_cast<uint64_t>(bits);
  }
  EXPECT_LE(total, 900u);
  EXPECT_GE(total, 882u);  // the zeros among the last steps cannot be foreseen
  EXPECT_DOUBLE_EQ(controller.mean_bits(), static_cast<double>(total) / 300);
}

TEST(Bits, BeyondThePromisedEndTheMeanStillHolds) {
  BitRule rule;
  rule.budget = 3.5;
  rule.steps = 50;
  BitController controller(rule);
  for (uint64_t n = 0; n < 150; ++n) {
    controller.spent(controller.decide(n, 1 + static_cast<double>(n % 7)));
    if (n >= 49) {
      EXPECT_LE(controller.mean_bits(), 3.5);
    }
  }
  EXPECT_GE(controller.mean_bits(), .99 * 3.5);
}

TEST(Bits, TheErrorFormMeetsItsBound) {
  for (const int workers : {1, 4}) {
    SimulatedDescent d;
    d.dimension = 256, d.eta = .05, d.steps = 200, d.largest = true, d.workers = workers;
    BitRule rule = convex_budget(d, 2);
    rule.form = BitRule::Form::error;
    rule.error = 1e-4;
    rule.eta = d.eta;
    rule.dimension = 256;
    rule.workers = workers;
    double term = 0, loss = 0, full = 0;
    const int seeds = 64;
    for (int s = 0; s < seeds; ++s) {
      BitController controller(rule);
      loss += descend(d, s + 1, [&](uint64_t n, double norm) {
        const int bits = controller.decide(n, norm);
        EXPECT_LT(bits, rule.most);
        const double levels = std::exp2(bits - 1) - 1;
        term += std::pow(rule.alpha, static_cast<double>(d.steps - 1 - n)) * norm * norm / (levels * levels);
        return bits;
      });
      full += descend(d, s + 1, [](uint64_t, double) { return 32; });
    }
    term *= 256 * d.eta * d.eta / (12 * workers) / seeds;
    EXPECT_LE(term, rule.error);
    EXPECT_GT(term, rule.error / 6);  // rounding up loses at most a factor of 4, and the low clamp some more
    EXPECT_LE((loss - full) / seeds, 1.3 * rule.error);
  }
  BitRule rule;
  rule.form = BitRule::Form::error;
  rule.error = .01;
  rule.eta = .1;
  rule.dimension = 1024;
  rule.workers = 8;
  BitController controller(rule);
  double term = 0;
  for (int n = 0; n < 400; ++n) {
    const double norm = std::pow(100, -n / 399.0);
    const double levels = std::exp2(controller.decide(n, norm) - 1) - 1;
    term += norm * norm / (levels * levels);
  }
  term *= 1024 * .1 / (6 * 1.9 * 400 * 8);
  EXPECT_LE(term, .01);
  EXPECT_GT(term, .01 / 6);
}

TEST(Bits, ARestoredControllerContinuesBitForBit) {
  for (const bool convex : {false, true}) {
    BitRule rule = convex_budget(SimulatedDescent{}, 3.2);
    rule.convex = convex;
    BitController through(rule);
    RandomStream random(4);
    std::vector<double> norms(600);
    for (double& norm : norms) norm = std::exp(random.gauss());
    std::vector<uint64_t> saved;
    std::vector<int> widths;
    for (uint64_t n = 0; n < 600; ++n) {
      if (n == 251) saved = through.save();
      widths.push_back(through.decide(n, norms[n]));
      EXPECT_EQ(through.decide(n, norms[n]), widths.back());  // deciding again changes nothing
      through.spent(widths.back());
    }
    BitController resumed(rule);
    resumed.restore(saved);
    for (uint64_t n = 251; n < 600; ++n) {
      ASSERT_EQ(resumed.decide(n, norms[n]), widths[n]) << n;
      resumed.spent(widths[n]);
    }
    EXPECT_EQ(resumed.save(), through.save());
    saved.pop_back();
    EXPECT_THROW(resumed.restore(saved), Error);
    saved.push_back(std::bit_cast<uint64_t>(std::numeric_limits<double>::infinity()));
    EXPECT_THROW(resumed.restore(saved), Error);
  }
}

TEST(Bits, ADecisionCostsTheSameForAnyLength) {
  BitRule rule;
  rule.convex = true;
  rule.alpha = .999999;
  rule.budget = 3.3;
  rule.steps = 100'000'000;
  BitController controller(rule);
  double best = 1;
  for (uint64_t n = 0; n < 200; ++n) {
    const auto start = std::chrono::steady_clock::now();
    controller.spent(controller.decide(n, 1 + static_cast<double>(n % 5)));
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  EXPECT_LT(best, 1e-3);  // some 3 us; a sum over the steps would take a second
}

TEST(Bits, RulesThatMakeNoSenseAreRefusedByName) {
  const auto field = [](auto change) {
    BitRule rule;
    rule.steps = 10;
    change(rule);
    try {
      BitController controller(rule);
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::usage);
      return e.field();
    }
    return std::string();
  };
  using Form = BitRule::Form;
  EXPECT_EQ(field([](BitRule&) {}), "");
  EXPECT_EQ(field([](BitRule& r) { r.least = 1; }), "min");
  EXPECT_EQ(field([](BitRule& r) { r.least = 9, r.most = 8; }), "min");
  EXPECT_EQ(field([](BitRule& r) { r.most = 33; }), "max");
  EXPECT_EQ(field([](BitRule& r) { r.budget = 1.5; }), "budget");
  EXPECT_EQ(field([](BitRule& r) { r.budget = std::nan(""); }), "budget");
  EXPECT_EQ(field([](BitRule& r) { r.convex = true, r.alpha = 1.5; }), "alpha");
  EXPECT_EQ(field([](BitRule& r) { r.form = Form::error; }), "error");
  EXPECT_EQ(field([](BitRule& r) { r.form = Form::error, r.error = 1; }), "eta");
  EXPECT_EQ(field([](BitRule& r) { r.form = Form::error, r.error = 1, r.eta = 3; }), "smooth");
  EXPECT_EQ(field([](BitRule& r) { r.form = Form::error, r.error = 1, r.eta = 1, r.convex = true, r.steps = 0; }),
            "steps");
}

}  // namespace
}  // namespace gradwire
