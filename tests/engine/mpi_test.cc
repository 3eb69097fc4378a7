// SPDX-License-Identifier: Apache-2.0
// The MPI engine against the promises of engine.h, really run under mpirun: `mpirun -n 4 mpi_test`. All ranks run the
// same tests in the same order and meet in an MPI_Barrier after each, so that a failure on one rank cannot let the next
// test start crooked. Tests that need more ranks than there are say so and are skipped.
//
// `mpi_test --level single|funneled|serialized` initialises MPI with that thread level. The same promises hold there,
// and the engine makes no MPI call on another thread than the test's.
#include <gtest/gtest.h>
#define OMPI_SKIP_MPICXX 1
#include <mpi.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <iostream>
#include <stdexcept>
#include <thread>

#include "engine/engine_fixture.h"
#include "engine/mpi_core.h"
#include "gradwire/collective.h"
#include "gradwire/error.h"
#include "gradwire/mpi.h"

namespace gradwire {
namespace {

using namespace std::chrono_literals;
using namespace test;

const std::array<size_t, 5> kLengths{0, 1, 257, 65536, 5'000'011};

int world_rank() {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  return rank;
}

int world_size() {
  int size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  return size;
}

class Mpi : public ::testing::Test {
 protected:
  void TearDown() override { MPI_Barrier(MPI_COMM_WORLD); }
};

#define NEEDS_RANKS(n) \
  if (world_size() < (n)) GTEST_SKIP() << "needs " << (n) << " ranks"

TEST_F(Mpi, SaysWhatItIs) {
  const auto engine = make_mpi();
  EXPECT_TRUE(mpi_built());
  EXPECT_EQ(engine->name(), "mpi");
  EXPECT_EQ(engine->rank(), world_rank());
  EXPECT_EQ(engine->size(), world_size());
}

TEST_F(Mpi, EveryOperationBringsExactBytesForEveryLength) {
  const auto engine = make_mpi();
  uint64_t op = 0;
  for (const size_t length : kLengths) {
    CheckedAllToAll exchange(*engine, ++op, [&](int from, int to) { return length == 0 ? 0 : length + from + 2 * to; });
    exchange.start(*engine).wait();
    EXPECT_EQ(exchange.wrong(), "") << length;
    CheckedAllGather gather(*engine, ++op, [&](int from) { return length == 0 ? 0 : length + from; });
    gather.start(*engine).wait();
    EXPECT_EQ(gather.wrong(), "") << length;
    for (int root = 0; root < engine->size(); ++root) {
      CheckedBroadcast cast(*engine, ++op, length, root);
      cast.start(*engine).wait();
      EXPECT_EQ(cast.wrong(), "") << length;
    }
    engine->barrier().wait();
  }
}

TEST_F(Mpi, AllToAllTakesAnotherLengthForEveryPairAlsoZero) {
  const auto engine = make_mpi();
  CheckedAllToAll exchange(*engine, 5, [&](int from, int to) { return size_t(((from * 7 + to * 3) % 4) * 100'003); });
  exchange.start(*engine).wait();
  EXPECT_EQ(exchange.wrong(), "");
}

TEST_F(Mpi, AllGatherMayRunInPlace) {
  const auto engine = make_mpi();
  CheckedAllGather gather(*engine, 2, [](int) { return size_t{300'007}; });
  auto& own = gather.received(engine->rank());
  fill_expected(own, 2, engine->rank(), kAllRanks);
  gather.start_from(*engine, own).wait();
  EXPECT_EQ(gather.wrong(), "");
}

TEST_F(Mpi, LongTransfersAreSentInPieces) {
  const size_t former = engine_detail::set_chunk_bytes(1000);
  {
    const auto engine = make_mpi();
    for (const size_t length : {999, 1000, 1001, 2000, 250'019}) {
      CheckedAllToAll exchange(*engine, length, [&](int from, int to) { return length + (from == to ? 0 : to); });
      CheckedAllGather gather(*engine, length + 1, [&](int) { return length; });
      Handle a = exchange.start(*engine);
      Handle b = gather.start(*engine);
      b.wait();
      a.wait();
      EXPECT_EQ(exchange.wrong() + gather.wrong(), "") << length;
    }
  }
  EXPECT_EQ(engine_detail::set_chunk_bytes(former), 1000u);
  EXPECT_EQ(former, size_t{1} << 30);
}

TEST_F(Mpi, ManyOperationsInFlightMayBeWaitedForInAnyOrderOnEachRank) {
  const auto engine = make_mpi();
  constexpr int kOperations = 40;
  std::vector<CheckedAllToAll> exchanges;
  std::vector<Handle> handles;
  for (int op = 0; op < kOperations; ++op) {
    exchanges.emplace_back(*engine, op,
                           [&](int from, int to) { return size_t(1 + (op * 131 + from * 17 + to) % 5000); });
  }
  for (CheckedAllToAll& exchange : exchanges) handles.push_back(exchange.start(*engine));
  std::vector<int> order(kOperations);
  for (int op = 0; op < kOperations; ++op) order[op] = op;
  std::shuffle(order.begin(), order.end(), std::mt19937(100 + engine->rank()));
  for (const int op : order) {
    handles[op].wait();
    EXPECT_EQ(exchanges[op].wrong(), "") << "operation " << op;
  }
}

TEST_F(Mpi, RandomOperationsGiveExactBytes) {
  const auto engine = make_mpi();
  random_operations(*engine, 600, 20'240'608);
}

TEST_F(Mpi, BytesMoveWhileTheCallerDoesNotWait) {
  NEEDS_RANKS(2);
  const auto engine = make_mpi();
  if (engine->stays_on_its_thread()) GTEST_SKIP() << "takes MPI_THREAD_MULTIPLE";
  CheckedAllGather gather(*engine, 1, [](int) { return size_t{4'000'037}; });
  Handle handle = gather.start(*engine);
  int token = 0;
  if (engine->rank() == 0) {
    // Rank 0 waits for its handle only after all others are through.
    for (int p = 1; p < engine->size(); ++p) MPI_Recv(&token, 1, MPI_INT, p, 7, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    handle.wait();
  } else {
    handle.wait();
    MPI_Send(&token, 1, MPI_INT, 0, 7, MPI_COMM_WORLD);
  }
  EXPECT_EQ(gather.wrong(), "");
}

TEST_F(Mpi, TheCallersCommunicatorsStayTheCallersOwn) {
  // Two communicators in two orders, an engine on each, and the caller's own messages in between.
  MPI_Comm backwards = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, 0, -world_rank(), &backwards);
  {
    const auto forth = make_mpi();
    const auto back = make_mpi(backwards);
    EXPECT_EQ(back->rank(), world_size() - 1 - forth->rank());
    CheckedAllToAll a(*forth, 1, [](int from, int to) { return size_t(70'000 + 3 * from + to); });
    CheckedAllToAll b(*back, 2, [](int from, int to) { return size_t(70'000 + from + 5 * to); });
    Handle in_a = a.start(*forth);
    Handle in_b = b.start(*back);
    int sum = 0, one = 1;
    MPI_Allreduce(&one, &sum, 1, MPI_INT, MPI_SUM, backwards);
    EXPECT_EQ(sum, world_size());
    const int next = (world_rank() + 1) % world_size(), before = (world_rank() + world_size() - 1) % world_size();
    int got = -1, mine = world_rank();
    MPI_Sendrecv(&mine, 1, MPI_INT, next, 1, &got, 1, MPI_INT, before, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    EXPECT_EQ(got, before);
    if (world_rank() % 2 == 0) {
      in_a.wait();
      in_b.wait();
    } else {
      in_b.wait();
      in_a.wait();
    }
    EXPECT_EQ(a.wrong() + b.wrong(), "");
  }
  int finalised = 1, sum = 0, one = 1;
  MPI_Finalized(&finalised);
  EXPECT_FALSE(finalised);
  MPI_Allreduce(&one, &sum, 1, MPI_INT, MPI_SUM, backwards);
  EXPECT_EQ(sum, world_size());
  MPI_Comm_free(&backwards);
}

TEST_F(Mpi, SplitFormsGroupsInTheOrderOfRanksAndGroupsOfGroups) {
  const auto engine = make_mpi();
  const int me = engine->rank();
  const auto half = engine->split(me % 2 - 1);  // colours may be negative
  EXPECT_EQ(half->size(), (engine->size() + 1 - me % 2) / 2);
  EXPECT_EQ(half->rank(), me / 2);
  CheckedAllGather inner(*half, 6, [](int) { return size_t{99'991}; });
  CheckedAllGather outer(*engine, 7, [](int) { return size_t{99'991}; });
  Handle a = outer.start(*engine);
  inner.start(*half).wait();
  a.wait();
  EXPECT_EQ(inner.wrong() + outer.wrong(), "");
  const auto alone = half->split(me);
  EXPECT_EQ(alone->size(), 1);
  alone->barrier().wait();
}

TEST_F(Mpi, BytesSentCountsPayloadToOtherRanksOnly) {
  const auto engine = make_mpi();
  const uint64_t others = static_cast<uint64_t>(engine->size()) - 1;
  const int me = engine->rank();
  uint64_t expected = 0;
  CheckedAllToAll exchange(*engine, 1, [](int from, int to) { return size_t(100 * from + to); });
  exchange.start(*engine).wait();
  for (int to = 0; to < engine->size(); ++to) expected += to == me ? 0 : 100 * me + to;
  CheckedAllGather gather(*engine, 2, [](int from) { return size_t(1000 + from); });
  gather.start(*engine).wait();
  expected += others * (1000 + me);
  CheckedBroadcast cast(*engine, 3, 77, 0);
  cast.start(*engine).wait();
  expected += me == 0 ? others * 77 : 0;
  EXPECT_EQ(engine->bytes_sent(), expected);
  const auto all = engine->split(0);
  EXPECT_EQ(engine->bytes_sent(), expected);
  CheckedAllGather inner(*all, 4, [](int) { return size_t{10}; });
  inner.start(*all).wait();
  EXPECT_EQ(all->bytes_sent(), others * 10);
  EXPECT_EQ(engine->bytes_sent(), expected + others * 10);
}

TEST_F(Mpi, AHandleOutlivesItsEngine) {
  auto engine = make_mpi();
  CheckedAllToAll exchange(*engine, 1, [](int, int) { return size_t{40'000}; });
  Handle handle = exchange.start(*engine);
  engine.reset();
  handle.wait();
  EXPECT_EQ(exchange.wrong(), "");
}

TEST_F(Mpi, EnginesMayBeMadeAndDestroyedAgainAndAgain) {
  for (int round = 0; round < 30; ++round) {
    const auto engine = make_mpi();
    CheckedAllToAll exchange(*engine, round, [](int, int) { return size_t{30'000}; });
    exchange.start(*engine).wait();
    ASSERT_EQ(exchange.wrong(), "");
  }
}

TEST_F(Mpi, AnIdleEngineDoesNotBurnACore) {
  const auto engine = make_mpi();
  engine->barrier().wait();
  const auto used = [] {
    timespec t{};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
  };
  const double before = used();
  std::this_thread::sleep_for(500ms);  // idleness is what is measured
  EXPECT_LT(used() - before, 0.1);
  engine->barrier().wait();
}

TEST_F(Mpi, AnotherOperationIsAMismatchThatNamesBoth) {
  NEEDS_RANKS(2);
  const auto engine = make_mpi();
  std::vector<std::byte> data(100'000);
  const Outcome result = outcome_of([&] {
    if (engine->rank() == 1)
      engine->barrier().wait();
    else
      engine->broadcast(data, 0).wait();
    engine->barrier().wait();
  });
  EXPECT_EQ(result.kind, ErrorKind::mismatch) << result.text;
  EXPECT_TRUE(mentions(result, "rank 1") && mentions(result, "barrier") && mentions(result, "broadcast"))
      << result.text;
  EXPECT_EQ(outcome_of([&] { engine->barrier(); }).text, result.text);
}

TEST_F(Mpi, AnotherRootIsAMismatch) {
  NEEDS_RANKS(2);
  const auto engine = make_mpi();
  std::vector<std::byte> data(8);
  const Outcome result = outcome_of([&] {
    engine->broadcast(data, engine->rank() == 1 ? 1 : 0).wait();
    engine->barrier().wait();
  });
  EXPECT_EQ(result.kind, ErrorKind::mismatch) << result.text;
  EXPECT_TRUE(mentions(result, "root 0") && mentions(result, "root 1")) << result.text;
}

TEST_F(Mpi, AnotherLengthIsAMismatchThatNamesSenderSentAndExpectedAndWritesNothing) {
  NEEDS_RANKS(2);
  for (const size_t length : {40, 400'000}) {
    const auto engine = make_mpi();
    const bool odd = engine->rank() == 1;
    CheckedBroadcast cast(*engine, 1, odd ? length - 7 : length, 0);
    const Outcome result = outcome_of([&] {
      cast.start(*engine).wait();
      engine->barrier().wait();
    });
    EXPECT_EQ(result.kind, ErrorKind::mismatch) << result.text;
    EXPECT_EQ(result.rank, 0);
    EXPECT_TRUE(mentions(result, "rank 0 sends " + std::to_string(length) + " bytes to rank 1") &&
                mentions(result, std::to_string(length - 7) + " bytes"))
        << result.text;
    if (odd) {
      EXPECT_TRUE(cast.untouched());
    }
  }
}

TEST_F(Mpi, ALengthThatDoesNotFitItselfIsAMismatch) {
  const auto engine = make_mpi();
  std::vector<std::vector<std::byte>> buffers(engine->size(), std::vector<std::byte>(9));
  buffers[engine->rank()].resize(8);
  std::vector<std::byte> mine(9);
  const Outcome result = outcome_of([&] { engine->all_gather(mine, spans_of<Bytes>(buffers)).wait(); });
  EXPECT_EQ(result.kind, ErrorKind::mismatch) << result.text;
}

TEST_F(Mpi, AStalledRankIsNamedWithinTheTimeoutAndFindsTheEnginePoisoned) {
  NEEDS_RANKS(2);
  const auto engine = make_mpi();
  const int stalled = engine->size() - 1;
  engine->barrier().wait();
  if (engine->rank() == 0) engine->set_timeout(1s);
  const std::string words = "rank " + std::to_string(stalled) + " did not start all_gather (operation 1) within 1 s";
  const auto begin = SteadyClock::now();
  CheckedAllGather gather(*engine, 1, [](int) { return size_t{3'000'017}; });
  if (engine->rank() == stalled) {
    // It does not call for longer than rank 0's time-out: until the others have failed and say so.
    int token = 0;
    for (int p = 0; p < stalled; ++p) MPI_Recv(&token, 1, MPI_INT, p, 7, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    const Outcome result = outcome_of([&] { gather.start(*engine).wait(); });
    EXPECT_EQ(result.text, words);
    EXPECT_EQ(result.rank, stalled);
  } else {
    const Outcome result = outcome_of([&] { gather.start(*engine).wait(); });
    EXPECT_EQ(result.kind, ErrorKind::engine);
    EXPECT_EQ(result.text, words);
    EXPECT_EQ(result.rank, stalled);
    EXPECT_EQ(outcome_of([&] { engine->barrier(); }).text, words);
    EXPECT_LT(SteadyClock::now() - begin, 20s) << "only rank 0 has the short time-out; its poison must wake the others";
    int token = 0;
    MPI_Send(&token, 1, MPI_INT, stalled, 7, MPI_COMM_WORLD);
  }
}

TEST_F(Mpi, ARankThatLeavesIsNamedAtOnce) {
  NEEDS_RANKS(2);
  auto engine = make_mpi();
  engine->barrier().wait();
  const auto begin = SteadyClock::now();
  if (engine->rank() == 1) {
    engine.reset();
    EXPECT_LT(SteadyClock::now() - begin, 4s) << "the others' progress threads answer the farewell";
    return;
  }
  const Outcome result = outcome_of([&] { engine->barrier().wait(); });
  EXPECT_LT(SteadyClock::now() - begin, 20s);
  EXPECT_EQ(result.kind, ErrorKind::engine);
  EXPECT_EQ(result.rank, 1);
  EXPECT_EQ(result.text, "rank 1 left (its engine was destroyed) before barrier (operation 1)");
}

TEST_F(Mpi, PoisonReachesPendingWaitsAndLaterCallsOfEveryRank) {
  const auto engine = make_mpi();
  const int culprit = engine->size() - 1;
  if (engine->rank() == culprit) engine->poison("the disk is full");
  const Outcome result = outcome_of([&] { engine->barrier().wait(); });
  EXPECT_EQ(result.kind, ErrorKind::engine);
  EXPECT_EQ(result.rank, culprit);
  EXPECT_EQ(result.text, "rank " + std::to_string(culprit) + " poisoned the engine: the disk is full");
}

TEST_F(Mpi, PoisonOfTheParentReachesItsGroupsAlsoOfRanksThatWaitInThem) {
  NEEDS_RANKS(3);
  const auto engine = make_mpi();
  const auto all = engine->split(0);
  if (engine->rank() == 2) {
    engine->poison("enough");
    EXPECT_TRUE(outcome_of([&] { all->barrier(); }).threw) << "at once on the rank itself";
    return;
  }
  const Outcome result = outcome_of([&] { all->barrier().wait(); });
  EXPECT_EQ(result.kind, ErrorKind::engine);
  EXPECT_EQ(result.rank, 2);
  EXPECT_TRUE(mentions(result, "rank 2 poisoned the engine: enough")) << result.text;
}

TEST_F(Mpi, PoisonOfAGroupLeavesTheParentAlone) {
  const auto engine = make_mpi();
  const auto half = engine->split(engine->rank() % 2);
  if (engine->rank() == 0) half->poison("only us");
  const Outcome result = outcome_of([&] { half->barrier().wait(); });
  EXPECT_EQ(result.threw, engine->rank() % 2 == 0);
  engine->barrier().wait();
}

TEST_F(Mpi, ARankThatDoesNotComeToASplitIsNamed) {
  NEEDS_RANKS(2);
  const auto engine = make_mpi();
  if (engine->rank() == 0) engine->set_timeout(300ms);
  if (engine->rank() != 1) {
    const Outcome result = outcome_of([&] { engine->split(0); });
    EXPECT_EQ(result.text, "rank 1 did not start split (operation 0) within 0.3 s");
    EXPECT_EQ(result.rank, 1);
  }
  MPI_Barrier(MPI_COMM_WORLD);
  if (engine->rank() == 1) {
    EXPECT_TRUE(outcome_of([&] { engine->split(0); }).threw);
  }
}

// Buffers die as soon as wait() has thrown, with long transfers in the air; MPI must be through with them.
TEST_F(Mpi, APoisonedWaitLetsGoOfItsBuffersAndNeitherHangsNorSpoilsWhatCompletes) {
  for (int round = 0; round < 12; ++round) {
    const auto engine = make_mpi();
    std::vector<std::unique_ptr<CheckedAllToAll>> exchanges;
    std::vector<Handle> handles;
    outcome_of([&] {
      for (int op = 0; op < 4; ++op) {
        exchanges.push_back(std::make_unique<CheckedAllToAll>(*engine, op, [](int, int) { return size_t{700'001}; }));
        handles.push_back(exchanges.back()->start(*engine));
      }
    });
    if (engine->rank() == round % engine->size()) {
      for (int spin = round * 40; spin > 0; --spin) std::this_thread::yield();
      engine->poison("now");
    }
    const auto begin = SteadyClock::now();
    for (size_t op = 0; op < handles.size(); ++op) {
      if (!outcome_of([&] { handles[op].wait(); }).threw) {
        EXPECT_EQ(exchanges[op]->wrong(), "");
      }
      exchanges[op].reset();
    }
    EXPECT_LT(SteadyClock::now() - begin, 20s);
  }
}

// A process that is stopped with bytes in the air can neither answer nor be cancelled: the others get their error a
// little later, and are told to keep the buffers. (A killed process ends the job through the launcher.)
TEST_F(Mpi, AFrozenProcessIsNamedThoughBytesAreInTheAir) {
  NEEDS_RANKS(2);
  const auto engine = make_mpi();
  const int frozen = engine->size() - 1;
  int pid = getpid();
  MPI_Bcast(&pid, 1, MPI_INT, frozen, MPI_COMM_WORLD);
  static std::vector<std::unique_ptr<CheckedAllGather>> keep;  // until the process ends
  CheckedAllGather& gather =
      *keep.emplace_back(std::make_unique<CheckedAllGather>(*engine, 1, [](int) { return size_t{20'000'003}; }));
  engine->barrier().wait();
  engine->set_timeout(1s);
  const auto begin = SteadyClock::now();
  Handle handle = gather.start(*engine);
  if (engine->rank() == frozen) raise(SIGSTOP);
  const Outcome result = outcome_of([&] {
    handle.wait();
    engine->barrier().wait();
  });
  EXPECT_EQ(result.kind, ErrorKind::engine);
  EXPECT_EQ(result.rank, frozen) << result.text;
  EXPECT_EQ(result.field, "timeout") << result.text;
  if (engine->rank() == frozen) return;
  EXPECT_LT(SteadyClock::now() - begin, 20s);
  MPI_Comm others = MPI_COMM_NULL;
  MPI_Group world = MPI_GROUP_NULL, awake = MPI_GROUP_NULL;
  MPI_Comm_group(MPI_COMM_WORLD, &world);
  MPI_Group_excl(world, 1, &frozen, &awake);
  MPI_Comm_create_group(MPI_COMM_WORLD, awake, 0, &others);
  MPI_Barrier(others);  // before it is woken, everybody has failed
  if (engine->rank() == 0) kill(pid, SIGCONT);
  MPI_Comm_free(&others);
  MPI_Group_free(&awake);
  MPI_Group_free(&world);
}

// The same means, bit for bit, as over threads of one process, whatever thread the steps run on.
TEST_F(Mpi, AReducerGivesTheBitsOfLoopback) {
  const auto gradient = [](int rank, uint64_t step) {
    std::vector<float> values(40'000);
    for (size_t i = 0; i < values.size(); ++i)
      values[i] = static_cast<float>((i * 7 + static_cast<size_t>(rank) * 13 + step * 5) % 101) - 50;
    return values;
  };
  const auto engine = make_mpi();
  for (const char* codec : {"qsgd:bits=4", "lowrank:rank=4", "lowrank:rank=4,alternate=on"}) {
    const auto run = [&](Engine& any) {
      std::vector<float> mean(40'000);
      Reducer reducer(any, {{"weight", mean.size(), DType::f32, 2, 160}}, {.up = codec});
      for (uint64_t step = 0; step < 5; ++step) reducer.run(step, gradient(any.rank(), step), mean);
      return mean;
    };
    const std::vector<float> mean = run(*engine);
    std::vector<float> expected;
    run_loopback(engine->size(), [&](Engine& loopback) {
      std::vector<float> result = run(loopback);
      if (loopback.rank() == 0) expected = std::move(result);
    });
    EXPECT_EQ(mean, expected) << codec;
  }
}

// All processes of these tests run on one machine.
TEST_F(Mpi, RanksOfOneMachineShareANode) {
  const auto engine = make_mpi();
  EXPECT_EQ(engine->node(), 0);
  EXPECT_EQ(engine->split(engine->rank() % 2)->node(), 0);
}

TEST_F(Mpi, AReducerOnTwoLevelsGivesTheBitsOfLoopback) {
  const std::vector<NamedTensor> tensors{{"weight", 100'000}, {"bias", 10, DType::f32, 1}};
  const auto run = [&](Engine& engine, int nodes) {
    std::vector<std::vector<float>> data{std::vector<float>(100'000), std::vector<float>(10)};
    Reducer reducer(engine, tensors,
                    {.up = "1d=fp32;*=optquant:bits=3", .feedback = ReduceOptions::Feedback::on, .nodes = nodes});
    for (uint64_t step = 0; step < 3; ++step) {
      for (auto& values : data)
        for (size_t i = 0; i < values.size(); ++i)
          values[i] = static_cast<float>((i * 7 + static_cast<size_t>(engine.rank()) * 13 + step * 5) % 101) - 50;
      const void* in[] = {data[0].data(), data[1].data()};
      void* out[] = {data[0].data(), data[1].data()};
      reducer.run(step, in, out);
    }
    if (nodes == ReduceOptions::kAutoNodes) {
      EXPECT_EQ(reducer.node_bytes(), engine.size() == 1 ? reducer.message_bytes() : 0u);
    }
    return data;
  };
  const auto engine = make_mpi();
  std::vector<int> layouts{1, ReduceOptions::kAutoNodes};
  if (engine->size() % 2 == 0) layouts.push_back(2);
  for (int nodes : layouts) {
    const auto result = run(*engine, nodes);
    std::vector<std::vector<float>> expected;
    run_loopback(engine->size(), [&](Engine& loopback) {
      auto mine = run(loopback, nodes);
      if (loopback.rank() == 0) expected = std::move(mine);
    });
    EXPECT_EQ(result, expected) << nodes << " nodes";
  }
}

TEST_F(Mpi, AReducerOnTwoLevelsRefusesNodesThatDoNotDivideTheRanks) {
  NEEDS_RANKS(3);
  const auto engine = make_mpi();
  const Outcome result = outcome_of([&] {
    Reducer reducer(*engine, {{"weight", 100}}, {.nodes = engine->size() - 1});
  });
  EXPECT_EQ(result.kind, ErrorKind::usage);
  EXPECT_EQ(result.field, "nodes") << result.text;
  EXPECT_TRUE(mentions(result, "does not divide")) << result.text;
}

// Rank 3 stays away from a step, and the others name it by its number among all ranks.
TEST_F(Mpi, AReducerOnTwoLevelsNamesAStalledRank) {
  NEEDS_RANKS(4);
  const auto engine = make_mpi();
  std::vector<float> data(100);
  {
    Reducer reducer(*engine, {{"weight", 100}}, {.nodes = 2});
    if (engine->rank() == 0) engine->set_timeout(1s);
    int token = 0;
    if (engine->rank() == 3)
      for (int p = 0; p < 3; ++p) MPI_Recv(&token, 1, MPI_INT, p, 9, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    const Outcome result = outcome_of([&] { reducer.run(0, data, data); });
    EXPECT_EQ(result.kind, ErrorKind::engine) << result.text;
    EXPECT_EQ(result.rank, 3) << result.text;
    if (engine->rank() < 3) MPI_Send(&token, 1, MPI_INT, 3, 9, MPI_COMM_WORLD);
  }
}

TEST_F(Mpi, BelowMultipleAnEngineStaysOnItsThread) {
  int level = MPI_THREAD_SINGLE;
  MPI_Query_thread(&level);
  const auto engine = make_mpi();
  EXPECT_EQ(engine->stays_on_its_thread(), level < MPI_THREAD_MULTIPLE);
  const auto group = engine->split(0);
  EXPECT_EQ(group->stays_on_its_thread(), level < MPI_THREAD_MULTIPLE);
  if (level == MPI_THREAD_MULTIPLE) return;
  Outcome used, made;
  std::thread([&] {
    used = outcome_of([&] { engine->barrier().wait(); });
    if (level < MPI_THREAD_SERIALIZED) made = outcome_of([] { make_mpi(); });
  }).join();
  EXPECT_EQ(used.kind, ErrorKind::usage) << used.text;
  EXPECT_TRUE(mentions(used, "MPI_THREAD_MULTIPLE")) << used.text;
  if (level < MPI_THREAD_SERIALIZED) {
    EXPECT_EQ(made.kind, ErrorKind::unsupported) << made.text;
    EXPECT_TRUE(mentions(made, level == MPI_THREAD_SINGLE ? "MPI_THREAD_SINGLE" : "MPI_THREAD_FUNNELED")) << made.text;
  }
  engine->barrier().wait();
}

// Ranks that wait for different engines answer each other all the same.
TEST_F(Mpi, AWaitForOneEngineServesTheOthers) {
  NEEDS_RANKS(2);
  const auto first = make_mpi();
  const auto second = first->split(0);
  CheckedAllGather a(*first, 1, [](int) { return size_t{300'001}; });
  CheckedAllGather b(*second, 2, [](int) { return size_t{300'001}; });
  Handle in_first = a.start(*first), in_second = b.start(*second);
  if (first->rank() % 2 == 0) {
    in_first.wait();
    in_second.wait();
  } else {
    in_second.wait();
    in_first.wait();
  }
  EXPECT_EQ(a.wrong() + b.wrong(), "");
}

TEST_F(Mpi, RefusesANullCommunicator) {
  const MPI_Comm none = MPI_COMM_NULL;
  EXPECT_EQ(outcome_of([&] { make_mpi(none); }).field, "communicator");
}

// Prints failures only, with the rank in front: rank 0 has the usual printer, the others this one.
class Quiet : public ::testing::EmptyTestEventListener {
  void OnTestPartResult(const ::testing::TestPartResult& result) override {
    if (result.failed()) {
      std::cerr << "rank " << world_rank() << ": " << (result.file_name() ? result.file_name() : "?") << ":"
                << result.line_number() << ": " << result.message() << std::endl;
    }
  }
};

// The thread level that the command line names; MPI_THREAD_MULTIPLE without one, and -1 for an unknown name.
int level_of(int argc, char** argv) {
  if (argc < 3 || std::string(argv[1]) != "--level") return MPI_THREAD_MULTIPLE;
  const std::array levels{std::pair{"single", MPI_THREAD_SINGLE}, std::pair{"funneled", MPI_THREAD_FUNNELED},
                          std::pair{"serialized", MPI_THREAD_SERIALIZED}};
  for (const auto& [name, level] : levels)
    if (argv[2] == std::string(name)) return level;
  return -1;
}

}  // namespace
}  // namespace gradwire

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  const int level = gradwire::level_of(argc, argv);
  if (level < 0) return std::cerr << "unknown level " << argv[2] << "\n", 2;
  int provided = 0;
  MPI_Init_thread(&argc, &argv, level, &provided);
  if (gradwire::world_rank() != 0) {
    auto& listeners = ::testing::UnitTest::GetInstance()->listeners();
    delete listeners.Release(listeners.default_result_printer());
    listeners.Append(new gradwire::Quiet);
  }
  const int failed = RUN_ALL_TESTS();
  MPI_Finalize();
  return failed;
}
