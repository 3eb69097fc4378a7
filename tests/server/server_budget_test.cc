// SPDX-License-Identifier: Apache-2.0
// dqsgd over a parameter server, in a closed loop on norms that look like those of trainings. The workers tell the
// server the length of the run, so it plans as a Reducer does that knows it: the budget is spent, and the noise is the
// same although shards decide on their own. A server that is not told the length runs in the same loops, and loses.
#include <fmt/format.h>

#include <cmath>

#include "codec/norm_profiles.h"
#include "core/bits.h"
#include "server/reducer_descent.h"
#include "server/server_faults.h"

namespace gradwire::server {
namespace {

using norms::kSteps;

constexpr int kWorkers = 2;
constexpr size_t kTensors = 4;
constexpr uint64_t kElements = 1024;  // of a tensor: one bucket

Signature budget_signature(const std::string& up, uint64_t steps) {
  Signature signature;
  for (size_t i = 0; i < kTensors; ++i) signature.parameters.push_back({"t" + std::to_string(i), {kElements}});
  signature.up = up;
  signature.down = "fp32";
  signature.steps = steps;
  return signature;
}

using Tensors = DescentTensors;

// The update of a worker: uniform values within +-norm. And what all of them would have added up to without
// compression: the difference from it grows in each step by what the quantisation of that step has left out.
class BudgetCourse {
 public:
  explicit BudgetCourse(std::vector<double> norms)
      : norms_(std::move(norms)), exact_(kTensors, std::vector<double>(kElements)), left_(exact_) {}
  void update(int worker, uint64_t step, Tensors& to) const {
    for (size_t i = 0; i < kTensors; ++i)
      for (uint64_t k = 0; k < kElements; ++k) to[i][k] = value(worker, step, i, k);
  }
  void see(uint64_t step, const Tensors& weights) {  // after step - 1
    for (size_t i = 0; i < kTensors; ++i)
      for (uint64_t k = 0; k < kElements; ++k) {
        for (int worker = 0; worker < kWorkers; ++worker)
          exact_[i][k] -= static_cast<double>(value(worker, step - 1, i, k)) / kWorkers;
        const double left = static_cast<double>(weights[i][k]) - exact_[i][k];
        noise_ += (left - left_[i][k]) * (left - left_[i][k]);
        left_[i][k] = left;
      }
  }
  double noise() const { return noise_; }

 private:
  float value(int worker, uint64_t step, size_t i, uint64_t k) const {
    const uint64_t draw = mix64(mix64(step * kWorkers + static_cast<uint64_t>(worker)) + i * kElements + k);
    return static_cast<float>(norms_[step] * (static_cast<double>(draw >> 11) * 0x1p-52 - 1));
  }
  std::vector<double> norms_;
  std::vector<std::vector<double>> exact_, left_;
  double noise_ = 0;
};

double noise_over_reducer(const std::vector<double>& norms, const std::string& up) {
  BudgetCourse course(norms);
  descend_over_reducer(
      budget_signature(up, 0), kWorkers, kSteps,
      [&](uint64_t rank, uint64_t step, const Tensors&, Tensors& to) {
        course.update(static_cast<int>(rank), step, to);
      },
      [&](uint64_t step, const Tensors& weights) { course.see(step, weights); });
  return course.noise();
}

struct ServerRun {
  double noise, bits;  // bits: the mean width
};

ServerRun run_over_server(const std::vector<double>& norms, const std::string& up, uint64_t told, size_t shards) {
  HubOptions options = small_hub(kWorkers, kPatience);
  options.shard_elements = kTensors * kElements / shards;
  ServerFixture server(options);
  const Signature signature = budget_signature(up, told);
  // What a message has besides codes.
  const Codec codec = Codec::parse(up);
  std::vector<TensorSpec> specs;
  for (size_t i = 0; i < kTensors / shards; ++i)
    specs.push_back({.name = signature.parameters[i].name, .count = kElements, .codec = codec.fitted({{4}})});
  const double other =
      8.0 * static_cast<double>(Plan(specs).message_bytes()) / static_cast<double>(specs.size() * kElements) - 4;
  BudgetCourse course(norms);
  double bits = 0;
  ToyWorkers toys = make_workers(server, signature, kWorkers);
  join(toys);
  std::vector<std::thread> threads;
  for (int number = 0; number < kWorkers; ++number)
    threads.emplace_back([&, number] {
      ToyWorker& toy = *toys[static_cast<size_t>(number)];
      while (toy.step < kSteps) {
        course.update(number, toy.step, toy.update.values);
        toy.step = toy.client.exchange(toy.update.constant(), toy.weights.pointers);
        if (number > 0) continue;
        bits += (toy.client.bits() - other) / kSteps;
        course.see(toy.step, toy.weights.values);
      }
    });
  for (std::thread& thread : threads) thread.join();
  expect_ledger(*server.hub());
  return {course.noise(), bits};
}

TEST(ServerBudget, ARunOfKnownLengthSpendsItsBudgetAndIsAsGoodAsAReducer) {
  for (const double budget : {3.0, 4.5}) {
    const std::string up = fmt::format("dqsgd:budget={}", budget);
    for (const norms::NormProfile& profile : norms::profiles())
      for (int seed = 1; seed <= (budget == 3 ? 1 : 2); ++seed) {
        const std::vector<double> norms = norms_of(profile, seed);
        const double reducer = noise_over_reducer(norms, up);
        const ServerRun server = run_over_server(norms, up, kSteps, 2);
        const std::string figures = fmt::format("{}, {}, seed {}: noise over the reducer's {:.3f}, {:.3f} bits", up,
                                                profile.name, seed, server.noise / reducer, server.bits);
        std::printf("%s\n", figures.c_str());
        EXPECT_LE(server.noise, 1.05 * reducer) << figures;
        EXPECT_LE(server.bits, budget + 1e-9) << figures;
        EXPECT_GE(server.bits, 0.985 * budget) << figures;
      }
  }
}

// A burst can only be paid for with bits that are saved later, which takes a later to count on.
TEST(ServerBudget, AServerThatIsNotToldTheLengthLoses) {
  for (const int seed : {1, 2}) {
    const std::vector<double> norms = norms_of(norms::profiles()[0], seed);
    const ServerRun told = run_over_server(norms, "dqsgd:budget=4.5", kSteps, 2),
                    untold = run_over_server(norms, "dqsgd:budget=4.5", 0, 2);
    EXPECT_GT(untold.noise, 1.3 * told.noise);
  }
}

// A bound on the error is for the model, so shards divide it.
TEST(ServerBudget, ABoundOnTheErrorIsSharedByTheShards) {
  const std::vector<double> norms = norms_of(norms::profiles()[1], 1);
  const std::string up = "dqsgd:error=2,eta=0.1,smooth=1";
  const ServerRun one = run_over_server(norms, up, kSteps, 1), several = run_over_server(norms, up, kSteps, kTensors);
  std::printf("one shard: %.3f bits, noise %.4g; several: %.3f bits, noise %.4g\n", one.bits, one.noise, several.bits,
              several.noise);
  EXPECT_GT(one.bits, 3);  // the bound is at work
  EXPECT_LT(one.bits, 10);
  EXPECT_NEAR(several.bits, one.bits, 0.15);
  EXPECT_LT(several.noise, 1.1 * one.noise);
}

}  // namespace
}  // namespace gradwire::server
