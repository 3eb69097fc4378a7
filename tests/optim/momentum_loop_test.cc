// SPDX-License-Identifier: Apache-2.0
// Closed loops: workers that train with Adam, compress what they exchange with error feedback, and must get as far as
// Adam does without compression. The rival is the obvious way, gradients with error feedback into the same Adam.
#include <gtest/gtest.h>

#include <cmath>
#include <numbers>
#include <string_view>

#include "core/bits.h"
#include "gradwire/collective.h"
#include "optim/momentum.h"
#include "optim/momentum_fixture.h"

namespace gradwire::test {
namespace {

constexpr int kWorld = 4;
constexpr uint64_t kElements = 2048, kSteps = 1200;

// A noisy quadratic whose curvatures and noises differ by orders of magnitude between coordinates, as those of a
// transformer's layers do. What Adam is good at, and what one learning rate for all coordinates is not.
struct LossProfile {
  const char* name;
  double spread;  // decades that curvatures spread over
  double noise;   // of a worker's gradient, relative to the first gradients
  double rare;    // the share of steps in which a coordinate has a gradient at all
};
const LossProfile kProfiles[] = {{"dense", 3, 1, 1}, {"flat", 1, 0.3, 1}, {"rare", 2, 1, 0.2}};

struct UnevenQuadratic {
  UnevenQuadratic(const LossProfile& p, uint64_t seed) : profile(p), curvature(kElements) {
    std::mt19937_64 generator(seed);
    std::uniform_real_distribution<double> uniform(-p.spread, 0);
    for (double& value : curvature) value = std::pow(10.0, uniform(generator));
  }
  // Of the mean over samples; the least is 0.
  double loss(const std::vector<float>& w) const {
    double sum = 0;
    for (uint64_t i = 0; i < kElements; ++i) sum += curvature[i] * w[i] * w[i];
    return sum;
  }
  std::vector<float> gradient(const std::vector<float>& w, uint64_t step, int rank) const {
    uint64_t state = mix64(step * 64 + static_cast<uint64_t>(rank));
    const auto uniform = [&] {
      state = state * 6364136223846793005u + 1442695040888963407u;
      return static_cast<double>(state >> 40) * 0x1p-24;
    };
    std::vector<float> g(kElements);
    for (uint64_t i = 0; i < kElements; ++i) {
      if (profile.rare < 1 && uniform() >= profile.rare) continue;
      const double normal = (uniform() + uniform() + uniform() + uniform() - 2) * std::sqrt(3.0);
      g[i] = static_cast<float>(curvature[i] * (w[i] + profile.noise * normal) / profile.rare);
    }
    return g;
  }
  LossProfile profile;
  std::vector<double> curvature;
};

double rate_at(uint64_t step) {
  const double at = static_cast<double>(step) / kSteps;
  return 0.01 * std::min(1.0, 20 * at + 0.01) * 0.5 * (1 + std::cos(std::numbers::pi * at));
}

const AdamOptions kAdam{.beta2 = 0.99};

// The last loss, of workers that exchange gradients.
double train_with_gradients(const UnevenQuadratic& task, const std::string& codec, uint64_t seed) {
  double loss = 0;
  run_loopback(kWorld, [&](Engine& engine) {
    Reducer reducer(engine, {{"weight", kElements}},
                    {.up = codec, .down = codec == "fp32" ? "fp32" : "optquant:bits=4", .seed = seed});
    std::vector<float> w = normal_values(kElements, seed, 1), first(kElements), second(kElements), mean(kElements);
    const Elementwise device{Device{}};
    for (uint64_t step = 0; step < kSteps; ++step) {
      const std::vector<float> g = task.gradient(w, seed * kSteps + step, engine.rank());
      reducer.run(step, g, mean);
      const OptimizerSpan spans[] = {{.gradient = mean.data(),
                                      .first = first.data(),
                                      .second = second.data(),
                                      .shared = nullptr,
                                      .out = w.data(),
                                      .count = kElements}};
      adam_step(device, spans, kAdam, step + 1, rate_at(step), 1);
    }
    if (engine.rank() == 0) loss = task.loss(w);
  });
  return loss;
}

double train_with_momenta(const UnevenQuadratic& task, const std::string& codec, uint64_t seed) {
  double loss = 0;
  run_loopback(kWorld, [&](Engine& engine) {
    const std::vector<NamedTensor> tensors{{"weight", kElements}};
    const std::string down = codec == "fp32" ? "fp32" : "optquant:bits=4";
    const bool warm = codec != "fp32";
    Reducer exact(engine, tensors, {.up = "fp32"}),
        pool(engine, tensors, {.up = "bf16", .owner_feedback = ReduceOptions::Feedback::off});
    Reducer begin(engine, tensors, {.up = "qsgd:bits=4", .owner_feedback = ReduceOptions::Feedback::off, .seed = seed});
    Reducer reducer(engine, tensors,
                    {.up = codec, .down = down, .feedback = ReduceOptions::Feedback::momentum, .seed = seed});
    MomentumWorker worker(kElements, seed, {.adam = kAdam, .world = kWorld});
    MomentumOptimizer& optimizer = *worker.optimizer;
    const std::vector<size_t> all{0};
    for (uint64_t step = 0; step < kSteps; ++step) {
      const std::vector<float> g = task.gradient(worker.weights, seed * kSteps + step, engine.rank());
      const std::vector<const float*> gradients{g.data()};
      if (optimizer.exact()) {
        exact.run(step, g, worker.values);
        optimizer.exact_step(gradients, 1, rate_at(step), 1);
      } else {
        optimizer.propose(all, gradients, 1);
        (warm && step < kSteps / 10 ? begin : reducer).run(step, worker.values, worker.values);
        optimizer.to_momenta();
        optimizer.step(gradients, 1, rate_at(step), 1);
      }
      if (!optimizer.pools()) continue;
      pool.run(step, worker.own_second, worker.second);
      MomentumOptimizer::lift(worker.second);
      optimizer.pooled();
    }
    if (engine.rank() == 0) loss = task.loss(worker.weights);
  });
  return loss;
}

class MomentumLoop : public testing::TestWithParam<LossProfile> {};
INSTANTIATE_TEST_SUITE_P(Profiles, MomentumLoop, testing::ValuesIn(kProfiles),
                         [](const auto& info) { return std::string(info.param.name); });

struct LoopBound {
  const char* codec;
  double most;  // of the last loss, over that of the same rule with an exact exchange
};

TEST_P(MomentumLoop, CompressedMomentaGetAsFarAsAdam) {
  const bool flat = std::string_view(GetParam().name) == "flat";
  const LoopBound bounds[] = {
      {"fft:theta=0.85", 1.15}, {"topk:ratio=0.03", 1.5}, {"optquant:bits=2,mode=biased", 1.03}};
  for (const uint64_t seed : {1, 2}) {
    const UnevenQuadratic task(GetParam(), seed);
    const double adam = train_with_gradients(task, "fp32", seed), exact = train_with_momenta(task, "fp32", seed);
    EXPECT_LT(exact, (GetParam().rare < 1 ? 1.3 : 1.03) * adam) << "seed " << seed;
    for (const auto& [codec, most] : bounds) {
      const double ours = train_with_momenta(task, codec, seed), rival = train_with_gradients(task, codec, seed);
      EXPECT_LT(ours, most * exact) << codec << ", seed " << seed;
      // Where all coordinates are alike Adam is not needed, and the second moments that feedback spoils do less harm.
      EXPECT_LT(ours, (flat ? 1.1 : 0.5) * rival) << codec << ", seed " << seed;
    }
  }
}

// Unbiased codecs of few bits, whose traits say `momentum`.
TEST_P(MomentumLoop, FewUnbiasedBitsGetAsFarAsAdam) {
  const char* const codecs[] = {"optquant:bits=2", "dqsgd:budget=3"};
  for (const uint64_t seed : {1, 2}) {
    const UnevenQuadratic task(GetParam(), seed);
    const double exact = train_with_momenta(task, "fp32", seed);
    for (const char* codec : {codecs[seed - 1]}) {  // one each, which keeps the test short
      ASSERT_TRUE(Codec::parse(codec).traits().momentum) << codec;
      const double ours = train_with_momenta(task, codec, seed), rival = train_with_gradients(task, codec, seed);
      EXPECT_LT(ours, 1.1 * exact) << codec << ", seed " << seed;
      EXPECT_LT(ours, rival) << codec << ", seed " << seed;
    }
  }
}

// What such a codec owes stays bounded, also for momenta with heavy tails. qsgd of two bits, which lacks the trait, is
// the rival: what it owes is larger than ten gradients.
TEST(MomentumResidual, StaysBoundedForEveryCodecWithTheTrait) {
  constexpr uint64_t kLong = 1500;
  const auto worst = [](const char* codec, bool heavy, uint64_t seed) {
    double largest = 0;
    run_loopback(1, [&](Engine& engine) {
      Reducer reducer(engine, {{"m", kElements}},
                      {.up = codec,
                       .down = "fp32",
                       .feedback = ReduceOptions::Feedback::on,
                       .owner_feedback = ReduceOptions::Feedback::off,
                       .seed = seed});
      const auto draw = [&](uint64_t key) {
        std::vector<float> values = normal_values(kElements, key, 1);
        if (heavy)  // the cube of a normal variable has a kurtosis of 46
          for (float& value : values) value = value * value * value;
        return values;
      };
      const std::vector<float> always = draw(seed);
      std::vector<float> momentum(kElements), out(kElements);
      for (uint64_t step = 0; step < kLong; ++step) {
        const std::vector<float> noise = draw(seed * kLong * 2 + step + 1);
        double norm = 0, owed = 0;
        for (uint64_t i = 0; i < kElements; ++i) {
          momentum[i] += 0.1f * (0.3f * always[i] + noise[i] - momentum[i]);
          norm += momentum[i] * momentum[i];
        }
        reducer.run(step, momentum, out);
        if (step % 50 != 49 || step < 100) continue;
        for (float e : reducer.feedback().residual(Direction::up, "m", 0)) owed += e * e;
        largest = std::max(largest, std::sqrt(owed / norm));
      }
    });
    return largest;
  };
  for (const uint64_t seed : {1, 2})
    for (const bool heavy : {false, true}) {
      for (const char* codec : {"optquant:bits=2", "optquant:bits=3", "qsgd:bits=3", "nuqsgd:bits=3", "dqsgd:budget=3"})
        EXPECT_LT(worst(codec, heavy, seed), 5) << codec << (heavy ? ", heavy tails" : "") << ", seed " << seed;
      EXPECT_GT(worst("qsgd:bits=2", heavy, seed), 10) << "seed " << seed;
    }
}

}  // namespace
}  // namespace gradwire::test
