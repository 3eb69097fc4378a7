// SPDX-License-Identifier: Apache-2.0
// The all-reduce of the C interface against that of C++: the same bits over callbacks, after a restart, and when ranks
// disagree or fail.
#include <unistd.h>

#include <cstddef>
#include <filesystem>
#include <fstream>
#include <limits>
#include <stdexcept>

#include "gradwire/collective.h"
#include "public/c_api_fixture.h"

namespace gradwire {
namespace {

std::vector<float> means_of_cpp(int world, const char* codec, uint64_t steps, ReduceOptions::Method method,
                                int nodes = 0) {
  std::vector<float> result;
  run_loopback(world, [&](Engine& engine) {
    std::vector<float> mean(kCApiCount);
    Reducer reducer(engine, {{"weight", kCApiCount}}, {.method = method, .up = codec, .seed = 3, .nodes = nodes});
    for (uint64_t step = 0; step < steps; ++step) reducer.run(step, c_api_gradient(engine.rank(), step), mean);
    if (engine.rank() == 0) result = mean;
  });
  return result;
}

TEST(CApiReducer, AReducerOverCallbacksGivesTheBitsOfCpp) {
  for (const char* codec : {"onebit", "qsgd:bits=4", "optquant:bits=2"}) {
    for (const char* method : {"scatter", "gather"}) {
      Hall hall(3);
      std::vector<std::vector<float>> means(3, std::vector<float>(kCApiCount));
      run_in_hall(hall, [&](int rank, const gw_communicator& communicator) {
        gw_reducer* reducer = opened_reducer(communicator, codec);
        EXPECT_EQ(gw_reducer_set(reducer, "method", method), GW_OK) << gw_error();
        for (uint64_t step = 0; step < 6; ++step)
          EXPECT_EQ(run_reducer(reducer, step, c_api_gradient(rank, step), means[static_cast<size_t>(rank)]), GW_OK)
              << gw_error();
        uint64_t bytes = 0;
        EXPECT_EQ(gw_reducer_get(reducer, "message_bytes", &bytes), GW_OK) << gw_error();
        EXPECT_GT(bytes, 0u);
        gw_reducer_close(reducer);
      });
      EXPECT_EQ(means[0], means_of_cpp(3, codec, 6,
                                       method == std::string("gather") ? ReduceOptions::Method::gather
                                                                       : ReduceOptions::Method::scatter));
      EXPECT_EQ(means[0], means[1]);
      EXPECT_EQ(means[0], means[2]);
      EXPECT_EQ(hall.closed, 3);
      EXPECT_EQ(hall.abandoned, 0);
    }
  }
}

// A matrix that travels as factors, and a vector beside it. There are no messages with such a plan.
TEST(CApiReducer, LowRankGivesTheBitsOfCpp) {
  const char* const codec = "2d=lowrank:rank=3;*=onebit";
  constexpr uint64_t kRows = 50, kSteps = 5;
  Hall hall(3);
  std::vector<std::vector<float>> means(3, std::vector<float>(2 * kCApiCount));
  run_in_hall(hall, [&](int rank, const gw_communicator& communicator) {
    gw_plan* plan = nullptr;
    gw_reducer* reducer = nullptr;
    EXPECT_EQ(gw_plan_open(codec, &plan), GW_OK) << gw_error();
    EXPECT_EQ(gw_plan_add_matrix(plan, "weight", GW_F32, kRows, kCApiCount / kRows), GW_OK) << gw_error();
    EXPECT_EQ(gw_plan_add(plan, "bias", GW_F32, kCApiCount, 1), GW_OK) << gw_error();
    size_t bytes = 0;
    EXPECT_EQ(gw_plan_bytes(plan, &bytes), GW_USAGE);
    EXPECT_NE(std::string(gw_error()).find("lowrank is no codec of messages"), std::string::npos) << gw_error();
    EXPECT_EQ(gw_plan_add_matrix(plan, "large", GW_F32, UINT64_MAX / 2, 3), GW_USAGE);
    EXPECT_EQ(gw_reducer_open(&communicator, plan, &reducer), GW_OK) << gw_error();
    gw_plan_close(plan);
    float* const mean = means[static_cast<size_t>(rank)].data();
    for (uint64_t step = 0; step < kSteps; ++step) {
      const std::vector<float> gradient = c_api_gradient(rank, step);
      const void* in[] = {gradient.data(), gradient.data()};
      void* out[] = {mean, mean + kCApiCount};
      EXPECT_EQ(gw_reducer_run(reducer, step, in, out), GW_OK) << gw_error();
    }
    gw_reducer_close(reducer);
  });
  EXPECT_EQ(means[0], means[1]);
  EXPECT_EQ(means[0], means[2]);
  std::vector<float> expected(2 * kCApiCount);
  run_loopback(3, [&](Engine& engine) {
    Reducer reducer(engine, {{"weight", kCApiCount, DType::f32, 2, kRows}, {"bias", kCApiCount, DType::f32, 1}},
                    {.up = codec});
    std::vector<float> both(2 * kCApiCount);
    for (uint64_t step = 0; step < kSteps; ++step) {
      const std::vector<float> gradient = c_api_gradient(engine.rank(), step);
      const std::span<const float> in[] = {gradient, gradient};
      const std::span<float> out[] = {std::span(both).first(kCApiCount), std::span(both).last(kCApiCount)};
      reducer.run(step, in, out);
    }
    if (engine.rank() == 0) expected = both;
  });
  EXPECT_EQ(means[0], expected);
}

// Nodes are given by their number, or found by the communicator's field.
TEST(CApiReducer, TwoLevelsGiveTheBitsOfCpp) {
  const std::vector<float> expected = means_of_cpp(4, "onebit", 3, ReduceOptions::Method::scatter, 2);
  for (const char* nodes : {"2", "auto"}) {
    Hall hall(4);
    std::vector<std::vector<float>> means(4, std::vector<float>(kCApiCount));
    std::vector<uint64_t> bytes(4), left(4);
    run_in_hall(hall, [&](int rank, const gw_communicator& given) {
      gw_communicator communicator = given;
      communicator.node = 1 + rank / 2;
      gw_reducer* reducer = opened_reducer(communicator, "onebit");
      EXPECT_EQ(gw_reducer_set(reducer, "nodes", nodes), GW_OK) << gw_error();
      const size_t r = static_cast<size_t>(rank);
      for (uint64_t step = 0; step < 3; ++step)
        EXPECT_EQ(run_reducer(reducer, step, c_api_gradient(rank, step), means[r]), GW_OK) << gw_error();
      EXPECT_EQ(gw_reducer_get(reducer, "message_bytes", &bytes[r]), GW_OK) << gw_error();
      EXPECT_EQ(gw_reducer_get(reducer, "node_bytes", &left[r]), GW_OK) << gw_error();
      gw_reducer_close(reducer);
    });
    for (size_t r = 0; r < 4; ++r) {
      EXPECT_EQ(means[r], expected) << nodes << ", rank " << r;
      EXPECT_LT(left[r], bytes[r]);
      EXPECT_GT(left[r], 0u);
    }
  }
}

// A program that knows gw_communicator as it was before the field `node` does not say where its ranks run.
TEST(CApiReducer, AnOlderCommunicatorIsAcceptedAndItsNodesAreNotKnown) {
  gw_communicator old = lone_communicator();
  old.struct_bytes = offsetof(gw_communicator, node);
  old.node = -77;  // not a part of it
  gw_reducer* reducer = opened_reducer(old, "onebit");
  std::vector<float> mean(kCApiCount);
  EXPECT_EQ(gw_reducer_set(reducer, "nodes", "auto"), GW_OK) << gw_error();
  EXPECT_EQ(run_reducer(reducer, 0, c_api_gradient(0, 0), mean), GW_USAGE);
  EXPECT_NE(std::string(gw_error()).find("does not know which ranks share a node"), std::string::npos) << gw_error();
  EXPECT_EQ(gw_reducer_set(reducer, "nodes", "0"), GW_OK) << gw_error();
  EXPECT_EQ(run_reducer(reducer, 0, c_api_gradient(0, 0), mean), GW_OK) << gw_error();
  gw_reducer_close(reducer);
}

TEST(CApiReducer, ARunThatWasSavedGoesOnBitForBit) {
  const std::vector<float> expected = means_of_cpp(2, "onebit", 8, ReduceOptions::Method::scatter);
  const auto folder = std::filesystem::temp_directory_path() / ("c_api_test." + std::to_string(getpid()));
  std::filesystem::create_directory(folder);
  std::vector<std::vector<float>> means(2, std::vector<float>(kCApiCount));
  for (const bool resumed : {false, true}) {
    Hall hall(2);
    run_in_hall(hall, [&](int rank, const gw_communicator& communicator) {
      const std::string path = folder / std::to_string(rank);
      gw_reducer* reducer = opened_reducer(communicator, "onebit");
      if (resumed) {
        EXPECT_EQ(gw_reducer_load(reducer, path.c_str()), GW_OK) << gw_error();
      }
      for (uint64_t step = resumed ? 5 : 0; step < (resumed ? 8u : 5u); ++step)
        EXPECT_EQ(run_reducer(reducer, step, c_api_gradient(rank, step), means[static_cast<size_t>(rank)]), GW_OK)
            << gw_error();
      if (!resumed) {
        EXPECT_EQ(gw_reducer_save(reducer, path.c_str()), GW_OK) << gw_error();
      }
      gw_reducer_close(reducer);
    });
  }
  std::filesystem::remove_all(folder);
  EXPECT_EQ(means[0], expected);
  EXPECT_EQ(means[1], expected);
}

TEST(CApiReducer, RanksThatDisagreeAreToldAndAMissingArgumentLeavesTheReducerUsable) {
  Hall hall(2);
  run_in_hall(hall, [&](int rank, const gw_communicator& communicator) {
    std::vector<float> mean(kCApiCount);
    gw_reducer* reducer = opened_reducer(communicator, "qsgd:bits=4");
    EXPECT_EQ(
        rank == 1 ? gw_reducer_run(reducer, 0, nullptr, nullptr) : run_reducer(reducer, 0, c_api_gradient(0, 0), mean),
        rank == 1 ? GW_USAGE : GW_MISMATCH)
        << gw_error();
    EXPECT_EQ(run_reducer(reducer, 0, c_api_gradient(rank, 0), mean), GW_OK) << gw_error();
    EXPECT_EQ(gw_reducer_set(reducer, "method", "gather"), GW_USAGE) << "it is too late";
    gw_reducer_close(reducer);

    reducer = opened_reducer(communicator, rank == 0 ? "qsgd:bits=4" : "qsgd:bits=5");
    EXPECT_EQ(run_reducer(reducer, 0, c_api_gradient(rank, 0), mean), GW_MISMATCH) << gw_error();
    EXPECT_NE(std::string(gw_error()).find("rank 1"), std::string::npos) << gw_error();
    gw_reducer_close(reducer);
  });
  EXPECT_EQ(hall.closed, 4);
}

TEST(CApiReducer, AFailingCallbackIsQuotedAndEndsTheReducer) {
  Hall hall(2);
  hall.broken_rank = 0;
  run_in_hall(hall, [&](int rank, const gw_communicator& communicator) {
    if (rank == 1) {  // only takes part, so that nobody waits
      const size_t sizes[] = {0, 0};
      const void* send[] = {nullptr, nullptr};
      void* recv[] = {nullptr, nullptr};
      return static_cast<void>(communicator.exchange(communicator.context, send, sizes, recv, sizes));
    }
    std::vector<float> mean(kCApiCount);
    gw_reducer* reducer = opened_reducer(communicator, "qsgd:bits=4");
    for (int attempt = 0; attempt < 2; ++attempt) {
      EXPECT_EQ(run_reducer(reducer, 0, c_api_gradient(0, 0), mean), GW_ENGINE);
      EXPECT_NE(std::string(gw_error()).find("the cable is cut"), std::string::npos) << gw_error();
    }
    gw_reducer_close(reducer);
  });
}

TEST(CApiReducer, ResultsThatAreNotFiniteAreCountedAndChangeNothing) {
  gw_reducer* reducer = opened_reducer(lone_communicator(), "onebit");
  std::vector<float> mean(kCApiCount), bad = c_api_gradient(0, 0);
  bad[7] = std::numeric_limits<float>::infinity();
  EXPECT_EQ(run_reducer(reducer, 0, bad, mean), GW_OK) << gw_error();
  EXPECT_EQ(run_reducer(reducer, 0, c_api_gradient(0, 0), mean), GW_OK) << gw_error();
  uint64_t skipped = 0;
  EXPECT_EQ(gw_reducer_get(reducer, "skipped", &skipped), GW_OK) << gw_error();
  EXPECT_EQ(skipped, 1u);
  EXPECT_EQ(mean, means_of_cpp(1, "onebit", 1, ReduceOptions::Method::scatter));
  gw_reducer_close(reducer);
}

// C++ programs may use the C interface, and their callbacks may throw.
TEST(CApiReducer, AnExceptionOfACallbackBecomesACode) {
  gw_communicator throwing = lone_communicator();
  throwing.size = 2;
  int what = 0;
  throwing.context = &what;
  throwing.exchange = [](void* context, const void* const*, const size_t*, void* const*, const size_t*) -> int {
    switch (*static_cast<int*>(context)) {
      case 0:
        throw std::runtime_error("thrown by the callback");
      case 1:
        throw std::bad_alloc();
      default:
        throw 7;
    }
  };
  throwing.abandon = [](void*, const char*) { throw 8; };
  throwing.close = [](void*) { throw 9; };
  for (what = 0; what < 3; ++what) {
    std::vector<float> mean(kCApiCount);
    gw_reducer* reducer = opened_reducer(throwing, "onebit");
    EXPECT_EQ(run_reducer(reducer, 0, c_api_gradient(0, 0), mean), what == 1 ? GW_RESOURCE : GW_INTERNAL);
    EXPECT_NE(std::string(gw_error())
                  .find(what == 0   ? "thrown by the callback"
                        : what == 1 ? "memory"
                                    : "exception"),
              std::string::npos)
        << gw_error();
    gw_reducer_close(reducer);
  }
}

// Two tensors of different types and codecs: each gets its own mean, in its own type.
TEST(CApiReducer, SeveralTensorsKeepTheirTypesAndCodecs) {
  Hall hall(2);
  run_in_hall(hall, [&](int rank, const gw_communicator& communicator) {
    gw_plan* plan = nullptr;
    ASSERT_EQ(gw_plan_open("1d=fp32;*=qsgd:bits=4", &plan), GW_OK) << gw_error();
    ASSERT_EQ(gw_plan_add(plan, "bias", GW_F32, 3, 1), GW_OK) << gw_error();
    ASSERT_EQ(gw_plan_add(plan, "nothing", GW_F32, 0, 2), GW_OK) << gw_error();
    ASSERT_EQ(gw_plan_add(plan, "weight", GW_F16, 2000, 2), GW_OK) << gw_error();
    gw_reducer* reducer = nullptr;
    ASSERT_EQ(gw_reducer_open(&communicator, plan, &reducer), GW_OK) << gw_error();
    gw_plan_close(plan);
    float bias[3] = {1.0f + static_cast<float>(rank), -2, 1e-7f};
    std::vector<uint16_t> weight(2000, 0x4000);  // 2.0, which 4 bits give exactly where it is the largest
    const void* in[] = {bias, nullptr, weight.data()};
    void* out[] = {bias, nullptr, weight.data()};
    ASSERT_EQ(gw_reducer_run(reducer, 0, in, out), GW_OK) << gw_error();
    EXPECT_EQ(bias[0], 1.5f);
    EXPECT_EQ(bias[2], 1e-7f);
    EXPECT_EQ(weight, std::vector<uint16_t>(2000, 0x4000));
    gw_reducer_close(reducer);
  });
}

// What is loaded may be anything: the code says so, or the next step does, and the process goes on.
TEST(CApiReducer, StrangeFilesAreRefused) {
  const std::string path = std::filesystem::temp_directory_path() / ("c_api_state." + std::to_string(getpid()));
  std::vector<float> mean(kCApiCount);
  gw_reducer* reducer = opened_reducer(lone_communicator(), "onebit");
  ASSERT_EQ(run_reducer(reducer, 0, c_api_gradient(0, 0), mean), GW_OK) << gw_error();
  ASSERT_EQ(gw_reducer_save(reducer, path.c_str()), GW_OK) << gw_error();
  EXPECT_EQ(gw_reducer_save(reducer, "/nowhere/at/all"), GW_IO);
  std::string whole;
  {
    std::ifstream file(path, std::ios::binary);
    whole.assign(std::istreambuf_iterator<char>(file), {});
  }
  std::mt19937_64 random(3);
  for (int round = 0; round < 60; ++round) {
    std::string damaged = whole;
    if (round % 2)
      damaged[random() % (round % 4 == 1 ? 64 : damaged.size())] ^= static_cast<char>(1u << random() % 8);
    else
      damaged.resize(random() % damaged.size());
    std::ofstream(path, std::ios::binary | std::ios::trunc) << damaged;
    EXPECT_NE(gw_reducer_load(reducer, path.c_str()), GW_OK) << "round " << round;
    EXPECT_STRNE(gw_error(), "") << "round " << round;
  }
  // The state of another model: its tensor has the same name and another size.
  std::ofstream(path, std::ios::binary | std::ios::trunc) << whole;
  const PlanHandle smaller("onebit", 100, "weight");
  const gw_communicator alone = lone_communicator();
  gw_reducer* other = nullptr;
  ASSERT_EQ(gw_reducer_open(&alone, smaller, &other), GW_OK) << gw_error();
  const int loaded = gw_reducer_load(other, path.c_str());
  const int ran = run_reducer(other, 1, c_api_gradient(0, 0), mean);
  EXPECT_TRUE((loaded == GW_OK || loaded == GW_USAGE || loaded == GW_MISMATCH) && (ran == GW_OK || ran == GW_USAGE))
      << gw_error();
  gw_reducer_close(other);
  EXPECT_EQ(run_reducer(reducer, 1, c_api_gradient(0, 1), mean), GW_OK) << gw_error();
  gw_reducer_close(reducer);
  std::filesystem::remove(path);
}

}  // namespace
}  // namespace gradwire
