// SPDX-License-Identifier: Apache-2.0
// Statistics from workers that lie. Those that cannot be are refused with their update; those that could be change no
// more than tables that stay valid, and never crash, stall or poison the others.
#include <random>

#include "server/noisy_quadratic.h"
#include "server/shard_coders.h"
#include "server/untrusted_worker.h"

namespace gradwire::server {
namespace {

constexpr uint64_t kElements = 512;

Signature one_tensor(const std::string& up) {
  Signature signature;
  signature.parameters = {{"w", {8, kElements / 8}}};
  signature.up = up;
  signature.down = "fp32";
  return signature;
}

struct EncodedUpdate {
  std::vector<std::byte> message, statistics;
  Blob payload() const {
    std::vector<std::byte> both(message);
    both.insert(both.end(), statistics.begin(), statistics.end());
    return make_blob(std::move(both));
  }
};

EncodedUpdate encoded(const Signature& signature, uint64_t step) {
  ShardWriter writer(specs_of(signature, shard_layouts(signature)[0], ShardMessage::up), Direction::up, {}, {});
  std::vector<float> values(kElements);
  for (size_t k = 0; k < kElements; ++k) values[k] = static_cast<float>(k % 37) * 0.01f - 0.2f;
  const void* const in[] = {values.data()};
  Runner& runner = writer.runner(step);
  EncodedUpdate update{std::vector<std::byte>(writer.message_bytes()), {}};
  runner.encode(in, {.step = step}, update.message);
  update.statistics = writer.learning().observe(runner, step, step, in, nullptr, update.message);
  return update;
}

// An honest worker, whose weights and tables are compared with those of a worker that is alone.
struct HonestLearner {
  HonestLearner(ServerFixture& server, const Signature& signature)
      : client({.signature = signature, .dial = server.dialer(), .name = "", .id = {}, .patience_s = kPatience}) {
    join();
  }
  void join() {
    float* const at[] = {weights.data()};
    client.join(at);
  }
  void work() {
    std::vector<float> update(kElements);
    for (size_t k = 0; k < kElements; ++k)
      update[k] = 0.1f * weights[k] + static_cast<float>(mix64(++draws) >> 40) * 0x1p-24f - 0.5f;
    const float* const in[] = {update.data()};
    float* const at[] = {weights.data()};
    client.exchange(in, at);
  }
  std::vector<float> weights = std::vector<float>(kElements);
  uint64_t draws = 0;
  Client client;
};

void put(std::vector<std::byte>& bytes, size_t word, int64_t value) {
  std::memcpy(bytes.data() + 8 * word, &value, sizeof value);
}

TEST(ServerStatistics, ThoseThatCannotBeAreRefusedWithTheirUpdate) {
  const Signature signature = one_tensor("optquant:bits=3,refit=2");
  using Change = std::function<void(EncodedUpdate&)>;
  const auto word = [](size_t at, int64_t value) {
    return [=](EncodedUpdate& update) { put(update.statistics, at, value); };
  };
  const std::vector<std::pair<const char*, Change>> lies = {
      {"none", [](EncodedUpdate& update) { update.statistics.clear(); }},
      {"too few", [](EncodedUpdate& update) { update.statistics.resize(update.statistics.size() - 8); }},
      {"too many", [](EncodedUpdate& update) { update.statistics.resize(update.statistics.size() + 8); }},
      {"half a word", [](EncodedUpdate& update) { update.statistics.resize(4); }},
      {"twice",
       [](EncodedUpdate& update) {
         const std::vector<std::byte> copy = update.statistics;
         update.statistics.insert(update.statistics.end(), copy.begin(), copy.end());
       }},
      {"of another codec", word(0, 1)},
      {"of codec -1", word(0, -1)},
      {"exponent", word(1, 513)},
      {"least exponent", word(1, INT64_MIN)},
      {"greatest exponent", word(1, INT64_MAX)},
      {"count", word(2, INT64_MAX)},
      {"least count", word(100, INT64_MIN)},
      {"just too many", word(100, (int64_t{1} << 55) + 1)},
      {"behind half a message", [](EncodedUpdate& update) { update.message.resize(update.message.size() / 2); }},
  };
  HubOptions options = small_hub(1, kPatience);
  ServerFixture server(options), alone(options);
  HonestLearner honest(server, signature), lonely(alone, signature);
  uint64_t step = 0;
  for (const auto& [name, change] : lies) {
    SCOPED_TRACE(name);
    while (encoded(signature, step).statistics.empty()) {  // to a step at which statistics are due
      honest.work();
      lonely.work();
      ++step;
    }
    {
      UntrustedWorker liar(server);
      liar.hello(signature);
      ASSERT_TRUE(liar.hears(FrameKind::welcome));
      EncodedUpdate update = encoded(signature, step);
      Frame frame{.kind = FrameKind::update, .step = step, .sequence = 1};
      change(update);
      frame.tail = update.statistics.size();
      liar.say(frame, update.payload());
      ASSERT_TRUE(liar.read());
      Blob unused;
      ASSERT_TRUE(liar.hears(FrameKind::weights, frame, unused));
      EXPECT_EQ(frame.status, UpdateStatus::corrupt);
    }
    honest.work();
    lonely.work();
    ++step;
    ASSERT_TRUE(honest.weights == lonely.weights);
  }
}

TEST(ServerStatistics, ATailThatIsLongerThanItsPayloadIsNotRead) {
  const auto head = write_head({.kind = FrameKind::update, .sequence = 1, .tail = 101}, 100);
  EXPECT_THROW(read_frame_head(head, 100), Error);
  EXPECT_THROW(read_frame_head(write_head({.kind = FrameKind::pull, .tail = 1}, 1), 1), Error);
  EXPECT_EQ(read_frame_head(write_head({.kind = FrameKind::weights, .tail = 100}, 100), 100).tail, 100u);
}

// Within the ranges that are checked, a worker may say anything.
void lie(std::vector<std::byte>& statistics, std::mt19937_64& random) {
  const uint64_t how = random() % 6;
  const size_t words = statistics.size() / 8;
  const int64_t most = int64_t{1} << 55;
  put(statistics, 1, how == 0 ? 512 : how == 1 ? -512 : static_cast<int64_t>(random() % 600) - 300);
  for (size_t i = 2; i < words; ++i) {
    const int64_t any = static_cast<int64_t>(random() % static_cast<uint64_t>(2 * most)) - most;
    put(statistics, i, how == 2 ? 1 : how == 3 ? most : how == 4 ? -most : how == 5 && i % 3 ? 0 : any);
  }
}

TEST(ServerStatistics, OneWhoLiesLeavesTheOthersWithTablesThatWork) {
  for (const char* up : {"optquant:bits=3,refit=1", "optquant:bits=2,mode=biased,refit=1", "casq:bits=2,refit=1",
                         "casq:mode=paper,refit=1,rule=density", "casq:mode=paper,refit=1,rule=entropy",
                         "casq:bits=3,mode=paper,refit=1,cut=0.9", "rangefloat:bits=8,refit=1", "dqsgd:budget=4",
                         "fft:format=range,refit=1"}) {
    SCOPED_TRACE(up);
    const Signature signature = one_tensor(up);
    ServerFixture server(small_hub(2, kPatience));
    HonestLearner honest(server, signature);
    std::mt19937_64 random(7);
    UntrustedWorker liar(server);
    liar.hello(signature);
    ASSERT_TRUE(liar.hears(FrameKind::welcome));
    for (uint64_t step = 0; step < 12; ++step) {
      EncodedUpdate update = encoded(signature, step);
      if (!update.statistics.empty()) lie(update.statistics, random);
      Frame frame{.kind = FrameKind::update, .step = step, .sequence = step + 1, .tail = update.statistics.size()};
      liar.say(frame, update.payload());
      honest.work();
      Blob unused;
      ASSERT_TRUE(liar.hears(FrameKind::weights, frame, unused));
      EXPECT_EQ(frame.status, UpdateStatus::applied);
      EXPECT_EQ(frame.contributors, 2u);
    }
    EXPECT_EQ(honest.client.counts().applied, 12u);
    for (const float one : honest.weights) ASSERT_TRUE(std::isfinite(one));
  }
}

}  // namespace
}  // namespace gradwire::server
