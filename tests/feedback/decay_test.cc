// SPDX-License-Identifier: Apache-2.0
// Residuals that decay: x = g + loss_scale * decay * before. In a closed loop with the same gradient in every step a
// residual stays below a geometric sum, which the rival that keeps residuals whole exceeds.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <random>

#include "gradwire/coder.h"
#include "gradwire/error.h"
#include "gradwire/feedback.h"
#include "gradwire/runner.h"

namespace gradwire {
namespace {

constexpr uint64_t kCount = 2500;

std::vector<float> normal_gradient(uint64_t seed) {
  std::mt19937_64 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(kCount);
  for (float& value : values) value = normal(generator);
  return values;
}

double norm(const std::vector<float>& values) {
  double sum = 0;
  for (const float value : values) sum += static_cast<double>(value) * value;
  return std::sqrt(sum);
}

// One tensor, encoded step after step with feedback.
struct DecayLoop {
  explicit DecayLoop(const std::string& codec)
      : plan({{"x", kCount, DType::f32, Codec::parse(codec)}}),
        runner(make_runner(plan, Device{})),
        message(plan.message_bytes()) {
    feedback.add(Direction::up, "x", kCount);
  }
  std::vector<float> step(uint64_t number, const std::vector<float>& gradient, float decay, float loss_scale = 1) {
    const auto begun = feedback.begin(Direction::up, number, plan.tensors(), loss_scale);
    begun->residuals.decay = decay;
    const void* in[] = {gradient.data()};
    runner->encode(in, {.step = number}, message, &begun->residuals);
    feedback.commit(number);
    return feedback.residual(Direction::up, "x");
  }

  Plan plan;
  std::unique_ptr<Runner> runner;
  std::vector<std::byte> message;
  ErrorFeedback feedback;
};

TEST(Decay, IsOneFactorOfTheResidualThatIsAdded) {
  const std::vector<float> first = normal_gradient(1), second = normal_gradient(2);
  DecayLoop loop("topk:ratio=0.1"), scaled("topk:ratio=0.1");
  const std::vector<float> before = loop.step(0, first, 0.25f);
  const std::vector<float> after = loop.step(1, second, 0.25f);
  size_t sent = 0;
  for (uint64_t i = 0; i < kCount; ++i) {
    sent += after[i] == 0;
    if (after[i] != 0) EXPECT_EQ(after[i], second[i] + before[i] * 0.25f) << i;
  }
  EXPECT_NEAR(static_cast<double>(sent), 0.1 * kCount, 20);
  // The loss scale is no part of a residual.
  auto times = [](std::vector<float> values, float factor) {
    for (float& value : values) value *= factor;
    return values;
  };
  scaled.step(0, times(first, 512), 0.25f, 512);
  EXPECT_EQ(scaled.step(1, times(second, 1024), 0.25f, 1024), after);
}

TEST(Decay, AConstantGradientLeavesAtMostAGeometricSum) {
  for (const float decay : {0.5f, 0.9f})
    for (uint64_t seed = 0; seed < 3; ++seed) {
      const std::vector<float> gradient = normal_gradient(seed);
      const double most = 1 / (1 - static_cast<double>(decay)) * (1 + 1e-5);
      DecayLoop loop("topk:ratio=0.01"), rival("topk:ratio=0.01");
      double found = 0, of_rival = 0;
      for (uint64_t step = 0; step < 1000; ++step) {
        const std::vector<float> here = loop.step(step, gradient, decay), there = rival.step(step, gradient, 1);
        for (uint64_t i = 0; i < kCount; ++i) {
          const auto size = static_cast<double>(std::fabs(gradient[i]));
          found = std::max(found, std::fabs(static_cast<double>(here[i])) / size);
          of_rival = std::max(of_rival, std::fabs(static_cast<double>(there[i])) / size);
        }
      }
      EXPECT_LE(found, most) << decay << " " << seed;
      EXPECT_GT(found, 0.9 * most) << "the bound is reached, by what is never sent";
      EXPECT_GT(of_rival, 3 * most) << decay << " " << seed;
    }
}

// ||e'|| <= q (||g|| + decay ||e||), where q < 1 is the part of its input that a codec leaves out.
TEST(Decay, EveryCodecWithFeedbackStaysBelowItsOwnGeometricSum) {
  for (const char* codec :
       {"onebit", "topk:ratio=0.03", "topk:ratio=0.03,bits=2", "fft:theta=0.85", "casq:bits=2", "loggrid:k=0"})
    for (uint64_t seed = 0; seed < 2; ++seed) {
      const std::vector<float> gradient = normal_gradient(seed);
      const double whole = norm(gradient), decay = 0.75;
      DecayLoop loop(codec);
      double largest = 0, worst = 0, before = 0;
      for (uint64_t step = 0; step < 1000; ++step) {
        const std::vector<float> input = [&] {
          std::vector<float> x = gradient;
          const std::vector<float> e = loop.feedback.residual(Direction::up, "x");
          for (uint64_t i = 0; i < kCount; ++i) x[i] += 0.75f * e[i];
          return x;
        }();
        before = norm(loop.step(step, gradient, 0.75f));
        worst = std::max(worst, before / norm(input));
        largest = std::max(largest, before);
      }
      ASSERT_LT(worst, 1) << codec;
      EXPECT_LE(largest, whole * worst / (1 - worst * decay) * 1.0001) << codec << " " << seed;
    }
}

std::string refused_field(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.field();
  }
  return "nothing";
}

TEST(Decay, IsRefusedWhereItHasNoMeaningAndComparedByRanks) {
  const std::vector<float> gradient = normal_gradient(0);
  for (const float decay : {0.0f, -1.0f, 1.5f, std::numeric_limits<float>::quiet_NaN()}) {
    EXPECT_EQ(refused_field([&] { DecayLoop("onebit").step(0, gradient, decay); }), "decay") << decay;
    EXPECT_EQ(refused_field([&] {
                ModelCoder({{"x", kCount}}, {.reduce = {.up = "onebit", .decay = decay}});
              }),
              "decay");
  }
  constexpr auto kOff = ReduceOptions::Feedback::off;
  EXPECT_EQ(refused_field([&] {
              ModelCoder({{"x", kCount}}, {.reduce = {.feedback = kOff, .owner_feedback = kOff, .decay = 0.9f}});
            }),
            "decay");
  const ModelCoder one({{"x", kCount}}, {.reduce = {.up = "onebit", .decay = 0.9f}}),
      other({{"x", kCount}}, {.reduce = {.up = "onebit"}});
  EXPECT_NE(one.handshake(), other.handshake());
}

}  // namespace
}  // namespace gradwire
