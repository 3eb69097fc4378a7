// SPDX-License-Identifier: Apache-2.0
// The server is killed at any point of a step, also while it saves, and its disk fails. Workers reconnect by themselves
// and send again what it forgot: it ends with the weights of one that was never killed.
#include <fmt/format.h>

#include <cstring>
#include <ctime>
#include <iostream>

#include "server/model_state.h"
#include "server/server_faults.h"

namespace gradwire::server {
namespace {

struct ServerMode {
  const char* name;
  bool updates, pools;
};

Signature signature_of(const ServerMode& mode) {
  Signature signature = small_signature();
  signature.sends_updates = mode.updates;
  signature.pools = mode.pools;
  if (mode.updates) signature.down = "loggrid:k=6";
  return signature;
}

// With shared moments a step depends on their mean, and so does everything after it.
void descend(ToyWorkers& toys, const ServerMode& mode, uint64_t until) {
  std::vector<std::thread> threads;
  for (size_t i = 0; i < toys.size(); ++i)
    threads.emplace_back([&, i] {
      ToyWorker& toy = *toys[i];
      while (toy.step < until) {
        float rate = 0.1f;
        if (mode.pools) {
          ToyTensors second(signature_of(mode), static_cast<float>(i + 1) + 0.37f * static_cast<float>(toy.step));
          toy.client.pool(second.pointers);
          rate = 0.05f + 0.002f * second.values[2][69999];
        }
        toy.work(rate);
      }
    });
  for (std::thread& thread : threads) thread.join();
}

std::vector<std::vector<float>> undisturbed(const ServerMode& mode, size_t workers, uint64_t until) {
  ServerFixture server(fault_options(static_cast<uint32_t>(workers)));
  ToyWorkers toys = make_workers(server, signature_of(mode), workers);
  join(toys);
  descend(toys, mode, until);
  expect_agreement(toys);
  return toys[0]->weights.values;
}

class ServerKilled : public testing::TestWithParam<ServerMode> {};

TEST_P(ServerKilled, AtAnyPointOfAStepEndsWithTheSameWeights) {
  const ServerMode mode = GetParam();
  const auto expected = undisturbed(mode, 2, 9);
  for (uint64_t point = 0; point < 16; point += test::lighter(1, 3)) {
    SCOPED_TRACE(point);
    HubOptions options = fault_options(2);
    options.checkpoint = scratch_file(std::string("killed_") + mode.name);
    options.save_every = 3;
    ServerFixture server(options);
    std::atomic<bool> armed{false};
    std::atomic<uint64_t> events{0};
    const uint64_t when = 7 + point * 5;  // of all that both workers send and listen for
    const LinkHook hook = [&](const Frame*) {
      if (!armed || events++ != when) return;
      server.kill();
      server.start();
    };
    ToyWorkers toys;
    for (uint64_t i = 0; i < 2; ++i)
      toys.push_back(std::make_unique<ToyWorker>(hooked(server, i + 1, hook), signature_of(mode), i + 1));
    join(toys);
    ASSERT_TRUE(on_disk(server, 0));
    armed = true;
    descend(toys, mode, 9);
    EXPECT_GT(events, when);
    expect_agreement(toys);
    EXPECT_TRUE(toys[0]->weights.values == expected);
    expect_ledger(*server.hub());
    for (auto& toy : toys) EXPECT_GT(toy->client.counts().reconnects, 0u);
  }
}

TEST_P(ServerKilled, WhileItSavesEndsWithTheSameWeights) {
  const ServerMode mode = GetParam();
  const auto expected = undisturbed(mode, 2, 9);
  for (const char* at : {"opened", "half", "written", "synced", "linked", "renamed", "kept"}) {
    SCOPED_TRACE(at);
    HubOptions options = fault_options(2);
    options.checkpoint = scratch_file(std::string("saving_") + mode.name);
    options.save_every = 3;
    std::atomic<bool> armed{false}, there{false}, dead{false};
    options.save_hook = [&](const char* stage) {
      if (!armed || std::strcmp(stage, at) != 0) return;
      there = true;
      while (!dead) std::this_thread::sleep_for(1ms);
      throw Error(ErrorKind::io, "killed here", "path");
    };
    ServerFixture server(options);
    ToyWorkers toys = make_workers(server, signature_of(mode), 2);
    join(toys);
    ASSERT_TRUE(on_disk(server, 0));
    descend(toys, mode, 4);  // one is saved as well
    ASSERT_TRUE(on_disk(server, 3));
    armed = true;
    std::thread killer([&] {
      EXPECT_TRUE(eventually([&] { return there.load(); }));
      std::thread release([&] {
        EXPECT_TRUE(eventually([&] { return server.hub() == nullptr; }));  // from here on it reaches no worker
        armed = false;
        dead = true;
      });
      server.kill();
      release.join();
      server.start();
    });
    descend(toys, mode, 9);
    killer.join();
    expect_agreement(toys);
    EXPECT_TRUE(toys[0]->weights.values == expected);
    expect_ledger(*server.hub());
  }
}

INSTANTIATE_TEST_SUITE_P(Sending, ServerKilled,
                         testing::Values(ServerMode{"weights", false, false}, ServerMode{"updates", true, false},
                                         ServerMode{"pools", false, true}),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(ServerRestart, AStepWhoseOnlyContributorIsDeadIsPassedOver) {
  HubOptions options = fault_options(1);
  options.deadline_s = 0.15;
  options.return_s = 0.4;
  options.checkpoint = scratch_file("only.gwc");
  options.save_every = 4;
  ServerFixture server(options);
  ToyWorkers toys = make_workers(server, small_signature(), 2);
  join(toys);
  work(toys, 4);
  ASSERT_TRUE(on_disk(server, 4));
  toys[0]->work();  // alone, at the deadline
  EXPECT_EQ(toys[1]->work(), 5u);
  EXPECT_GT(toys[1]->client.counts().late, 0u);
  // The other one's update of the next step is there first, so it counts whether or not the first one is in time.
  const uint64_t before = server.hub()->status()["bytes"]["up"];
  std::thread second([&] { toys[1]->work(); });
  EXPECT_TRUE(eventually([&] { return server.hub()->status()["bytes"]["up"] > before; }));
  toys[0]->work();
  second.join();
  ASSERT_EQ(server.hub()->status()["durable_step"], 4);
  server.kill();
  toys.erase(toys.begin());
  server.start();
  ASSERT_EQ(server.hub()->status()["step"], 4);
  work(toys, 9);
  EXPECT_GT(toys[0]->client.counts().replayed, 0u);
  expect_ledger(*server.hub());
  ASSERT_TRUE(toys[0]->client.leave(kPatience));
  EXPECT_LT(server.hub()->status()["ledger"]["relative"], 1e-6);
}

TEST(ServerRestart, ADamagedCheckpointIsAStepBackThatTheLedgerShows) {
  HubOptions options = fault_options(2);
  options.checkpoint = scratch_file("damaged.gwc");
  options.save_every = 3;
  ServerFixture server(options);
  ToyWorkers toys = make_workers(server, small_signature(), 2);
  join(toys);
  for (uint64_t step : {3, 6}) {
    work(toys, step);
    ASSERT_TRUE(on_disk(server, step));
  }
  work(toys, 7);  // on the way they hear of it
  server.kill();
  std::filesystem::resize_file(options.checkpoint, std::filesystem::file_size(options.checkpoint) / 2);
  server.start();
  EXPECT_EQ(server.hub()->status()["step"], 3);
  work(toys, 9);
  expect_agreement(toys);
  // Workers had been told that steps 3 to 5 were safe: these are gone, and not in silence.
  EXPECT_GT(server.hub()->status()["ledger"]["relative"], 1e-3);
}

TEST(ServerRestart, ACheckpointBehindALinkIsSavedWhereItLeadsAndTheLinkStays) {
  namespace fs = std::filesystem;
  const fs::path folder = scratch_file("behind_a_link"), link = folder / "link.gwc", there = folder / "far" / "ps.gwc";
  fs::remove_all(folder);
  fs::create_directories(there.parent_path());
  fs::create_symlink("far/ps.gwc", link);  // it leads to nothing yet
  HubOptions options = fault_options(1);
  options.checkpoint = link.string();
  options.save_every = 2;
  ServerFixture server(options);
  ToyWorkers toys = make_workers(server, small_signature(), 1);
  join(toys);
  work(toys, 4);
  ASSERT_TRUE(on_disk(server, 4));
  EXPECT_EQ(fs::read_symlink(link), "far/ps.gwc");
  EXPECT_TRUE(fs::is_regular_file(fs::symlink_status(there)));
  EXPECT_TRUE(fs::exists(there.string() + ".old"));
  EXPECT_FALSE(fs::exists(fs::symlink_status(link.string() + ".old")));
  // The file is in use, whichever of its names a second server is given.
  options.checkpoint = there.string();
  EXPECT_THROW(ServerHub{options}, Error);
  server.kill();
  server.start();
  EXPECT_GE(server.hub()->status()["step"], 4);
  work(toys, 6);
  ASSERT_TRUE(on_disk(server, 6));
  EXPECT_TRUE(fs::is_symlink(link));
  server.kill();
  fs::remove_all(folder);
}

// The largest number of tensors that a server takes. To restore them is about as much work as to read them, and not the
// square of it.
TEST(ServerRestart, ACheckpointOfManyTensorsIsLoadedInATimeThatGrowsWithTheirNumber) {
  Signature signature;
  const uint64_t tensors = ModelLimits{}.max_tensors / test::lighter<uint64_t>(1, 16);
  for (uint64_t i = 0; i < tensors; ++i)
    signature.parameters.push_back({fmt::format("block.of.layers.{:06}.weight", i), {1}});
  HubOptions options = fault_options(1);
  options.checkpoint = scratch_file("many_tensors.gwc");
  const ServerModel model(signature, options.shard_elements, false);
  ModelCopy copy;
  for (const ShardLayout& layout : model.layouts)
    copy.shards.push_back({7, 0, std::vector<float>(layout.elements(), 0.5f), {}, {}});
  ServerState state = copied_arrays(model, copy);
  add_bookkeeping(state, model, copy, options, Membership(options));
  state.extra["bytes_up"] = state.extra["bytes_down"] = 0;
  state.extra["losses"] = nlohmann::json::array();
  save_state(options.checkpoint, state);
  const auto seconds = [] { return static_cast<double>(std::clock()) / CLOCKS_PER_SEC; };  // of the processor
  double begin = seconds();
  EXPECT_EQ(load_state(options.checkpoint).weights.size(), signature.parameters.size());
  const double read = seconds() - begin;
  begin = seconds();
  ServerHub hub(options);
  const double loaded = seconds() - begin;
  EXPECT_EQ(hub.status()["step"], 7);
  std::cout << "read in " << read << " s, loaded in " << loaded << " s\n";
  EXPECT_LT(loaded, 8 * read);
  std::filesystem::remove(options.checkpoint);
}

// The disk.

class DiskTrouble : public testing::TestWithParam<std::tuple<bool, bool>> {};

TEST_P(DiskTrouble, HoldsTrainingUpAfterThreeIntervalsAndNotForGood) {
  const auto [async, hangs] = GetParam();
  HubOptions options = fault_options(2);
  options.async = async;
  options.checkpoint = scratch_file("disk.gwc");
  options.save_every = 3;
  std::atomic<bool> broken{false};
  options.save_hook = [&, hangs = hangs](const char*) {
    while (hangs && broken) std::this_thread::sleep_for(1ms);
    if (broken) throw Error(ErrorKind::io, "No space left on device", "path");
  };
  ServerFixture server(options);
  ToyWorkers toys = make_workers(server, small_signature(), 2);
  join(toys);
  ASSERT_TRUE(on_disk(server, 0));
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
  EXPECT_TRUE(eventually([&] { return server.hub()->status()["state"] == "waiting for the disk"; }));
  EXPECT_TRUE(eventually([&] { return server.hub()->status()["step"] >= 10; }));
  const uint64_t step = server.hub()->status()["step"];
  EXPECT_LE(step, async ? 21u : 10u);
  EXPECT_EQ(running, 2u);
  if (!hangs) {
    EXPECT_TRUE(eventually([&] { return server.hub()->status()["checkpoint"]["failed"] > 0; }));
    EXPECT_EQ(server.hub()->status()["checkpoint"]["last_error"], "No space left on device");
  }
  broken = false;
  for (std::thread& thread : threads) thread.join();
  expect_ledger(*server.hub());
  const uint64_t one =
      static_cast<uint64_t>(toys[0]->client.bits() * static_cast<double>(toys[0]->weights.count()) / 8);
  EXPECT_LE(most, 23 * one);
  if (!async) {
    EXPECT_LE(most, 12 * one);
    expect_agreement(toys);
  }
  EXPECT_EQ(server.hub()->status()["checkpoint"]["last_error"], nullptr);
}
INSTANTIATE_TEST_SUITE_P(AsyncHangs, DiskTrouble, testing::Combine(testing::Bool(), testing::Bool()));

}  // namespace
}  // namespace gradwire::server
