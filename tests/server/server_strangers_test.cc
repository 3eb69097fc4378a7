// SPDX-License-Identifier: Apache-2.0
// What a peer can do to a server by what it claims or leaves out, and what an operator can do by mistake: memory for
// models that never come, first weights that never come, two servers for one file, a checkpoint that somebody has
// written, a benchmark that takes a server over, and a journal that somebody wants to fill.
#include "core/machine.h"
#include "server/checkpoint.h"
#include "server/machine.h"
#include "server/server_faults.h"
#include "server/untrusted_worker.h"

namespace gradwire::server {
namespace {

double resident_mb() { return static_cast<double>(resident_memory()) / 1e6; }

template <class Work>
std::pair<std::string, std::string> refusal_of(const Work& work) {  // its field and its words
  try {
    work();
  } catch (const Error& error) {
    return {error.field(), error.what()};
  }
  return {"nothing was thrown", ""};
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// ---- Memory

TEST(ServerStrangers, AHelloTakesNoMemoryForTheModelThatItClaims) {
  for (const bool pools : {false, true}) {
    HubOptions options = fault_options(1);
    options.shard_elements = uint64_t{1} << 20;
    ServerFixture server(options);
    Signature huge = plain_signature();
    huge.parameters = {{"weight", {1000, 1000, 1000}}};
    huge.sends_updates = huge.pools = pools;
    const double before = resident_mb();
    UntrustedWorker stranger(server);
    stranger.hello(huge);
    EXPECT_TRUE(stranger.hears(FrameKind::welcome)) << stranger.refusal();
    EXPECT_EQ(server.hub()->status()["model"]["elements"], 1'000'000'000);
#ifndef __SANITIZE_ADDRESS__
    EXPECT_LT(resident_mb() - before, 100) << "MB for a model of which no weight has come";
#endif
    EXPECT_LT(server.hub()->status()["memory_bytes"].get<uint64_t>(), uint64_t{1} << 20);
  }
}

TEST(ServerStrangers, TheLimitOfElementsFollowsFromTheMemory) {
  const uint64_t elements = default_max_elements();
  EXPECT_GE(elements, 1u);
  EXPECT_LE(elements * 8, machine_memory() / 4);
}

// ---- First weights

TEST(ServerStrangers, FirstWeightsThatDoNotComeAreAskedOfTheNext) {
  HubOptions options = fault_options(1);
  options.initial_s = 0.2;
  ServerFixture server(options);
  UntrustedWorker slow(server);
  slow.hello(plain_signature(), "slow-worker");
  ASSERT_TRUE(slow.hears(FrameKind::welcome));
  ToyWorker honest(server, plain_signature(), 1);
  EXPECT_EQ(honest.join(), 0u);
  EXPECT_EQ(honest.work(), 1u);
  EXPECT_TRUE(eventually([&] { return slow.refused(); }));
  EXPECT_TRUE(has(slow.refusal(), "--initial")) << slow.refusal();
  EXPECT_EQ(server.hub()->status()["refused"]["slow"], 1);
}

TEST(ServerStrangers, TheSameShardAgainAndAgainBuysNoTime) {
  HubOptions options = fault_options(1);
  options.initial_s = 0.2;
  ServerFixture server(options);
  UntrustedWorker slow(server);
  slow.hello(plain_signature(), "slow-worker");
  ASSERT_TRUE(slow.hears(FrameKind::welcome));
  const Blob first = message_of(plain_signature(), 0, 1, ShardMessage::whole);
  EXPECT_TRUE(eventually([&] {
    if (slow.refused()) return true;
    slow.say({.kind = FrameKind::initial, .shard = 0}, first);
    return false;
  }));
  // It was the only one that knew of this model: the next worker brings its own.
  Signature other = plain_signature();
  other.parameters.pop_back();
  ToyWorker honest(server, other, 1);
  EXPECT_EQ(honest.join(), 0u);
  EXPECT_EQ(honest.work(), 1u);
}

// ---- One checkpoint

TEST(ServerStrangers, TwoServersForOneCheckpointAreOneTooMany) {
  HubOptions options = fault_options(1);
  options.checkpoint = scratch_file("shared_checkpoint");
  {
    const ServerHub first(options);
    const auto [field, words] = refusal_of([&] { const ServerHub second(options); });
    EXPECT_EQ(field, "checkpoint");
    EXPECT_TRUE(has(words, options.checkpoint)) << words;
    EXPECT_TRUE(has(words, "another server (pid " + std::to_string(::getpid()) + ")")) << words;
  }
  EXPECT_FALSE(std::filesystem::exists(options.checkpoint + ".lock"));
  const ServerHub after(options);
}

TEST(ServerStrangers, AForgedCheckpointIsRefusedByName) {
  HubOptions options = fault_options(1);
  options.checkpoint = scratch_file("forged");
  {
    ServerFixture server(options);
    ToyWorker one(server, plain_signature(), 1), two(server, plain_signature(), 2);
    one.join();
    two.join();
    EXPECT_TRUE(one.client.leave(kPatience));
    EXPECT_TRUE(two.client.leave(kPatience));
  }
  const ServerState good = load_state(options.checkpoint);
  std::filesystem::remove(options.checkpoint + ".old");
  ASSERT_EQ(good.workers.size(), 2u);
  const auto start_with = [&](const auto& change) {
    ServerState state = good;
    change(state);
    save_state(options.checkpoint, state);
    std::filesystem::remove(options.checkpoint + ".old");
    return refusal_of([&] { const ServerHub hub(options); });
  };
  EXPECT_EQ(start_with([](ServerState&) {}).first, "nothing was thrown");
  EXPECT_EQ(start_with([](ServerState& s) { s.extra["next_slot"] = 1; }).first, "next_slot");
  EXPECT_EQ(start_with([](ServerState& s) { s.extra["next_slot"] = uint64_t{1} << 40; }).first, "next_slot");
  EXPECT_EQ(start_with([](ServerState& s) { s.workers[1].extra["slot"] = 0; }).first, "slot");
  EXPECT_EQ(start_with([](ServerState& s) { s.extra["parts"][0]["version"] = ~uint64_t{0}; }).first, "version");
  EXPECT_EQ(start_with([](ServerState& s) { s.extra["part_elements"] = 0; }).first, "part_elements");
  options.limits.max_elements = 1000;
  const auto [field, words] = start_with([](ServerState&) {});
  EXPECT_EQ(field, "signature");
  EXPECT_TRUE(has(words, "--max-elements")) << words;
}

// ---- Benchmarks

TEST(ServerStrangers, ABenchmarkNeedsAServerForBenchmarksAndTrainingOneForTraining) {
  for (const bool bench : {false, true}) {
    HubOptions options = fault_options(1);
    options.bench = bench;
    ServerFixture server(options);
    const auto join = [&](bool as_bench) {
      ToyTensors weights(plain_signature());
      Client client({.signature = plain_signature(),
                     .dial = server.dialer(),
                     .name = "",
                     .id = {},
                     .patience_s = kPatience,
                     .bench = as_bench});
      return refusal_of([&] { client.join(weights.pointers); });
    };
    EXPECT_TRUE(has(join(!bench).second, "--bench"));
    EXPECT_EQ(server.hub()->status()["refused"]["bench"], 1);
    EXPECT_EQ(join(bench).first, "nothing was thrown");
  }
}

// ---- The journal

TEST(ServerStrangers, RefusalsAreInTheJournalAndCannotFillIt) {
  HubOptions options = fault_options(1);
  std::mutex mutex;
  std::vector<nlohmann::json> lines;
  options.log = [&](const nlohmann::json& event) {
    const std::lock_guard lock(mutex);
    if (event["event"] == "refused") lines.push_back(event);
  };
  ServerFixture server(options);
  ToyWorker honest(server, plain_signature(), 1);
  honest.join();
  Signature other = plain_signature();
  other.up = "qsgd:bits=4";
  const auto begin = SteadyClock::now();
  for (int i = 0; i < 500; ++i) {
    UntrustedWorker stranger(server);
    stranger.hello(other, "stranger-" + std::to_string(i));
  }
  EXPECT_EQ(server.hub()->status()["refused"]["signature"], 500);  // not under the mutex, which the journal takes
  const std::lock_guard lock(mutex);
  ASSERT_FALSE(lines.empty());
  EXPECT_EQ(lines[0]["reason"], "signature");
  EXPECT_EQ(lines[0]["peer"], "local");
  EXPECT_TRUE(has(lines[0]["note"], "trains something else")) << lines[0];
  EXPECT_LE(static_cast<double>(lines.size()), 9 + seconds_since(begin));
}

TEST(ServerStrangers, CheckpointsAreInTheJournal) {
  HubOptions options = fault_options(1);
  options.checkpoint = scratch_file("journalled");
  std::mutex mutex;
  nlohmann::json saved;
  options.log = [&](const nlohmann::json& event) {
    const std::lock_guard lock(mutex);
    if (event["event"] == "saved" && saved.is_null()) saved = event;
  };
  ServerFixture server(options);
  ToyWorker honest(server, plain_signature(), 1);
  honest.join();
  EXPECT_TRUE(eventually([&] {
    const std::lock_guard lock(mutex);
    return !saved.is_null();
  }));
  const std::lock_guard lock(mutex);
  EXPECT_EQ(saved["path"], options.checkpoint);
  EXPECT_EQ(saved["step"], 0);
  EXPECT_GT(saved["bytes"], 0);
}

}  // namespace
}  // namespace gradwire::server
