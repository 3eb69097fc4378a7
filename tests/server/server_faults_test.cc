// SPDX-License-Identifier: Apache-2.0
// Everything that may go wrong with honest workers and their connections: they die, stall, leave, are cut off.
// Afterwards, at rest, survivors agree bit for bit, nothing is missing and nothing counts twice.
#include "server/server_faults.h"

#include <cstring>

namespace gradwire::server {
namespace {

constexpr size_t kShards = 4;  // of small_signature() in parts of 32768 elements

Signature exact_down() {
  Signature signature = small_signature();
  signature.down = "fp32";
  return signature;
}

// Workers.

// Point k < kShards: before part k is sent; kShards: all are sent; kShards + 1: it waits.
class WorkerKilled : public testing::TestWithParam<size_t> {};

TEST_P(WorkerKilled, OthersGoOnWithTheShards) {
  Signature signature = small_signature();
  signature.up = signature.down = "fp32";  // nothing is held back: every element of every step is known
  ServerFixture server(fault_options(2));
  std::atomic<bool> doomed{false};
  std::atomic<size_t> updates{0}, listens{0};
  ToyWorkers toys = make_workers(server, signature, 2);
  const size_t point = GetParam();
  toys.push_back(std::make_unique<ToyWorker>(hooked(server, 3,
                                                    [&](const Frame* sent) {
                                                      if (!doomed) return;
                                                      if (sent && sent->kind == FrameKind::update && updates++ == point)
                                                        throw Killed{};
                                                      // One look without patience after each part, then it waits.
                                                      if (!sent && updates == kShards && listens++ == point - kShards &&
                                                          point >= kShards)
                                                        throw Killed{};
                                                    }),
                                             signature, 3));
  join(toys);
  ToyTensors expected(signature);
  const auto layouts = shard_layouts(signature, 32768);
  ASSERT_EQ(layouts.size(), kShards);
  for (uint64_t step = 0; step < 6; ++step) {
    doomed = step == 3;
    std::vector<std::thread> threads;
    for (auto& toy : toys)
      threads.emplace_back([&] {
        try {
          toy->work();
        } catch (const Killed&) {
          toy->step = kNone;
        }
      });
    if (doomed) {  // the others' step waits until it is dead, and no longer
      threads.back().join();
      threads.pop_back();
      ASSERT_EQ(toys.back()->step, kNone);
      const ToyTensors last = toys.back()->update;
      toys.pop_back();
      for (std::thread& thread : threads) thread.join();
      for (size_t p = 0; p < kShards; ++p) {
        // With what it had sent, or, where that was still in a queue when it died, without it: but all of the part.
        const auto after = [&](size_t i, uint64_t k, bool with) {
          float sum = toys[0]->update.values[i][k] + toys[1]->update.values[i][k];
          if (with) sum += last.values[i][k];
          return expected.values[i][k] - sum / (with ? 3.0f : 2.0f);
        };
        const ParameterRange& first = layouts[p].ranges[0];
        const bool with = p < point && toys[0]->weights.values[first.parameter][first.first] ==
                                           after(first.parameter, first.first, true);
        for (const ParameterRange& range : layouts[p].ranges)
          for (uint64_t k = range.first; k < range.first + range.count; ++k)
            expected.values[range.parameter][k] = after(range.parameter, k, with);
      }
    } else {
      for (std::thread& thread : threads) thread.join();
      for (size_t i = 0; i < expected.values.size(); ++i)
        for (size_t k = 0; k < expected.values[i].size(); ++k) {
          float sum = 0;
          for (const auto& toy : toys) sum += toy->update.values[i][k];
          expected.values[i][k] -= sum / static_cast<float>(toys.size());
        }
    }
    expect_agreement(toys);
    ASSERT_TRUE(toys[0]->weights.values == expected.values) << "step " << step;
  }
  expect_ledger(*server.hub());
}
INSTANTIATE_TEST_SUITE_P(AtPoint, WorkerKilled, testing::Range(size_t{0}, kShards + 2));

TEST(ServerFaults, WhatAKilledWorkerHeldIsHeldAndThenLost) {
  HubOptions options = fault_options(1);
  options.rejoin_s = 1000;
  options.checkpoint = scratch_file("lost.gwc");
  ServerFixture server(options);
  ToyWorkers toys = make_workers(server, small_signature(), 3);
  join(toys);
  work(toys, 5);
  const Tally tally = toys[2]->client.tally();
  const std::string id = toys[2]->client.id();
  toys.pop_back();
  work(toys, 9);
  EXPECT_EQ(server.hub()->status()["ledger"]["lost"], 0.0);
  const double held = server.hub()->status()["ledger"]["held"];
  EXPECT_NEAR(held, tally.residual + toys[0]->client.tally().residual + toys[1]->client.tally().residual,
              1e-9 + 1e-6 * std::fabs(held));
  expect_ledger(*server.hub());
  server.hub()->stop();
  server.kill();
  server.options().rejoin_s = 0.3;  // from now on
  server.options().return_s = 1000;
  server.start();
  work(toys, 12);  // not held up by one who is given up for lost, however long the others may be awaited
  ASSERT_TRUE(eventually([&] { return server.hub()->status()["ledger"]["lost"] != 0.0; }));
  EXPECT_DOUBLE_EQ(server.hub()->status()["ledger"]["lost"].get<double>(), tally.residual);
  expect_agreement(toys);
  expect_ledger(*server.hub());
}

TEST(ServerFaults, AWorkerThatStallsInTheMiddleOfAStepLosesNothing) {
  for (size_t point = 0; point <= kShards; ++point) {
    HubOptions options = fault_options(1);
    options.deadline_s = 0.1;
    ServerFixture server(options);
    std::atomic<bool> stalls{false}, stands{false}, wakes{false};
    std::atomic<size_t> updates{0};
    ToyWorkers toys = make_workers(server, small_signature(), 2);
    auto stalled = std::make_unique<ToyWorker>(hooked(server, 3,
                                                      [&](const Frame* sent) {
                                                        const bool here =
                                                            sent ? sent->kind == FrameKind::update && updates++ == point
                                                                 : updates == point && point == kShards;
                                                        if (stalls && here) {
                                                          stands = true;
                                                          EXPECT_TRUE(eventually([&] { return wakes.load(); }));
                                                        }
                                                      }),
                                               small_signature(), 3);
    join(toys);
    stalled->join();
    stalls = true;
    std::thread sleeper([&] { stalled->work(); });
    ASSERT_TRUE(eventually([&] { return stands.load(); }));  // what it sent before is there, however slow it was
    work(toys, 3);
    EXPECT_EQ(toys[0]->step, 3u);
    wakes = true;
    sleeper.join();
    stalls = false;
    EXPECT_EQ(stalled->step, point < kShards ? 3u : 1u);  // with nothing late, what it waited for
    EXPECT_EQ(stalled->client.counts().applied, point);
    EXPECT_EQ(stalled->client.counts().late, kShards - point);
    toys.push_back(std::move(stalled));
    work(toys, 6);
    EXPECT_EQ(state_of_worker(*server.hub(), toys.back()->client), "present");
    expect_agreement(toys);
    expect_ledger(*server.hub());
  }
}

TEST(ServerFaults, OneWhoHasNothingToSendDoesNotWaitForAStalledWorkerForever) {
  HubOptions options = fault_options(1);
  options.deadline_s = 0.2;
  ServerFixture server(options);
  ToyWorkers toys = make_workers(server, small_signature(), 2);
  join(toys);
  toys[0]->step = toys[0]->client.skip(toys[0]->weights.pointers, Client::SkipReason::watching);
  EXPECT_EQ(toys[0]->step, 1u);
  EXPECT_EQ(toys[1]->work(), 1u);
  EXPECT_GT(toys[1]->client.counts().late, 0u);
  expect_agreement(toys);
}

TEST(ServerFaults, WithoutStepsAStalledWorkerIsWaitedForOnceAndOneThatWarmsUpNotAtAll) {
  HubOptions options = fault_options(1);
  options.async = true;
  options.staleness = 2;
  options.deadline_s = 1;
  ServerFixture server(options);
  ToyWorkers toys = make_workers(server, small_signature(), 3);
  join(toys);
  ToyWorker &slow = *toys[0], &warm = *toys[1], &quick = *toys[2];
  slow.work();
  std::atomic<bool> over{false};
  std::atomic<int> skipped{0};
  std::thread skips([&] {
    for (; !over; ++skipped) warm.client.skip(warm.weights.pointers, Client::SkipReason::watching);
  });
  for (int i = 0; i < 30; ++i) quick.work();  // the deadline passes once
  EXPECT_EQ(state_of_worker(*server.hub(), slow.client), "lagging");
  ASSERT_TRUE(eventually([&] { return skipped > 40; }));  // from here on it is ahead of the others
  slow.work();                                            // is 29 behind, and goes on where the others are
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(state_of_worker(*server.hub(), slow.client), "present");
    quick.work();
    // Had its answer waited for the slow one until the deadline, the slow one would be lagging again.
    EXPECT_EQ(state_of_worker(*server.hub(), slow.client), "present");
    slow.work();
  }
  EXPECT_TRUE(eventually([&] { return state_of_worker(*server.hub(), warm.client) == "present"; }));
  over = true;
  skips.join();
  expect_ledger(*server.hub());
}

TEST(ServerFaults, CutRepeatedAndReorderedUpdatesCountOnce) {
  for (uint64_t seed = 1; seed <= test::lighter<uint64_t>(6, 2); ++seed) {
    Signature signature = exact_down();
    ServerFixture server(fault_options(3));
    ToyWorkers toys;
    for (uint64_t i = 0; i < 3; ++i)
      toys.push_back(
          std::make_unique<ToyWorker>(server, signature, 10 * seed + i,
                                      LinkFaults{.repeat = 0.2, .swap = 0.2, .flip = 0, .cut = seed % 2 ? 0.02 : 0}));
    join(toys);
    const uint64_t before = server.hub()->status()["memory_bytes"];
    work(toys, 25);
    expect_agreement(toys);
    expect_nothing_missing(toys);
    expect_ledger(*server.hub());
    uint64_t reconnects = 0;
    for (const auto& toy : toys) {
      reconnects += toy->client.counts().reconnects;
      EXPECT_EQ(toy->client.counts().late, 0u);
      EXPECT_EQ(toy->client.memory().messages, 0u);  // nothing is saved, so nothing is kept
    }
    EXPECT_EQ(reconnects > 0, seed % 2 == 1);
    EXPECT_LT(server.hub()->status()["memory_bytes"].get<uint64_t>(), before + 4 * 80000);
  }
}

TEST(ServerFaults, FlippedBitsAreSeenAndTheUpdateGoesBack) {
  for (uint64_t seed = 1; seed <= test::lighter<uint64_t>(4, 1); ++seed) {
    ServerFixture server(fault_options(3));
    ToyWorkers toys;
    for (uint64_t i = 0; i < 3; ++i)
      toys.push_back(std::make_unique<ToyWorker>(server, small_signature(), 10 * seed + i,
                                                 LinkFaults{.repeat = 0, .swap = 0, .flip = 0.1, .cut = 0}));
    join(toys);
    work(toys, 30);
    expect_agreement(toys);
    expect_ledger(*server.hub());
    uint64_t corrupt = 0;
    for (const auto& toy : toys) corrupt += toy->client.counts().corrupt;
    EXPECT_GT(corrupt, 5u);
    EXPECT_EQ(server.hub()->status()["refused"]["corrupt"], corrupt);
  }
}

// Leaving.

TEST(ServerFaults, AResidualSurvivesAServerThatIsKilledBeforeItIsOnDisk) {
  for (const bool at_once : {false, true}) {
    HubOptions options = fault_options(1);
    options.checkpoint = scratch_file("residual.gwc");
    options.save_every = 1000;
    std::atomic<bool> armed{false}, there{false}, dead{false};
    options.save_hook = [&](const char* stage) {
      if (!armed || std::strcmp(stage, "opened") != 0) return;
      there = true;
      while (!dead) std::this_thread::sleep_for(1ms);
      throw Error(ErrorKind::io, "killed here", "path");
    };
    ServerFixture server(options);
    ToyWorkers toys = make_workers(server, exact_down(), 2);
    join(toys);
    ASSERT_TRUE(on_disk(server, 0));
    work(toys, 5);
    armed = true;
    std::thread leaver([&] { EXPECT_TRUE(toys[1]->client.leave(kPatience)); });
    ASSERT_TRUE(eventually([&] { return there.load(); }));
    if (!at_once) toys[0]->work();  // others go on without the one that waits for the disk
    std::thread release([&] {
      EXPECT_TRUE(eventually([&] { return server.hub() == nullptr; }));
      armed = false;
      dead = true;
    });
    server.kill();
    release.join();
    server.start();
    std::thread other([&] { toys[0]->work(); });
    leaver.join();
    other.join();
    EXPECT_TRUE(toys[0]->client.leave(kPatience));
    const nlohmann::json ledger = server.hub()->status()["ledger"];
    EXPECT_EQ(ledger["held"], 0.0);
    EXPECT_EQ(ledger["lost"], 0.0);
    expect_ledger(*server.hub());
    EXPECT_TRUE(eventually([&] { return server.hub()->finished(); }));
  }
}

TEST(ServerFaults, EverybodyLeavesAtOnce) {
  for (const bool async : {false, true}) {
    HubOptions options = fault_options(1);
    options.async = async;
    options.checkpoint = scratch_file("everybody.gwc");
    ServerFixture server(options);
    ToyWorkers toys = make_workers(server, exact_down(), 4);
    join(toys);
    std::vector<std::thread> threads;
    for (size_t i = 0; i < toys.size(); ++i)
      threads.emplace_back([&, i] {
        for (size_t step = 0; step < 5 + i; ++step) toys[i]->work();
        EXPECT_TRUE(toys[i]->client.leave(kPatience));
      });
    for (std::thread& thread : threads) thread.join();
    EXPECT_TRUE(eventually([&] { return server.hub()->finished(); }));
    EXPECT_EQ(server.hub()->status()["ledger"]["held"], 0.0);
    expect_ledger(*server.hub());
    server.kill();
    server.start();  // and it is all on disk
    EXPECT_EQ(server.hub()->status()["ledger"]["held"], 0.0);
    expect_ledger(*server.hub());
    EXPECT_TRUE(server.hub()->finished());
  }
}

TEST(ServerFaults, LeavingAServerThatIsGoneTakesNoLongerThanItMay) {
  ServerFixture server(fault_options(1));
  ToyWorkers toys = make_workers(server, small_signature(), 2);
  join(toys);
  work(toys, 2);
  server.kill();
  // Not its patience, which is far longer, but the time that it was given ends it.
  const auto begin = SteadyClock::now();
  EXPECT_FALSE(toys[0]->client.leave(0.3));
  EXPECT_LT(seconds_since(begin), kPatience);
}

}  // namespace
}  // namespace gradwire::server
