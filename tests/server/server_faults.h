// SPDX-License-Identifier: Apache-2.0
// What the tests of the server's faults share: links that die or wait at a chosen point, and what must hold at rest.
#pragma once

#include <unistd.h>

#include <functional>

#include "server/server_fixture.h"

namespace gradwire::server {

struct Killed {};  // thrown through a worker: what kill -9 is to a process

// Looks at everything that a worker does with its connection, and may throw, wait, or kill the server, before it
// happens.
using LinkHook = std::function<void(const Frame* sent)>;  // null: it listens

class HookedLink final : public Link {
 public:
  HookedLink(std::unique_ptr<Link> inner, LinkHook hook) : inner_(std::move(inner)), hook_(std::move(hook)) {}
  void send(const Frame& frame, const Blob& payload) override {
    hook_(&frame);
    inner_->send(frame, payload);
  }
  bool receive(Frame& frame, Blob& payload, std::chrono::milliseconds patience) override {
    hook_(nullptr);
    return inner_->receive(frame, payload, patience);
  }

 private:
  std::unique_ptr<Link> inner_;
  LinkHook hook_;
};

inline Dialer hooked(ServerFixture& server, uint64_t seed, LinkHook hook, LinkFaults faults = {}) {
  return [dial = server.dialer(faults, seed), hook] { return std::make_unique<HookedLink>(dial(), hook); };
}

inline HubOptions fault_options(uint32_t min_workers) { return small_hub(min_workers, kPatience); }

inline void join(ToyWorkers& toys) {  // in this order: slots
  for (auto& toy : toys) toy->join();
}

inline void work(ToyWorkers& toys, uint64_t until) {
  std::vector<std::thread> threads;
  for (auto& toy : toys)
    threads.emplace_back([&toy, until] {
      while (toy->step < until) toy->work();
    });
  for (std::thread& thread : threads) thread.join();
}

inline void expect_agreement(const ToyWorkers& toys) {
  for (const auto& toy : toys) {
    EXPECT_EQ(toy->step, toys[0]->step);
    EXPECT_TRUE(toy->weights.values == toys[0]->weights.values)
        << toy->client.slot() << " holds other weights than " << toys[0]->client.slot();
  }
}

// Element by element, for weights by fp32 from zeros and the same workers in all steps: what is missing from their sum
// is in the residuals. The weights themselves are sums in f32.
inline void expect_nothing_missing(const ToyWorkers& toys, double tolerance = 2e-5) {
  double worst = 0;
  for (size_t i = 0; i < toys[0]->computed.size(); ++i)
    for (size_t k = 0; k < toys[0]->computed[i].size(); ++k) {
      double sum = 0;
      for (const auto& toy : toys) sum += toy->computed[i][k] - static_cast<double>(toy->client.residual(i)[k]);
      worst = std::max(worst, std::fabs(sum / static_cast<double>(toys.size()) +
                                        static_cast<double>(toys[0]->weights.values[i][k])));
    }
  EXPECT_LT(worst, tolerance);
}

inline bool on_disk(ServerFixture& server, uint64_t step) {
  return eventually([&] {
    const nlohmann::json status = server.hub()->status();
    return status["checkpoint"]["saved"] > 0 && status["durable_step"] >= step;
  });
}

inline std::string state_of_worker(ServerHub& hub, const Client& client) {
  const nlohmann::json status = hub.status();
  for (const nlohmann::json& one : status["workers"]["list"])
    if (one["id"] == client.id().substr(0, 8)) return one["state"];
  return "unknown";
}

}  // namespace gradwire::server
