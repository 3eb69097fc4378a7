// SPDX-License-Identifier: Apache-2.0
// Everything that may go wrong with honest workers: they die, stall, lose their connection; the server is killed at any
// point, also while it saves; the disk fails. Afterwards, at rest, survivors agree bit for bit, nothing is missing and
// nothing counts twice. A server that is killed and restarted ends with the weights of one that was not.
#include <cstring>
#include <fstream>

#include "server_faults.h"

namespace gradwire::server {
namespace {

constexpr size_t kParts = 4;  // of small_signature() in parts of 32768 elements

Signature exact_down() {
  Signature signature = small_signature();
  signature.down = "fp32";
  return signature;
}

// Workers.

// Point k < kParts: before part k is sent; kParts: all are sent; kParts + 1: it waits.
class WorkerKilled : public testing::TestWithParam<size_t> {};

TEST_P(WorkerKilled, OthersGoOnWithTheParts) {
  Signature signature = small_signature();
  signature.up = signature.down = "fp32";  // nothing is held back: every element of every step is known
  Rig rig(faulty(2));
  std::atomic<bool> doomed{false};
  std::atomic<size_t> updates{0}, listens{0};
  Toys toys = crew(rig, signature, 2);
  const size_t point = GetParam();
  toys.push_back(std::make_unique<Toy>(fated(rig, 3,
                                             [&](const Frame* sent) {
                                               if (!doomed) return;
                                               if (sent && sent->kind == Kind::update && updates++ == point) throw Killed{};
                                               // One look without patience after each part, then it waits.
                                               if (!sent && updates == kParts && listens++ == point - kParts && point >= kParts) throw Killed{};
                                             }),
                                       signature, 3));
  join(toys);
  Tensors expected(signature);
  const auto cuts = cut_parts(signature, 32768);
  ASSERT_EQ(cuts.size(), kParts);
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
      const Tensors last = toys.back()->update;
      toys.pop_back();
      for (std::thread& thread : threads) thread.join();
      for (size_t p = 0; p < kParts; ++p)
        for (const Piece& piece : cuts[p].pieces)
          for (uint64_t k = piece.first; k < piece.first + piece.count; ++k) {
            float sum = toys[0]->update.values[piece.parameter][k] + toys[1]->update.values[piece.parameter][k];
            if (p < point) sum += last.values[piece.parameter][k];
            expected.values[piece.parameter][k] -= sum / (p < point ? 3.0f : 2.0f);
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
  expect_ledger(*rig.hub());
}
INSTANTIATE_TEST_SUITE_P(AtPoint, WorkerKilled, testing::Range(size_t{0}, kParts + 2));

TEST(ServerFaults, WhatAKilledWorkerHeldIsHeldAndThenLost) {
  HubOptions options = faulty(1);
  options.rejoin_s = 1000;
  options.checkpoint = scratch_file("lost.gwc");
  Rig rig(options);
  Toys toys = crew(rig, small_signature(), 3);
  join(toys);
  work(toys, 5);
  const Tally tally = toys[2]->client.tally();
  const std::string id = toys[2]->client.id();
  toys.pop_back();
  work(toys, 9);
  EXPECT_EQ(rig.hub()->status()["ledger"]["lost"], 0.0);
  const double held = rig.hub()->status()["ledger"]["held"];
  EXPECT_NEAR(held, tally.residual + toys[0]->client.tally().residual + toys[1]->client.tally().residual, 1e-9 + 1e-6 * std::fabs(held));
  expect_ledger(*rig.hub());
  rig.hub()->stop();
  rig.kill();
  rig.options().rejoin_s = 0.3;  // from now on
  rig.options().return_s = 1000;
  rig.start();
  work(toys, 12);  // not held up by one who is given up for lost, however long the others may be awaited
  ASSERT_TRUE(eventually([&] { return rig.hub()->status()["ledger"]["lost"] != 0.0; }));
  EXPECT_DOUBLE_EQ(rig.hub()->status()["ledger"]["lost"].get<double>(), tally.residual);
  expect_agreement(toys);
  expect_ledger(*rig.hub());
}

TEST(ServerFaults, AWorkerThatStallsInTheMiddleOfAStepLosesNothing) {
  for (size_t point = 0; point <= kParts; ++point) {
    HubOptions options = faulty(1);
    options.deadline_s = 0.1;
    Rig rig(options);
    std::atomic<bool> stalls{false}, wakes{false};
    std::atomic<size_t> updates{0};
    Toys toys = crew(rig, small_signature(), 2);
    auto stalled = std::make_unique<Toy>(fated(rig, 3,
                                               [&](const Frame* sent) {
                                                 const bool here = sent ? sent->kind == Kind::update && updates++ == point : updates == point && point == kParts;
                                                 if (stalls && here) {
                                                   EXPECT_TRUE(eventually([&] { return wakes.load(); }));
                                                 }
                                               }),
                                         small_signature(), 3);
    join(toys);
    stalled->join();
    stalls = true;
    std::thread sleeper([&] { stalled->work(); });
    work(toys, 3);
    EXPECT_EQ(toys[0]->step, 3u);
    wakes = true;
    sleeper.join();
    stalls = false;
    EXPECT_EQ(stalled->step, point < kParts ? 3u : 1u);  // with nothing late, what it waited for
    EXPECT_EQ(stalled->client.counts().applied, point);
    EXPECT_EQ(stalled->client.counts().late, kParts - point);
    toys.push_back(std::move(stalled));
    work(toys, 6);
    EXPECT_EQ(state_of_worker(*rig.hub(), toys.back()->client), "present");
    expect_agreement(toys);
    expect_ledger(*rig.hub());
  }
}

TEST(ServerFaults, OneWhoHasNothingToSendDoesNotWaitForAStalledWorkerForever) {
  HubOptions options = faulty(1);
  options.deadline_s = 0.2;
  Rig rig(options);
  Toys toys = crew(rig, small_signature(), 2);
  join(toys);
  toys[0]->step = toys[0]->client.skip(toys[0]->weights.pointers);
  EXPECT_EQ(toys[0]->step, 1u);
  EXPECT_EQ(toys[1]->work(), 1u);
  EXPECT_GT(toys[1]->client.counts().late, 0u);
  expect_agreement(toys);
}

TEST(ServerFaults, WithoutStepsAStalledWorkerIsWaitedForOnceAndOneThatWarmsUpNotAtAll) {
  HubOptions options = faulty(1);
  options.async = true;
  options.staleness = 2;
  options.deadline_s = 1;
  Rig rig(options);
  Toys toys = crew(rig, small_signature(), 3);
  join(toys);
  Toy &slow = *toys[0], &warm = *toys[1], &quick = *toys[2];
  slow.work();
  std::atomic<bool> over{false};
  std::thread skips([&] {
    while (!over) warm.client.skip(warm.weights.pointers);
  });
  for (int i = 0; i < 30; ++i) quick.work();  // the deadline passes once
  const auto begin = Clock::now();
  slow.work();  // is 29 behind, and goes on where the others are
  for (int i = 0; i < 3; ++i) {
    quick.work();
    slow.work();
  }
  EXPECT_LT(std::chrono::duration<double>(Clock::now() - begin).count(), 0.9);
  over = true;
  skips.join();
  expect_ledger(*rig.hub());
}

TEST(ServerFaults, CutRepeatedAndReorderedUpdatesCountOnce) {
  for (uint64_t seed = 1; seed <= 6; ++seed) {
    Signature signature = exact_down();
    Rig rig(faulty(3));
    Toys toys;
    for (uint64_t i = 0; i < 3; ++i) toys.push_back(std::make_unique<Toy>(rig, signature, 10 * seed + i, Mischief{.repeat = 0.2, .swap = 0.2, .flip = 0, .cut = seed % 2 ? 0.02 : 0}));
    join(toys);
    const uint64_t before = rig.hub()->status()["memory_bytes"];
    work(toys, 25);
    expect_agreement(toys);
    expect_nothing_missing(toys);
    expect_ledger(*rig.hub());
    uint64_t reconnects = 0;
    for (const auto& toy : toys) {
      reconnects += toy->client.counts().reconnects;
      EXPECT_EQ(toy->client.counts().late, 0u);
      EXPECT_EQ(toy->client.memory().messages, 0u);  // nothing is saved, so nothing is kept
    }
    EXPECT_EQ(reconnects > 0, seed % 2 == 1);
    EXPECT_LT(rig.hub()->status()["memory_bytes"].get<uint64_t>(), before + 4 * 80000);
  }
}

TEST(ServerFaults, FlippedBitsAreSeenAndTheUpdateGoesBack) {
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    Rig rig(faulty(3));
    Toys toys;
    for (uint64_t i = 0; i < 3; ++i) toys.push_back(std::make_unique<Toy>(rig, small_signature(), 10 * seed + i, Mischief{.repeat = 0, .swap = 0, .flip = 0.1, .cut = 0}));
    join(toys);
    work(toys, 30);
    expect_agreement(toys);
    expect_ledger(*rig.hub());
    uint64_t corrupt = 0;
    for (const auto& toy : toys) corrupt += toy->client.counts().corrupt;
    EXPECT_GT(corrupt, 5u);
    EXPECT_EQ(rig.hub()->status()["refused"]["corrupt"], corrupt);
  }
}

// The server.

struct Mode {
  const char* name;
  bool updates, pools;
};

Signature signature_of(const Mode& mode) {
  Signature signature = small_signature();
  signature.sends_updates = mode.updates;
  signature.pools = mode.pools;
  if (mode.updates) signature.down = "loggrid:k=6";
  return signature;
}

// With shared moments a step depends on their mean, and so does everything after it.
void descend(Toys& toys, const Mode& mode, uint64_t until) {
  std::vector<std::thread> threads;
  for (size_t i = 0; i < toys.size(); ++i)
    threads.emplace_back([&, i] {
      Toy& toy = *toys[i];
      while (toy.step < until) {
        float rate = 0.1f;
        if (mode.pools) {
          Tensors second(signature_of(mode), static_cast<float>(i + 1) + 0.37f * static_cast<float>(toy.step));
          toy.client.pool(second.pointers);
          rate = 0.05f + 0.002f * second.values[2][69999];
        }
        toy.work(rate);
      }
    });
  for (std::thread& thread : threads) thread.join();
}

std::vector<std::vector<float>> undisturbed(const Mode& mode, size_t workers, uint64_t until) {
  Rig rig(faulty(static_cast<uint32_t>(workers)));
  Toys toys = crew(rig, signature_of(mode), workers);
  join(toys);
  descend(toys, mode, until);
  expect_agreement(toys);
  return toys[0]->weights.values;
}

class ServerKilled : public testing::TestWithParam<Mode> {};

TEST_P(ServerKilled, AtAnyPointOfAStepEndsWithTheSameWeights) {
  const Mode mode = GetParam();
  const auto expected = undisturbed(mode, 2, 9);
  for (uint64_t point = 0; point < 16; ++point) {
    SCOPED_TRACE(point);
    HubOptions options = faulty(2);
    options.checkpoint = scratch_file(std::string("killed_") + mode.name);
    options.save_every = 3;
    Rig rig(options);
    std::atomic<bool> armed{false};
    std::atomic<uint64_t> events{0};
    const uint64_t when = 7 + point * 5;  // of all that both workers send and listen for
    const Fate fate = [&](const Frame*) {
      if (!armed || events++ != when) return;
      rig.kill();
      rig.start();
    };
    Toys toys;
    for (uint64_t i = 0; i < 2; ++i) toys.push_back(std::make_unique<Toy>(fated(rig, i + 1, fate), signature_of(mode), i + 1));
    join(toys);
    ASSERT_TRUE(on_disk(rig, 0));
    armed = true;
    descend(toys, mode, 9);
    EXPECT_GT(events, when);
    expect_agreement(toys);
    EXPECT_TRUE(toys[0]->weights.values == expected);
    expect_ledger(*rig.hub());
    for (auto& toy : toys) EXPECT_GT(toy->client.counts().reconnects, 0u);
  }
}

TEST_P(ServerKilled, WhileItSavesEndsWithTheSameWeights) {
  const Mode mode = GetParam();
  const auto expected = undisturbed(mode, 2, 9);
  for (const char* at : {"opened", "half", "written", "synced", "linked", "renamed", "kept"}) {
    SCOPED_TRACE(at);
    HubOptions options = faulty(2);
    options.checkpoint = scratch_file(std::string("saving_") + mode.name);
    options.save_every = 3;
    std::atomic<bool> armed{false}, there{false}, dead{false};
    options.save_hook = [&](const char* stage) {
      if (!armed || std::strcmp(stage, at) != 0) return;
      there = true;
      while (!dead) std::this_thread::sleep_for(1ms);
      throw Error(ErrorKind::io, "killed here", "path");
    };
    Rig rig(options);
    Toys toys = crew(rig, signature_of(mode), 2);
    join(toys);
    ASSERT_TRUE(on_disk(rig, 0));
    descend(toys, mode, 4);  // one is saved as well
    ASSERT_TRUE(on_disk(rig, 3));
    armed = true;
    std::thread killer([&] {
      EXPECT_TRUE(eventually([&] { return there.load(); }));
      std::thread release([&] {
        EXPECT_TRUE(eventually([&] { return rig.hub() == nullptr; }));  // nobody hears of it any more
        armed = false;
        dead = true;
      });
      rig.kill();
      release.join();
      rig.start();
    });
    descend(toys, mode, 9);
    killer.join();
    expect_agreement(toys);
    EXPECT_TRUE(toys[0]->weights.values == expected);
    expect_ledger(*rig.hub());
  }
}

INSTANTIATE_TEST_SUITE_P(Sending, ServerKilled, testing::Values(Mode{"weights", false, false}, Mode{"updates", true, false}, Mode{"pools", false, true}),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(ServerFaults, AStepWhoseOnlyContributorIsDeadIsPassedOver) {
  HubOptions options = faulty(1);
  options.deadline_s = 0.15;
  options.return_s = 0.4;
  options.checkpoint = scratch_file("only.gwc");
  options.save_every = 4;
  Rig rig(options);
  Toys toys = crew(rig, small_signature(), 2);
  join(toys);
  work(toys, 4);
  ASSERT_TRUE(on_disk(rig, 4));
  toys[0]->work();  // alone, at the deadline
  EXPECT_EQ(toys[1]->work(), 5u);
  EXPECT_GT(toys[1]->client.counts().late, 0u);
  work(toys, 6);
  ASSERT_EQ(rig.hub()->status()["durable_step"], 4);
  rig.kill();
  toys.erase(toys.begin());
  rig.start();
  ASSERT_EQ(rig.hub()->status()["step"], 4);
  work(toys, 9);
  EXPECT_GT(toys[0]->client.counts().replayed, 0u);
  expect_ledger(*rig.hub());
  ASSERT_TRUE(toys[0]->client.leave(10));
  EXPECT_LT(rig.hub()->status()["ledger"]["relative"], 1e-6);
}

TEST(ServerFaults, ADamagedCheckpointIsAStepBackThatTheLedgerShows) {
  HubOptions options = faulty(2);
  options.checkpoint = scratch_file("damaged.gwc");
  options.save_every = 3;
  Rig rig(options);
  Toys toys = crew(rig, small_signature(), 2);
  join(toys);
  for (uint64_t step : {3, 6}) {
    work(toys, step);
    ASSERT_TRUE(on_disk(rig, step));
  }
  work(toys, 7);  // on the way they hear of it
  rig.kill();
  std::filesystem::resize_file(options.checkpoint, std::filesystem::file_size(options.checkpoint) / 2);
  rig.start();
  EXPECT_EQ(rig.hub()->status()["step"], 3);
  work(toys, 9);
  expect_agreement(toys);
  // Workers had been told that steps 3 to 5 were safe: these are gone, and not in silence.
  EXPECT_GT(rig.hub()->status()["ledger"]["relative"], 1e-3);
}

// The disk.

class DiskTrouble : public testing::TestWithParam<std::tuple<bool, bool>> {};

TEST_P(DiskTrouble, HoldsTrainingUpAfterThreeIntervalsAndNotForGood) {
  const auto [async, hangs] = GetParam();
  HubOptions options = faulty(2);
  options.async = async;
  options.checkpoint = scratch_file("disk.gwc");
  options.save_every = 3;
  std::atomic<bool> broken{false};
  options.save_hook = [&, hangs = hangs](const char*) {
    while (hangs && broken) std::this_thread::sleep_for(1ms);
    if (broken) throw Error(ErrorKind::io, "No space left on device", "path");
  };
  Rig rig(options);
  Toys toys = crew(rig, small_signature(), 2);
  join(toys);
  ASSERT_TRUE(on_disk(rig, 0));
  broken = true;
  std::atomic<uint64_t> most{0};
  std::atomic<uint32_t> running{2};
  std::vector<std::thread> threads;
  for (auto& toy : toys)
    threads.emplace_back([&] {
      for (int i = 0; i < 30; ++i) {
        toy->work();
        uint64_t kept = toy->client.memory().messages, before = most;
        while (kept > before && !most.compare_exchange_weak(before, kept)) {
        }
      }
      --running;
    });
  EXPECT_TRUE(eventually([&] { return rig.hub()->status()["state"] == "waiting for the disk"; }));
  EXPECT_TRUE(eventually([&] { return rig.hub()->status()["step"] >= 10; }));
  const uint64_t step = rig.hub()->status()["step"];
  EXPECT_LE(step, async ? 21u : 10u);
  EXPECT_EQ(running, 2u);
  if (!hangs) {
    EXPECT_TRUE(eventually([&] { return rig.hub()->status()["checkpoint"]["failed"] > 0; }));
    EXPECT_EQ(rig.hub()->status()["checkpoint"]["last_error"], "No space left on device");
  }
  broken = false;
  for (std::thread& thread : threads) thread.join();
  expect_ledger(*rig.hub());
  const uint64_t one = static_cast<uint64_t>(toys[0]->client.bits() * static_cast<double>(toys[0]->weights.count()) / 8);
  EXPECT_LE(most, 23 * one);
  if (!async) {
    EXPECT_LE(most, 12 * one);
    expect_agreement(toys);
  }
  EXPECT_EQ(rig.hub()->status()["checkpoint"]["last_error"], nullptr);
}
INSTANTIATE_TEST_SUITE_P(AsyncHangs, DiskTrouble, testing::Combine(testing::Bool(), testing::Bool()));

// Leaving.

TEST(ServerFaults, AHandoverSurvivesAServerThatIsKilledBeforeItIsOnDisk) {
  for (const bool at_once : {false, true}) {
    HubOptions options = faulty(1);
    options.checkpoint = scratch_file("handover.gwc");
    options.save_every = 1000;
    std::atomic<bool> armed{false}, there{false}, dead{false};
    options.save_hook = [&](const char* stage) {
      if (!armed || std::strcmp(stage, "opened") != 0) return;
      there = true;
      while (!dead) std::this_thread::sleep_for(1ms);
      throw Error(ErrorKind::io, "killed here", "path");
    };
    Rig rig(options);
    Toys toys = crew(rig, exact_down(), 2);
    join(toys);
    ASSERT_TRUE(on_disk(rig, 0));
    work(toys, 5);
    armed = true;
    std::thread leaver([&] { EXPECT_TRUE(toys[1]->client.leave(20)); });
    ASSERT_TRUE(eventually([&] { return there.load(); }));
    if (!at_once) toys[0]->work();  // others go on without the one that waits for the disk
    std::thread release([&] {
      EXPECT_TRUE(eventually([&] { return rig.hub() == nullptr; }));
      armed = false;
      dead = true;
    });
    rig.kill();
    release.join();
    rig.start();
    std::thread other([&] { toys[0]->work(); });
    leaver.join();
    other.join();
    EXPECT_TRUE(toys[0]->client.leave(20));
    const nlohmann::json ledger = rig.hub()->status()["ledger"];
    EXPECT_EQ(ledger["held"], 0.0);
    EXPECT_EQ(ledger["lost"], 0.0);
    expect_ledger(*rig.hub());
    EXPECT_TRUE(eventually([&] { return rig.hub()->finished(); }));
  }
}

TEST(ServerFaults, EverybodyLeavesAtOnce) {
  for (const bool async : {false, true}) {
    HubOptions options = faulty(1);
    options.async = async;
    options.checkpoint = scratch_file("everybody.gwc");
    Rig rig(options);
    Toys toys = crew(rig, exact_down(), 4);
    join(toys);
    std::vector<std::thread> threads;
    for (size_t i = 0; i < toys.size(); ++i)
      threads.emplace_back([&, i] {
        for (size_t step = 0; step < 5 + i; ++step) toys[i]->work();
        EXPECT_TRUE(toys[i]->client.leave(20));
      });
    for (std::thread& thread : threads) thread.join();
    EXPECT_TRUE(eventually([&] { return rig.hub()->finished(); }));
    EXPECT_EQ(rig.hub()->status()["ledger"]["held"], 0.0);
    expect_ledger(*rig.hub());
    rig.kill();
    rig.start();  // and it is all on disk
    EXPECT_EQ(rig.hub()->status()["ledger"]["held"], 0.0);
    expect_ledger(*rig.hub());
    EXPECT_TRUE(rig.hub()->finished());
  }
}

TEST(ServerFaults, LeavingAServerThatIsGoneTakesNoLongerThanItMay) {
  Rig rig(faulty(1));
  Toys toys = crew(rig, small_signature(), 2);
  join(toys);
  work(toys, 2);
  rig.kill();
  const auto begin = Clock::now();
  EXPECT_FALSE(toys[0]->client.leave(0.3));
  EXPECT_LT(std::chrono::duration<double>(Clock::now() - begin).count(), 3);
}

}  // namespace
}  // namespace gradwire::server
