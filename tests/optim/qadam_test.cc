// SPDX-License-Identifier: Apache-2.0
// qadam against its formulas in double precision, and the experiments that say why it is as it is, with the library's
// own codecs: feedback is needed, quantised weights leave a floor of a known height, young moments must be corrected,
// and the second moments of workers whose data differ must be shared.
#include "optim/qadam.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <ostream>
#include <random>
#include <vector>

#include "device/memory.h"
#include "gradwire/error.h"
#include "gradwire/feedback.h"
#include "gradwire/runner.h"
#include "optim/normal_values.h"

namespace gradwire {
namespace {

using Array = std::vector<float>;

// One tensor through one codec and back, with or without feedback.
class Channel {
 public:
  Channel(const std::string& codec, uint64_t count, bool feedback)
      : plan_({{"x", count, DType::f32, Codec::parse(codec)}}),
        runner_(make_runner(plan_, Device{})),
        message_(plan_.message_bytes()),
        feedback_(feedback ? std::make_unique<ErrorFeedback>() : nullptr) {
    if (feedback_) feedback_->add(Direction::up, "x", count);
  }
  void pass(uint64_t step, const Array& in, Array& out) {
    const auto residuals = feedback_ ? feedback_->begin(Direction::up, step, plan_.tensors()) : nullptr;
    const void* from[] = {in.data()};
    void* to[] = {out.data()};
    runner_->encode(from, {.step = step}, message_, residuals ? &residuals->residuals : nullptr);
    runner_->decode(message_, to);
    if (feedback_) feedback_->commit(step);
  }

