// SPDX-License-Identifier: Apache-2.0
// What a reducer says of itself: where its time went, what memory it holds, and on which device it cannot work. Every
// rank has its own numbers; those of memory follow from the tensors and the codec alone, so they are checked exactly.
#include <chrono>
#include <future>

#include "collective/collective_fixture.h"

namespace gradwire {
namespace {

using namespace test;

TEST(Meter, TimesGrowWithEveryStepAndPartsDoNotOverlap) {
  const std::vector<NamedTensor> tensors{{"w", lighter<uint64_t>(1'000'000, 100'000)}};
  for (Method method : kMethods)
    for (int threads : {1, 2})
      for (const char* codec : {"qsgd:bits=4", "dqsgd:mode=paper,steps=5"})
        run_loopback(2, [&](Engine& engine) {
          Reducer reducer(engine, tensors, {.method = method, .up = codec, .device = {.threads = threads}});
          ReduceTimes last = reducer.times();
          EXPECT_EQ(last.encode + last.wait + last.decode, 0.0) << "nothing was reduced yet";
          TensorValues data = gradients(tensors, engine.rank(), 0);
          for (uint64_t step = 0; step < 3; ++step) {
            const auto begin = std::chrono::steady_clock::now();
            reducer.run(step, data.in(), data.out());
            const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - begin;
            const ReduceTimes now = reducer.times();
            EXPECT_GT(now.encode, last.encode) << codec;
            EXPECT_GT(now.wait, last.wait) << codec;
            EXPECT_GT(now.decode, last.decode) << codec;
            const double sum = (now.encode - last.encode) + (now.wait - last.wait) + (now.decode - last.decode);
            EXPECT_LE(sum, passed.count() * 1.001 + 1e-4) << codec << ": parts do not overlap";
            last = now;
          }
        });
}

// The time of a rank that comes late is waiting for the other, not work.
TEST(Meter, APeersWorkIsWaiting) {
  const std::vector<NamedTensor> tensors{{"w", 1000}};
  std::promise<void> hold;
  std::shared_future<void> held = hold.get_future().share();
  run_loopback(2, [&](Engine& engine) {
    Reducer reducer(engine, tensors, {.up = "qsgd:bits=4"});
    TensorValues data = gradients(tensors, engine.rank(), 0);
    if (engine.rank() == 1) {
      held.wait();
      return reducer.run(0, data.in(), data.out());
    }
    const auto begin = std::chrono::steady_clock::now();
    Handle handle = reducer.start(0, data.in(), data.out());
    // Work of this thread while the issuing one waits for rank 1: it is nobody's encode or decode.
    uint64_t x = 1;
    std::chrono::duration<double> passed{};
    while (passed.count() < 0.1) {
      for (int i = 0; i < 100'000; ++i) x = mix64(x);
      passed = std::chrono::steady_clock::now() - begin;
    }
    ASSERT_NE(x, 0u);
    hold.set_value();
    handle.wait();
    const ReduceTimes times = reducer.times();
    EXPECT_GT(times.wait, times.encode + times.decode);
    EXPECT_GT(times.wait, 0.01);
  });
}

TEST(Meter, MemoryIsWhatIsHeld) {
  const uint64_t count = 300'000, other = 1000;
  const std::vector<NamedTensor> tensors{{"w", count}, {"b", other, DType::f16, 1}};
  const auto memory = [&](const ReduceOptions& options, int world) {
    PerRank<ReduceMemory> all(world);
    run_loopback(world, [&](Engine& engine) {
      Reducer reducer(engine, tensors, options);
      TensorValues data = gradients(tensors, engine.rank(), 0);
      reducer.run(0, data.in(), data.out());
      all.of(engine) = reducer.memory();
      EXPECT_GE(all.of(engine).messages * static_cast<uint64_t>(world), reducer.message_bytes());
    });
    return all.values;
  };
  const Plan plan({{"w", count, DType::f32, Codec::parse("onebit")}, {"b", other, DType::f16, Codec::parse("onebit")}});
  for (const ReduceMemory& m : memory({.method = Method::gather, .up = "onebit"}, 3)) {
    EXPECT_EQ(m.residuals, 2 * 4 * (count + other));
    EXPECT_EQ(m.messages, 3 * plan.message_bytes());
    EXPECT_GE(m.sums, other * 4) << "f16 tensors are summed beside the outputs";
    EXPECT_LT(m.sums, other * 4 + 64);
  }
  for (const ReduceMemory& m : memory({.method = Method::gather, .up = "onebit", .residual = DType::bf16}, 2))
    EXPECT_EQ(m.residuals, 2 * 2 * (count + other));
  for (Method method : kMethods)
    for (const ReduceMemory& m : memory({.method = method, .up = "fp32"}, 2)) EXPECT_EQ(m.residuals, 0u);
  // Down, every element is owed by one rank.
  uint64_t residuals = 0, sums = 0;
  for (const ReduceMemory& m : memory({.up = "onebit"}, 3)) {
    residuals += m.residuals;
    sums += m.sums;
  }
  EXPECT_EQ(residuals, (3 + 1) * 2 * 4 * (count + other));
  EXPECT_GE(sums, 4 * (count + other));
}

// Messages of a codec that warms up as fp32 are large, and on the CPU their memory goes when they become small.
TEST(Meter, MemoryOfLargeMessagesIsGivenBack) {
  const std::vector<NamedTensor> tensors{{"w", 200'000}};
  run_loopback(2, [&](Engine& engine) {
    Reducer reducer(engine, tensors, {.method = Method::gather, .up = "casq:bits=2,start=1"});
    TensorValues data = gradients(tensors, engine.rank(), 0);
    std::vector<uint64_t> held;
    for (uint64_t step = 0; step < 2; ++step) {
      reducer.run(step, data.in(), data.out());
      held.push_back(reducer.memory().messages);
    }
    EXPECT_GE(held[0], 2 * 4 * 200'000u);
    EXPECT_LT(held[1], held[0] / 4);
  });
}

TEST(Meter, ADeviceThatIsNotHereIsRefusedOnAllRanks) {
  if (cuda_devices() > 0) GTEST_SKIP() << "there is a GPU here";
  const auto results = outcomes(2, [&](Engine& engine) {
    Device device;
    if (engine.rank() == 1) device.kind = Device::Kind::cuda;
    Reducer reducer(engine, {{"a", 100}}, {.device = device});
  });
  EXPECT_EQ(results[1].kind, ErrorKind::unsupported);
  EXPECT_EQ(results[1].field, "device") << results[1].text;
  EXPECT_EQ(results[0].kind, ErrorKind::mismatch);
  EXPECT_EQ(results[0].rank, 1);
}

}  // namespace
}  // namespace gradwire
