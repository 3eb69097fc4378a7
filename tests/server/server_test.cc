// SPDX-License-Identifier: Apache-2.0
// What the parameter server promises when nothing goes wrong: the arithmetic of the method, steps, joining, leaving,
// modes.
#include <unistd.h>

#include "server/server_fixture.h"

namespace gradwire::server {
namespace {

HubOptions quick(uint32_t min_workers = 1) { return small_hub(min_workers, kPatience); }

void run_all(ToyWorkers& toys, uint64_t steps) {
  std::vector<std::thread> threads;
  for (auto& toy : toys)
    threads.emplace_back([&] {
      toy->join();
      while (toy->step < steps) toy->work();
    });
  for (std::thread& thread : threads) thread.join();
}

TEST(Server, OneWorkerWithoutCompressionIsPlainDescent) {
  Signature signature = small_signature();
  signature.up = signature.down = "fp32";
  ServerFixture server(quick());
  ToyWorker toy(server, signature, 1);
  EXPECT_EQ(toy.join(), 0u);
  ToyTensors expected(signature);
  for (uint64_t step = 0; step < 5; ++step) {
    EXPECT_EQ(toy.work(), step + 1);
    for (size_t i = 0; i < expected.values.size(); ++i)
      for (size_t k = 0; k < expected.values[i].size(); ++k) {
        expected.values[i][k] -= toy.update.values[i][k];
        ASSERT_EQ(toy.weights.values[i][k], expected.values[i][k]);
      }
  }
  expect_ledger(*server.hub());
}

TEST(Server, WorkersHoldTheSameWeightsAndReachTheTarget) {
  const Signature signature = small_signature();
  ServerFixture server(quick(3));
  auto toys = make_workers(server, signature, 3);
  run_all(toys, 120);
  for (const auto& toy : toys) {
    EXPECT_EQ(toy->weights.values, toys[0]->weights.values);
    EXPECT_LT(toy->distance(), 0.15);
  }
  expect_ledger(*server.hub());
  EXPECT_EQ(server.hub()->status()["step"], 120);
}

TEST(Server, UpdatesDownWithFeedbackReachTheTargetToo) {
  Signature signature = small_signature();
  signature.sends_updates = true;
  signature.down = "loggrid:k=6";
  ServerFixture server(quick(2));
  auto toys = make_workers(server, signature, 2);
  const uint64_t steps = test::lighter(150, 40);
  run_all(toys, steps);
  EXPECT_EQ(toys[1]->weights.values, toys[0]->weights.values);
  EXPECT_LT(toys[0]->distance(), test::lighter(0.15, 0.5));
  expect_ledger(*server.hub());
  // One who joins later receives everything, and agrees.
  ToyWorker late(server, signature, 9);
  EXPECT_EQ(late.join(), steps);
  EXPECT_EQ(late.weights.values, toys[0]->weights.values);
}

TEST(Server, EveryCodecGoesUpAndDown) {
  for (const CodecInfo& info : codecs()) {
    SCOPED_TRACE(info.name);
    Signature signature = small_signature();
    signature.up = signature.down = info.example;
    ServerFixture server(quick(2));
    auto toys = make_workers(server, signature, 2);
    run_all(toys, 3);
    EXPECT_EQ(toys[1]->weights.values, toys[0]->weights.values);
    expect_ledger(*server.hub());
  }
}

TEST(Server, AWorkerThatLeavesHandsItsResidualOver) {
  Signature signature = small_signature();
  signature.down = "fp32";
  ServerFixture server(quick(1));
  ToyWorker toy(server, signature, 1);
  toy.join();
  for (int i = 0; i < 7; ++i) toy.work();
  ASSERT_TRUE(toy.client.leave(kPatience));
  const nlohmann::json status = server.hub()->status();
  EXPECT_EQ(status["ledger"]["held"], 0.0);
  expect_ledger(*server.hub());
  EXPECT_NEAR(status["ledger"]["applied"].get<double>(), status["ledger"]["computed"].get<double>(),
              1e-6 * status["ledger"]["magnitude"].get<double>());
  EXPECT_TRUE(server.hub()->finished());
  // Nothing is missing, element by element: what the next worker is given is what was computed. f32 rounds seven sums
  // of magnitude below 1, here and there.
  ToyWorker next(server, signature, 2);
  next.join();
  for (size_t i = 0; i < toy.computed.size(); ++i)
    for (size_t k = 0; k < toy.computed[i].size(); ++k)
      ASSERT_NEAR(next.weights.values[i][k], -toy.computed[i][k], 2e-6);
}

TEST(Server, AJoinerWithAnotherModelIsToldTheDifference) {
  const Signature signature = small_signature();
  ServerFixture server(quick());
  ToyWorker first(server, signature, 1);
  first.join();
  Signature other = signature;
  other.parameters[1].shape = {61};
  ToyWorker second(server, other, 2);
  try {
    second.join();
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("'conv.bias' [60] at the server, 'conv.bias' [61] here"),
              std::string::npos)
        << error.what();
  }
  other = signature;
  other.up = "qsgd:bits=4";
  ToyWorker third(server, other, 3);
  EXPECT_THROW(third.join(), Error);
  other = signature;
  other.feedback = ReduceOptions::Feedback::off;
  ToyWorker fourth(server, other, 4);
  try {
    fourth.join();
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("feedback is codec at the server, off here"), std::string::npos)
        << error.what();
  }
  EXPECT_EQ(server.hub()->status()["refused"]["signature"], 3);
}

