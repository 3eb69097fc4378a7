// SPDX-License-Identifier: Apache-2.0
// casq in its loop: a reducer with error feedback that refits as it goes, over thousands of steps. What one message
// costs says nothing about this. A rule that gives all buckets to one sign is best for a message and starves the other
// sign from fit to fit; it is here too, as a rival that fails.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "collective/collective_fixture.h"
#include "gradwire/learn.h"

namespace gradwire::test {
namespace {

constexpr uint64_t kTileElements = 32768, kSettled = 50;

// Gradients of kinds that training shows. The layers are four parts of one tensor whose scales go from 1 to 100, two in
// each tile.
enum class Profile { laplace, gauss, student, layers, zeros, skewed, one_sided };
constexpr Profile kProfiles[] = {Profile::laplace, Profile::gauss,  Profile::student,  Profile::layers,
                                 Profile::zeros,   Profile::skewed, Profile::one_sided};

std::vector<float> drawn(Profile profile, uint32_t seed) {
  std::mt19937 random(seed);
  std::exponential_distribution<float> exponential;
  std::normal_distribution<float> normal;
  std::student_t_distribution<float> student(3);
  std::vector<float> x(profile == Profile::layers ? 2 * kTileElements : kTileElements);
  for (uint64_t i = 0; i < x.size(); ++i) {
    const float laplace = exponential(random) * (random() & 1 ? 0.01f : -0.01f);
    switch (profile) {
      case Profile::laplace:
        x[i] = laplace;
        break;
      case Profile::gauss:
        x[i] = 0.01f * normal(random);
        break;
      case Profile::student:
        x[i] = 0.01f * student(random);
        break;
      case Profile::layers:
        x[i] = laplace * std::pow(100.0f, static_cast<float>(2 * i / kTileElements) / 3);
        break;
      case Profile::zeros:
        x[i] = random() & 1 ? laplace : 0;
        break;
      case Profile::skewed:
        x[i] = laplace > 0 ? 3 * laplace : laplace;
        break;
      case Profile::one_sided:
        x[i] = std::fabs(laplace) - 0.002f;
        break;
    }
  }
  return x;
}

double norm_of(const std::vector<double>& x) {
  double squares = 0;
  for (const double v : x) squares += v * v;
  return std::sqrt(squares);
}

// What is owed after every step, in norms of the gradient: the gradients so far less what was sent of them.
class Debt {
 public:
  explicit Debt(size_t count) : owed_(count) {}
  void add(std::span<const float> gradient, std::span<const float> sent) {
    double squares = 0;
    for (size_t i = 0; i < owed_.size(); ++i) {
      owed_[i] += static_cast<double>(gradient[i]) - sent[i];
      squares += static_cast<double>(gradient[i]) * gradient[i];
    }
    last = norm_of(owed_) / std::sqrt(squares);
    ++steps_;
    mean += (last - mean) / static_cast<double>(steps_);
    if (steps_ > kSettled) most = std::max(most, last);
  }
  double last = 0, mean = 0, most = 0;  // most: once the loop has settled

