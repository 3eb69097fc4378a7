// SPDX-License-Identifier: Apache-2.0
// A server and its workers in one process, without a network: frames go through a FaultyLink that can repeat, delay and
// alter them and cut the connection, by a seed. Killing the server destroys the hub without another word, as kill -9
// would.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <condition_variable>
#include <deque>
#include <filesystem>
#include <functional>
#include <mutex>
#include <random>
#include <thread>

#include "core/bits.h"
#include "gradwire/error.h"
#include "server/client.h"
#include "server/hub.h"
#include "support/lighter.h"
#include "support/scratch_folder.h"

namespace gradwire::server {

using namespace std::chrono_literals;

// Tests wait for events. This many seconds without the event are a failure; no test measures how many it took.
inline constexpr double kPatience = 120;

[[nodiscard]] inline bool eventually(const std::function<bool()>& event, double seconds = kPatience) {
  const auto begin = SteadyClock::now();
  while (!event()) {
    if (seconds_since(begin) > seconds) return false;
    std::this_thread::sleep_for(2ms);
  }
  return true;
}

// What a link does to a frame from a worker; zero: nothing.
struct LinkFaults {
  double repeat = 0, swap = 0, flip = 0, cut = 0;  // probabilities
};

class LocalSession final : public Session {
 public:
  void send(const Frame& frame, const Blob& payload) override {
    // Through the bytes and back, as on a network.
    const auto head = write_head(frame, payload ? payload->size() : 0);
    const std::lock_guard lock(mutex_);
    if (dead_) return;
    out_ += head.size() + (payload ? payload->size() : 0);
    queue_.emplace_back(read_frame_head(head, payload ? payload->size() : 0), payload);
    wake_.notify_all();
  }
  void refuse(Refusal why, const std::string& words) override {
    const std::lock_guard lock(mutex_);
    refusal_ = why;
    words_ = words;
    dead_ = true;
    wake_.notify_all();
  }
  std::string peer() const override { return "local"; }
  uint64_t bytes_in() const override { return in_; }
  uint64_t bytes_out() const override { return out_; }

  bool receive(Frame& frame, Blob& payload, std::chrono::milliseconds patience) {
    std::unique_lock lock(mutex_);
    wake_.wait_for(lock, patience, [this] { return dead_ || !queue_.empty(); });
    if (!queue_.empty()) {
      std::tie(frame, payload) = queue_.front();
      queue_.pop_front();
      return true;
    }
    if (!dead_) return false;
    if (refusal_ == Refusal::signature || refusal_ == Refusal::full) throw Error(ErrorKind::mismatch, words_, "server");
    throw LinkLost(words_.empty() ? "cut" : words_);
  }
  void kill() {
    const std::lock_guard lock(mutex_);
    dead_ = true;
    queue_.clear();
    wake_.notify_all();
  }
  std::atomic<uint64_t> in_{0}, out_{0};

 private:
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::pair<Frame, Blob>> queue_;
  bool dead_ = false;
  std::optional<Refusal> refusal_;
  std::string words_;
};

class ServerFixture {
 public:
  explicit ServerFixture(HubOptions options) : options_(std::move(options)) { start(); }
  ~ServerFixture() { kill(); }

  void start() { set(std::make_shared<ServerHub>(options_)); }
  void kill() {
    std::shared_ptr<ServerHub> old = set(nullptr);
    while (old.use_count() > 1) std::this_thread::sleep_for(1ms);  // a frame is being handled
  }
  std::shared_ptr<ServerHub> hub() {
    const std::lock_guard lock(mutex_);
    return hub_;
  }
  HubOptions& options() { return options_; }

  class FaultyLink final : public Link {
   public:
    FaultyLink(ServerFixture& server, LinkFaults faults, uint64_t seed)
        : server_(server), faults_(faults), random_(seed), session_(std::make_shared<LocalSession>()) {
      const std::lock_guard lock(server_.mutex_);
      if (!server_.hub_) throw LinkLost("no server");
      server_.sessions_.push_back(session_);
    }
    ~FaultyLink() override {
      session_->kill();
      if (const auto hub = server_.hub()) hub->vanished(session_.get());
    }
    void send(const Frame& frame, const Blob& payload) override {
      if (chance(faults_.cut)) {
        session_->kill();
        if (const auto hub = server_.hub()) hub->vanished(session_.get());
        throw LinkLost("cut by the wire");
      }
      if (frame.kind == FrameKind::update && chance(faults_.swap)) {  // overtaken by the next one
        held_.emplace_back(frame, payload);
        return;
      }
      deliver(frame, payload);
      if (frame.kind == FrameKind::update && chance(faults_.repeat)) deliver(frame, payload);
      for (const auto& [late, content] : std::exchange(held_, {})) deliver(late, content);
    }
    bool receive(Frame& frame, Blob& payload, std::chrono::milliseconds patience) override {
      for (const auto& [late, content] : std::exchange(held_, {})) deliver(late, content);
      return session_->receive(frame, payload, patience);
    }

   private:
    bool chance(double p) { return p > 0 && std::uniform_real_distribution<>(0, 1)(random_) < p; }
    void deliver(const Frame& frame, Blob payload) {
      const auto hub = server_.hub();
      if (!hub) throw LinkLost("no server");
      if (frame.kind == FrameKind::update && chance(faults_.flip)) {
        std::vector<std::byte> bytes = *payload;
        bytes[random_() % bytes.size()] ^= std::byte(1u << random_() % 8);
        payload = make_blob(std::move(bytes));
      }
      session_->in_ += kFrameHead + (payload ? payload->size() : 0);
      hub->received(session_, frame, payload ? payload : make_blob({}), [] {});
    }

