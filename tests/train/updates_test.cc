// SPDX-License-Identifier: Apache-2.0
// Updates without a server against the arithmetic that updates.h promises, done here once more with one runner per
// worker. A server must do the same.
#include "train/updates.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <limits>
#include <mutex>
#include <random>

#include "train/mean_updates.h"

namespace gradwire::train {
namespace {

using Floats = std::vector<float>;
constexpr std::chrono::milliseconds kTimeout{20000};
constexpr uint64_t kSeed = 3;

const std::vector<NamedTensor>& tensors() {
  static const std::vector<NamedTensor> list{{.name = "fc.weight", .count = 5000},
                                             {.name = "fc.bias", .count = 10, .dimensions = 1}};
  return list;
}

// A list of arrays, one per tensor, that is a function of (worker, step).
std::vector<Floats> made_up(int worker, uint64_t step) {
  std::mt19937_64 generator(static_cast<uint64_t>(worker) * 1000 + step);
  std::normal_distribution<float> normal;
  std::vector<Floats> all;
  for (const NamedTensor& one : tensors()) {
    all.emplace_back(one.count);
    for (float& value : all.back()) value = 0.01f * normal(generator);
  }
  return all;
}

template <class T>
std::vector<T*> pointers(std::vector<Floats>& arrays) {
  std::vector<T*> list;
  for (Floats& array : arrays) list.push_back(array.data());
  return list;
}

ReduceOptions gather(const std::string& up) {
  return {.method = ReduceOptions::Method::gather, .up = up, .seed = kSeed};
}

// The promise, with W workers on one processor.
std::vector<Floats> expected(const std::string& up, const std::string& down, int world, uint64_t steps,
                             std::vector<Floats>* full = nullptr) {
  const auto plan_of = [](const std::string& text) {
    const Rules rules = Rules::parse(text);
    std::vector<TensorSpec> specs;
    for (const NamedTensor& one : tensors())
      specs.push_back(
          {.name = one.name, .count = one.count, .codec = rules.codec_for(one.name, one.dimensions, one.count)});
    return Plan(std::move(specs));
  };
  const Plan plan = plan_of(up), weights_plan = plan_of(down);
  const auto coder = make_runner(plan, {}), weights_coder = make_runner(weights_plan, {});
  std::vector<std::byte> message(plan.message_bytes()), weights_message(weights_plan.message_bytes());
  std::vector<ErrorFeedback> residuals(static_cast<size_t>(world));
  for (ErrorFeedback& one : residuals)
    for (const TensorSpec& spec : plan.tensors())
      if (spec.codec.traits().feedback) one.add(Direction::up, spec.name, spec.count);
  std::vector<Floats> x = made_up(99, 0), weights = x;
  for (uint64_t step = 0; step < steps; ++step) {
    std::vector<Floats> sum = made_up(0, 0);
    for (Floats& array : sum) std::fill(array.begin(), array.end(), 0.0f);
    for (int rank = 0; rank < world; ++rank) {
      std::vector<Floats> update = made_up(rank, step);
      ErrorFeedback& own = residuals[static_cast<size_t>(rank)];
      const auto begun = own.begin(Direction::up, step, plan.tensors());
      coder->encode(pointers<const void>(update),
                    {.seed = kSeed,
                     .step = step,
                     .stage = 0,
                     .rank = static_cast<uint32_t>(rank),
                     .world = static_cast<uint32_t>(world)},
                    message, &begun->residuals);
      coder->decode(message, pointers<void>(sum), Write::add);
      own.commit(step);
    }
    for (size_t i = 0; i < x.size(); ++i)
      for (size_t k = 0; k < x[i].size(); ++k) x[i][k] = x[i][k] - sum[i][k] / static_cast<float>(world);
    weights_coder->encode(pointers<const void>(x), {.seed = kSeed, .step = step + 1, .stage = 1}, weights_message);
    weights_coder->decode(weights_message, pointers<void>(weights));
  }
  if (full) *full = x;
  return weights;
}

class Promise : public testing::TestWithParam<std::tuple<const char*, const char*, int>> {};

TEST_P(Promise, IsKeptBitForBit) {
  const auto [up, down, world] = GetParam();
  std::vector<Floats> full;
  const std::vector<Floats> wanted = expected(up, down, world, 6, &full);
  run_loopback(world, [&, up = up, down = down](Engine& engine) {
    MeanUpdates updates(engine, tensors(), gather(up), down, kTimeout);
    std::vector<Floats> weights = made_up(99, 0);
    EXPECT_EQ(updates.begin(pointers<float>(weights)), 0u);
    for (uint64_t step = 0; step < 6; ++step) {
      std::vector<Floats> update = made_up(engine.rank(), step);
      const StepResult result = updates.exchange(step, pointers<const float>(update), pointers<float>(weights), {});
      EXPECT_TRUE(result.applied);
      EXPECT_EQ(result.next, step + 1);
    }
    EXPECT_EQ(weights, wanted);
    const auto held = updates.held();
    for (size_t i = 0; i < held.size(); ++i) EXPECT_EQ(Floats(held[i].begin(), held[i].end()), full[i]);
  });
}

INSTANTIATE_TEST_SUITE_P(
    Updates, Promise,
    testing::Combine(testing::Values("loggrid:k=2", "qsgd:bits=4", "1d=fp32;*=topk:ratio=0.05", "fp32"),
                     testing::Values("unigrid:bits=8", "fp32", "qsgd:bits=8"), testing::Values(1, 3)));

TEST(Updates, WeightsBeginAsTheyWillGoDown) {
  run_loopback(1, [](Engine& engine) {
    MeanUpdates updates(engine, tensors(), gather("loggrid:k=2"), "unigrid:bits=2", kTimeout);
    std::vector<Floats> weights = made_up(99, 0);
    updates.begin(pointers<float>(weights));
    EXPECT_NE(weights, made_up(99, 0)) << "on a grid of three values";
    const auto held = updates.held();
    EXPECT_EQ(Floats(held[0].begin(), held[0].end()), made_up(99, 0)[0]) << "held in full precision";
  });
}

TEST(Updates, AWorkerWithoutAnUpdateLeavesTheStepOutForAll) {
  run_loopback(3, [](Engine& engine) {
    MeanUpdates updates(engine, tensors(), gather("loggrid:k=1"), "fp32", kTimeout);
    std::vector<Floats> weights = made_up(99, 0);
    updates.begin(pointers<float>(weights));
    const auto hash = [&] { return updates.residuals()->hash(); };
    const auto go = [&](uint64_t step, bool nothing) {
      std::vector<Floats> update = made_up(engine.rank(), step);
      return updates.exchange(step, nothing ? std::vector<const float*>{} : pointers<const float>(update),
                              pointers<float>(weights), {});
    };
    EXPECT_TRUE(go(0, false).applied);
    const std::vector<Floats> before = weights;
    const uint64_t residual = hash();
    const StepResult result = go(1, engine.rank() == 1);
    EXPECT_FALSE(result.applied);
    EXPECT_EQ(result.next, 2u);
    EXPECT_EQ(weights, before);
    EXPECT_EQ(hash(), residual);
    EXPECT_TRUE(go(2, false).applied);
    EXPECT_NE(weights, before);
    EXPECT_NE(hash(), residual);
  });
}

TEST(Updates, ThatGoDownAsUpdatesKeepWeightsInFullPrecision) {
  run_loopback(2, [](Engine& engine) {
    const ReduceOptions options{.up = "loggrid:k=2", .seed = kSeed};
    MeanUpdates updates(engine, tensors(), options, "", kTimeout);
    std::vector<Floats> weights = made_up(99, 0), sum = made_up(99, 0);
    updates.begin(pointers<float>(weights));
    EXPECT_EQ(weights, made_up(99, 0));
    constexpr uint64_t kSteps = 200;
    for (uint64_t step = 0; step < kSteps; ++step) {
      std::vector<Floats> update = made_up(engine.rank(), step);
      updates.exchange(step, pointers<const float>(update), pointers<float>(weights), {});
      for (int rank = 0; rank < 2; ++rank) {
        const std::vector<Floats> one = made_up(rank, step);
        for (size_t k = 0; k < one[0].size(); ++k) sum[0][k] -= one[0][k] / 2;
      }
    }
    // The residuals, of workers and owners, stay of the size of one step's updates; the distance to the first weights
    // does not.
    double away = 0, walked = 0;
    for (size_t k = 0; k < sum[0].size(); ++k) {
      away = std::max(away, std::abs(double{weights[0][k]} - sum[0][k]));
      walked = std::max(walked, std::abs(double{sum[0][k]} - made_up(99, 0)[0][k]));
      if (k > 200) break;
    }
    EXPECT_LT(away, 0.05);
    EXPECT_GT(walked, 0.15);
  });
}

TEST(Updates, PoolTheMeanOfSecondMoments) {
  run_loopback(3, [](Engine& engine) {
    MeanUpdates updates(engine, tensors(), gather("loggrid:k=2"), "fp32", kTimeout);
    for (const uint64_t step : {0, 1, 3}) {
      std::vector<Floats> second = made_up(engine.rank(), step),
                          others[] = {made_up(0, step), made_up(1, step), made_up(2, step)};
      updates.pool(step, pointers<float>(second));
      for (size_t k = 0; k < second[0].size(); ++k)
        ASSERT_EQ(second[0][k], (others[0][0][k] + others[1][0][k] + others[2][0][k]) / 3.0f);
    }
  });
}

class Kept : public testing::TestWithParam<std::pair<const char*, const char*>> {};

TEST_P(Kept, UpdatesGoOnFromIt) {
  const char *const up = GetParam().first, *const down = GetParam().second;
  run_loopback(2, [&](Engine& engine) {
    const std::string path =
        (std::filesystem::path(testing::TempDir()) / ("kept-" + std::to_string(engine.rank()))).string();
    std::vector<Floats> weights = made_up(99, 0), kept;
    const auto run = [&](MeanUpdates& updates, uint64_t from, uint64_t to) {
      for (uint64_t step = from; step < to; ++step) {
        std::vector<Floats> update = made_up(engine.rank(), step);
        updates.exchange(step, pointers<const float>(update), pointers<float>(weights), {});
      }
    };
    {
      MeanUpdates whole(engine, tensors(), gather(up), down, kTimeout);
      whole.begin(pointers<float>(weights));
      run(whole, 0, 8);
    }
    const std::vector<Floats> wanted = std::exchange(weights, made_up(99, 0));
    {
      MeanUpdates first(engine, tensors(), gather(up), down, kTimeout);
      first.begin(pointers<float>(weights));
      run(first, 0, 5);
      first.residuals()->save(path);
      for (const auto& array : first.held()) kept.emplace_back(array.begin(), array.end());
    }
    MeanUpdates second(engine, tensors(), gather(up), down, kTimeout);
    *second.residuals() = ErrorFeedback::load(path);
    for (size_t i = 0; i < kept.size(); ++i) std::copy(kept[i].begin(), kept[i].end(), second.held()[i].begin());
    run(second, 5, 8);
    EXPECT_EQ(weights, wanted);
    std::filesystem::remove(path);
  });
}

INSTANTIATE_TEST_SUITE_P(Updates, Kept,
                         testing::Values(std::pair{"loggrid:k=1", "unigrid:bits=8"},
                                         std::pair{"casq:bits=2,refit=2", "optquant:bits=4,refit=2"},
                                         std::pair{"fp32", "dqsgd:budget=6"}));

}  // namespace
}  // namespace gradwire::train