TEST(Server, WhatCannotBeCutMustFitAFrame) {
  Signature signature;
  signature.parameters = {{"huge.weight", {16'000'000}}};
  signature.up = "onebit:mode=paper";  // one unit, the whole tensor
  EXPECT_THROW(check_limits(signature, {}), Error);
  signature.up = "onebit";
  EXPECT_NO_THROW(check_limits(signature, {}));
  signature.buffers = {{"huge.mean", {16'000'000}}};
  EXPECT_THROW(check_limits(signature, {}), Error);
}

TEST(Server, ItIsFullAtItsLimit) {
  HubOptions options = quick();
  options.max_workers = 2;
  ServerFixture server(options);
  auto toys = make_workers(server, small_signature(), 3);
  toys[0]->join();
  toys[1]->join();
  EXPECT_THROW(toys[2]->join(), Error);
}

TEST(Server, AStepWaitsForTheWorkersThatItNeeds) {
  ServerFixture server(quick(2));
  auto toys = make_workers(server, small_signature(), 2);
  toys[0]->join();
  std::thread first([&] { toys[0]->work(); });
  const uint64_t all =
      static_cast<uint64_t>(toys[0]->client.bits() * static_cast<double>(toys[0]->weights.count()) / 8);
  ASSERT_TRUE(eventually([&] { return server.hub()->status()["bytes"]["up"] >= all; }));
  EXPECT_EQ(server.hub()->status()["step"], 0);
  EXPECT_EQ(server.hub()->status()["state"], "waiting for workers");
  toys[1]->join();
  toys[1]->work();
  first.join();
  EXPECT_EQ(server.hub()->status()["step"], 1);
}

TEST(Server, ALateUpdateGoesBackIntoTheResidual) {
  HubOptions options = quick(1);
  options.deadline_s = 0.2;
  ServerFixture server(options);
  auto toys = make_workers(server, small_signature(), 2);
  toys[0]->join();
  toys[1]->join();
  toys[0]->work();  // closes at the deadline without the other
  toys[0]->work();
  EXPECT_EQ(toys[0]->step, 2u);
  EXPECT_EQ(toys[1]->work(), 2u);
  EXPECT_EQ(toys[1]->client.counts().applied, 0u);
  EXPECT_GT(toys[1]->client.counts().late, 0u);
  double difference = 0, computed = 0;
  for (size_t i = 0; i < toys[1]->computed.size(); ++i)
    for (size_t k = 0; k < toys[1]->computed[i].size(); ++k) {
      difference = std::max(difference, std::fabs(toys[1]->client.residual(i)[k] - toys[1]->computed[i][k]));
      computed = std::max(computed, std::fabs(toys[1]->computed[i][k]));
    }
  EXPECT_LT(difference, 1e-6 * computed);  // all of it, to f32 rounding
  std::thread first([&] { toys[0]->work(); });
  toys[1]->work();
  first.join();
  EXPECT_EQ(toys[0]->weights.values, toys[1]->weights.values);
  expect_ledger(*server.hub());
}

TEST(Server, WithoutStepsWorkersRunAtTheirOwnPaceWithinTheBound) {
  HubOptions options = quick(1);
  options.async = true;
  options.staleness = 2;
  ServerFixture server(options);
  auto toys = make_workers(server, small_signature(), 3);
  std::vector<std::thread> threads;
  for (auto& toy : toys) toy->join();
  for (size_t i = 0; i < toys.size(); ++i)
    threads.emplace_back([&, i] {
      for (int step = 0; step < 80; ++step) {
        toys[i]->work();
        if (i == 0) std::this_thread::sleep_for(1ms);  // a slow one
      }
      EXPECT_TRUE(toys[i]->client.leave(kPatience));
    });
  for (std::thread& thread : threads) thread.join();
  const nlohmann::json status = server.hub()->status();
  EXPECT_LE(status["staleness"]["max"].get<uint64_t>(), 3 * 5u);
  EXPECT_EQ(status["refused"]["late"], 0);
  expect_ledger(*server.hub());
  ToyWorker next(server, small_signature(), 7);
  next.join();
  EXPECT_LT(next.distance(), 0.25);
}

