// SPDX-License-Identifier: Apache-2.0
// lowrank in a closed loop: two ranks train a matrix with SGD for more than a thousand steps, on several kinds of
// gradients and with several seeds. With error feedback it must come close to training with exact means, and what it
// owes must stay bounded; without feedback, in the same loop, it must not.
#include <fmt/format.h>

#include <cmath>
#include <random>

#include "collective/collective_fixture.h"

namespace gradwire {
namespace {

using namespace test;

constexpr uint64_t kRows = 24, kColumns = 40, kCount = kRows * kColumns, kSteps = 1200, kLast = 200;

// What gradients look like. The weights w shall reach a target; a gradient is curvature * (w - target) + noise.
struct NoiseProfile {
  const char* name;
  double rate;
  // Noise of a rank at a step.
  void (*noise)(std::mt19937_64& random, uint64_t step, std::vector<double>& out);
  bool moves;  // the target turns slowly
};

double normal(std::mt19937_64& random) { return std::normal_distribution<double>()(random); }

void even(std::mt19937_64& random, uint64_t, std::vector<double>& out) {
  for (double& x : out) x = 0.3 * normal(random);
}
// As in the embedding of rare words: a step is about a few rows, and then strongly.
void rare_rows(std::mt19937_64& random, uint64_t, std::vector<double>& out) {
  for (uint64_t i = 0; i < kRows; ++i) {
    const double strength = random() % 8 == 0 ? 1.0 : 0.0;
    for (uint64_t j = 0; j < kColumns; ++j) out[i * kColumns + j] = strength * normal(random);
  }
}
// Heavy tails, and thirty times less from the middle of the run on, as after a drop of the rate.
void tails_that_fall(std::mt19937_64& random, uint64_t step, std::vector<double>& out) {
  const double size = step < kSteps / 2 ? 0.3 : 0.01;
  for (double& x : out) x = size * std::student_t_distribution<double>(3)(random);
}

const NoiseProfile kProfiles[] = {
    {"even", 0.05, even, false}, {"rare rows", 0.05, rare_rows, true}, {"tails", 0.05, tails_that_fall, false}};

struct End {
  double loss = 0;  // the mean of the last steps
  double owed = 0;  // the largest residual over the mean gradient, in that time
};

End train(const NoiseProfile& profile, const std::string& codec, uint64_t seed, bool feedback) {
  End end;
  const std::vector<NamedTensor> tensors{{"w", kCount, DType::f32, 2, kRows}};
  run_loopback(2, [&](Engine& engine) {
    std::mt19937_64 shared(seed), own(seed * 100 + static_cast<uint64_t>(engine.rank()));
    std::vector<double> curvature(kCount), w(kCount), target(kCount), noise(kCount);
    for (double& c : curvature) c = std::exp(std::log(0.05) * std::uniform_real_distribution<double>()(shared));
    for (double& v : target) v = normal(shared);
    Reducer reducer(engine, tensors, {.up = codec});
    std::vector<float> gradient(kCount), mean(kCount);
    double loss = 0, squares = 0, owed = 0;
    for (uint64_t step = 0; step < kSteps; ++step) {
      profile.noise(own, step, noise);
      const double turn = profile.moves ? std::cos(2e-3 * static_cast<double>(step)) : 1.0;
      const bool last = step >= kSteps - kLast;
      for (uint64_t i = 0; i < kCount; ++i) {
        const double off = w[i] - turn * target[i];
        gradient[i] = static_cast<float>(curvature[i] * off + noise[i]);
        if (last) loss += curvature[i] * off * off / 2;
        if (last) squares += static_cast<double>(gradient[i]) * gradient[i];
      }
      if (!feedback) reducer.feedback().set_residual(Direction::up, "w", 0, std::vector<float>(kCount));
      reducer.run(step, gradient, mean);
      for (uint64_t i = 0; i < kCount; ++i) w[i] -= profile.rate * static_cast<double>(mean[i]);
      if (!last || codec == "fp32") continue;
      double square = 0;
      for (const float x : reducer.feedback().residual(Direction::up, "w")) square += static_cast<double>(x) * x;
      owed = std::max(owed, square);
    }
    if (engine.rank() == 0) end = {loss / kLast, std::sqrt(owed / (squares / kLast))};
  });
  return end;
}

// Measured on these profiles and seeds: losses up to 1.09 of that of exact means with feedback and 3.4 to 180 times it
// without, residuals of up to 2.9 gradients.
TEST(LowRankLoop, FollowsExactMeansOnlyWithFeedback) {
  for (const NoiseProfile& profile : kProfiles)
    for (const uint64_t seed : {1, 2, 3}) {
      if (kThreadSanitizer && (seed > 1 || &profile != kProfiles)) continue;  // the threads do the same in all of them
      const End exact = train(profile, "fp32", seed, true);
      for (const char* codec :
           {"lowrank:rank=4,bits=8", "lowrank:rank=4,bits=4", "lowrank:rank=4,bits=4,alternate=on"}) {
        const std::string what = fmt::format("{}, {}, seed {}", profile.name, codec, seed);
        const End found = train(profile, codec, seed, true);
        EXPECT_LT(found.loss, 1.15 * exact.loss) << what;
        EXPECT_LT(found.owed, 4) << what;
        if (seed > 1) continue;
        EXPECT_GT(train(profile, codec, seed, false).loss, 2 * exact.loss) << what << ": the test shows nothing";
      }
    }
}

}  // namespace
}  // namespace gradwire
