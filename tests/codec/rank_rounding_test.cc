// SPDX-License-Identifier: Apache-2.0
// Ranks 2i and 2i + 1 have opposite random draws (core/random.h), so that their errors partly cancel in the mean. The
// rival in every test is independent rounding: the same ranks with a seed each.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <random>
#include <set>

#include "codec/test_devices.h"
#include "core/random.h"
#include "gradwire/learn.h"
#include "gradwire/message.h"

namespace gradwire::test {
namespace {

constexpr size_t kCount = 8192;
using Gradients = std::vector<std::vector<float>>;  // by rank

// What the gradients of W ranks look like: `alike` is the share of their norm that is common to all.
struct RankProfile {
  const char* name;
  double alike;
  bool sparse = false;   // nine of ten elements are zero
  bool opposed = false;  // every other rank has the opposite sign
};
constexpr RankProfile kProfiles[] = {{"noise", 0}, {"half", 0.5},         {"alike", 0.9},
                                     {"same", 1},  {"sparse", 0.5, true}, {"opposed", 0.9, false, true}};

Gradients draw(const RankProfile& profile, uint32_t world, uint32_t seed) {
  std::mt19937 generator(seed);
  std::exponential_distribution<double> size;
  const auto laplace = [&] { return size(generator) * (generator() & 1 ? 0.01 : -0.01); };
  std::vector<double> common(kCount);
  for (double& v : common) v = laplace();
  Gradients gradients(world, std::vector<float>(kCount));
  for (uint32_t rank = 0; rank < world; ++rank)
    for (size_t i = 0; i < kCount; ++i) {
      double v = std::sqrt(profile.alike) * common[i] + std::sqrt(1 - profile.alike) * laplace();
      if (profile.sparse && generator() % 10) v = 0;
      gradients[rank][i] = static_cast<float>(profile.opposed && rank % 2 ? -v : v);
    }
  return gradients;
}

// The squared error of the mean over the ranks, summed over some steps.
double error_of_mean(const Codec& codec, const Gradients& gradients, const std::function<Stamp(uint32_t)>& stamp_of) {
  const TestDevice device(Device{});
  const Plan plan({{"w", kCount, DType::f32, codec}});
  double error = 0;
  for (uint64_t step = 0; step < 4; ++step) {
    std::vector<double> sum(kCount);
    for (uint32_t rank = 0; rank < gradients.size(); ++rank) {
      Stamp stamp = stamp_of(rank);
      stamp.step = step;
      const auto y = values_of(device.decode(plan, device.encode(plan, {raw_of(gradients[rank])}, stamp))[0]);
      for (size_t i = 0; i < kCount; ++i) sum[i] += static_cast<double>(y[i]) - gradients[rank][i];
    }
    for (double e : sum) error += e * e;
  }
  return error;
}

double over_independent(const std::string& spec, const RankProfile& profile, uint32_t world) {
  double together = 0, independent = 0;
  for (uint32_t seed = 1; seed <= 3; ++seed) {
    const Gradients gradients = draw(profile, world, seed);
    const Codec codec = fit(Codec::parse(spec), gradients[0].data(), kCount, DType::f32);
    together += error_of_mean(codec, gradients,
                              [&](uint32_t rank) { return Stamp{.seed = seed, .rank = rank, .world = world}; });
    independent +=
        error_of_mean(codec, gradients, [&](uint32_t rank) { return Stamp{.seed = seed + 1000 * (rank + 1)}; });
  }
  return together / independent;
}

const char* const kSpecs[] = {"qsgd:bits=2",   "qsgd:bits=4",     "qsgd:bits=8",    "terngrad",
                              "nuqsgd:bits=3", "optquant:bits=2", "optquant:bits=4"};

TEST(RankRounding, TheMeanIsNeverWorseThanWithIndependentDraws) {
  // 3 seeds x 4 steps x 8192 elements: the ratio of two such sums of squares has a standard error below 0.01.
  for (const char* spec : kSpecs)
    for (const RankProfile& profile : kProfiles)
      for (uint32_t world : {2u, 3u, 4u, 8u}) {
        const double ratio = over_independent(spec, profile, world);
        RecordProperty(std::string(spec) + " " + profile.name + " " + std::to_string(world), std::to_string(ratio));
        EXPECT_LE(ratio, 1.03) << spec << ", " << profile.name << ", " << world << " ranks";
      }
}

TEST(RankRounding, PairsDrawOppositesAndDifferentPairsIndependently) {
  std::set<uint64_t> keys;
  for (uint32_t rank = 0; rank < 64; rank += 2) {
    EXPECT_EQ(call_key(1, 2, 0, rank), call_key(1, 2, 0, rank + 1));
    EXPECT_EQ(rank_mask(rank), 0u);
    EXPECT_EQ(rank_mask(rank + 1), 0xffffffffu);
    keys.insert(call_key(1, 2, 0, rank));
  }
  EXPECT_EQ(keys.size(), 32u);
}

TEST(RankRounding, EveryRankByItselfIsUnbiased) {
  const std::vector<float> x = draw({"noise", 0}, 1, 5)[0];
  const TestDevice device(Device{});
  for (const char* spec : {"qsgd:bits=3", "optquant:bits=3"}) {
    const Codec codec = fit(Codec::parse(spec), x.data(), x.size(), DType::f32);
    const Plan plan({{"w", kCount, DType::f32, codec}});
    for (uint32_t rank : {1u, 5u}) {
      std::vector<double> sum(kCount);
      double squares = 0;
      for (uint64_t step = 0; step < 1000; ++step) {
        const Stamp stamp{.seed = 3, .step = step, .rank = rank, .world = 6};
        const auto y = values_of(device.decode(plan, device.encode(plan, {raw_of(x)}, stamp))[0]);
        for (size_t i = 0; i < kCount; ++i) {
          const double e = static_cast<double>(y[i]) - x[i];
          sum[i] += e;
          squares += e * e;
        }
      }
      // Without bias, and with independent steps, the square of an element's sum is on average the sum of its squares.
      // Over 8192 elements the ratio has a standard error of sqrt(2 / 8192) = 0.016, or a little more where few
      // elements have most of the variance.
      double of_sums = 0;
      for (double e : sum) of_sums += e * e;
      EXPECT_NEAR(of_sums / squares, 1, 0.1) << spec << ", rank " << rank;
    }
  }
}

}  // namespace
}  // namespace gradwire::test