TEST(Server, WithoutStepsAWorkerIsNotTooStaleBecauseTheOthersHaveLeft) {
  HubOptions options = quick(1);
  options.async = true;
  options.staleness = 2;
  ServerFixture server(options);
  ToyWorkers toys = make_workers(server, small_signature(), 7);
  for (auto& toy : toys) toy->join();
  for (size_t i = 1; i < toys.size(); ++i) {
    toys[i]->work();
    EXPECT_TRUE(toys[i]->client.leave(kPatience));
  }
  toys[0]->work();  // six updates behind, which one worker alone cannot be
  EXPECT_EQ(server.hub()->status()["refused"]["late"], 0);
  EXPECT_TRUE(toys[0]->client.leave(kPatience));
  expect_ledger(*server.hub());
}

TEST(Server, WithoutStepsANewcomerBeginsAtTheStepOfTheOthers) {
  HubOptions options = quick(1);
  options.async = true;
  ServerFixture server(options);
  ToyWorkers toys = make_workers(server, small_signature(), 3);
  toys[0]->join();
  toys[1]->join();
  for (int step = 0; step < 6; ++step)
    for (int i : {0, 1}) toys[static_cast<size_t>(i)]->work();
  EXPECT_EQ(toys[0]->step, 6u);
  EXPECT_EQ(toys[2]->join(), 6u);  // the server has counted twelve updates
}

TEST(Server, SharedMomentsAreTheMeanOfTheWorkers) {
  Signature signature = small_signature();
  signature.pools = true;
  ServerFixture server(quick(2));
  auto toys = make_workers(server, signature, 2);
  std::vector<ToyTensors> second;
  second.emplace_back(signature, 1.0f);
  second.emplace_back(signature, 4.0f);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < 2; ++i)
    threads.emplace_back([&, i] {
      toys[i]->join();
      for (int round = 0; round < 3; ++round) {
        toys[i]->client.pool(second[i].pointers);
        toys[i]->work();
      }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(second[0].values, second[1].values);
  EXPECT_EQ(second[0].values[2][12345], 2.5f);
  EXPECT_EQ(toys[0]->weights.values, toys[1]->weights.values);
}

TEST(Server, BuffersOfTheFirstWorkerReachThoseWhoJoin) {
  const Signature signature = small_signature();
  ServerFixture server(quick(1));
  ToyWorker first(server, signature, 1);
  first.join();
  first.work();
  EXPECT_TRUE(first.client.owns_buffers());
  std::vector<float> mean(60, 3.5f);
  const float* list[] = {mean.data()};
  first.client.send_buffers(list);
  first.work();
  ToyWorker second(server, signature, 2);
  second.join();
  std::vector<float> received(60);
  float* to[] = {received.data()};
  ASSERT_TRUE(second.client.take_buffers(to));
  EXPECT_EQ(received, mean);
}

TEST(Server, ARestartedServerGoesOnFromItsCheckpointAndWorkersSendAgainWhatItForgot) {
  HubOptions options = quick(2);
  options.checkpoint = scratch_file("restart.gwc");
  options.save_every = 4;
  ServerFixture server(options);
  // The same run without a restart.
  HubOptions plain = quick(2);
  ServerFixture other(plain);
  auto expected = make_workers(other, small_signature(), 2);
  for (auto& toy : expected) toy->join();  // in this order: slots
  auto toys = make_workers(server, small_signature(), 2);
  for (auto& toy : toys) toy->join();
  const auto work = [](ToyWorkers& list, uint64_t until) {
    std::vector<std::thread> threads;
    for (auto& toy : list)
      threads.emplace_back([&toy, until] {
        while (toy->step < until) toy->work();
      });
    for (std::thread& thread : threads) thread.join();
  };
  work(expected, 12);
  work(toys, 7);
  ASSERT_TRUE(eventually([&] { return server.hub()->status()["durable_step"] >= 4; }));
  server.kill();
  server.start();
  EXPECT_EQ(server.hub()->status()["step"], 4);
  work(toys, 12);
  EXPECT_EQ(toys[0]->weights.values, expected[0]->weights.values);
  EXPECT_EQ(toys[1]->weights.values, expected[0]->weights.values);
  EXPECT_GT(toys[0]->client.counts().replayed, 0u);
  expect_ledger(*server.hub());
}

}  // namespace
}  // namespace gradwire::server
