// SPDX-License-Identifier: Apache-2.0
// optquant in a closed loop: two ranks, more than a thousand steps, levels that are fitted anew on the way, and
// gradients whose zeros come and go and whose two signs change places. What is sent must stay unbiased, and its error
// close to that of an oracle which fits its levels to every step's own gradients. Two rivals have to miss the same
// bound: qsgd with as many bits, and symmetric levels, even if they are the best ones at every step.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <utility>

#include "codec/level_reference.h"
#include "codec/optquant/levels.h"
#include "collective/collective_fixture.h"
#include "gradwire/learn.h"

namespace gradwire::test {
namespace {

constexpr uint64_t kElements = 4096, kSteps = 1200;
constexpr int kRanks = 2;
constexpr double kBound = 1.25;  // of the oracle's error; levels are up to 100 steps old

// Laplace with a share of zeros from a third to four fifths, and signs that differ in scale by up to e^1.4.
std::vector<float> drifting(int rank, uint64_t step, uint64_t seed) {
  const double turn = 2 * M_PI * static_cast<double>(step), phase = static_cast<double>(seed);
  const double zeros = 0.57 + 0.24 * std::sin(turn / 800 + phase), skew = 0.7 * std::sin(turn / 500 + 2 * phase);
  std::mt19937_64 random(mix64(seed * 1'000'003 + step * 2 + static_cast<uint64_t>(rank)));
  std::vector<float> x(kElements, 0.0f);
  for (float& v : x) {
    const uint64_t bits = random();
    const double share = static_cast<double>(bits >> 40) * 0x1p-24, u = static_cast<double>(bits & 0xffffff) + 0.5;
    if (share < zeros) continue;
    const double size = -std::log(u * 0x1p-24);
    v = static_cast<float>(bits >> 32 & 1 ? size * std::exp(skew) : -size * std::exp(-skew));
  }
  return x;
}

struct LoopResult {
  double error = 0;               // sum over steps and elements of (result - mean)^2
  double independent = 0;         // the same, predicted from the levels in use, if ranks rounded independently
  double expected = 0;            // ... and as they do round, against each other
  std::array<double, 3> drift{};  // sum of result - mean: of elements below, at and above zero on rank 0
  std::array<double, 3> variance{};
  std::vector<std::vector<float>> levels;  // in use, of each step
};

// How one element, whose bucket has this norm, is rounded: by how far apart its two levels are, and how often up.
struct ElementRounding {
  double gap = 0, chance = 0;
  double variance() const { return gap * gap * chance * (1 - chance); }
};

ElementRounding rounding_of(const std::vector<float>& levels, double x, double norm) {
  if (norm == 0) return {};
  const double t = x / norm;
  const size_t up =
      std::clamp<size_t>(std::upper_bound(levels.begin(), levels.end(), t) - levels.begin(), 1, levels.size() - 1);
  const double gap = levels[up] - levels[up - 1];
  return {norm * gap, (t - levels[up - 1]) / gap};
}

// Of ranks 0 and 1, whose draws are u and 1 - u: both round up with the chance max(0, p + q - 1).
double covariance_of(const ElementRounding& a, const ElementRounding& b) {
  return a.gap * b.gap * (std::max(0.0, a.chance + b.chance - 1) - a.chance * b.chance);
}

LoopResult loop(const std::string& spec, uint64_t seed) {
  LoopResult result;
  run_loopback(kRanks, [&](Engine& engine) {
    const std::vector<NamedTensor> tensors{{"w", kElements}};
    Reducer reducer(engine, tensors, {.method = Method::gather, .up = spec, .seed = seed});
    TensorValues in(tensors), out(tensors);
    for (uint64_t step = 0; step < kSteps; ++step) {
      const std::vector<float> own = drifting(engine.rank(), step, seed);
      in.fill([&](size_t, uint64_t i) { return own[i]; });
      reducer.run(step, in.in(), out.out());
      if (engine.rank() != 0) continue;
      std::vector<float> levels;
      const std::vector<Codec> codecs = reducer.codecs(Direction::up);
      for (uint32_t word : codecs[0].table()) levels.push_back(bits_float(word));
      result.levels.push_back(levels);
      const std::vector<float> other = drifting(1, step, seed);
      double norms[kRanks] = {};
      for (uint64_t i = 0; i < kElements; ++i) {
        if (i % 1024 == 0)
          for (int rank = 0; rank < kRanks; ++rank) {
            norms[rank] = 0;
            for (uint64_t j = i; j < i + 1024; ++j)
              norms[rank] = std::max<double>(norms[rank], std::fabs(rank ? other[j] : own[j]));
          }
        const double off = out.get(0, i) - (static_cast<double>(own[i]) + other[i]) / 2;
        const size_t kind = own[i] < 0 ? 0 : own[i] == 0 ? 1 : 2;
        result.error += off * off;
        result.drift[kind] += off;
        if (levels.empty()) continue;
        const ElementRounding first = rounding_of(levels, own[i], norms[0]),
                              second = rounding_of(levels, other[i], norms[1]);
        const double independent = (first.variance() + second.variance()) / 4,
                     variance = independent + covariance_of(first, second) / 2;
        result.independent += independent;
        result.expected += variance;
        result.variance[kind] += variance;
      }
    }
  });
  return result;
}

// The error of a set of levels on both ranks' gradients of a step, in the units of LoopResult.
struct StepData {
  LevelSample sample;
  double total = 0;
  StepData(uint64_t step, uint64_t seed) {
    for (int rank = 0; rank < kRanks; ++rank) {
      const std::vector<float> x = drifting(rank, step, seed);
      for (uint64_t i = 0; i < kElements; i += 1024) sample.add({x.begin() + i, x.begin() + i + 1024});
    }
    sample.sort();
    for (double w : sample.weight) total += w / 1024;
  }
  double error_of(double mean) const { return mean * total / (kRanks * kRanks); }
};

TEST(LevelsLoop, RefittedLevelsFollowADriftAndStayUnbiased) {
  for (uint64_t seed : {1, 2, 3}) {
    const LoopResult fitted = loop("optquant:bits=3", seed), rival = loop("qsgd:bits=3", seed);
    double oracle = 0, part = 0, symmetric = 0;
    for (uint64_t step = 0; step < kSteps; ++step) {
      const StepData data(step, seed);
      const LevelFit best = fit_levels(data.sample.histogram, 3, {});
      const double error = data.error_of(level_error(best.levels, data.sample.t, data.sample.weight, {}));
      oracle += error;
      if (step % 50 != 7) continue;
      part += error;
      symmetric += data.error_of(level_optima(data.sample, 3, 3).symmetric[3]);
    }
    std::printf("seed %d: refitted %.4f of the oracle's error, best symmetric levels of every step %.4f, qsgd %.4f\n",
                static_cast<int>(seed), fitted.independent / oracle, symmetric / part, rival.error / oracle);
    EXPECT_LE(fitted.independent, kBound * oracle) << seed;
    EXPECT_LT(fitted.expected, fitted.independent) << seed;
    EXPECT_GT(symmetric, kBound * part) << seed;
    EXPECT_GT(rival.error, kBound * oracle) << seed;
    // Step 0 has no fitted levels, so its variance is not in `expected`.
    EXPECT_NEAR(fitted.error, fitted.expected, 0.02 * fitted.expected) << seed;
    for (size_t kind = 0; kind < 3; ++kind) {
      const double z = fitted.drift[kind] / std::sqrt(fitted.variance[kind]);
      std::printf("  mean z of elements %s zero: %.2f\n", kind == 0 ? "below" : kind == 1 ? "at" : "above", z);
      EXPECT_LE(std::fabs(z), 4.5) << seed << " " << kind;
    }
    size_t fits = 0;
    for (uint64_t step = 1; step < kSteps; ++step) fits += fitted.levels[step] != fitted.levels[step - 1];
    EXPECT_GE(fits, 15u) << "after steps 1, 2, 4, ..., 64 and every 100 from then on";
  }
}

// --- the number of workers ------------------------------------------------------------------------------------------

std::vector<float> learned_levels(const std::string& spec, int world) {
  const Codec codec = Codec::parse(spec);
  Learner learner(codec, kElements, world);
  const std::vector<float> x = drifting(0, 3, 9);
  const void* in[] = {x.data()};
  const Plan plan({{"w", kElements, DType::f32, learner.codec(0)}});
  const auto runner = make_runner(plan, {});
  std::vector<std::byte> message(plan.message_bytes());
  runner->encode(in, {}, message);
  const uint32_t which[] = {0};
  learner.observe(*runner, which, 0, in, nullptr, message);
  runner->wait();
  learner.collect();
  std::vector<std::byte> stats(learner.stats_bytes());
  learner.take_stats(stats);
  const std::vector<std::span<const std::byte>> ranks(static_cast<size_t>(world), stats);
  learner.learn(0, ranks);
  std::vector<float> levels;
  const Codec learned = learner.codec(1);
  for (uint32_t word : learned.table()) levels.push_back(bits_float(word));
  return levels;
}

TEST(LevelsLoop, WorkersFollowTheWorldUnlessGiven) {
  const std::string spec = "optquant:bits=3,mode=biased,kappa=0.125";
  EXPECT_EQ(learned_levels(spec, 4), learned_levels(spec + ",workers=4", 1));
  EXPECT_EQ(learned_levels(spec + ",workers=4", 2), learned_levels(spec + ",workers=4", 1));
  EXPECT_NE(learned_levels(spec, 4), learned_levels(spec, 1));
  EXPECT_EQ(learned_levels(spec, 1), learned_levels(spec + ",workers=1", 4));
}

}  // namespace
}  // namespace gradwire::test