 private:
  Plan plan_;
  std::unique_ptr<Runner> runner_;
  std::vector<std::byte> message_;
  std::unique_ptr<ErrorFeedback> feedback_;
};

// One worker with one array.
class QAdamWorker {
 public:
  QAdamWorker(uint64_t count, const QAdamOptions& options, const Device& device = {})
      : qadam({count}, options, device), update(count) {}
  const Array& step(double rate, const Array& gradient) {
    const float* in[] = {gradient.data()};
    float* out[] = {update.data()};
    qadam.step(rate, in, out);
    return update;
  }
  const Array& again(double rate) {
    float* out[] = {update.data()};
    qadam.again(rate, out);
    return update;
  }
  QAdam qadam;
  Array update;
};

// The formulas --------------------------------------------------------------------------------------------------------

struct Mode {
  const char* name;
  QAdamOptions options;
};
void PrintTo(const Mode& mode, std::ostream* out) { *out << mode.name; }

class Formula : public testing::TestWithParam<Mode> {};

TEST_P(Formula, IsFollowedInEveryMode) {
  const QAdamOptions o = GetParam().options;
  constexpr uint64_t kCount = 1000;
  QAdamWorker worker(kCount, o);
  std::vector<double> m(kCount), sizes(kCount), v(kCount, o.correction && !o.theory ? 0 : o.epsilon);
  for (int k = 1; k <= 60; ++k) {
    Array gradient = test::normal_values(kCount, static_cast<uint64_t>(k), std::pow(10.0, k % 5 - 3));
    gradient[7] = 0;  // one that never moves
    const double rate = o.theory ? 0.01 / std::sqrt(k) : 0.01;
    const Array& update = worker.step(rate, gradient);
    const double theta = o.theory ? 1 - o.theta / k : o.theta;
    for (uint64_t i = 0; i < kCount; ++i) {
      m[i] = o.beta * m[i] + (1 - o.beta) * gradient[i];
      sizes[i] = o.beta * sizes[i] + (1 - o.beta) * std::abs(gradient[i]);
      v[i] = theta * v[i] + (1 - theta) * gradient[i] * double{gradient[i]};
      const double factor = o.correction && !o.theory ? rate / (1 - std::pow(o.beta, k)) /
                                                            (std::sqrt(v[i] / (1 - std::pow(o.theta, k))) + o.epsilon)
                                                      : rate / std::sqrt(v[i]);
      // A first moment whose terms cancel has lost digits: what counts is the size of what it was made of.
      ASSERT_NEAR(update[i], factor * m[i], 1e-6 * factor * sizes[i]) << GetParam().name << " " << k;
    }
    ASSERT_EQ(update[7], 0);
  }
  EXPECT_EQ(worker.qadam.taken, 60u);
}

INSTANTIATE_TEST_SUITE_P(QAdam, Formula,
                         testing::Values(Mode{"corrected", {}}, Mode{"paper", {.epsilon = 1e-5, .correction = false}},
                                         Mode{"theory", {.theta = 0.9, .epsilon = 1e-5, .theory = true}},
                                         Mode{"other numbers", {.beta = 0.5, .theta = 0.97, .epsilon = 1e-3}}),
                         [](const auto& info) {
                           std::string name = info.param.name;
                           std::replace(name.begin(), name.end(), ' ', '_');
                           return name;
                         });

TEST(QAdam, ACoordinateWithoutGradientNeverBecomesNotANumber) {
  QAdamWorker worker(1, {.theta = 0.5, .epsilon = 1e-30, .correction = false});  // v decays to nothing in a few steps
  for (int k = 0; k < 400; ++k) ASSERT_EQ(worker.step(1, {0})[0], 0) << k;
  ASSERT_EQ(worker.qadam.read(QAdam::Moment::second, 0)[0], 0) << "or the test proves nothing";
  for (int k = 0; k < 4; ++k) ASSERT_TRUE(std::isfinite(worker.step(1, {1e-25f})[0]));  // its square is no f32
}

TEST(QAdam, ThreadsChangeNoBit) {
  constexpr uint64_t kCount = 300'001;
  QAdamWorker alone(kCount, {}), three(kCount, {}, Device{.threads = 3});
  for (uint64_t k = 0; k < 4; ++k) {
    const Array gradient = test::normal_values(kCount, k);
    ASSERT_EQ(alone.step(0.1, gradient), three.step(0.1, gradient));
  }
}

TEST(QAdam, GoesOnFromArraysThatWereKept) {
  QAdamWorker first(100, {.shared = true});
  const auto pool = [](QAdamWorker& worker, uint64_t step) {
    if (!worker.qadam.pools(step)) return;
    worker.qadam.pool([&](std::span<float* const> second) {
      for (int i = 0; i < 100; ++i) second[0][i] *= 3;
    });
    worker.again(0.1);
  };
  for (uint64_t step = 0; step < 5; ++step) {
    first.step(0.1, test::normal_values(100, step));
    pool(first, step);
  }
  QAdamWorker second(100, {.shared = true});
  for (const QAdam::Moment moment : first.qadam.moments()) second.qadam.write(moment, 0, first.qadam.read(moment, 0));
  second.qadam.taken = first.qadam.taken;
  for (uint64_t step = 5; step < 9; ++step) {
    const Array gradient = test::normal_values(100, step);
    first.step(0.1, gradient);
    second.step(0.1, gradient);
    pool(first, step);
    pool(second, step);
    ASSERT_EQ(first.update, second.update) << step;
  }
}

TEST(QAdam, PoolsEarlyAndOftenAtFirst) {
  QAdam shared({1}, {.shared = true, .share_every = 16}), local({1}, {});
  std::vector<uint64_t> steps;
  for (uint64_t step = 0; step < 64; ++step) {
    if (shared.pools(step)) steps.push_back(step + 1);
    EXPECT_FALSE(local.pools(step));
  }
  EXPECT_EQ(steps, (std::vector<uint64_t>{1, 2, 4, 8, 16, 32, 48, 64}));
}

TEST(QAdam, WhatIsPooledIsCorrectedAndUsedAtOnce) {
  QAdamWorker worker(1, {.shared = true});
  EXPECT_NEAR(worker.step(1, {2})[0], 1, 1e-6);
  worker.qadam.pool([](std::span<float* const> second) {
    EXPECT_NEAR(second[0][0], 4, 1e-5);  // g^2, not (1 - theta) g^2
    second[0][0] = 16;
  });
  EXPECT_NEAR(worker.again(1)[0], 0.5, 1e-6);
  // Then it goes on like the worker's own: (theta 16 (1 - theta) + 4 (1 - theta)) / (1 - theta^2) = 10.
  EXPECT_NEAR(worker.step(1, {2})[0], 2 / std::sqrt(10.0), 1e-3);
}

// A mean of zero must not stay below the line until the next pooling: its root would divide what comes then.
TEST(QAdam, AGradientThatWakesUpBetweenPoolingsIsNotBlownUp) {
  QAdamWorker shared(1, {.shared = true}), local(1, {});
  for (uint64_t step = 0; step < 40; ++step) {
    const Array gradient{step < 18 ? 0.0f : 1.0f};
    local.step(1, gradient);
    shared.step(1, gradient);
    if (shared.qadam.pools(step)) {
      shared.qadam.pool([](std::span<float* const>) {});
      shared.again(1);
    }
    ASSERT_NEAR(shared.update[0], local.update[0], 1e-5) << step;
  }
}

TEST(QAdam, RefusesNumbersThatCannotBe) {
  const auto field_of = [](const QAdamOptions& options) -> std::string {
    try {
      QAdam({1}, options);
    } catch (const Error& error) {
      return error.field();
    }
    return "";
  };
  EXPECT_EQ(field_of({.beta = 1}), "beta");
  EXPECT_EQ(field_of({.theta = 1}), "theta");
  EXPECT_EQ(field_of({.theta = 1, .theory = true}), "");
  EXPECT_EQ(field_of({.epsilon = 0}), "epsilon");
  EXPECT_EQ(field_of({.share_every = 0}), "share_every");
}

// Arrays of every length over several launches, with values down to the smallest.
TEST(QAdam, AGpuGivesTheBitsOfTheProcessor) {
  if (cuda_devices() == 0) GTEST_SKIP() << "compiled, not run: no GPU here";
  std::vector<uint64_t> counts{1'000'003, 1, 0};
  for (uint64_t i = 0; i < 90; ++i) counts.push_back(100 + 13 * i);
  const Device gpu{.kind = Device::Kind::cuda};
  const std::shared_ptr<Memory> memory = memory_of(gpu);
  for (const QAdamOptions& options :
       {QAdamOptions{}, QAdamOptions{.shared = true}, QAdamOptions{.epsilon = 1e-5, .theory = true}}) {
    QAdam here(counts, options), there(counts, options, gpu);
    std::vector<Array> gradients, updates;
    std::vector<const float*> in, in_there;
    std::vector<float*> out, out_there;
    for (const uint64_t count : counts) {
      gradients.emplace_back(count);
      updates.emplace_back(count);
      in.push_back(gradients.back().data());
      out.push_back(updates.back().data());
      in_there.push_back(static_cast<const float*>(memory->allocate(4 * count + 4)));
      out_there.push_back(static_cast<float*>(memory->allocate(4 * count + 4)));
    }
    for (uint64_t step = 0; step < 6; ++step) {
      for (size_t i = 0; i < counts.size(); ++i) {
        const Array fresh =
            test::normal_values(counts[i], 100 * step + i, std::pow(10.0, -static_cast<double>(i % 5) * 7));
        std::copy(fresh.begin(), fresh.end(), gradients[i].begin());  // where `in` points to
        memory->from_host(const_cast<float*>(in_there[i]), in[i], 4 * counts[i]);
      }
      here.step(0.01, in, out);
      there.step(0.01, in_there, out_there);
      if (here.pools(step)) {
        for (QAdam* one : {&here, &there})
          one->pool([&](std::span<float* const> second) {
            for (size_t i = 0; i < counts.size(); ++i)
              for (uint64_t k = 0; k < counts[i]; ++k) second[i][k] *= 1.5f;
          });
        here.again(0.01, out);
        there.again(0.01, out_there);
      }
      for (size_t i = 0; i < counts.size(); ++i) {
        Array got(counts[i]);
        memory->to_host(got.data(), out_there[i], 4 * counts[i]);
        ASSERT_EQ(got, updates[i]) << "step " << step << ", array " << i;
        for (const QAdam::Moment moment : here.moments()) ASSERT_EQ(here.read(moment, i), there.read(moment, i));
      }
    }
    for (size_t i = 0; i < counts.size(); ++i) {
      memory->release(const_cast<float*>(in_there[i]));
      memory->release(out_there[i]);
    }
  }
}

// The experiments -----------------------------------------------------------------------------------------------------

TEST(QAdam, TheFirstRatiosPeakAtSixPointSixUnlessCorrected) {
  const auto peak = [](const QAdamOptions& options) {
    QAdamWorker worker(1, options);
    float most = 0;
    for (int k = 0; k < 2000; ++k) most = std::max(most, worker.step(1, {0.37f})[0]);
    return most;
  };
  EXPECT_NEAR(peak({.epsilon = 1e-12, .correction = false}), 6.57, 0.02);
  EXPECT_LE(peak({}), 1.0001f);
  EXPECT_LE(peak({.theta = 0.999, .epsilon = 1e-12, .theory = true}), 1.01f);
}

// sup |u - Q(u)|^2 / |u|^2, reached by one large value and others just below half of the smallest power.
TEST(QAdam, TheGridOfUpdatesContractsAsTheoryHasIt) {
  constexpr uint64_t kCount = 100;
  for (const int k : {0, 1, 2, 4}) {
    const double powers = std::pow(4.0, k + 1), others = kCount - 1;
    const double bound = std::max(others / (powers + others), k > 0 ? others / (16 + 9 * others) : 0);
    Channel channel("loggrid:k=" + std::to_string(k) + ",scale=tensor", kCount, false);
    const auto error = [&](const Array& u) {
      Array out(kCount);
      channel.pass(0, u, out);
      double lost = 0, size = 0;
      for (uint64_t i = 0; i < kCount; ++i) {
        lost += std::pow(double{u[i]} - out[i], 2);
        size += std::pow(double{u[i]}, 2);
      }
      return lost / size;
    };
    Array worst(kCount, std::nextafter(std::ldexp(1.0f, -k - 1), 0.0f));
    worst[0] = 1;
    EXPECT_NEAR(error(worst), others / (powers + others), 1e-4) << k;  // 0.9612 with k = 0, 0.6074 with k = 2
    for (uint64_t seed = 0; seed < 300; ++seed) {
      Array u = test::normal_values(kCount, seed);
      u[0] *= static_cast<float>(1 + seed % 30);
      ASSERT_LE(error(u), bound + 1e-6) << k << " " << seed;
    }
  }
}

// One coordinate that always moves keeps the scale large: a hundred noisy ones are rounded to nothing, step after step.
// Returns their mean loss at the end of the run.
double loss_beside_a_large_coordinate(const std::string& codec, bool feedback) {
  constexpr uint64_t kCount = 101;
  constexpr int kSteps = 20000, kSeen = 2000;
  QAdamWorker worker(kCount, {.beta = 0.99, .correction = false});
  Channel up(codec, kCount, feedback);
  std::vector<double> x(kCount);
  Array gradient(kCount), sent(kCount);
  std::mt19937_64 generator(5);
  std::normal_distribution<double> noise(0, 10);
  double loss = 0;
  for (int t = 0; t < kSteps; ++t) {
    gradient[0] = static_cast<float>(x[0] - 1e4);
    for (uint64_t i = 1; i < kCount; ++i) gradient[i] = static_cast<float>(x[i] - 1 + noise(generator));
    up.pass(static_cast<uint64_t>(t), worker.step(0.002, gradient), sent);
    for (uint64_t i = 0; i < kCount; ++i) x[i] -= sent[i];
    if (t < kSteps - kSeen) continue;
    for (uint64_t i = 1; i < kCount; ++i) loss += (x[i] - 1) * (x[i] - 1) / 2;
  }
  return loss / (kSeen * (kCount - 1.0));
}

TEST(QAdam, WithoutFeedbackACoarseGridFreezes) {
  const double exact = loss_beside_a_large_coordinate("fp32", false);
  EXPECT_NEAR(exact, 0.0037, 0.002);
  for (const char* k : {"0", "1", "2"})
    EXPECT_NEAR(loss_beside_a_large_coordinate(std::string("loggrid:k=") + k, true), exact, 0.3 * exact) << k;
  EXPECT_NEAR(loss_beside_a_large_coordinate("loggrid:k=0", false), 0.4966, 0.02);
  EXPECT_NEAR(loss_beside_a_large_coordinate("loggrid:k=1", false), 0.298, 0.06);
  EXPECT_NEAR(loss_beside_a_large_coordinate("loggrid:k=2", false), 0.0052, 0.003);
}

// The gradient is taken at weights on a grid of steps `delta`: they end up on the two points around the best one, in
// the proportion that makes the mean gradient vanish. Returns the mean loss there, over the predicted one.
double floor_over_prediction(int power) {
  constexpr uint64_t kCount = 2048;
  constexpr int kSteps = 20000;
  const double delta = std::ldexp(1.0, -power);
  const std::string codec = "unigrid:bits=" + std::to_string(power + 2) +
                            ",range=" + std::to_string((std::ldexp(1.0, power + 1) - 1) * delta);
  QAdamWorker worker(kCount, {.theory = true});
  Channel down(codec, kCount, false);
  std::mt19937_64 generator(static_cast<uint64_t>(power));
  std::uniform_real_distribution<double> place(-1, 1), weight(0.5, 2);
  std::vector<double> best(kCount), curve(kCount);
  std::generate(best.begin(), best.end(), [&] { return place(generator); });
  std::generate(curve.begin(), curve.end(), [&] { return weight(generator); });
  Array x(kCount), on_grid(kCount), gradient(kCount);
  double loss = 0;
  for (int t = 0; t < kSteps; ++t) {
    down.pass(static_cast<uint64_t>(t), x, on_grid);
    for (uint64_t i = 0; i < kCount; ++i) {
      const double away = on_grid[i] - best[i];
      gradient[i] = static_cast<float>(curve[i] * away);
      if (t >= kSteps / 2) loss += curve[i] * away * away / 2;
    }
    const Array& update = worker.step(0.05 / std::sqrt(t + 1), gradient);
    for (uint64_t i = 0; i < kCount; ++i) x[i] -= update[i];
  }
  return loss / (kSteps / 2.0) / (std::accumulate(curve.begin(), curve.end(), 0.0) * delta * delta / 12);
}

TEST(QAdam, QuantisedWeightsLeaveAFloorThatFallsFourTimesABit) {
  for (int power = 3; power <= 8; ++power) {
    const double ratio = floor_over_prediction(power);
    EXPECT_GE(ratio, 0.9) << power;
    EXPECT_LE(ratio, 1.1) << power;
  }
}

// Workers 2 (x - 1)^2 and (x + 1)^2 / 2, best together at 0.6, with noise of their own in their gradients; many copies
// at once, whose mean where they end is returned.
double end_of_two_workers(double noise1, double noise2, bool shared) {
  constexpr uint64_t kCount = 512;
  constexpr int kSteps = 6000;
  const QAdamOptions options{.shared = shared};
  QAdamWorker workers[] = {{kCount, options}, {kCount, options}};
  std::normal_distribution<double> noises[] = {std::normal_distribution<double>(0, noise1),
                                               std::normal_distribution<double>(0, noise2)};
  std::mt19937_64 generator(11);
  Array x(kCount), gradient(kCount);
  double sum = 0;
  for (int t = 0; t < kSteps; ++t) {
    const double rate = t < kSteps / 2 ? 0.01 : 0.002;
    for (int w = 0; w < 2; ++w) {
      for (uint64_t i = 0; i < kCount; ++i)
        gradient[i] = static_cast<float>((w == 0 ? 4 * (x[i] - 1) : x[i] + 1) + noises[w](generator));
      workers[w].step(rate, gradient);
    }
    if (workers[0].qadam.pools(static_cast<uint64_t>(t))) {
      Array mean(kCount);
      for (QAdamWorker& worker : workers)  // first what all have, then what each takes
        worker.qadam.pool([&](std::span<float* const> second) {
          for (uint64_t i = 0; i < kCount; ++i) mean[i] += second[0][i] / 2;
        });
      for (QAdamWorker& worker : workers) {
        worker.qadam.pool([&](std::span<float* const> second) { std::copy(mean.begin(), mean.end(), second[0]); });
        worker.again(rate);
      }
    }
    for (uint64_t i = 0; i < kCount; ++i) x[i] -= (workers[0].update[i] + workers[1].update[i]) / 2;
    if (t >= kSteps * 3 / 4) sum += std::accumulate(x.begin(), x.end(), 0.0) / kCount;
  }
  return sum / (kSteps / 4.0);
}

TEST(QAdam, LocalSecondMomentsEndAtAWrongPointAndSharedOnesDoNot) {
  EXPECT_NEAR(end_of_two_workers(10, 1, false), -0.43, 0.05);
  EXPECT_NEAR(end_of_two_workers(1, 10, false), 0.95, 0.05);
  EXPECT_NEAR(end_of_two_workers(10, 1, true), 0.6, 0.05);
  EXPECT_NEAR(end_of_two_workers(1, 10, true), 0.6, 0.05);
}

}  // namespace
}  // namespace gradwire
