// SPDX-License-Identifier: Apache-2.0
// Everything at once: workers join, leave, are killed, stall and lose their connections while the server is killed and
// restarted, by a schedule that a seed decides. When it is over, those who are left agree bit for bit, and everything
// that was computed is applied or was lost with a worker that was killed. And many workers at a time.
#include <algorithm>

#include "server/server_faults.h"

namespace gradwire::server {
namespace {

Signature storm_signature() {
  Signature signature;
  signature.parameters = {{"a", {40, 50}}, {"b", {30}}, {"c", {300, 150}}};  // two parts
  return signature;
}

// A worker in a thread of its own, and what is to happen to it.
class StormWorker {
 public:
  StormWorker(ServerFixture& server, uint64_t seed) {
    thread_ = std::thread([this, &server, seed] { live(server, seed); });
  }
  ~StormWorker() { thread_.join(); }

  std::atomic<int> doom{-1}, cut{-1};
  std::atomic<int> stall_ms{0};
  std::atomic<bool> leave{false}, joined{false}, gone{false}, rest{false};
  std::atomic<uint64_t> target{0};
  std::unique_ptr<ToyWorker> toy;  // not for others before gone or resting
  std::atomic<bool> resting{false};
  std::string failure;
  uint64_t most_kept = 0;

 private:
  void live(ServerFixture& server, uint64_t seed) {
    const LinkHook hook = [this](const Frame*) {
      if (doom >= 0 && doom-- == 0) throw Killed{};
      if (cut >= 0 && cut-- == 0) throw LinkLost("cut");
    };
    try {
      toy = std::make_unique<ToyWorker>(hooked(server, seed, hook), storm_signature(), seed);
      toy->join();
      joined = true;
      while (!leave && !(rest && (target == 0 || toy->step >= target))) {
        if (const int ms = stall_ms.exchange(0)) std::this_thread::sleep_for(std::chrono::milliseconds(ms));
        toy->work();
        most_kept = std::max(most_kept, toy->client.memory().messages);
      }
      if (leave) {
        if (!toy->client.leave(kPatience)) failure = "could not leave";
        gone = true;
      }
    } catch (const Killed&) {
      toy.reset();
      gone = true;
    } catch (const std::exception& error) {
      failure = error.what();
      gone = true;
    }
    resting = true;
  }

