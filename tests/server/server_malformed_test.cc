// SPDX-License-Identifier: Apache-2.0
// What a server is told by those who are not what they say: frames of wrong kinds, parts and orders, texts that are
// none, messages of other models, numbers that are not. It answers with a refusal or a verdict, goes on reading, and no
// weight is changed by it.
#include <limits>

#include "server/server_faults.h"

namespace gradwire::server {
namespace {

Signature plain() {
  Signature signature = small_signature();
  signature.up = signature.down = "fp32";
  return signature;
}

Blob words(const std::string& text) {
  const auto bytes = std::as_bytes(std::span(text));
  return make_blob({bytes.begin(), bytes.end()});
}

// A session that says whatever it likes.
class Stranger {
 public:
  explicit Stranger(Rig& rig) : rig_(rig) {}
  ~Stranger() { rig_.hub()->vanished(session_.get()); }

  void say(const Frame& frame, Blob payload) {
    ++said_;
    EXPECT_NO_THROW(
        rig_.hub()->received(session_, frame, payload ? payload : make_blob({}), [read = read_] { ++*read; }));
  }
  void hello(const Signature& signature, const std::string& id = "stranger0") {
    say({.kind = Kind::hello}, text_blob({{"id", id}, {"name", ""}, {"signature", signature.json()}}));
  }
  // Everything that was said has been read, and the session may say more.
  bool read() const {
    return eventually([&] { return *read_ == said_; });
  }
  // The next answer of a kind.
  bool hears(Kind kind, Frame& frame, Blob& payload) {
    try {
      while (session_->receive(frame, payload, 120s))
        if (frame.kind == kind) return true;
    } catch (const std::exception& error) {
      refusal_ = error.what();
    }
    return false;
  }
  bool hears(Kind kind) {
    Frame frame;
    Blob payload;
    return hears(kind, frame, payload);
  }
  bool refused() {
    Frame frame;
    Blob payload;
    try {
      while (session_->receive(frame, payload, 0ms)) {
      }
    } catch (const std::exception& error) {
      refusal_ = error.what();
    }
    return !refusal_.empty();
  }
  const std::string& refusal() const { return refusal_; }

 private:
  Rig& rig_;
  std::shared_ptr<LocalSession> session_ = std::make_shared<LocalSession>();
  std::shared_ptr<std::atomic<int>> read_ = std::make_shared<std::atomic<int>>(0);
  int said_ = 0;
  std::string refusal_;
};

Blob message_of(const Signature& signature, size_t part, float fill, Way way = Way::up) {
  const Cut cut = cut_parts(signature, 32768)[part];
  const Plan plan(specs_of(signature, cut, way));
  const auto runner = make_runner(plan, {});
  std::vector<float> values(cut.elements(), fill);
  std::vector<const void*> in;
  const float* at = values.data();
  for (const Piece& piece : cut.pieces) {
    in.push_back(at);
    at += piece.count;
  }
  std::vector<std::byte> message(plan.message_bytes());
  runner->encode(in, {}, message);
  return make_blob(std::move(message));
}

// An honest worker beside whom others lie. It knows what its weights must be.
class Witness {
 public:
  explicit Witness(Rig& rig) : toy_(rig, plain(), 1), expected_(plain()) { toy_.join(); }
  void expect_unharmed() {
    toy_.work();
    for (size_t i = 0; i < expected_.values.size(); ++i)
      for (size_t k = 0; k < expected_.values[i].size(); ++k) expected_.values[i][k] -= toy_.update.values[i][k];
    ASSERT_TRUE(toy_.weights.values == expected_.values);
  }
  Toy& toy() { return toy_; }