    ServerFixture& server_;
    LinkFaults faults_;
    std::mt19937_64 random_;
    std::shared_ptr<LocalSession> session_;
    std::vector<std::pair<Frame, Blob>> held_;
  };
  Dialer dialer(LinkFaults faults = {}, uint64_t seed = 1) {
    return [this, faults, seed, count = std::make_shared<uint64_t>(0)] {
      return std::make_unique<FaultyLink>(*this, faults, seed * 1000 + ++*count);
    };
  }

 private:
  std::shared_ptr<ServerHub> set(std::shared_ptr<ServerHub> hub) {
    const std::lock_guard lock(mutex_);
    std::swap(hub_, hub);
    if (!hub_)
      for (const auto& one : std::exchange(sessions_, {}))
        if (const auto session = one.lock()) session->kill();
    return hub;
  }

  HubOptions options_;
  std::mutex mutex_;
  std::shared_ptr<ServerHub> hub_;
  std::vector<std::weak_ptr<LocalSession>> sessions_;
};

inline Signature small_signature(uint64_t scale = 1) {
  Signature signature;
  signature.parameters = {{"conv.weight", {static_cast<int64_t>(60 * scale), 50}},
                          {"conv.bias", {60}},
                          {"fc.weight", {10, static_cast<int64_t>(7000 * scale)}}};
  signature.buffers = {{"bn.mean", {60}}};
  signature.model = "toy";
  return signature;
}

inline Signature plain_signature() {  // without compression
  Signature signature = small_signature();
  signature.up = signature.down = "fp32";
  return signature;
}

// ToyTensors of a model, with the pointers that clients take.
struct ToyTensors {
  std::vector<std::vector<float>> values;
  std::vector<float*> pointers;
  explicit ToyTensors(const Signature& signature, float fill = 0) {
    for (const Variable& one : signature.parameters) values.emplace_back(one.count(), fill);
    for (auto& one : values) pointers.push_back(one.data());
  }
  std::vector<const float*> constant() const { return {pointers.begin(), pointers.end()}; }
  uint64_t count() const {
    uint64_t sum = 0;
    for (const auto& one : values) sum += one.size();
    return sum;
  }
};

// A worker with a problem of its own: half the squared distance to a target, with noise. Adds up, in double, what it
// computed.
class ToyWorker {
 public:
  ToyWorker(ServerFixture& server, const Signature& signature, uint64_t seed, LinkFaults faults = {})
      : ToyWorker(server.dialer(faults, seed), signature, seed) {}
  ToyWorker(Dialer dial, const Signature& signature, uint64_t seed)
      : draws_(mix64(seed)),
        weights(signature),
        update(signature),
        client({.signature = signature,
                .dial = std::move(dial),
                .name = "toy" + std::to_string(seed),
                .id = {},
                .patience_s = kPatience}) {
    for (const auto& one : weights.values) computed.emplace_back(one.size());
  }
  uint64_t join() { return step = client.join(weights.pointers); }
  uint64_t work(float rate = 0.1f) {
    double loss = 0;
    for (size_t i = 0; i < weights.values.size(); ++i) {
      const float* at = weights.values[i].data();
      float* change = update.values[i].data();
      double* sum = computed[i].data();
      for (size_t k = 0, count = weights.values[i].size(); k < count; ++k) {
        const float gradient = at[k] - target(i, k) + noise();
        loss += gradient * gradient;
        change[k] = rate * gradient;
        sum[k] += static_cast<double>(change[k]);
      }
    }
    client.report({{"loss", loss}, {"step", step}});
    return step = client.exchange(update.constant(), weights.pointers);
  }
  // From -1 to 1. This and noise() are integer arithmetic, since under ThreadSanitizer the tests took most of their
  // time for sines and a library's random numbers.
  static float target(size_t tensor, size_t k) {
    return static_cast<float>((tensor * 100 + k) * 37 % 401) * 0.005f - 1.0f;
  }
  double distance() const {
    double worst = 0;
    for (size_t i = 0; i < weights.values.size(); ++i)
      for (size_t k = 0; k < weights.values[i].size(); ++k)
        worst = std::max(worst, std::fabs(static_cast<double>(weights.values[i][k]) - target(i, k)));
    return worst;
  }

 private:
  float noise() {  // uniform, with a standard deviation of 0.1
    return (static_cast<float>(mix64(++draws_) >> 40) * 0x1p-24f - 0.5f) * 0.34641f;
  }
  uint64_t draws_;

 public:
  ToyTensors weights, update;
  std::vector<std::vector<double>> computed;
  Client client;
  uint64_t step = 0;
};

using ToyWorkers = std::vector<std::unique_ptr<ToyWorker>>;

inline ToyWorkers make_workers(ServerFixture& server, const Signature& signature, size_t count) {
  ToyWorkers toys;
  for (size_t i = 0; i < count; ++i) toys.push_back(std::make_unique<ToyWorker>(server, signature, i + 1));
  return toys;
}

// Two threads, several parts even of a small model.
inline HubOptions small_hub(uint32_t min_workers, double deadline_s) {
  HubOptions options;
  options.min_workers = min_workers;
  options.threads = 2;
  options.shard_elements = 32768;
  options.deadline_s = deadline_s;
  return options;
}

inline void expect_ledger(const ServerHub& hub) {
  const nlohmann::json ledger = hub.status()["ledger"];
  EXPECT_GT(ledger["magnitude"].get<double>(), 0);
  EXPECT_LT(ledger["relative"].get<double>(), 1e-6) << ledger.dump();
}

}  // namespace gradwire::server