  std::thread thread_;
};

struct Counts {
  int joins = 0, leaves = 0, kills = 0, server_kills = 0, layouts = 0, stalls = 0;
};

void storm(uint64_t seed, int events, bool async) {
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  const auto pick = [&](uint64_t n) { return random() % n; };
  HubOptions options = fault_options(1);
  options.async = async;
  options.deadline_s = 0.1;
  options.return_s = 0.3;
  options.rejoin_s = 1;
  options.save_every = 5;
  options.checkpoint = scratch_file("storm_" + std::to_string(seed) + (async ? "_async.gwc" : ".gwc"));
  ServerFixture server(options);
  std::vector<std::unique_ptr<StormWorker>> storm_workers;
  uint64_t next = seed * 1000;
  Counts counts;
  const auto alive = [&] {
    std::vector<StormWorker*> list;
    for (const auto& worker : storm_workers)
      if (worker->joined && !worker->gone && !worker->leave && worker->doom < 0) list.push_back(worker.get());
    return list;
  };
  const auto bring = [&] {
    storm_workers.push_back(std::make_unique<StormWorker>(server, next++));
    StormWorker& worker = *storm_workers.back();
    EXPECT_TRUE(eventually([&] { return worker.joined || worker.gone; }));
    ++counts.joins;
  };
  for (int i = 0; i < 3; ++i) bring();
  ASSERT_TRUE(on_disk(server, 0));
  uint64_t memory_early = 0, memory_late = 0;
  for (int event = 0; event < events; ++event) {
    // Some steps between two events, or a moment where there are none.
    const uint64_t wanted = server.hub()->status()["step"].get<uint64_t>() + pick(3);
    (void)eventually([&] { return server.hub()->status()["step"] >= wanted; }, 0.15);
    const std::vector<StormWorker*> list = alive();
    const auto one = [&]() -> StormWorker& { return *list[pick(list.size())]; };
    const uint64_t kind = pick(10);
    if (list.size() < 3 || (kind < 2 && list.size() < 6)) {
      bring();
    } else if (kind == 2 && list.size() > 3) {
      one().leave = true;
      ++counts.leaves;
    } else if (kind <= 4 && list.size() > 3) {
      one().doom = static_cast<int>(pick(12));
      ++counts.kills;
    } else if (kind == 5) {
      server.kill();
      server.start();
      ++counts.server_kills;
    } else if (kind <= 7) {
      one().cut = static_cast<int>(pick(12));
      ++counts.layouts;
    } else {
      one().stall_ms = static_cast<int>(20 + pick(200));
      ++counts.stalls;
    }
    const uint64_t memory = server.hub()->status()["memory_bytes"];
    (event < events / 4 ? memory_early : memory_late) =
        std::max(event < events / 4 ? memory_early : memory_late, memory);
    std::erase_if(storm_workers, [](const auto& worker) {
      if (!worker->gone || !worker->resting) return false;
      EXPECT_EQ(worker->failure, "");
      return true;
    });
  }
  // At rest: all who are left come to the same step.
  std::erase_if(storm_workers, [](const auto& worker) {
    return (worker->leave || worker->doom >= 0) && eventually([&] { return worker->resting.load(); });
  });
  const uint64_t target = server.hub()->status()["step"].get<uint64_t>() + 10;
  for (const auto& worker : storm_workers) {
    worker->target = async ? 0 : target;
    worker->rest = true;
  }
  ToyWorkers toys;
  uint64_t kept = 0;
  for (const auto& worker : storm_workers) {
    ASSERT_TRUE(eventually([&] { return worker->resting.load(); }));
    EXPECT_EQ(worker->failure, "");
    kept = std::max(kept, worker->most_kept);
    if (worker->toy && !worker->gone) toys.push_back(std::move(worker->toy));
  }
  EXPECT_GE(toys.size(), 2u);
  if (async)
    for (auto& toy : toys) {
      toy->client.skip(toy->weights.pointers, Client::SkipReason::not_finite);
      toy->step = 0;
    }
  expect_agreement(toys);
  expect_ledger(*server.hub());
  EXPECT_LT(memory_late, 2 * memory_early);
  const uint64_t one =
      static_cast<uint64_t>(toys[0]->client.bits() * static_cast<double>(toys[0]->weights.count()) / 8);
  EXPECT_LT(kept, (async ? 6 : 1) * 20 * one);
  // And when they have left, nothing is held by anybody.
  std::vector<std::thread> threads;
  for (auto& toy : toys) threads.emplace_back([&toy] { EXPECT_TRUE(toy->client.leave(kPatience)); });
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(eventually([&] { return std::fabs(server.hub()->status()["ledger"]["held"].get<double>()) == 0; }));
  expect_ledger(*server.hub());
  std::printf("seed %llu: %d joins, %d leaves, %d kills, %d server kills, %d layouts, %d stalls\n",
              static_cast<unsigned long long>(seed), counts.joins, counts.leaves, counts.kills, counts.server_kills,
              counts.layouts, counts.stalls);
}

TEST(ServerStorm, TwoHundredEvents) { storm(1, test::lighter(200, 66), false); }
TEST(ServerStorm, WithoutSteps) { storm(2, test::lighter(80, 27), true); }
TEST(ServerStorm, LongThousandsOfEvents) {
  for (uint64_t seed = 10; seed < 22; ++seed) storm(seed, 400, seed % 3 == 2);
}

TEST(ServerStorm, SixtyFourWorkersAtOnceAndNotOneMore) {
  HubOptions options = fault_options(64);
  options.max_workers = 64;
  options.checkpoint = scratch_file("sixty_four.gwc");
  options.save_every = 4;
  ServerFixture server(options);
  Signature signature = storm_signature();
  signature.down = "fp32";
  ToyWorkers toys = make_workers(server, signature, 64);
  std::vector<std::thread> threads;
  for (auto& toy : toys) threads.emplace_back([&toy] { toy->join(); });
  for (std::thread& thread : threads) thread.join();
  ToyWorker another(server, signature, 100);
  EXPECT_THROW(another.join(), Error);
  work(toys, 5);
  const uint64_t early = server.hub()->status()["memory_bytes"];
  work(toys, test::lighter(20, 10));
  const uint64_t late = server.hub()->status()["memory_bytes"];
  expect_agreement(toys);
  expect_nothing_missing(toys);
  // 64 workers that go the same way add up to more than the root of their squares, and f32 rounds by what they add up
  // to.
  const nlohmann::json ledger = server.hub()->status()["ledger"];
  EXPECT_LT(std::fabs(ledger["difference"].get<double>()), 1e-6 * std::fabs(ledger["computed"].get<double>()))
      << ledger;
  EXPECT_LT(ledger["relative"].get<double>(), 1e-5) << ledger;
  EXPECT_LE(late, early + early / 2);
  EXPECT_EQ(server.hub()->status()["workers"]["present"], 64);
  EXPECT_EQ(server.hub()->status()["refused"]["full"], 1);
}

}  // namespace
}  // namespace gradwire::server
