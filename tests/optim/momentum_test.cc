// SPDX-License-Identifier: Apache-2.0
// The rule of optimizers that exchange momenta: against its formulas in double precision, its bits, and what it must
// keep. Closed loops with compression are in momentum_loop_test.cc.
#include "optim/momentum.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "optim/momentum_fixture.h"

namespace gradwire::test {
namespace {

constexpr uint64_t kCount = 300;
constexpr double kRate = 0.003, kFactor = 0.5;

struct MomentumCase {
  const char* name;
  MomentumOptions options;
};
void PrintTo(const MomentumCase& one, std::ostream* out) { *out << one.name; }

const MomentumCase kCases[] = {{"sgd", {.adam = {.weight_decay = 0.01}, .adaptive = false, .momentum = 0.9}},
                               {"adam", {.adam = {.weight_decay = 0.1}}},
                               {"adamw", {.adam = {.weight_decay = 0.1, .decoupled = true}}},
                               {"other_numbers", {.adam = {.beta1 = 0.5, .beta2 = 0.97, .epsilon = 1e-3}}}};

// The rule in double precision, for all workers at once, with an exact exchange.
struct ReferenceRule {
  ReferenceRule(const MomentumOptions& o, const std::vector<float>& start)
      : options(o), w(start.begin(), start.end()), m(w.size()), v(w.size()) {
    q.assign(o.world, std::vector<double>(w.size()));
    s = q;
  }
  double own(const std::vector<float>& g, size_t i) const {
    return kFactor * g[i] + (options.adam.decoupled ? 0 : options.adam.weight_decay * w[i]);
  }
  double below(size_t i) const {
    return std::sqrt(v[i] / (1 - std::pow(options.adam.beta2, static_cast<double>(pooled)))) + options.adam.epsilon;
  }
  void step(const std::vector<std::vector<float>>& gradients) {
    const AdamOptions& o = options.adam;
    const double rho = (options.world - 1.0) / (options.world + 1.0);
    const bool exact = options.adaptive && taken == 0;
    ++taken;
    const auto k = static_cast<double>(taken);
    for (size_t i = 0; i < w.size(); ++i) {
      double mean = 0;
      for (const auto& g : gradients) mean += own(g, i) / options.world;
      for (int r = 0; r < options.world; ++r) {
        q[r][i] = rho * q[r][i] + (1 - rho) * own(gradients[r], i);
        s[r][i] = o.beta2 * s[r][i] + (1 - o.beta2) * std::pow(q[r][i] / (1 - std::pow(rho, k)), 2);
      }
      if (!options.adaptive) {
        m[i] = options.momentum * m[i] + mean;
        w[i] -= kRate * m[i];
        continue;
      }
      if (exact) {
        m[i] = (1 - o.beta1) * mean;
        v[i] = (1 - o.beta2) * mean * mean;
      } else {
        const double limit = 10 * (1 - std::pow(o.beta1, k));
        double updates = 0;
        for (const auto& g : gradients)
          updates += std::clamp((o.beta1 * m[i] + (1 - o.beta1) * own(g, i)) / below(i), -limit, limit) / options.world;
        m[i] = updates * below(i);
      }
      const double divisor = exact ? std::sqrt(v[i] / (1 - o.beta2)) + o.epsilon : below(i);
      w[i] =
          w[i] * (o.decoupled ? 1 - kRate * o.weight_decay : 1) - kRate / (1 - std::pow(o.beta1, k)) * m[i] / divisor;
    }
    if (!options.adaptive || taken != next) return;
    double sum = 0;
    for (size_t i = 0; i < w.size(); ++i) {
      v[i] = 0;
      for (const auto& own : s) v[i] += own[i] / options.world;
      sum += v[i];
    }
    for (double& value : v) value = std::max(value, 1e-4 * sum / static_cast<double>(w.size()));
    pooled = taken;
    next = taken + std::clamp<uint64_t>(taken / 4, 1, 64);
  }
  MomentumOptions options;
  std::vector<double> w, m, v;
  std::vector<std::vector<double>> q, s;
  uint64_t taken = 0, pooled = 0, next = 1;
};

class MomentumRule : public testing::TestWithParam<MomentumCase> {};
INSTANTIATE_TEST_SUITE_P(Momentum, MomentumRule, testing::ValuesIn(kCases),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(MomentumRule, FollowsItsFormulasWithAnExactExchange) {
  for (const int world : {1, 3}) {
    MomentumOptions options = GetParam().options;
    options.world = world;
    std::vector<MomentumWorker> workers;
    for (int r = 0; r < world; ++r) workers.emplace_back(kCount, 1, options);
    ReferenceRule reference(options, workers[0].weights);
    for (uint64_t k = 0; k < 80; ++k) {
      std::vector<std::vector<float>> gradients;
      for (int r = 0; r < world; ++r) gradients.push_back(normal_values(kCount, 1000 * k + r, 0.01 * (1 + k % 7)));
      step_together(workers, gradients, kFactor, kRate);
      reference.step(gradients);
      for (uint64_t i = 0; i < kCount; ++i)
        ASSERT_NEAR(workers[0].weights[i], reference.w[i], 2e-6 * (1 + static_cast<double>(k)))
            << "world " << world << ", step " << k << ", element " << i;
      for (const MomentumWorker& other : workers) ASSERT_EQ(other.weights, workers[0].weights);
    }
    EXPECT_EQ(workers[0].optimizer->counts.pooled, options.adaptive ? 78 : 0);
  }
}

// A sum of many steps that arrives at once must not change how far a later step goes: the rule is linear in what is
// exchanged as long as second moments are not pooled.
TEST(Momentum, IsLinearInWhatIsExchangedBetweenPoolings) {
  const MomentumOptions options{.adam = {.weight_decay = 0.1, .decoupled = true}};
  const auto after = [&](float scale) {
    std::vector<MomentumWorker> one;
    one.emplace_back(kCount, 1, options);
    for (uint64_t k = 0; k < 100; ++k) step_together(one, {normal_values(kCount, k, 0.01)}, 1, kRate);
    const std::vector<float> before = one[0].weights;
    for (float& value : one[0].values) value = scale;  // what the exchange brought
    const std::vector<const float*> gradients{one[0].values.data()};
    one[0].optimizer->to_momenta();
    one[0].optimizer->step(gradients, 1, kRate, 1);
    std::vector<double> change;
    for (uint64_t i = 0; i < kCount; ++i)
      change.push_back(double{one[0].weights[i]} - double{before[i]} * (1 - kRate * 0.1));
    return change;
  };
  const std::vector<double> once = after(1), thousand = after(1000);
  for (uint64_t i = 0; i < kCount; ++i) ASSERT_NEAR(thousand[i], 1000 * once[i], 1e-3 * std::abs(thousand[i]) + 2e-4);
}

TEST(Momentum, WithSecondMomentsThatStandStillItIsPreconditionedMomentumBitForBit) {
  const MomentumOptions options{.adam = {.weight_decay = 0.1, .decoupled = true}};
  std::vector<MomentumWorker> one;
  one.emplace_back(kCount, 1, options);
  uint64_t k = 0;
  for (; one[0].optimizer->counts.next - k > 1 || k < 250; ++k)
    step_together(one, {normal_values(kCount, k, 0.01)}, 1, kRate);
  const auto rounded = [](float value) {
    volatile float kept = value;
    return kept;
  };
  step_together(one, {normal_values(kCount, k++, 0.01)}, 1, kRate);  // pools
  ASSERT_EQ(one[0].optimizer->counts.pooled, k);
  std::vector<float> w = one[0].weights, m = one[0].first;
  const std::vector<float> v = one[0].second;
  const auto root = static_cast<float>(std::sqrt(1 - std::pow(0.999, static_cast<double>(k))));
  for (int more = 0; more < 60; ++more) {
    const std::vector<float> g = normal_values(kCount, k++, 0.01);
    step_together(one, {g}, 1, kRate);
    const auto rate = static_cast<float>(kRate / (1 - std::pow(0.9, static_cast<double>(k))));
    const auto keep = static_cast<float>(1 - kRate * 0.1);
    for (uint64_t i = 0; i < kCount; ++i) {
      const float below = rounded(rounded(rounded(std::sqrt(v[i])) / root) + 1e-8f);
      const float u = rounded(rounded(rounded(0.9f * m[i]) + rounded(static_cast<float>(1 - 0.9) * g[i])) / below);
      m[i] = rounded(u * below);
      w[i] = rounded(rounded(w[i] * keep) - rounded(rate * rounded(m[i] / below)));
    }
    ASSERT_EQ(one[0].weights, w) << "step " << k;
  }
}

// The mean of the own second moments is what Adam finds from averaged gradients. Squares of the workers' own gradients
// are larger by as much as the number of workers.
TEST(Momentum, PooledSecondMomentsAreThoseOfAveragedGradients) {
  for (const int world : {2, 4, 16}) {
    for (const double signal : {0.0, 0.3, 3.0}) {
      const MomentumOptions options{.adam = {.beta2 = 0.99}, .world = world};
      std::vector<MomentumWorker> workers;
      for (int r = 0; r < world; ++r) workers.emplace_back(kCount, 1, options);
      std::vector<double> adam(kCount), naive(kCount);
      for (uint64_t k = 0; k < 1000; ++k) {
        std::vector<std::vector<float>> gradients;
        for (int r = 0; r < world; ++r) {
          gradients.push_back(normal_values(kCount, 77 + 1000 * k + r, 1));
          for (float& g : gradients.back()) g += static_cast<float>(signal);
        }
        for (uint64_t i = 0; i < kCount; ++i) {
          double mean = 0, squares = 0;
          for (const auto& g : gradients) {
            mean += g[i] / world;
            squares += double{g[i]} * g[i] / world;
          }
          adam[i] = 0.99 * adam[i] + 0.01 * mean * mean;
          naive[i] = 0.99 * naive[i] + 0.01 * squares;
        }
        step_together(workers, gradients, 1, 0);
      }
      double pooled = 0;
      for (const MomentumWorker& one : workers)
        pooled += std::accumulate(one.own_second.begin(), one.own_second.end(), 0.0) / world;
      const double truth = std::accumulate(adam.begin(), adam.end(), 0.0);
      EXPECT_NEAR(pooled / truth, 1, 0.06) << world << " workers, signal " << signal;
      if (signal == 0) {
        EXPECT_GT(std::accumulate(naive.begin(), naive.end(), 0.0) / truth, 0.9 * world);
      }
    }
  }
}

TEST(Momentum, WhatIsNotFiniteStaysVisibleAndALargeUpdateIsLimited) {
  std::vector<MomentumWorker> one;
  one.emplace_back(4, 1, MomentumOptions{});
  step_together(one, {{0.1f, 0.1f, 0.1f, 0.1f}}, 1, kRate);
  const float infinity = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> g{infinity, nan, 1e6f, -1e6f};
  const std::vector<size_t> all{0};
  const std::vector<const float*> gradients{g.data()};
  const MomentumWorker before = one[0];
  one[0].optimizer->propose(all, gradients, 1);
  EXPECT_EQ(one[0].values[0], infinity);
  EXPECT_TRUE(std::isnan(one[0].values[1]));
  EXPECT_FLOAT_EQ(one[0].values[2], 0.19f * kLargestUpdate);
  EXPECT_FLOAT_EQ(one[0].values[3], -0.19f * kLargestUpdate);
  // A step that is left out changes nothing but the values, which the next step writes anew.
  EXPECT_EQ(one[0].weights, before.weights);
  EXPECT_EQ(one[0].first, before.first);
  EXPECT_EQ(one[0].own_first, before.own_first);
  EXPECT_EQ(one[0].own_second, before.own_second);
}

TEST(Momentum, ACoordinateThatWakesUpTakesNoHugeStep) {
  std::vector<MomentumWorker> one;
  one.emplace_back(kCount, 1, MomentumOptions{.adam = {.epsilon = 1e-8}});
  for (uint64_t k = 0; k < 300; ++k) {
    std::vector<float> g = normal_values(kCount, k, 0.01);
    if (k < 280) g[7] = 0;  // so that its second moment is that of no gradient for some steps more
    const float before = one[0].weights[7];
    step_together(one, {g}, 1, kRate);
    ASSERT_LE(std::abs(one[0].weights[7] - before), 10 * kRate * 1.001) << "step " << k;
  }
}

TEST(Momentum, PoolingsBecomeRare) {
  uint64_t k = 1, poolings = 1;
  uint64_t longest = 0;
  while (k < 10'000) {
    const uint64_t next = next_pooling(k);
    ASSERT_GT(next, k);
    longest = std::max(longest, next - k);
    k = next;
    ++poolings;
  }
  EXPECT_EQ(longest, 64);
  EXPECT_LT(poolings, 185);
}

}  // namespace
}  // namespace gradwire::test
