// SPDX-License-Identifier: Apache-2.0
// Workers that descend a noisy quadratic over a server, and what a restart of that server may change: nothing.
#pragma once

#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "server/noisy_quadratic.h"
#include "server/server_fixture.h"

namespace gradwire::server {

inline std::vector<float*> pointers(NoisyQuadratic::Tensors& tensors) {
  std::vector<float*> list;
  for (auto& one : tensors) list.push_back(one.data());
  return list;
}

inline std::vector<const float*> constant(const NoisyQuadratic::Tensors& tensors) {
  std::vector<const float*> list;
  for (const auto& one : tensors) list.push_back(one.data());
  return list;
}

// `number` chooses the worker's noise. `rate`, where given, is the learning rate that it sends with each update.
struct QuadraticWorker {
  using Tensors = NoisyQuadratic::Tensors;
  using Rate = double (*)(uint64_t step);

  QuadraticWorker(ServerFixture& server, const NoisyQuadratic& given, const Signature& signature, uint64_t which,
                  Rate at_step = nullptr)
      : problem(given),
        number(which),
        rate(at_step),
        client({.signature = signature, .dial = server.dialer(), .name = "", .id = {}, .patience_s = kPatience}) {
    step = client.join(pointers(weights));
  }
  void work() {
    problem.update(number, step, weights, update);
    send(update);
  }
  void send(const Tensors& sent) {
    if (rate) client.set_rate(rate(step));
    step = client.exchange(constant(sent), pointers(weights));
  }

  const NoisyQuadratic& problem;
  uint64_t number, step = 0;
  Rate rate;
  Tensors weights = NoisyQuadratic::zeros(), update = NoisyQuadratic::zeros();
  Client client;
};

using QuadraticWorkers = std::vector<std::unique_ptr<QuadraticWorker>>;

// All work until a step; `seen` is called by the first one after each of its steps.
inline void work_until(QuadraticWorkers& workers, uint64_t until, const std::function<void()>& seen = {}) {
  std::vector<std::thread> threads;
  for (auto& worker : workers)
    threads.emplace_back([&, first = &worker == &workers.front()] {
      while (worker->step < until) {
        worker->work();
        if (first && seen) seen();
      }
    });
  for (std::thread& thread : threads) thread.join();
}

inline constexpr uint64_t kOneShard = NoisyQuadratic::kTensors * NoisyQuadratic::kElements,
                          kTwoShards = NoisyQuadratic::kElements;

inline HubOptions quadratic_hub(uint32_t min_workers, uint64_t shard_elements) {
  HubOptions options = small_hub(min_workers, kPatience);
  options.shard_elements = shard_elements;
  return options;
}

// Two workers reach step `end` with the same weights, whether or not their server is killed and started again at each
// of the steps `kills`. `start` makes the workers.
inline void expect_restarts_change_nothing(std::initializer_list<uint64_t> kills, uint64_t end,
                                           const std::function<QuadraticWorkers(ServerFixture&)>& start) {
  NoisyQuadratic::Tensors expected;
  for (const bool restarts : {false, true}) {
    HubOptions options = quadratic_hub(2, kTwoShards);
    options.checkpoint = scratch_file("quadratic_restart.gwc");
    options.save_every = 4;
    ServerFixture server(options);
    QuadraticWorkers workers = start(server);
    for (const uint64_t until : kills) {
      work_until(workers, until);
      if (!restarts) continue;
      ASSERT_TRUE(eventually([&] { return server.hub()->status()["durable_step"] >= until - 8; }));
      server.kill();
      server.start();
    }
    work_until(workers, end);
    EXPECT_TRUE(workers[0]->weights == workers[1]->weights);
    if (restarts)
      EXPECT_TRUE(workers[0]->weights == expected);
    else
      expected = workers[0]->weights;
    expect_ledger(*server.hub());
  }
}

}  // namespace gradwire::server