 private:
  std::vector<double> owed_;
  uint64_t steps_ = 0;
};

// Through a reducer, as training does it. `turn`: the gradient turns by so much in a step towards another one.
Debt reduced(const std::string& spec, Profile profile, uint32_t seed, uint64_t steps, double turn = 0) {
  const std::vector<float> from = drawn(profile, seed), to = drawn(profile, seed + 1000);
  Debt debt(from.size());
  run_loopback(1, [&](Engine& engine) {
    Reducer reducer(engine, {{"w", from.size()}}, {.method = Method::gather, .up = spec});
    std::vector<float> gradient = from, sent(from.size());
    for (uint64_t step = 0; step < steps; ++step) {
      const double angle = turn * static_cast<double>(step);
      const auto here = static_cast<float>(std::cos(angle)), there = static_cast<float>(std::sin(angle));
      for (size_t i = 0; i < from.size() && turn > 0; ++i) gradient[i] = here * from[i] + there * to[i];
      reducer.run(step, std::span<const float>(gradient), std::span<float>(sent));
      debt.add(gradient, sent);
    }
  });
  return debt;
}

// A rival: the same fits at the same steps, but always the order with the least error in one message. A learner uses
// it in odd steps.
Debt greedy(const std::string& spec, Profile profile, uint32_t seed, uint64_t steps) {
  const std::vector<float> gradient = drawn(profile, seed);
  Debt debt(gradient.size());
  std::vector<float> owed(gradient.size()), left(gradient.size()), sent(gradient.size());
  Learner learner(Codec::parse(spec), gradient.size(), 1);
  const void *in[] = {gradient.data()}, *before[] = {owed.data()};
  void *after[] = {left.data()}, *out[] = {sent.data()};
  const uint32_t which[] = {0};
  for (uint64_t step = 0; step < steps; ++step) {
    const Plan plan({{"w", gradient.size(), DType::f32, learner.codec(step | 1)}});
    const auto runner = make_runner(plan, {});
    std::vector<std::byte> message(plan.message_bytes());
    const Residuals residuals{.before = before, .after = after};
    runner->encode(in, {.step = step}, message, &residuals);
    if (learner.observes(step)) {
      learner.observe(*runner, which, step, in, &residuals, message);
      runner->wait();
      learner.collect();
      std::vector<std::byte> stats(learner.stats_bytes());
      learner.take_stats(stats);
      const std::span<const std::byte> ranks[] = {stats};
      learner.learn(step, ranks);
    }
    runner->decode(message, out, Write::set, nullptr);
    owed = left;
    debt.add(gradient, sent);
  }
  return debt;
}

TEST(CasqLoop, ResidualsStayBounded) {
  for (const Profile profile : kProfiles)
    for (const uint32_t seed : {1, 2}) {
      const Debt ours = reduced("casq:bits=2", profile, seed, 2000);
      const std::string what = "profile " + std::to_string(static_cast<int>(profile)) + " seed " + std::to_string(seed);
      EXPECT_LT(ours.most, 1.1) << what;
      EXPECT_LT(ours.last, 1.1) << what;
      // A table that is never fitted keeps all outliers within the budget. That has the greater error in one message
      // and is hard to beat here.
      EXPECT_LT(ours.most, 1.4 * reduced("casq:bits=2,refit=0", profile, seed, 300).most) << what;
    }
}

TEST(CasqLoop, ResidualsStayBoundedWhileGradientsDrift) {
  for (const Profile profile : {Profile::laplace, Profile::student, Profile::layers}) {
    EXPECT_LT(reduced("casq:bits=2", profile, 3, 1000, 0.01).most, 1.1) << static_cast<int>(profile);
    EXPECT_LT(reduced("casq:bits=1", profile, 3, 1000, 0.01).most, 7) << static_cast<int>(profile);
  }
}

TEST(CasqLoop, TheOrderThatIsBestForOneMessageStarvesASign) {
  for (const uint32_t seed : {1, 2}) {
    EXPECT_GT(greedy("casq:bits=2", Profile::laplace, seed, 400).most, 3);
    EXPECT_GT(greedy("casq:bits=2", Profile::zeros, seed, 400).most, 3);
    EXPECT_GT(greedy("casq:bits=1", Profile::laplace, seed, 400).most, 8);
  }
}

// With two clusters nothing but the sign is known of an element, and a bucket has about eight: large elements are owed
// a lot before their bucket is large enough. The debt stays at a few gradients; that of onebit grows without end.
TEST(CasqLoop, OneBitStaysBoundedWhereSignsAloneDoNot) {
  for (const Profile profile : kProfiles) {
    const bool heavy = profile == Profile::student;
    const Debt ours = reduced("casq:bits=1", profile, 1, 2000), signs = reduced("onebit", profile, 1, 600);
    EXPECT_LT(ours.most, heavy ? 7 : 4.5) << static_cast<int>(profile);
    EXPECT_LT(ours.most, signs.last / 4) << static_cast<int>(profile);
    EXPECT_LT(reduced("casq:bits=1,refit=0", profile, 1, 300).most, heavy ? 7 : 4.5) << static_cast<int>(profile);
  }
  // What brings the bound down is buckets.
  EXPECT_LT(reduced("casq:bits=1,budget=0.25", Profile::laplace, 1, 1000).most, 1.3);
}

TEST(CasqLoop, MoreBitsStayBounded) {
  for (const Profile profile : {Profile::laplace, Profile::student, Profile::skewed})
    for (const char* spec : {"casq:bits=3", "casq:bits=4"})
      EXPECT_LT(reduced(spec, profile, 1, 1000).most, 0.5) << spec << " profile " << static_cast<int>(profile);
}

// The mean, because single fits are unlucky: the published hash fills few buckets where their number is a multiple of
// 131. The next fit has another number.
TEST(CasqLoop, ThePapersFormStaysBounded) {
  for (const Profile profile : kProfiles)
    EXPECT_LT(reduced("casq:bits=2,mode=paper", profile, 1, 600).mean, 1.1) << static_cast<int>(profile);
}

// Gradients of four ranks, which have a part in common, reduced to their mean. What a rank counts as sent must be what
// the others have made of its message, or the debt grows in every step.
Debt reduced_by_four(const std::string& spec, Profile profile, uint32_t seed, uint64_t steps) {
  constexpr int kRanks = 4;
  constexpr size_t kElements = kTileElements / 4;
  const std::vector<float> common = drawn(profile, seed);
  std::vector<std::vector<float>> gradients;
  std::vector<float> mean(kElements);
  for (int rank = 0; rank < kRanks; ++rank) {
    std::vector<float>& own = gradients.emplace_back(drawn(profile, seed + 10 + static_cast<uint32_t>(rank)));
    own.resize(kElements);
    for (size_t i = 0; i < own.size(); ++i) mean[i] += (own[i] += common[i]) / kRanks;
  }
  Debt debt(mean.size());
  run_loopback(kRanks, [&](Engine& engine) {
    Reducer reducer(engine, {{"w", mean.size()}}, {.method = Method::gather, .up = spec});
    const std::vector<float>& gradient = gradients[static_cast<size_t>(engine.rank())];
    std::vector<float> sent(gradient.size());
    for (uint64_t step = 0; step < steps; ++step) {
      reducer.run(step, std::span<const float>(gradient), std::span<float>(sent));
      if (engine.rank() == 0) debt.add(mean, sent);
    }
  });
  return debt;
}

TEST(CasqLoop, SeveralRanksOweNoMoreThanOne) {
  uint32_t seed = 0;
  for (const Profile profile : {Profile::laplace, Profile::student, Profile::skewed})
    for (const char* spec : {"casq:bits=2", "casq:bits=2,mode=paper", "casq:bits=2,mode=paper,counts=on"}) {
      const Debt debt = reduced_by_four(spec, profile, ++seed, 1000);
      EXPECT_LT(debt.mean, 1.1) << spec << " profile " << static_cast<int>(profile);
      EXPECT_LT(debt.last, 2) << spec << " profile " << static_cast<int>(profile);
    }
}

// Descent with momentum on a quadratic, whose curvatures span two decades, from the noisy gradients of four ranks.
double trained(const std::string& spec, uint32_t seed) {
  constexpr uint64_t count = 8192, steps = 1200;
  double loss = 0;
  run_loopback(4, [&](Engine& engine) {
    Reducer reducer(engine, {{"w", count}}, {.method = Method::gather, .up = spec});
    std::mt19937 random(seed), own(seed + 10 * static_cast<uint32_t>(engine.rank() + 1));
    std::exponential_distribution<float> exponential;
    std::uniform_real_distribution<float> decades(-2, 0), noise(-0.1f, 0.1f);
    std::vector<float> curvature(count), weights(count), momentum(count), gradient(count), mean(count);
    for (uint64_t i = 0; i < count; ++i) {
      curvature[i] = std::pow(10.0f, decades(random));
      weights[i] = exponential(random) * (random() & 1 ? 1.0f : -1.0f);
    }
    for (uint64_t step = 0; step < steps; ++step) {
      for (uint64_t i = 0; i < count; ++i) gradient[i] = curvature[i] * weights[i] + noise(own);
      reducer.run(step, std::span<const float>(gradient), std::span<float>(mean));
      for (uint64_t i = 0; i < count; ++i) weights[i] -= 0.01f * (momentum[i] = 0.9f * momentum[i] + mean[i]);
    }
    if (engine.rank() != 0) return;
    for (uint64_t i = 0; i < count; ++i) loss += 0.5 / count * curvature[i] * weights[i] * weights[i];
  });
  return loss;
}

TEST(CasqLoop, TrainingReachesWhatSignsAndFloatsReach) {
  for (const uint32_t seed : {1, 2}) {
    const double floats = trained("fp32", seed), one = trained("casq:bits=1", seed);
    EXPECT_LT(one, 1.1 * trained("onebit", seed));
    EXPECT_LT(one, 1.5 * floats);
    EXPECT_LT(trained("casq:bits=2", seed), 1.1 * floats);
  }
}

// The cluster that is first to get buckets. The default table has the positive outliers first.
uint32_t first_of(const Codec& codec) {
  const uint32_t clusters = 1u << std::stoi(codec.get("bits"));
  return codec.table().empty() ? clusters - 1 : codec.table()[clusters - 1];
}

TEST(CasqLoop, OutliersOfEitherSignAreFirstInTurn) {
  const std::vector<float> gradient = drawn(Profile::laplace, 1);
  for (const char* spec : {"casq:bits=1", "casq:bits=2", "casq:bits=4", "casq:bits=2,refit=0", "casq:bits=1,refit=0"}) {
    std::vector<Codec> used;
    run_loopback(1, [&](Engine& engine) {
      Reducer reducer(engine, {{"w", gradient.size()}}, {.method = Method::gather, .up = spec});
      std::vector<float> sent(gradient.size());
      for (uint64_t step = 0; step < 16; ++step) {
        reducer.run(step, std::span<const float>(gradient), std::span<float>(sent));
        used.push_back(reducer.codecs(Direction::up)[0]);
      }
    });
    for (uint64_t step = 9; step < 16; ++step) {  // from the fit after 8 steps to that after 16
      const uint32_t last = (1u << std::stoi(used[step].get("bits"))) - 1;
      EXPECT_EQ(first_of(used[step]) + first_of(used[step - 1]), last) << spec << " step " << step;
      EXPECT_TRUE(step == 9 || used[step] == used[step - 2]) << spec << " step " << step;
    }
  }
}

}  // namespace
}  // namespace gradwire::test
