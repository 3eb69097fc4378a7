// SPDX-License-Identifier: Apache-2.0
// The loopback engine against the promises of engine.h: exact bytes for every operation, world and length; several
// operations in flight, waited in any order; ranks that disagree, stall, leave or throw are named to all others, at
// once or within the time-out, and nobody hangs. Ranks are threads, so this is the program to run under TSan.
//
// What rank `from` sends rank `to` in operation `op` is a function of these numbers: receivers know what must come.
#include "gradwire/engine.h"

#include "core/clock.h"
#ifdef GRADWIRE_HAS_MPI
#include "gradwire/mpi.h"
#endif

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <latch>
#include <mutex>
#include <random>
#include <stdexcept>
#include <thread>

#include "engine/engine_fixture.h"
#include "engine/group_engine.h"
#include "gradwire/error.h"
#include "support/lighter.h"

namespace gradwire {
namespace {

using namespace std::chrono_literals;
using namespace test;

const std::array kWorlds{1, 2, 3, 4, 7};
const std::array<size_t, 5> kLengths{0, 1, 257, 65536, 3'000'017};

// The longest is left to the small worlds: it is about long copies, not about many ranks.
std::span<const size_t> lengths(int world) { return std::span(kLengths).first(world > 4 ? 4 : 5); }

// What each rank threw. Each rank's engine lives until all have ended, unless the body takes it: nobody is told "left"
// by accident.
std::vector<Outcome> outcomes(int world, const std::function<void(std::unique_ptr<Engine>&)>& body) {
  auto engines = make_loopback(world);
  std::vector<Outcome> results(world);
  std::vector<std::thread> threads;
  for (int r = 0; r < world; ++r) {
    threads.emplace_back([&, r] { results[r] = outcome_of([&] { body(engines[r]); }); });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
}

TEST(Loopback, AllToAllBringsEveryPairItsBytesInEveryWorldAndLength) {
  for (const int world : kWorlds) {
    for (const size_t length : lengths(world)) {
      run_loopback(world, [&](Engine& engine) {
        CheckedAllToAll exchange(engine, 3, [&](int, int) { return length; });
        exchange.start(engine).wait();
        EXPECT_EQ(exchange.wrong(), "") << "world " << world << " length " << length;
      });
    }
  }
}

TEST(Loopback, AllToAllTakesAnotherLengthForEveryPairAlsoZero) {
  for (const int world : kWorlds) {
    run_loopback(world, [&](Engine& engine) {
      CheckedAllToAll exchange(engine, 5, [&](int from, int to) { return size_t(((from * 7 + to * 3) % 4) * 1009); });
      exchange.start(engine).wait();
      EXPECT_EQ(exchange.wrong(), "");
    });
  }
}

TEST(Loopback, AllGatherBringsEverybodysBytesToEverybody) {
  for (const int world : kWorlds) {
    for (const size_t length : lengths(world)) {
      run_loopback(world, [&](Engine& engine) {
        CheckedAllGather gather(engine, 9, [&](int from) { return length + (length > 0 ? from : 0); });
        gather.start(engine).wait();
        EXPECT_EQ(gather.wrong(), "") << "world " << world << " length " << length;
      });
    }
  }
}

TEST(Loopback, AllGatherMayRunInPlace) {
  run_loopback(3, [](Engine& engine) {
    CheckedAllGather gather(engine, 2, [](int) { return size_t{10'007}; });
    auto& own = gather.received(engine.rank());
    fill_expected(own, 2, engine.rank(), kAllRanks);
    gather.start_from(engine, own).wait();
    EXPECT_EQ(gather.wrong(), "");
  });
}

TEST(Loopback, BroadcastBringsTheRootsBytesToEverybodyFromEveryRoot) {
  for (const int world : kWorlds) {
    for (const size_t length : lengths(world)) {
      run_loopback(world, [&](Engine& engine) {
        for (int root = 0; root < world; ++root) {
          CheckedBroadcast cast(engine, root, length, root);
          cast.start(engine).wait();
          EXPECT_EQ(cast.wrong(), "") << "world " << world << " root " << root << " length " << length;
        }
      });
    }
  }
}

TEST(Loopback, BarrierHoldsEverybodyUntilTheLastHasCome) {
  for (const int world : kWorlds) {
    std::atomic<int> come{0};
    run_loopback(world, [&](Engine& engine) {
      for (int round = 1; round <= 20; ++round) {
        ++come;
        engine.barrier().wait();
        EXPECT_GE(come.load(), round * world);
        engine.barrier().wait();
      }
    });
  }
}

TEST(Loopback, ManyOperationsInFlightMayBeWaitedForInAnyOrderOnEachRank) {
  run_loopback(4, [](Engine& engine) {
    constexpr int kOperations = 40;
    std::vector<CheckedAllToAll> exchanges;
    std::vector<Handle> handles;
    for (int op = 0; op < kOperations; ++op) {
      exchanges.emplace_back(engine, op,
                             [&](int from, int to) { return size_t(1 + (op * 131 + from * 17 + to) % 5000); });
    }
    for (CheckedAllToAll& exchange : exchanges) handles.push_back(exchange.start(engine));
    std::vector<int> order(kOperations);
    for (int op = 0; op < kOperations; ++op) order[op] = op;
    std::shuffle(order.begin(), order.end(), std::mt19937(100 + engine.rank()));
    for (const int op : order) {
      handles[op].wait();
      EXPECT_EQ(exchanges[op].wrong(), "") << "operation " << op;
    }
  });
}

TEST(Loopback, AnOperationEndsForThoseWhoWaitThoughOthersHaveOnlyStartedIt) {
  std::latch others_done(2);
  run_loopback(3, [&](Engine& engine) {
    CheckedAllToAll exchange(engine, 1, [](int, int) { return size_t{100'003}; });
    Handle handle = exchange.start(engine);
    if (engine.rank() == 0) {
      others_done.wait();  // rank 0 does not wait for its handle before the others are through
      handle.wait();
    } else {
      handle.wait();
      others_done.count_down();
    }
    EXPECT_EQ(exchange.wrong(), "");
  });
}

TEST(Loopback, ADroppedHandleHasFinishedItsOperation) {
  run_loopback(2, [](Engine& engine) {
    CheckedAllToAll first(engine, 1, [](int, int) { return size_t{50'000}; });
    CheckedAllToAll second(engine, 2, [](int, int) { return size_t{50'000}; });
    {
      Handle handle = first.start(engine);
      handle = second.start(engine);  // drops the first
      EXPECT_EQ(first.wrong(), "");
    }
    EXPECT_EQ(second.wrong(), "");
    engine.barrier().wait();
  });
}

TEST(Loopback, WaitingTwiceForAHandleIsRefused) {
  run_loopback(1, [](Engine& engine) {
    Handle handle = engine.barrier();
    handle.wait();
    const Outcome again = outcome_of([&] { handle.wait(); });
    EXPECT_EQ(again.kind, ErrorKind::usage);
    EXPECT_EQ(again.field, "handle");
  });
}

TEST(Loopback, RandomOperationsGiveExactBytes) {
  constexpr int kOperations = 2000;
  run_loopback(4, [](Engine& engine) { random_operations(engine, kOperations, 20'240'607); });
}

TEST(Loopback, BytesSentCountsPayloadToOtherRanksOnly) {
  run_loopback(4, [](Engine& engine) {
    const int me = engine.rank();
    CheckedAllToAll exchange(engine, 1, [](int from, int to) { return size_t(100 * from + to); });
    exchange.start(engine).wait();
    uint64_t expected = 0;
    for (int to = 0; to < 4; ++to) expected += to == me ? 0 : 100 * me + to;
    EXPECT_EQ(engine.bytes_sent(), expected);
    CheckedAllGather gather(engine, 2, [](int from) { return size_t(1000 + from); });
    gather.start(engine).wait();
    expected += 3 * (1000 + me);
    EXPECT_EQ(engine.bytes_sent(), expected);
    CheckedBroadcast cast(engine, 3, 77, 2);
    cast.start(engine).wait();
    expected += me == 2 ? 3 * 77 : 0;
    EXPECT_EQ(engine.bytes_sent(), expected);
    engine.barrier().wait();
    const auto half = engine.split(me % 2);
    EXPECT_EQ(half->bytes_sent(), 0u);
    EXPECT_EQ(engine.bytes_sent(), expected) << "barrier and split carry no payload";
    CheckedAllGather inner(*half, 4, [](int) { return size_t{10}; });
    inner.start(*half).wait();
    EXPECT_EQ(half->bytes_sent(), 10u);
    EXPECT_EQ(engine.bytes_sent(), expected + 10);
  });
}

TEST(Loopback, SplitFormsGroupsInTheOrderOfRanksAndGroupsOfGroups) {
  run_loopback(7, [](Engine& engine) {
    const int me = engine.rank();
    const auto third = engine.split(me % 3 - 1);  // colours may be negative
    EXPECT_EQ(third->name(), "loopback");
    EXPECT_EQ(third->size(), me % 3 == 0 ? 3 : 2);
    EXPECT_EQ(third->rank(), me / 3);
    CheckedAllGather gather(*third, 6, [](int) { return size_t{999}; });
    gather.start(*third).wait();
    EXPECT_EQ(gather.wrong(), "");
    const auto alone = third->split(me);
    EXPECT_EQ(alone->size(), 1);
    alone->barrier().wait();
    engine.barrier().wait();
  });
}

TEST(Loopback, ParentAndGroupMayHaveOperationsInFlightTogether) {
  run_loopback(4, [](Engine& engine) {
    const auto pair = engine.split(engine.rank() / 2);
    CheckedAllToAll outer(engine, 1, [](int, int) { return size_t{3001}; });
    CheckedAllToAll inner(*pair, 2, [](int, int) { return size_t{3001}; });
    Handle a = outer.start(engine);
    Handle b = inner.start(*pair);
    b.wait();
    a.wait();
    EXPECT_EQ(outer.wrong() + inner.wrong(), "");
  });
}

// Ranks 0, 2, 4 and ranks 1, 3, 5, which know each other by their places in these lists.
TEST(Groups, OfOneEngineExchangeTheirOwnBytesInOneOrder) {
  run_loopback(6, [&](Engine& whole) {
    const int first = whole.rank() % 2;
    GroupEngine group(whole, {first + 4, first, first + 2});
    EXPECT_EQ(group.size(), 3);
    EXPECT_EQ(group.rank(), whole.rank() < 2 ? 1 : whole.rank() < 4 ? 2 : 0);
    uint64_t op = 0, sent = 0;
    for (const size_t length : {size_t{0}, size_t{1}, size_t{257}, size_t{65536}}) {
      CheckedAllToAll exchange(group, ++op, [&](int from, int to) { return length + from + 2 * to; });
      exchange.start(group).wait();
      EXPECT_EQ(exchange.wrong(), "");
      CheckedAllGather gather(group, ++op, [&](int from) { return length + from; });
      gather.start(group).wait();
      EXPECT_EQ(gather.wrong(), "");
      CheckedBroadcast cast(group, ++op, length, 2);
      cast.start(group).wait();
      EXPECT_EQ(cast.wrong(), "");
      group.barrier().wait();
      for (int p = 0; p < 3; ++p)
        if (p != group.rank()) sent += length + group.rank() + 2 * p;
      sent += 2 * (length + group.rank()) + (group.rank() == 2 ? 2 * length : 0);
      EXPECT_EQ(group.bytes_sent(), sent);
      EXPECT_EQ(whole.bytes_sent(), sent);
    }
    GroupEngine alone(whole, {whole.rank()});
    CheckedAllGather own(alone, 1, [](int) { return size_t{100}; });
    own.start(alone).wait();
    EXPECT_EQ(own.wrong(), "");
  });
}

TEST(Groups, NameARankByItsNumberInTheWholeEngine) {
  const auto results = outcomes(4, [](std::unique_ptr<Engine>& engine) {
    GroupEngine group(*engine, {engine->rank() % 2, engine->rank() % 2 + 2});
    if (engine->rank() == 3) return engine.reset();
    group.barrier().wait();
  });
  for (int r = 0; r < 3; ++r) EXPECT_EQ(results[r].rank, 3) << results[r].text;
}

TEST(LoopbackFailure, AnotherOperationIsAMismatchThatNamesBoth) {
  const auto results = outcomes(2, [](std::unique_ptr<Engine>& engine) {
    std::vector<std::byte> data(8), more(8);
    const std::array<Bytes, 2> recv{Bytes(data), Bytes(more)};
    if (engine->rank() == 0) engine->all_gather(data, recv).wait();
    if (engine->rank() == 1) engine->broadcast(data, 0).wait();
  });
  for (const Outcome& result : results) {
    EXPECT_EQ(result.kind, ErrorKind::mismatch) << result.text;
    EXPECT_EQ(result.rank, 1);
    EXPECT_TRUE(mentions(result, "rank 1") && mentions(result, "all_gather") && mentions(result, "broadcast"))
        << result.text;
  }
}

TEST(LoopbackFailure, AnotherRootIsAMismatch) {
  const auto results = outcomes(3, [](std::unique_ptr<Engine>& engine) {
    std::vector<std::byte> data(8);
    engine->broadcast(data, engine->rank() == 2 ? 1 : 0).wait();
    engine->barrier().wait();
  });
  for (const Outcome& result : results) {
    EXPECT_EQ(result.kind, ErrorKind::mismatch) << result.text;
    EXPECT_TRUE(mentions(result, "rank 2") && mentions(result, "root 0") && mentions(result, "root 1")) << result.text;
  }
}

TEST(LoopbackFailure, AnotherLengthIsAMismatchThatNamesSenderSentAndExpectedAndWritesNothing) {
  const auto results = outcomes(3, [](std::unique_ptr<Engine>& engine) {
    std::vector<std::byte> data(engine->rank() == 2 ? 33 : 40);
    CheckedBroadcast cast(*engine, 1, engine->rank() == 2 ? 33 : 40, 0);
    const Outcome result = outcome_of([&] {
      cast.start(*engine).wait();
      engine->barrier().wait();
    });
    if (engine->rank() == 2) {
      EXPECT_TRUE(cast.untouched());
    }
    throw Error(result.kind, result.text, result.field, result.rank);
  });
  for (const Outcome& result : results) {
    EXPECT_EQ(result.kind, ErrorKind::mismatch) << result.text;
    EXPECT_EQ(result.rank, 0);
    EXPECT_TRUE(mentions(result, "rank 0 sends 40 bytes to rank 2") && mentions(result, "33 bytes")) << result.text;
  }
}

TEST(LoopbackFailure, ALengthThatDoesNotFitItselfIsAMismatch) {
  const auto results = outcomes(1, [](std::unique_ptr<Engine>& engine) {
    std::vector<std::byte> data(9), other(8);
    const std::array<Bytes, 1> recv{Bytes(other)};
    engine->all_gather(data, recv).wait();
  });
  EXPECT_EQ(results[0].kind, ErrorKind::mismatch) << results[0].text;
}

TEST(LoopbackFailure, WrongArgumentsAreRefusedWithoutPoison) {
  run_loopback(1, [](Engine& engine) {
    std::vector<std::byte> data(4);
    const std::array<Bytes, 2> two{Bytes(data), Bytes(data)};
    EXPECT_EQ(outcome_of([&] { engine.all_gather(data, two); }).field, "recv");
    EXPECT_EQ(outcome_of([&] { engine.all_to_all({}, {}); }).field, "send");
    EXPECT_EQ(outcome_of([&] { engine.broadcast(data, 1); }).field, "root");
    EXPECT_EQ(outcome_of([&] { engine.broadcast(data, -1); }).field, "root");
    EXPECT_EQ(outcome_of([&] { engine.set_timeout(0ms); }).field, "timeout");
    engine.barrier().wait();
  });
  EXPECT_EQ(outcome_of([] { make_loopback(0); }).field, "world");
}

TEST(LoopbackFailure, AStalledRankIsNamedWithinTheTimeoutAndFindsTheEnginePoisoned) {
  std::latch others_posted(2), others_done(3);
  const auto results = outcomes(4, [&](std::unique_ptr<Engine>& engine) {
    engine->barrier().wait();
    if (engine->rank() == 0) engine->set_timeout(200ms);
    std::vector<std::byte> data(1000);
    if (engine->rank() == 2) {
      others_done.wait();
      engine->broadcast(data, 0);
      return;
    }
    const auto begin = SteadyClock::now();
    const Outcome result = outcome_of([&] {
      if (engine->rank() == 0) others_posted.wait();
      Handle handle = engine->broadcast(data, 0);
      if (engine->rank() != 0) others_posted.count_down();
      handle.wait();
    });
    EXPECT_LT(SteadyClock::now() - begin, 20s)
        << "only rank 0 has the short time-out; the others are woken by its poison";
    const Outcome later = outcome_of([&] { engine->barrier(); });
    EXPECT_EQ(later.text, result.text) << "later calls fail at once with the same words";
    others_done.count_down();
    throw Error(result.kind, result.text, result.field, result.rank);
  });
  for (const Outcome& result : results) {
    EXPECT_EQ(result.kind, ErrorKind::engine);
    EXPECT_EQ(result.rank, 2);
    EXPECT_EQ(result.text, "rank 2 did not start broadcast from root 0 (operation 1) within 0.2 s");
  }
}

TEST(LoopbackFailure, TheRankFurthestBehindIsBlamedNotTheOneThatWaitsForIt) {
  std::latch posted(1), done(2);
  const auto results = outcomes(3, [&](std::unique_ptr<Engine>& engine) {
    engine->set_timeout(engine->rank() == 2 ? 200ms : 60s);
    if (engine->rank() == 0) return done.wait();  // starts nothing at all
    Handle first = engine->barrier();
    if (engine->rank() == 1) {
      posted.count_down();
    } else {
      posted.wait();
      engine->barrier();  // dropped: waits, and finds ranks 0 and 1 missing; rank 0 is further behind
    }
    const Outcome result = outcome_of([&] { first.wait(); });
    done.count_down();
    throw Error(result.kind, result.text, result.field, result.rank);
  });
  EXPECT_EQ(results[1].rank, 0) << results[1].text;
  EXPECT_EQ(results[2].rank, 0) << results[2].text;
}

TEST(LoopbackFailure, ARankThatLeavesIsNamedAtOnce) {
  const auto begin = SteadyClock::now();
  std::latch posted(3);
  const auto results = outcomes(4, [&](std::unique_ptr<Engine>& engine) {
    if (engine->rank() == 1) {
      posted.wait();
      engine.reset();
      return;
    }
    Handle handle = engine->barrier();
    posted.count_down();
    handle.wait();
  });
  EXPECT_LT(SteadyClock::now() - begin, 20s);
  for (const int r : {0, 2, 3}) {
    EXPECT_EQ(results[r].kind, ErrorKind::engine);
    EXPECT_EQ(results[r].rank, 1);
    EXPECT_EQ(results[r].text, "rank 1 left (its engine was destroyed) before barrier (operation 0)");
  }
}

TEST(LoopbackFailure, ARankThatHasLeftIsNamedToThoseWhoComeLater) {
  std::latch gone(1);
  const auto results = outcomes(2, [&](std::unique_ptr<Engine>& engine) {
    engine->barrier().wait();
    if (engine->rank() == 0) {
      engine.reset();
      gone.count_down();
      return;
    }
    gone.wait();
    engine->barrier().wait();
  });
  EXPECT_EQ(results[1].rank, 0);
  EXPECT_TRUE(mentions(results[1], "left")) << results[1].text;
}

TEST(LoopbackFailure, LeavingAfterTheLastOperationHarmsNobody) {
  for (int round = 0; round < 200; ++round) {
    const auto results = outcomes(3, [](std::unique_ptr<Engine>& engine) {
      CheckedAllToAll exchange(*engine, 1, [](int, int) { return size_t{100}; });
      exchange.start(*engine).wait();
      engine.reset();
    });
    for (const Outcome& result : results) ASSERT_FALSE(result.threw) << result.text;
  }
}

TEST(LoopbackFailure, AHandleOutlivesItsEngine) {
  const auto results = outcomes(2, [](std::unique_ptr<Engine>& engine) {
    CheckedAllToAll exchange(*engine, 1, [](int, int) { return size_t{4000}; });
    Handle handle = exchange.start(*engine);
    engine.reset();
    handle.wait();
    EXPECT_EQ(exchange.wrong(), "");
  });
  for (const Outcome& result : results) EXPECT_FALSE(result.threw) << result.text;
}

TEST(LoopbackFailure, PoisonReachesPendingWaitsAndLaterCallsOfEveryRank) {
  std::latch posted(2);
  const auto results = outcomes(3, [&](std::unique_ptr<Engine>& engine) {
    if (engine->rank() == 0) {
      posted.wait();
      engine->poison("the disk is full");
      engine->barrier();
      return;
    }
    Handle handle = engine->barrier();
    posted.count_down();
    handle.wait();
  });
  for (const Outcome& result : results) {
    EXPECT_EQ(result.kind, ErrorKind::engine);
    EXPECT_EQ(result.rank, 0);
    EXPECT_EQ(result.text, "rank 0 poisoned the engine: the disk is full");
  }
}

TEST(LoopbackFailure, TheFirstPoisonStays) {
  const auto results = outcomes(1, [](std::unique_ptr<Engine>& engine) {
    engine->poison("first");
    engine->poison("second");
    engine->barrier();
  });
  EXPECT_TRUE(mentions(results[0], "first")) << results[0].text;
}

TEST(LoopbackFailure, PoisonOfTheParentReachesItsGroupsAndTheirGroups) {
  std::latch posted(3);
  const auto results = outcomes(4, [&](std::unique_ptr<Engine>& engine) {
    const auto all = engine->split(0);
    const auto pair = all->split(engine->rank() / 2);
    if (engine->rank() == 3) {
      posted.wait();
      engine->poison("enough");
    } else {
      posted.count_down();
    }
    pair->barrier().wait();
    pair->barrier().wait();
    pair->barrier().wait();
    engine->barrier().wait();
  });
  for (const Outcome& result : results) {
    EXPECT_EQ(result.kind, ErrorKind::engine);
    EXPECT_TRUE(mentions(result, "rank 3 poisoned the engine: enough")) << result.text;
  }
}

TEST(LoopbackFailure, PoisonOfAGroupLeavesTheParentAndOtherGroupsAlone) {
  run_loopback(4, [](Engine& engine) {
    const auto pair = engine.split(engine.rank() / 2);
    if (engine.rank() == 1) pair->poison("only us");
    engine.barrier().wait();
    const Outcome result = outcome_of([&] { pair->barrier().wait(); });
    EXPECT_EQ(result.threw, engine.rank() < 2);
    engine.barrier().wait();
  });
}

TEST(LoopbackFailure, ARankThatDoesNotComeToASplitIsNamed) {
  std::latch done(2);
  const auto results = outcomes(3, [&](std::unique_ptr<Engine>& engine) {
    if (engine->rank() == 0) engine->set_timeout(100ms);
    if (engine->rank() == 1) return done.wait();
    const Outcome result = outcome_of([&] { engine->split(0); });
    done.count_down();
    throw Error(result.kind, result.text, result.field, result.rank);
  });
  for (const int r : {0, 2}) {
    EXPECT_EQ(results[r].text, "rank 1 did not start split (operation 0) within 0.1 s");
    EXPECT_EQ(results[r].rank, 1);
  }
}

TEST(LoopbackFailure, AGroupInheritsTheTimeout) {
  std::latch done(1);
  const auto results = outcomes(2, [&](std::unique_ptr<Engine>& engine) {
    engine->set_timeout(1s);
    const auto all = engine->split(0);
    if (engine->rank() == 1) return done.wait();
    const Outcome result = outcome_of([&] { all->barrier().wait(); });
    done.count_down();
    throw Error(result.kind, result.text, result.field, result.rank);
  });
  EXPECT_TRUE(mentions(results[0], "within 1 s")) << results[0].text;
}

// Buffers die as soon as wait() has thrown: under ASan and TSan this finds a copy that still runs.
TEST(LoopbackFailure, NobodyTouchesTheBuffersOfAFailedWait) {
  for (int round = 0; round < test::lighter(20, 8); ++round) {
    outcomes(4, [&](std::unique_ptr<Engine>& engine) {
      std::mt19937 random(round * 4 + engine->rank());
      std::vector<Handle> handles;
      std::vector<std::unique_ptr<CheckedAllToAll>> exchanges;
      const Outcome start = outcome_of([&] {
        for (int op = 0; op < 4; ++op) {
          exchanges.push_back(std::make_unique<CheckedAllToAll>(*engine, op, [](int, int) { return size_t{200'000}; }));
          handles.push_back(exchanges.back()->start(*engine));
        }
      });
      if (engine->rank() == round % 4) {
        for (unsigned spin = random() % 2000; spin > 0; --spin) std::this_thread::yield();
        engine->poison("now");
      }
      for (size_t op = 0; op < handles.size(); ++op) {
        const Outcome end = outcome_of([&] { handles[op].wait(); });
        if (!end.threw) {
          EXPECT_EQ(exchanges[op]->wrong(), "");
        }
        exchanges[op].reset();
      }
    });
  }
}

// Rank 2 pushes a long message into rank 1's buffer, rank 0 poisons meanwhile, and rank 1, whose wait fails, writes its
// own mark where a copy writes last: no byte of rank 2's may come after it. Whether poison comes in the middle of a
// copy is up to the scheduler; a wait that took its time says that it did, and then the test has seen what it is about.
TEST(LoopbackFailure, AFailedWaitReturnsOnlyWhenCopiesIntoItsBuffersHaveEnded) {
  constexpr size_t kBytes = 64 << 20;
  std::vector<std::byte> source(kBytes, std::byte{0x11}), target(kBytes);
  const Bytes tail = Bytes(target).last(4096);
  bool held = false;
  for (int round = 0; round < 200 && !held; ++round) {
    std::latch posted(3), poisoned(1);
    outcomes(3, [&](std::unique_ptr<Engine>& engine) {
      std::array<ConstBytes, 3> send;
      std::array<Bytes, 3> recv;
      if (engine->rank() == 2) send[1] = source;
      if (engine->rank() == 1) recv[2] = target;
      Handle handle = engine->all_to_all(send, recv);
      posted.arrive_and_wait();
      if (engine->rank() == 0) {
        for (const auto until = SteadyClock::now() + round % 8 * 1ms; SteadyClock::now() < until;)
          std::this_thread::yield();
        engine->poison("now");
        poisoned.count_down();
      }
      if (engine->rank() == 1) {
        poisoned.wait();
        const auto begin = SteadyClock::now();
        EXPECT_TRUE(outcome_of([&] { handle.wait(); }).threw);
        held = SteadyClock::now() - begin > 1ms;
        std::fill(tail.begin(), tail.end(), std::byte{0x77});
      }
    });
    ASSERT_EQ(std::count(tail.begin(), tail.end(), std::byte{0x77}), 4096) << "round " << round;
  }
  EXPECT_TRUE(held) << "no failed wait has waited for a copy";
}

TEST(RunLoopback, RethrowsWhatTheBodyThrewNotWhatFollowedFromIt) {
  for (const int culprit : {0, 2}) {
    const auto begin = SteadyClock::now();
    try {
      run_loopback(3, [&](Engine& engine) {
        engine.barrier().wait();
        if (engine.rank() == culprit) throw std::out_of_range("tensor 7 does not exist");
        engine.barrier().wait();
      });
      FAIL() << "nothing was thrown";
    } catch (const std::out_of_range& e) {
      EXPECT_STREQ(e.what(), "tensor 7 does not exist");
    }
    EXPECT_LT(SteadyClock::now() - begin, 20s) << "the others must not wait for the time-out";
  }
}

TEST(RunLoopback, TheOriginalErrorWinsOverGroupsThatFellApartBefore) {
  for (int round = 0; round < 20; ++round) {
    EXPECT_THROW(run_loopback(3,
                              [](Engine& engine) {
                                const auto all = engine.split(0);
                                if (engine.rank() == 1) throw std::out_of_range("original");
                                all->barrier().wait();
                              }),
                 std::out_of_range);
  }
}

TEST(RunLoopback, TellsTheOthersTheWordsOfTheOneThatThrew) {
  std::mutex mutex;
  std::vector<std::string> heard;
  EXPECT_THROW(run_loopback(3,
                            [&](Engine& engine) {
                              if (engine.rank() == 1) throw std::out_of_range("tensor 7 does not exist");
                              const Outcome result = outcome_of([&] { engine.barrier().wait(); });
                              std::unique_lock lock(mutex);
                              heard.push_back(result.text);
                            }),
               std::out_of_range);
  EXPECT_EQ(heard, std::vector<std::string>(2, "rank 1 poisoned the engine: tensor 7 does not exist"));
}

TEST(RunLoopback, ARankThatReturnsEarlyIsNamed) {
  try {
    run_loopback(2, [](Engine& engine) {
      if (engine.rank() == 1) engine.barrier().wait();
    });
    FAIL() << "nothing was thrown";
  } catch (const Error& e) {
    EXPECT_EQ(e.rank(), 0) << e.what();
  }
}

TEST(RunLoopback, ThrowsWhatIsNoStdException) {
  EXPECT_THROW(run_loopback(2,
                            [](Engine& engine) {
                              if (engine.rank() == 0) throw 42;
                              engine.barrier().wait();
                            }),
               int);
}

#ifdef GRADWIRE_HAS_MPI
TEST(MakeMpi, WithoutAnInitialisedMpiIsRefusedInWords) {
  EXPECT_TRUE(mpi_built());
  try {
    make_mpi();
    FAIL() << "nothing was thrown";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::usage);
    EXPECT_NE(std::string(e.what()).find("MPI_Init_thread"), std::string::npos) << e.what();
  }
}
#endif

}  // namespace
}  // namespace gradwire
