// SPDX-License-Identifier: Apache-2.0
// Packed topk in a closed loop: SGD with error feedback on noisy quadratics, more than a thousand steps, several seeds.
// With 2 bits a value it must follow the loss of exact values at the same ratio, in a fraction of the bits; and the
// rival that spends the same bits on fewer exact values must lose.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "gradwire/feedback.h"
#include "gradwire/runner.h"

namespace gradwire {
namespace {

constexpr uint64_t kCount = 4096, kSteps = 1200;

// The mean over all steps of the loss sum of curvature * w^2 / 2. Curvatures are spread from 0.02 to 1, and a gradient
// has noise of standard deviation 0.3 in each element.
double mean_loss(const std::string& spec, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal;
  std::uniform_real_distribution<double> uniform;
  std::vector<double> curvature(kCount), w(kCount);
  for (double& c : curvature) c = std::exp(std::log(0.02) * uniform(random));
  for (double& v : w) v = normal(random);
  const Plan plan({{"w", kCount, DType::f32, Codec::parse(spec)}});
  const auto runner = make_runner(plan, Device{});
  std::vector<std::byte> message(plan.message_bytes());
  ErrorFeedback feedback;
  feedback.add(Direction::up, "w", kCount);
  std::vector<float> gradient(kCount), sent(kCount);
  double total = 0;
  for (uint64_t step = 0; step < kSteps; ++step) {
    for (uint64_t i = 0; i < kCount; ++i) gradient[i] = static_cast<float>(curvature[i] * w[i] + 0.3 * normal(random));
    const auto begun = feedback.begin(Direction::up, step, plan.tensors(), 1);
    const void* in[] = {gradient.data()};
    void* out[] = {sent.data()};
    runner->encode(in, {.step = step}, message, &begun->residuals);
    feedback.commit(step);
    runner->decode(message, out);
    for (uint64_t i = 0; i < kCount; ++i) {
      w[i] -= 0.05 * static_cast<double>(sent[i]);
      total += curvature[i] * w[i] * w[i] / 2;
    }
  }
  return total / static_cast<double>(kSteps);
}

TEST(TopkLoop, PackedValuesFollowExactOnesAndBeatThemAtEqualBits) {
  const Codec exact = Codec::parse("topk:ratio=0.03125");
  for (const uint64_t seed : {1, 2, 3}) {
    const double of_exact = mean_loss(exact.str(), seed);
    for (const char* bits : {"1", "2"}) {
      const Codec packed = Codec::parse("topk:ratio=0.03125,bits=" + std::string(bits));
      // As many exact values of 6 bytes as the packed bytes pay for, rounded up in favour of the rival.
      const double values = std::ceil(static_cast<double>(packed.bytes(kCount)) / 6);
      const Codec rival = Codec::parse("topk:ratio=" + std::to_string(values / kCount));
      ASSERT_GE(rival.bytes(kCount), packed.bytes(kCount));
      EXPECT_LT(packed.bytes(kCount) * 5, exact.bytes(kCount));
      const double of_packed = mean_loss(packed.str(), seed), of_rival = mean_loss(rival.str(), seed);
      std::printf("seed %d, bits=%s: exact %.3f in %d bytes, packed %.3f and rival %.3f in %d\n",
                  static_cast<int>(seed), bits, of_exact, static_cast<int>(exact.bytes(kCount)), of_packed, of_rival,
                  static_cast<int>(packed.bytes(kCount)));
      EXPECT_LT(of_packed, 1.01 * of_exact) << bits << " " << seed;
      EXPECT_GT(of_rival, 1.25 * of_packed) << bits << " " << seed;
    }
  }
}

}  // namespace
}  // namespace gradwire
