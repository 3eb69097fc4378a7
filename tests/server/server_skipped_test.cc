// SPDX-License-Identifier: Apache-2.0
// Steps that change nothing because something was not finite: they are counted, and a training that skips more than
// half of its steps has failed. Steps in which workers only watch are none of them.
#include <string>
#include <vector>

#include "server/server_faults.h"

namespace gradwire::server {
namespace {

using SkipReason = Client::SkipReason;

struct Journaled {
  HubOptions options;
  std::vector<nlohmann::json> lines;
  explicit Journaled(uint32_t min_workers) : options(small_hub(min_workers, kPatience)) {
    options.log = [this](const nlohmann::json& event) { lines.push_back(event); };
  }
  size_t count(const std::string& event) const {
    return static_cast<size_t>(
        std::count_if(lines.begin(), lines.end(), [&](const auto& one) { return one.at("event") == event; }));
  }
};

void expect_counts(ServerFixture& server, uint64_t skipped, bool failed) {
  const nlohmann::json status = server.hub()->status();
  EXPECT_EQ(status["skipped_steps"], skipped);
  EXPECT_EQ(status["failed"], failed);
  EXPECT_EQ(!server.hub()->failure().empty(), failed);
}

TEST(ServerSkipped, MoreThanHalfOfTheStepsIsAFailureAndSaidInWords) {
  Journaled journal(1);
  ServerFixture server(journal.options);
  expect_counts(server, 0, false);  // there is no model yet
  ToyWorker toy(server, small_signature(), 1);
  toy.join();
  for (int i = 0; i < 3; ++i) toy.work();
  expect_counts(server, 0, false);
  for (int i = 0; i < 3; ++i) toy.step = toy.client.skip(toy.weights.pointers, SkipReason::not_finite);
  expect_counts(server, 3, false);  // exactly half
  toy.step = toy.client.skip(toy.weights.pointers, SkipReason::not_finite);
  EXPECT_EQ(toy.step, 7u);
  expect_counts(server, 4, true);
  EXPECT_EQ(server.hub()->failure(), "4 of 7 steps were left out, because they were not finite");
  EXPECT_GE(journal.count("skipped"), 4u);  // a line for each shard
  server.hub()->stop();
  ASSERT_EQ(journal.count("failed"), 1u);
  EXPECT_EQ(journal.count("stopped"), 1u);
  // A training that recovers has not failed.
  ServerFixture other(small_hub(1, kPatience));
  ToyWorker second(other, small_signature(), 1);
  second.join();
  second.client.skip(second.weights.pointers, SkipReason::not_finite);
  expect_counts(other, 1, true);
  second.work();
  expect_counts(other, 1, false);
}

TEST(ServerSkipped, AStepWithAnUpdateIsNotSkippedAndWatchingIsNoFault) {
  ServerFixture server(small_hub(2, kPatience));
  ToyWorkers toys = make_workers(server, small_signature(), 2);
  join(toys);
  for (int i = 0; i < 5; ++i) {
    std::thread other([&] { toys[1]->work(); });
    toys[0]->client.skip(toys[0]->weights.pointers, SkipReason::not_finite);
    other.join();
  }
  expect_counts(server, 0, false);
  for (int i = 0; i < 9; ++i) {
    std::thread other([&] { toys[1]->client.skip(toys[1]->weights.pointers, SkipReason::watching); });
    toys[0]->client.skip(toys[0]->weights.pointers, SkipReason::watching);
    other.join();
  }
  EXPECT_EQ(server.hub()->status()["step"], 14);
  expect_counts(server, 0, false);
  // One worker's gradient was not finite, and the other one watches: nothing is left of the step.
  std::thread other([&] { toys[1]->client.skip(toys[1]->weights.pointers, SkipReason::watching); });
  toys[0]->client.skip(toys[0]->weights.pointers, SkipReason::not_finite);
  other.join();
  expect_counts(server, 1, false);
}

// Updates that are finite can still lead to weights that are not. The server sees this itself.
TEST(ServerSkipped, WeightsThatWouldNotStayFiniteAreSkippedSteps) {
  for (const bool async : {false, true}) {
    HubOptions options = small_hub(1, kPatience);
    options.async = async;
    ServerFixture server(options);
    ToyWorker toy(server, plain_signature(), 1);
    toy.join();
    for (auto& one : toy.update.values) std::fill(one.begin(), one.end(), 3e38f);
    for (int i = 0; i < 4; ++i) toy.client.exchange(toy.update.constant(), toy.weights.pointers);
    EXPECT_GT(toy.client.counts().corrupt, 0u);
    // Without steps, versions count the updates that were applied.
    EXPECT_EQ(server.hub()->status()["step"], async ? 1 : 4);
    expect_counts(server, 3, true);
    for (const auto& one : toy.weights.values)
      for (float value : one) ASSERT_EQ(value, -3e38f);
  }
}

TEST(ServerSkipped, WithoutStepsEachWorkerIsCounted) {
  HubOptions options = small_hub(1, kPatience);
  options.async = true;
  ServerFixture server(options);
  ToyWorkers toys = make_workers(server, small_signature(), 2);
  join(toys);
  for (int i = 0; i < 3; ++i) {
    toys[0]->work();
    toys[1]->client.skip(toys[1]->weights.pointers, SkipReason::not_finite);
  }
  expect_counts(server, 3, false);  // of 6
  toys[0]->client.skip(toys[0]->weights.pointers, SkipReason::watching);
  expect_counts(server, 3, false);
  toys[1]->client.skip(toys[1]->weights.pointers, SkipReason::not_finite);
  expect_counts(server, 4, true);
  EXPECT_EQ(server.hub()->failure(), "4 of 7 updates were left out, because they were not finite");
}

TEST(ServerSkipped, ACheckpointKeepsTheCount) {
  HubOptions options = small_hub(1, kPatience);
  options.checkpoint = scratch_file("skipped.gwc");
  options.save_every = 1;
  ServerFixture server(options);
  ToyWorker toy(server, small_signature(), 1);
  toy.join();
  toy.work();
  for (int i = 0; i < 3; ++i) toy.step = toy.client.skip(toy.weights.pointers, SkipReason::not_finite);
  ASSERT_TRUE(eventually([&] { return server.hub()->status()["durable_step"] == 4; }));
  server.kill();
  server.start();
  expect_counts(server, 3, true);
  for (int i = 0; i < 2; ++i) toy.step = toy.work();
  expect_counts(server, 3, false);
}

TEST(ServerSkipped, OnlyAPullMaySayThatAGradientWasNotFinite) {
  for (uint8_t kind = 1; kind <= 8; ++kind) {
    const Frame frame{.kind = static_cast<FrameKind>(kind), .flags = kNotFinite};
    const auto head = write_head(frame, 0);
    if (frame.kind == FrameKind::pull)
      EXPECT_EQ(read_frame_head(head, 0).flags, kNotFinite);
    else
      EXPECT_THROW(read_frame_head(head, 0), Error) << int{kind};
  }
  EXPECT_THROW(read_frame_head(write_head({.kind = FrameKind::pull, .flags = 16}, 0), 0), Error);
}

}  // namespace
}  // namespace gradwire::server