 private:
  Toy toy_;
  Tensors expected_;
};

TEST(ServerLies, EveryFlippedBitOfAHeadIsSeen) {
  const auto head = write_head({.kind = Kind::update, .part = 3, .step = 17, .sequence = 5, .tally = {1, 2, 3}}, 100);
  for (size_t bit = 0; bit < 8 * head.size(); ++bit) {
    auto altered = head;
    altered[bit / 8] ^= std::byte(1u << bit % 8);
    EXPECT_THROW(read_frame_head(altered, 100), Error) << bit;
  }
  EXPECT_THROW(read_frame_head(head, 101), Error);
  EXPECT_THROW(read_frame_head(std::span(head).first(95), 100), Error);
}

TEST(ServerLies, NothingIsHeardBeforeAHello) {
  Rig rig(faulty(1));
  for (const bool model : {false, true}) {
    std::optional<Witness> witness;
    if (model) witness.emplace(rig);
    for (uint8_t kind = 2; kind <= 68; kind = kind == 8 ? 65 : static_cast<uint8_t>(kind + 1)) {
      Stranger stranger(rig);
      stranger.say({.kind = static_cast<Kind>(kind), .sequence = 1}, message_of(plain(), 0, 1));
      EXPECT_TRUE(stranger.read());
      EXPECT_TRUE(stranger.refused()) << int{kind};
    }
    if (model) witness->expect_unharmed();
  }
}

TEST(ServerLies, HellosThatAreNoneAreRefusedInWords) {
  HubOptions options = faulty(1);
  options.limits.max_elements = 100000;
  Rig rig(options);
  const nlohmann::json good = {{"id", "stranger0"}, {"name", ""}, {"signature", plain().json()}};
  const auto with = [&](const char* path, nlohmann::json value) {
    nlohmann::json text = good;
    text[nlohmann::json::json_pointer(path)] = std::move(value);
    return text.dump();
  };
  const int64_t large = int64_t{1} << 40;
  const std::vector<std::string> texts = {"",
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
                                          with("/signature/pools", 1),
                                          with("/signature/sends_updates", nullptr)};
  for (const std::string& text : texts) {
    Stranger stranger(rig);
    stranger.say({.kind = Kind::hello}, words(text));
    EXPECT_TRUE(stranger.read());
    EXPECT_TRUE(stranger.refused()) << text.substr(0, 200);
    EXPECT_GT(stranger.refusal().size(), 10u);
  }
  EXPECT_EQ(rig.hub()->status()["workers"]["present"], 0);
  Witness witness(rig);
  witness.expect_unharmed();
  Stranger twice(rig);
  twice.hello(plain());
  EXPECT_TRUE(twice.hears(Kind::welcome));
  twice.hello(plain());
  EXPECT_TRUE(twice.refused());
}

TEST(ServerLies, NoFrameOfALiarChangesAWeight) {
  Signature other = plain();
  other.parameters[0].shape = {30, 100};
  other.parameters[0].name = "other";
  std::vector<std::byte> flipped = *message_of(plain(), 0, 1);
  flipped[flipped.size() / 2] ^= std::byte{1};
  const Blob fine = message_of(plain(), 0, 1), torn = make_blob({fine->begin(), fine->begin() + 1000});
  struct Lie {
    const char* name;
    Frame frame;
    Blob payload;
    std::optional<Verdict> verdict;  // none: it is refused
    bool at_close = false;           // its head is right: it is seen when the step closes
  };
  const std::vector<Lie> lies = {
      {"no message", {.kind = Kind::update, .sequence = 1}, make_blob({}), Verdict::corrupt},
      {"noise", {.kind = Kind::update, .sequence = 1}, words(std::string(5000, 'x')), Verdict::corrupt},
      {"oversize",
       {.kind = Kind::update, .sequence = 1},
       make_blob(std::vector<std::byte>(kMaxFrame)),
       Verdict::corrupt},
      {"torn", {.kind = Kind::update, .sequence = 1}, torn, Verdict::corrupt},
      {"flipped", {.kind = Kind::update, .sequence = 1}, make_blob(flipped), Verdict::corrupt, true},
      {"another part's", {.kind = Kind::update, .sequence = 1}, message_of(plain(), 1, 1), Verdict::corrupt},
      {"another codec's", {.kind = Kind::update, .sequence = 1}, message_of(small_signature(), 0, 1), Verdict::corrupt},
      {"not a number",
       {.kind = Kind::update, .sequence = 1},
       message_of(plain(), 0, std::nanf("")),
       Verdict::corrupt,
       true},
      {"infinite",
       {.kind = Kind::update, .sequence = 1},
       message_of(plain(), 0, std::numeric_limits<float>::infinity()),
       Verdict::corrupt,
       true},
      {"of the future", {.kind = Kind::update, .step = uint64_t{1} << 63, .sequence = 1}, fine, Verdict::early},
      {"of no step", {.kind = Kind::update, .step = kNone, .sequence = 1}, fine, Verdict::early},
      {"without a number", {.kind = Kind::update, .sequence = 0}, fine, {}},
      {"no such part", {.kind = Kind::update, .part = 4, .sequence = 1}, fine, {}},
      {"no such part at all", {.kind = Kind::pull, .part = ~0u}, nullptr, {}},
      {"pull of the future", {.kind = Kind::pull, .step = uint64_t{1} << 63}, nullptr, {}},
      {"pull of no step", {.kind = Kind::pull, .step = kNone}, nullptr, {}},
      {"first weights", {.kind = Kind::initial}, fine, {}},
      {"handover of noise", {.kind = Kind::handover, .sequence = 1}, words("noise"), Verdict::corrupt},
      {"handover of not a number",
       {.kind = Kind::handover, .sequence = 1},
       message_of(plain(), 0, std::nanf("")),
       Verdict::corrupt},
      {"buffers of noise", {.kind = Kind::buffers}, words("noise"), {}},
      {"report of noise", {.kind = Kind::report}, words("\xff{"), {}},
      {"welcome", {.kind = Kind::welcome}, words("{}"), {}},
      {"weights", {.kind = Kind::weights}, fine, {}},
      {"durable", {.kind = Kind::durable}, words("{}"), {}},
      {"notice", {.kind = Kind::notice}, words("{}"), {}},
  };
  Rig rig(faulty(1));
  Witness witness(rig);
  uint64_t step = 0;
  for (const Lie& lie : lies) {
    SCOPED_TRACE(lie.name);
    {
      Stranger stranger(rig);
      stranger.hello(plain());
      ASSERT_TRUE(stranger.hears(Kind::welcome));
      Frame frame = lie.frame;
      if (frame.kind == Kind::update && frame.step == 0) frame.step = step;
      stranger.say(frame, lie.payload);
      ASSERT_TRUE(stranger.read());
      if (!lie.verdict) {
        EXPECT_TRUE(eventually([&] { return stranger.refused(); }));
      } else if (!lie.at_close) {
        Blob unused;
        ASSERT_TRUE(stranger.hears(Kind::weights, frame, unused));
        EXPECT_EQ(frame.verdict, *lie.verdict);
      }
    }
    witness.expect_unharmed();
    ++step;
  }
  EXPECT_GT(rig.hub()->status()["refused"]["corrupt"], 10);
}

TEST(ServerLies, AnUpdateThatIsNotFiniteIsLeftOutAndTheOthersOfItsStepCount) {
  for (const float poison :
       {std::nanf(""), std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity()}) {
    Rig rig(faulty(2));
    Witness witness(rig);
    Stranger stranger(rig);
    stranger.hello(plain());
    ASSERT_TRUE(stranger.hears(Kind::welcome));
    for (uint32_t p = 0; p < 4; ++p)
      stranger.say({.kind = Kind::update, .part = p, .step = 0, .sequence = 1}, message_of(plain(), p, poison));
    witness.expect_unharmed();
    for (int p = 0; p < 4; ++p) {
      Frame frame;
      Blob payload;
      ASSERT_TRUE(stranger.hears(Kind::weights, frame, payload));
      EXPECT_EQ(frame.verdict, Verdict::corrupt);
      EXPECT_EQ(frame.contributors, 1u);
      EXPECT_TRUE(payload);
    }
    EXPECT_EQ(rig.hub()->status()["refused"]["corrupt"], 4);
    expect_ledger(*rig.hub());
  }
}

TEST(ServerLies, WeightsStayFiniteWhateverFiniteUpdatesSay) {
  for (const bool updates : {false, true}) {
    Signature signature = plain();
    signature.sends_updates = updates;
    Rig rig(faulty(1));
    Toy toy(rig, signature, 1);
    toy.join();
    Tensors huge(signature, 3e38f);
    for (int i = 0; i < 3; ++i) toy.client.exchange(huge.constant(), toy.weights.pointers);
    EXPECT_GT(toy.client.counts().corrupt, 0u);
    for (const auto& tensor : toy.weights.values)
      for (float value : tensor) ASSERT_TRUE(std::isfinite(value));
  }
}

// The first weights.

TEST(ServerLies, FirstWeightsAreAllOfOneWorker) {
  Rig rig(faulty(1));
  auto first = std::make_unique<Stranger>(rig);
  first->hello(plain(), "initialiser-1");
  ASSERT_TRUE(first->hears(Kind::welcome));
  Toy second(rig, plain(), 2);
  std::fill(second.weights.values[0].begin(), second.weights.values[0].end(), 7.0f);
  std::fill(second.weights.values[2].begin(), second.weights.values[2].end(), 7.0f);
  std::thread waits([&] { second.join(); });
  ASSERT_TRUE(eventually([&] { return rig.hub()->status()["workers"]["present"] == 2; }));
  for (uint32_t p = 0; p < 3; ++p)
    first->say({.kind = Kind::initial, .part = p}, message_of(plain(), p, 1, Way::whole));
  ASSERT_TRUE(first->read());
  first.reset();  // dies before the last part
  waits.join();
  for (size_t i : {0, 2})
    for (float value : second.weights.values[i]) ASSERT_EQ(value, 7.0f);
}

TEST(ServerLies, WhoBringsTheFirstWeightsMayLoseItsConnection) {
  Rig rig(faulty(1));
  Stranger first(rig);
  first.hello(plain(), "initialiser-1");
  ASSERT_TRUE(first.hears(Kind::welcome));
  first.say({.kind = Kind::initial, .part = 0}, message_of(plain(), 0, 1, Way::whole));
  Stranger again(rig);  // before the server has noticed
  again.hello(plain(), "initialiser-1");
  Frame frame;
  Blob payload;
  ASSERT_TRUE(again.hears(Kind::welcome, frame, payload));
  EXPECT_TRUE(read_text(*payload)["initial"]);
  EXPECT_TRUE(first.refused());
  for (uint32_t p = 0; p < 4; ++p) again.say({.kind = Kind::initial, .part = p}, message_of(plain(), p, 1, Way::whole));
  Toy toy(rig, plain(), 2);
  EXPECT_EQ(toy.join(), 0u);
  EXPECT_EQ(toy.weights.values[0][0], 1.0f);
}

TEST(ServerLies, BeforeTheFirstWeightsNothingIsTakenOrSaved) {
  HubOptions options = faulty(1);
  options.checkpoint = scratch_file("first.gwc");
  Rig rig(options);
  for (const Frame& frame : {Frame{.kind = Kind::update, .sequence = 1}, Frame{.kind = Kind::pull},
                             Frame{.kind = Kind::handover, .sequence = 1}, Frame{.kind = Kind::initial}}) {
    Stranger stranger(rig);
    stranger.hello(plain());
    ASSERT_TRUE(stranger.hears(Kind::welcome));
    stranger.say(frame, message_of(plain(), 0, frame.kind == Kind::initial ? std::nanf("") : 1));
    EXPECT_TRUE(stranger.read());
    EXPECT_TRUE(eventually([&] { return stranger.refused(); }));
  }
  {
    Stranger stranger(rig);
    stranger.hello(plain());
    ASSERT_TRUE(stranger.hears(Kind::welcome));
    stranger.say({.kind = Kind::goodbye}, nullptr);
    EXPECT_TRUE(stranger.hears(Kind::notice));
  }
  EXPECT_FALSE(std::filesystem::exists(options.checkpoint));
  Witness witness(rig);
  witness.expect_unharmed();
}

TEST(ServerLies, ALossWithoutMeasureDoesNotStopCheckpoints) {
  HubOptions options = faulty(2);
  options.checkpoint = scratch_file("loss.gwc");
  options.save_every = 1;
  Rig rig(options);
  Toys toys = crew(rig, small_signature(), 2);
  join(toys);
  for (auto& toy : toys) toy->client.report({{"loss", 1.7e308}});
  std::vector<std::thread> threads;
  for (auto& toy : toys)
    threads.emplace_back(
        [&toy] { toy->client.exchange(Tensors(small_signature(), 0.1f).constant(), toy->weights.pointers); });
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(on_disk(rig, 1));
  EXPECT_EQ(rig.hub()->status()["checkpoint"]["failed"], 0);
}

TEST(ServerLies, ThousandsWhoComeOnceAreForgottenButNotByTheLedger) {
  Signature tiny;
  tiny.parameters = {{"w", {16}}};
  tiny.up = tiny.down = "fp32";
  HubOptions options = faulty(1);
  options.rejoin_s = 0;
  options.checkpoint = scratch_file("thousands.gwc");
  Rig rig(options);
  Toy toy(rig, tiny, 1);
  toy.join();
  const auto visit = [&](int count, const std::string& who) {
    for (int i = 0; i < count; ++i) {
      Stranger liar(rig);  // claims a residual that nobody ever sees again
      liar.hello(tiny, "visitor" + who + std::to_string(i));
      EXPECT_TRUE(liar.hears(Kind::welcome));
      liar.say({.kind = Kind::handover, .sequence = 1, .tally = {.computed = 0.25, .squares = 1, .residual = 0.25}},
               message_of(tiny, 0, 0, Way::whole));
      EXPECT_TRUE(liar.read());
    }
  };
  visit(50, "a");
  const double before = rig.hub()->status()["ledger"]["computed"];
  EXPECT_NEAR(before, 50 * 0.25, 1e-9);
  visit(4200, "b");
  const nlohmann::json status = rig.hub()->status();
  EXPECT_NEAR(status["ledger"]["computed"].get<double>(), 4250 * 0.25, 1e-6);
  rig.hub()->stop();
  rig.kill();
  rig.start();
  EXPECT_NEAR(rig.hub()->status()["ledger"]["computed"].get<double>(), 4250 * 0.25, 1e-6);
  expect_ledger(*rig.hub());
  visit(50, "c");
  EXPECT_NEAR(rig.hub()->status()["ledger"]["computed"].get<double>(), 4300 * 0.25, 1e-6);
  expect_ledger(*rig.hub());
}

}  // namespace
}  // namespace gradwire::server
