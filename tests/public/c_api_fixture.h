// SPDX-License-Identifier: Apache-2.0
// Plans for the tests of the C interface, and ranks that are threads.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "gradwire.h"

namespace gradwire {

inline constexpr size_t kCApiCount = 5000;

inline std::vector<float> c_api_gradient(int rank, uint64_t step) {
  std::mt19937 random(static_cast<unsigned>(rank * 1000 + static_cast<int>(step)));
  std::normal_distribution<float> normal;
  std::vector<float> values(kCApiCount);
  for (float& value : values) value = normal(random);
  return values;
}

// A plan with one tensor, which is closed at the end.
struct PlanHandle {
  explicit PlanHandle(const std::string& codec, uint64_t count = kCApiCount, const char* name = "",
                      int dtype = GW_F32) {
    EXPECT_EQ(gw_plan_open(codec.c_str(), &plan), GW_OK) << gw_error();
    EXPECT_EQ(gw_plan_add(plan, name, dtype, count, 2), GW_OK) << gw_error();
  }
  ~PlanHandle() { gw_plan_close(plan); }
  PlanHandle(const PlanHandle&) = delete;
  PlanHandle& operator=(const PlanHandle&) = delete;
  operator gw_plan*() const { return plan; }
  gw_plan* plan = nullptr;
};

// The message of one tensor, at step 7 with seed 1.
template <class Element>
std::vector<std::byte> c_api_encode(gw_plan* plan, const std::vector<Element>& values) {
  size_t bytes = 0, written = 0;
  EXPECT_EQ(gw_plan_bytes(plan, &bytes), GW_OK) << gw_error();
  std::vector<std::byte> message(bytes);
  const void* tensors[] = {values.data()};
  EXPECT_EQ(gw_encode(plan, tensors, 7, 1, message.data(), bytes, &written), GW_OK) << gw_error();
  EXPECT_EQ(written, bytes);
  return message;
}

// Everybody shows what it sends, and takes what it wants when all have.
struct Hall {
  explicit Hall(int ranks) : world(ranks), meet(ranks), shown(static_cast<size_t>(ranks)) {}
  const int world;
  std::barrier<> meet;
  std::vector<const void* const*> shown;
  int broken_rank = -1;
  std::atomic<int> closed{0}, abandoned{0};
};

struct HallPlace {
  Hall* hall;
  int rank;
};

inline int exchange_in_hall(void* context, const void* const* send, const size_t* send_bytes, void* const* recv,
                            const size_t* recv_bytes) {
  const auto& [hall, rank] = *static_cast<HallPlace*>(context);
  EXPECT_EQ(send_bytes[rank] + recv_bytes[rank], 0u) << "a rank needs nobody to talk to itself";
  hall->shown[static_cast<size_t>(rank)] = send;
  hall->meet.arrive_and_wait();
  if (rank != hall->broken_rank)
    for (int p = 0; p < hall->world; ++p)
      if (recv_bytes[p] > 0) std::memcpy(recv[p], hall->shown[static_cast<size_t>(p)][rank], recv_bytes[p]);
  hall->meet.arrive_and_wait();
  return rank == hall->broken_rank ? gw_fail(GW_ENGINE, "the cable is cut") : GW_OK;
}

inline void run_in_hall(Hall& hall, const std::function<void(int rank, const gw_communicator&)>& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < hall.world; ++rank)
    threads.emplace_back([&, rank] {
      HallPlace place{&hall, rank};
      gw_communicator communicator{};
      communicator.struct_bytes = sizeof communicator;
      communicator.rank = rank;
      communicator.size = hall.world;
      communicator.context = &place;
      communicator.exchange = exchange_in_hall;
      communicator.abandon = [](void* context, const char*) { ++static_cast<HallPlace*>(context)->hall->abandoned; };
      communicator.close = [](void* context) { ++static_cast<HallPlace*>(context)->hall->closed; };
      body(rank, communicator);
    });
  for (std::thread& thread : threads) thread.join();
}

// A communicator of one rank, which needs no callbacks.
inline gw_communicator lone_communicator() {
  gw_communicator alone{};
  alone.struct_bytes = sizeof alone;
  alone.size = 1;
  return alone;
}

inline gw_reducer* opened_reducer(const gw_communicator& communicator, const char* codec) {
  const PlanHandle plan(codec, kCApiCount, "weight");  // a reducer does not need it after this
  gw_reducer* reducer = nullptr;
  EXPECT_EQ(gw_reducer_open(&communicator, plan, &reducer), GW_OK) << gw_error();
  EXPECT_EQ(gw_reducer_set(reducer, "seed", "3"), GW_OK) << gw_error();
  return reducer;
}

inline int run_reducer(gw_reducer* reducer, uint64_t step, const std::vector<float>& in, std::vector<float>& mean) {
  const void* from[] = {in.data()};
  void* to[] = {mean.data()};
  return gw_reducer_run(reducer, step, from, to);
}

}  // namespace gradwire
