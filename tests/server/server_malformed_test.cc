// SPDX-License-Identifier: Apache-2.0
// Malformed input from workers: frames of wrong kinds, for wrong shards and in wrong orders, texts that are not JSON,
// messages of other models, numbers that are not finite. The server answers with a refusal or a status and goes on
// reading, and no weight changes.
#include <limits>

#include "server/server_faults.h"
#include "server/untrusted_worker.h"

namespace gradwire::server {
namespace {

// An honest worker beside others that send malformed frames. It knows what its weights must be.
class HonestWorker {
 public:
  explicit HonestWorker(ServerFixture& server) : toy_(server, plain_signature(), 1), expected_(plain_signature()) {
    toy_.join();
  }
  void expect_unharmed() {
    toy_.work();
    for (size_t i = 0; i < expected_.values.size(); ++i)
      for (size_t k = 0; k < expected_.values[i].size(); ++k) expected_.values[i][k] -= toy_.update.values[i][k];
    ASSERT_TRUE(toy_.weights.values == expected_.values);
  }
  ToyWorker& toy() { return toy_; }

 private:
  ToyWorker toy_;
  ToyTensors expected_;
};

TEST(ServerMalformed, EveryFlippedBitOfAHeadIsSeen) {
  const auto head =
      write_head({.kind = FrameKind::update, .shard = 3, .step = 17, .sequence = 5, .tally = {1, 2, 3}}, 100);
  for (size_t bit = 0; bit < 8 * head.size(); ++bit) {
    auto altered = head;
    altered[bit / 8] ^= std::byte(1u << bit % 8);
    EXPECT_THROW(read_frame_head(altered, 100), Error) << bit;
  }
  EXPECT_THROW(read_frame_head(head, 101), Error);
  EXPECT_THROW(read_frame_head(std::span(head).first(95), 100), Error);
}

TEST(ServerMalformed, TextsAreBoundedInDepthBeforeThereIsAValue) {
  for (const size_t depth : {size_t{64}, size_t{2'000'000}})
    EXPECT_THROW(read_text(*words("{\"a\":" + std::string(depth, '[') + std::string(depth, ']') + "}")), Error)
        << depth;
  EXPECT_NO_THROW(read_text(*words("{\"a\":" + std::string(63, '[') + std::string(63, ']') + "}")));
  EXPECT_THROW(read_text(*words(std::string(2'000'000, '['))), Error);
  EXPECT_THROW(read_text(*words("{\"a\":1,\"a\":2}")), Error);
}

TEST(ServerMalformed, NothingIsHeardBeforeAHello) {
  ServerFixture server(fault_options(1));
  for (const bool model : {false, true}) {
    std::optional<HonestWorker> honest;
    if (model) honest.emplace(server);
    for (uint8_t kind = 2; kind <= 68; kind = kind == 8 ? 65 : static_cast<uint8_t>(kind + 1)) {
      UntrustedWorker untrusted(server);
      untrusted.say({.kind = static_cast<FrameKind>(kind), .sequence = 1}, message_of(plain_signature(), 0, 1));
      EXPECT_TRUE(untrusted.read());
      EXPECT_TRUE(untrusted.refused()) << int{kind};
    }
    if (model) honest->expect_unharmed();
  }
}

TEST(ServerMalformed, HellosThatAreNoneAreRefusedInWords) {
  HubOptions options = fault_options(1);
  options.limits.max_elements = 100000;
  ServerFixture server(options);
  const nlohmann::json good = {{"id", "stranger0"}, {"name", ""}, {"signature", plain_signature().json()}};
  const auto with = [&](const char* path, nlohmann::json value) {
    nlohmann::json text = good;
    text[nlohmann::json::json_pointer(path)] = std::move(value);
    return text.dump();
  };
  const int64_t large = int64_t{1} << 40;
  std::vector<std::string> texts = {"",
                                    "{",
                                    "[]",
                                    "null",
                                    "\xff\xfe",
                                    std::string(100000, '['),
                                    R"({"id":1})",
                                    with("/id", "short"),
                                    with("/id", std::string(65, 'x')),
                                    with("/id", nullptr),
                                    with("/name", std::string(129, 'x')),
                                    with("/signature", 1),
                                    with("/signature/parameters", nlohmann::json::array()),
                                    with("/signature/parameters/0", "w"),
                                    with("/signature/parameters/0/0", ""),
                                    with("/signature/parameters/0/0", std::string(1025, 'x')),
                                    with("/signature/parameters/0/0", "conv.bias"),
                                    with("/signature/parameters/0/0", "bn.mean"),
                                    with("/signature/parameters/0/0", "gradwire.state"),
                                    with("/signature/buffers/0/0", "__metadata__"),
                                    with("/signature/parameters/0/1", {-1}),
                                    with("/signature/parameters/0/1", {1.5}),
                                    with("/signature/parameters/0/1", {large, large}),
                                    with("/signature/parameters/0/1", {large, (1 << 24) + 1}),
                                    with("/signature/parameters/0/1", {large + 1}),
                                    with("/signature/parameters/0/1", std::vector<int>(17, 1)),
                                    with("/signature/parameters/0/1", {1000000}),
                                    with("/signature/up", "nonsense"),
                                    with("/signature/up", 4),
                                    with("/signature/down", "unigrid:bits=99"),
                                    with("/signature/feedback", 1),
                                    with("/signature/feedback", "sometimes"),
                                    with("/signature/pools", 1),
                                    with("/signature/steps", -1),
                                    with("/signature/steps", 1.5),
                                    with("/signature/steps", kMostSteps + 1),
                                    with("/signature/steps", "100"),
                                    with("/signature/steps", nullptr),
                                    with("/signature/sends_updates", nullptr)};
  // Nested deeper than the stack of a thread could follow, in every field.
  const std::string deep = std::string(200000, '[') + std::string(200000, ']');
  for (const char* path : {"/id", "/name", "/signature", "/signature/parameters", "/signature/parameters/0/1/0",
                           "/signature/up", "/signature/pools", "/unknown"}) {
    std::string text = with(path, "DEEP");
    text.replace(text.find("\"DEEP\""), 6, deep);
    texts.push_back(std::move(text));
  }
  for (const std::string& text : texts) {
    UntrustedWorker untrusted(server);
    untrusted.say({.kind = FrameKind::hello}, words(text));
    EXPECT_TRUE(untrusted.read());
    EXPECT_TRUE(untrusted.refused()) << text.substr(0, 200);
    EXPECT_GT(untrusted.refusal().size(), 10u);
  }
  EXPECT_EQ(server.hub()->status()["workers"]["present"], 0);
  HonestWorker honest(server);
  honest.expect_unharmed();
  UntrustedWorker twice(server);
  twice.hello(plain_signature());
  EXPECT_TRUE(twice.hears(FrameKind::welcome));
  twice.hello(plain_signature());
  EXPECT_TRUE(twice.refused());
}

TEST(ServerMalformed, NoMalformedFrameChangesAWeight) {
  Signature other = plain_signature();
  other.parameters[0].shape = {30, 100};
  other.parameters[0].name = "other";
  std::vector<std::byte> flipped = *message_of(plain_signature(), 0, 1);
  flipped[flipped.size() / 2] ^= std::byte{1};
  const Blob fine = message_of(plain_signature(), 0, 1), torn = make_blob({fine->begin(), fine->begin() + 1000});
  struct MalformedFrame {
    const char* name;
    Frame frame;
    Blob payload;
    std::optional<UpdateStatus> status;  // nothing: it is refused
    bool at_close = false;               // its head is right: it is seen when the step closes
  };
  const std::vector<MalformedFrame> frames = {
      {"no message", {.kind = FrameKind::update, .sequence = 1}, make_blob({}), UpdateStatus::corrupt},
      {"noise", {.kind = FrameKind::update, .sequence = 1}, words(std::string(5000, 'x')), UpdateStatus::corrupt},
      {"oversize",
       {.kind = FrameKind::update, .sequence = 1},
       make_blob(std::vector<std::byte>(kMaxFrame)),
       UpdateStatus::corrupt},
      {"torn", {.kind = FrameKind::update, .sequence = 1}, torn, UpdateStatus::corrupt},
      {"flipped", {.kind = FrameKind::update, .sequence = 1}, make_blob(flipped), UpdateStatus::corrupt, true},
      {"another shard's",
       {.kind = FrameKind::update, .sequence = 1},
       message_of(plain_signature(), 1, 1),
       UpdateStatus::corrupt},
      {"another codec's",
       {.kind = FrameKind::update, .sequence = 1},
       message_of(small_signature(), 0, 1),
       UpdateStatus::corrupt},
      {"not a number",
       {.kind = FrameKind::update, .sequence = 1},
       message_of(plain_signature(), 0, std::nanf("")),
       UpdateStatus::corrupt,
       true},
      {"infinite",
       {.kind = FrameKind::update, .sequence = 1},
       message_of(plain_signature(), 0, std::numeric_limits<float>::infinity()),
       UpdateStatus::corrupt,
       true},
      {"of the future",
       {.kind = FrameKind::update, .step = uint64_t{1} << 63, .sequence = 1},
       fine,
       UpdateStatus::early},
      {"of no step", {.kind = FrameKind::update, .step = kNone, .sequence = 1}, fine, UpdateStatus::early},
      {"without a number", {.kind = FrameKind::update, .sequence = 0}, fine, {}},
      {"no such shard", {.kind = FrameKind::update, .shard = 4, .sequence = 1}, fine, {}},
      {"no such shard at all", {.kind = FrameKind::pull, .shard = ~0u}, nullptr, {}},
      {"pull of the future", {.kind = FrameKind::pull, .step = uint64_t{1} << 63}, nullptr, {}},
      {"pull of no step", {.kind = FrameKind::pull, .step = kNone}, nullptr, {}},
      {"first weights", {.kind = FrameKind::initial}, fine, {}},
      {"residual of noise", {.kind = FrameKind::residual, .sequence = 1}, words("noise"), UpdateStatus::corrupt},
      {"residual of not a number",
       {.kind = FrameKind::residual, .sequence = 1},
       message_of(plain_signature(), 0, std::nanf("")),
       UpdateStatus::corrupt},
      {"buffers of noise", {.kind = FrameKind::buffers}, words("noise"), {}},
      {"report of noise", {.kind = FrameKind::report}, words("\xff{"), {}},
      {"welcome", {.kind = FrameKind::welcome}, words("{}"), {}},
      {"weights", {.kind = FrameKind::weights}, fine, {}},
      {"durable", {.kind = FrameKind::durable}, words("{}"), {}},
      {"notice", {.kind = FrameKind::notice}, words("{}"), {}},
  };
  ServerFixture server(fault_options(1));
  HonestWorker honest(server);
  uint64_t step = 0;
  for (const MalformedFrame& malformed : frames) {
    SCOPED_TRACE(malformed.name);
    {
      UntrustedWorker untrusted(server);
      untrusted.hello(plain_signature());
      ASSERT_TRUE(untrusted.hears(FrameKind::welcome));
      Frame frame = malformed.frame;
      if (frame.kind == FrameKind::update && frame.step == 0) frame.step = step;
      untrusted.say(frame, malformed.payload);
      ASSERT_TRUE(untrusted.read());
      if (!malformed.status) {
        EXPECT_TRUE(eventually([&] { return untrusted.refused(); }));
      } else if (!malformed.at_close) {
        Blob unused;
        ASSERT_TRUE(untrusted.hears(FrameKind::weights, frame, unused));
        EXPECT_EQ(frame.status, *malformed.status);
      }
    }
    honest.expect_unharmed();
    ++step;
  }
  EXPECT_GT(server.hub()->status()["refused"]["corrupt"], 10);
}

TEST(ServerMalformed, AnUpdateThatIsNotFiniteIsLeftOutAndTheOthersOfItsStepCount) {
  for (const float poison :
       {std::nanf(""), std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity()}) {
    ServerFixture server(fault_options(2));
    HonestWorker honest(server);
    UntrustedWorker untrusted(server);
    untrusted.hello(plain_signature());
    ASSERT_TRUE(untrusted.hears(FrameKind::welcome));
    for (uint32_t p = 0; p < 4; ++p)
      untrusted.say({.kind = FrameKind::update, .shard = p, .step = 0, .sequence = 1},
                    message_of(plain_signature(), p, poison));
    honest.expect_unharmed();
    for (int p = 0; p < 4; ++p) {
      Frame frame;
      Blob payload;
      ASSERT_TRUE(untrusted.hears(FrameKind::weights, frame, payload));
      EXPECT_EQ(frame.status, UpdateStatus::corrupt);
      EXPECT_EQ(frame.contributors, 1u);
      EXPECT_TRUE(payload);
    }
    EXPECT_EQ(server.hub()->status()["refused"]["corrupt"], 4);
    expect_ledger(*server.hub());
  }
}

TEST(ServerMalformed, WeightsStayFiniteWhateverFiniteUpdatesSay) {
  for (const bool updates : {false, true}) {
    Signature signature = plain_signature();
    signature.sends_updates = updates;
    ServerFixture server(fault_options(1));
    ToyWorker toy(server, signature, 1);
    toy.join();
    ToyTensors huge(signature, 3e38f);
    for (int i = 0; i < 3; ++i) toy.client.exchange(huge.constant(), toy.weights.pointers);
    EXPECT_GT(toy.client.counts().corrupt, 0u);
    for (const auto& tensor : toy.weights.values)
      for (float value : tensor) ASSERT_TRUE(std::isfinite(value));
  }
}

// The first weights.

TEST(ServerMalformed, FirstWeightsAreAllOfOneWorker) {
  ServerFixture server(fault_options(1));
  auto first = std::make_unique<UntrustedWorker>(server);
  first->hello(plain_signature(), "initialiser-1");
  ASSERT_TRUE(first->hears(FrameKind::welcome));
  ToyWorker second(server, plain_signature(), 2);
  std::fill(second.weights.values[0].begin(), second.weights.values[0].end(), 7.0f);
  std::fill(second.weights.values[2].begin(), second.weights.values[2].end(), 7.0f);
  std::thread waits([&] { second.join(); });
  ASSERT_TRUE(eventually([&] { return server.hub()->status()["workers"]["present"] == 2; }));
  for (uint32_t p = 0; p < 3; ++p)
    first->say({.kind = FrameKind::initial, .shard = p}, message_of(plain_signature(), p, 1, ShardMessage::whole));
  ASSERT_TRUE(first->read());
  first.reset();  // dies before the last part
  waits.join();
  for (size_t i : {0, 2})
    for (float value : second.weights.values[i]) ASSERT_EQ(value, 7.0f);
}

TEST(ServerMalformed, WhoBringsTheFirstWeightsMayLoseItsConnection) {
  ServerFixture server(fault_options(1));
  UntrustedWorker first(server);
  first.hello(plain_signature(), "initialiser-1");
  ASSERT_TRUE(first.hears(FrameKind::welcome));
  first.say({.kind = FrameKind::initial, .shard = 0}, message_of(plain_signature(), 0, 1, ShardMessage::whole));
  UntrustedWorker again(server);  // before the server has noticed
  again.hello(plain_signature(), "initialiser-1");
  Frame frame;
  Blob payload;
  ASSERT_TRUE(again.hears(FrameKind::welcome, frame, payload));
  EXPECT_TRUE(read_text(*payload)["initial"]);
  EXPECT_TRUE(first.refused());
  for (uint32_t p = 0; p < 4; ++p)
    again.say({.kind = FrameKind::initial, .shard = p}, message_of(plain_signature(), p, 1, ShardMessage::whole));
  ToyWorker toy(server, plain_signature(), 2);
  EXPECT_EQ(toy.join(), 0u);
  EXPECT_EQ(toy.weights.values[0][0], 1.0f);
}

TEST(ServerMalformed, WorkersThatAreForgottenWhileTheyWaitForTheFirstWeightsDoNotCount) {
  Signature tiny;
  tiny.parameters = {{"w", {16}}};
  tiny.up = tiny.down = "fp32";
  ServerFixture server(fault_options(1));
  auto first = std::make_unique<UntrustedWorker>(server);
  first->hello(tiny, "initialiser-1");
  ASSERT_TRUE(first->hears(FrameKind::welcome));
  for (int i = 0; i < test::lighter(4200, 300); ++i) {  // more than the server remembers
    UntrustedWorker visitor(server);
    visitor.hello(tiny, "visitor-" + std::to_string(i));
    visitor.say({.kind = FrameKind::goodbye}, nullptr);
  }
  first.reset();
  EXPECT_EQ(server.hub()->status()["state"], "waiting for the first worker");
  ToyWorker toy(server, tiny, 1);
  EXPECT_EQ(toy.join(), 0u);
}

TEST(ServerMalformed, BeforeTheFirstWeightsNothingIsTakenOrSaved) {
  HubOptions options = fault_options(1);
  options.checkpoint = scratch_file("first.gwc");
  ServerFixture server(options);
  for (const Frame& frame : {Frame{.kind = FrameKind::update, .sequence = 1}, Frame{.kind = FrameKind::pull},
                             Frame{.kind = FrameKind::residual, .sequence = 1}, Frame{.kind = FrameKind::initial}}) {
    UntrustedWorker untrusted(server);
    untrusted.hello(plain_signature());
    ASSERT_TRUE(untrusted.hears(FrameKind::welcome));
    untrusted.say(frame, message_of(plain_signature(), 0, frame.kind == FrameKind::initial ? std::nanf("") : 1));
    EXPECT_TRUE(untrusted.read());
    EXPECT_TRUE(eventually([&] { return untrusted.refused(); }));
  }
  {
    UntrustedWorker untrusted(server);
    untrusted.hello(plain_signature());
    ASSERT_TRUE(untrusted.hears(FrameKind::welcome));
    untrusted.say({.kind = FrameKind::goodbye}, nullptr);
    EXPECT_TRUE(untrusted.hears(FrameKind::notice));
  }
  EXPECT_FALSE(std::filesystem::exists(options.checkpoint));
  HonestWorker honest(server);
  honest.expect_unharmed();
}

TEST(ServerMalformed, ALossWithoutMeasureDoesNotStopCheckpoints) {
  HubOptions options = fault_options(2);
  options.checkpoint = scratch_file("loss.gwc");
  options.save_every = 1;
  ServerFixture server(options);
  ToyWorkers toys = make_workers(server, small_signature(), 2);
  join(toys);
  for (auto& toy : toys) toy->client.report({{"loss", 1.7e308}});
  std::vector<std::thread> threads;
  for (auto& toy : toys)
    threads.emplace_back(
        [&toy] { toy->client.exchange(ToyTensors(small_signature(), 0.1f).constant(), toy->weights.pointers); });
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(on_disk(server, 1));
  EXPECT_EQ(server.hub()->status()["checkpoint"]["failed"], 0);
}

TEST(ServerMalformed, ThousandsWhoComeOnceAreForgottenButNotByTheLedger) {
  Signature tiny;
  tiny.parameters = {{"w", {16}}};
  tiny.up = tiny.down = "fp32";
  HubOptions options = fault_options(1);
  options.rejoin_s = 0;
  options.checkpoint = scratch_file("thousands.gwc");
  ServerFixture server(options);
  ToyWorker toy(server, tiny, 1);
  toy.join();
  const auto visit = [&](int count, const std::string& who) {
    for (int i = 0; i < count; ++i) {
      UntrustedWorker visitor(server);  // claims a residual that never comes back
      visitor.hello(tiny, "visitor" + who + std::to_string(i));
      EXPECT_TRUE(visitor.hears(FrameKind::welcome));
      visitor.say(
          {.kind = FrameKind::residual, .sequence = 1, .tally = {.computed = 0.25, .squares = 1, .residual = 0.25}},
          message_of(tiny, 0, 0, ShardMessage::whole));
      EXPECT_TRUE(visitor.read());
    }
  };
  const int many = test::lighter(4200, 300);  // more than the server remembers
  visit(50, "a");
  const double before = server.hub()->status()["ledger"]["computed"];
  EXPECT_NEAR(before, 50 * 0.25, 1e-9);
  visit(many, "b");
  const nlohmann::json status = server.hub()->status();
  EXPECT_NEAR(status["ledger"]["computed"].get<double>(), (50 + many) * 0.25, 1e-6);
  server.hub()->stop();
  server.kill();
  server.start();
  EXPECT_NEAR(server.hub()->status()["ledger"]["computed"].get<double>(), (50 + many) * 0.25, 1e-6);
  expect_ledger(*server.hub());
  visit(50, "c");
  EXPECT_NEAR(server.hub()->status()["ledger"]["computed"].get<double>(), (100 + many) * 0.25, 1e-6);
  expect_ledger(*server.hub());
}

}  // namespace
}  // namespace gradwire::server
