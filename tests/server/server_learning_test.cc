// SPDX-License-Identifier: Apache-2.0
// Codecs that learn, over a parameter server: what they learn is what they learn over a Reducer, and it survives
// workers that die, workers that join and a server that is restarted.
#include <fmt/format.h>

#include <array>

#include "gradwire/collective.h"
#include "gradwire/message.h"
#include "server/quadratic_excess.h"
#include "server/quadratic_worker.h"

namespace gradwire::server {
namespace {

using Tensors = NoisyQuadratic::Tensors;
using Profile = NoisyQuadratic::Profile;

void join(QuadraticWorkers& workers, ServerFixture& server, const NoisyQuadratic& problem, const Signature& signature,
          uint64_t number) {
  workers.push_back(std::make_unique<QuadraticWorker>(server, problem, signature, number));
}

std::vector<std::string> specs_that_learn() {
  std::vector<std::string> list;
  for (const CodecInfo& info : codecs())
    if (const Codec codec = Codec::parse(info.example); codec.traits().learns && !Learner(codec, kOneShard, 1).ahead())
      list.push_back(info.example);
  list.insert(list.end(), {"casq:mode=paper", "casq:bits=2,start=5", "optquant:bits=2,mode=biased",
                           "fft:theta=0.5,schedule=step,until=9"});
  return list;
}

TEST(ServerLearning, OneShardLearnsBitForBitWhatAReducerLearns) {
  const NoisyQuadratic problem(Profile::sparse, 1);
  constexpr uint64_t kSteps = 110;  // refits after 1, 2, 4, ..., 64 and 100
  for (const std::string& up : specs_that_learn()) {
    SCOPED_TRACE(up);
    Tensors expected;
    descend_over_reducer(problem, NoisyQuadratic::signature(up), 3, kSteps,
                         [&](uint64_t, const Tensors& weights) { expected = weights; });
    ServerFixture server(quadratic_hub(3, kOneShard));
    QuadraticWorkers workers;
    Signature signature = NoisyQuadratic::signature(up);
    signature.steps = kSteps;
    for (uint64_t i = 0; i < 3; ++i) join(workers, server, problem, signature, i);
    work_until(workers, kSteps);
    for (const auto& worker : workers) EXPECT_TRUE(worker->weights == expected);
    expect_ledger(*server.hub());
  }
}

// ---- The closed loop

double excess_over_server(const NoisyQuadratic& problem, const std::string& up, bool churn) {
  Excess excess(problem);
  HubOptions options = quadratic_hub(3, kTwoShards);
  options.checkpoint = scratch_file("learning.gwc");
  options.rejoin_s = 0.1;  // one that has died is given up soon, and a restarted server does not wait for it
  ServerFixture server(options);
  const Signature signature = NoisyQuadratic::signature(up);
  QuadraticWorkers workers;
  for (uint64_t i = 0; i < 4; ++i) join(workers, server, problem, signature, i);
  const auto until = [&](uint64_t step) {
    work_until(workers, step, [&] { excess.see(workers[0]->step, workers[0]->weights); });
  };
  if (churn) {
    until(250);
    workers.pop_back();  // dies, and its residual with it
    excess.workers = {0, 1, 2};
    until(420);
    join(workers, server, problem, signature, 4);
    excess.workers = {0, 1, 2, 4};
    until(610);
    server.kill();
    server.options().rejoin_s = kPatience;
    server.start();
  }
  until(kLoopSteps);
  EXPECT_EQ(workers[3]->weights, workers[0]->weights);
  return excess.mean();
}

TEST(ServerLearning, ItIsAsGoodAsAReducerWhileWorkersDieAndJoinAndTheServerIsRestarted) {
  struct LoopCase {
    const char* spec;
    Profile profile;
    double of_untaught;  // what may be left of the excess of the tables that the codec begins with
    // ... and of that over a reducer. Two ranks of a pair round against each other, which halves their variance. A
    // reducer has two pairs; here, once a worker has died, one pair is left and the others have no partner: 3/4 in the
    // place of 1/2.
    double of_reducer;
  };
  for (const LoopCase& one :
       {LoopCase{"optquant:bits=3", Profile::normal, 0.8, 1.5},
        {"optquant:bits=3", Profile::sparse, 1.02, 1.5},  // it begins with levels that suit sparse noise
        {"optquant:bits=3", Profile::layered, 0.85, 1.5},
        {"casq:bits=2", Profile::normal, 0.6, 1},
        {"casq:bits=2", Profile::layered, 0.7, 1}}) {
    double server = 0, reducer = 0, untaught = 0;
    for (const uint64_t seed : {1, 2}) {
      const NoisyQuadratic problem(one.profile, seed);
      server += excess_over_server(problem, one.spec, true);
      reducer += excess_over_reducer(problem, NoisyQuadratic::signature(one.spec));
      untaught += excess_over_server(problem, std::string(one.spec) + ",refit=0", true);
    }
    const std::string figures = fmt::format("{} profile {}: server {:.4g}, reducer {:.4g}, untaught {:.4g}", one.spec,
                                            static_cast<int>(one.profile), server, reducer, untaught);
    std::printf("%s\n", figures.c_str());
    EXPECT_LT(server, 1.05 * one.of_reducer * reducer) << figures;
    EXPECT_LT(server, one.of_untaught * untaught) << figures;
  }
}

// ---- Restarts and joiners

// Remembers the tables of the last update that went through.
class TableWatch {
 public:
  Dialer dialer(ServerFixture& server) {
    return [this, inner = server.dialer()] { return std::make_unique<WatchedLink>(*this, inner()); };
  }
  std::vector<uint32_t> table() const {
    const std::lock_guard lock(mutex_);
    return table_;
  }

 private:
  class WatchedLink final : public Link {
   public:
    WatchedLink(TableWatch& watch, std::unique_ptr<Link> link) : watch_(watch), link_(std::move(link)) {}
    void send(const Frame& frame, const Blob& payload) override {
      if (frame.kind == FrameKind::update) {
        const Codec codec = read_head(message_part(frame, payload)).tensors[0].codec;
        const std::lock_guard lock(watch_.mutex_);
        watch_.table_.assign(codec.table().begin(), codec.table().end());
      }
      link_->send(frame, payload);
    }
    bool receive(Frame& frame, Blob& payload, std::chrono::milliseconds patience) override {
      return link_->receive(frame, payload, patience);
    }

   private:
    TableWatch& watch_;
    std::unique_ptr<Link> link_;
  };
  mutable std::mutex mutex_;
  std::vector<uint32_t> table_;
};

TEST(ServerLearning, ARestartChangesNoBitInEitherDirection) {
  struct Directions {
    const char *up, *down;
    bool updates;
  };
  for (const Directions& one : {Directions{"optquant:bits=3,refit=7", "optquant:bits=6,refit=5", false},
                                {"casq:bits=2,refit=5", "optquant:bits=5,mode=biased,refit=7", true},
                                {"dqsgd:budget=4", "dqsgd:budget=6", false},
                                {"casq:mode=paper,start=9,refit=6", "rangefloat:bits=8,refit=5", true}}) {
    SCOPED_TRACE(one.up);
    Signature signature = NoisyQuadratic::signature(one.up, one.down);
    signature.sends_updates = one.updates;
    const NoisyQuadratic problem(Profile::layered, 3);
    expect_restarts_change_nothing({11, 30, 47}, 60, [&](ServerFixture& server) {
      QuadraticWorkers workers;
      for (uint64_t i = 0; i < 2; ++i) join(workers, server, problem, signature, i);
      return workers;
    });
  }
}

// Runs two workers, then a third with them, and returns the tables of their last updates.
std::vector<std::vector<uint32_t>> tables_with_a_joiner(bool async, uint64_t more) {
  const NoisyQuadratic problem(Profile::sparse, 5);
  const Signature signature = NoisyQuadratic::signature("optquant:bits=3,refit=6");
  HubOptions options = quadratic_hub(1, kOneShard);
  options.async = async;
  ServerFixture server(options);
  std::array<TableWatch, 3> watches;
  std::vector<std::unique_ptr<Client>> clients;
  std::vector<Tensors> weights(3, NoisyQuadratic::zeros());
  const auto add = [&](size_t i) {
    clients.push_back(std::make_unique<Client>(
        ClientOptions{.signature = signature, .dial = watches[i].dialer(server), .name = "", .id = {}}));
    return clients[i]->join(pointers(weights[i]));
  };
  const auto work = [&](uint64_t steps) {
    std::vector<std::thread> threads;
    for (size_t i = 0; i < clients.size(); ++i)
      threads.emplace_back([&, i] {
        Tensors update = NoisyQuadratic::zeros();
        for (uint64_t step = 0; step < steps; ++step) {
          problem.update(i, clients[i]->step(), weights[i], update);
          clients[i]->exchange(constant(update), pointers(weights[i]));
        }
      });
    for (std::thread& thread : threads) thread.join();
  };
  add(0);
  add(1);
  work(20);
  add(2);
  work(more);
  return {watches[0].table(), watches[1].table(), watches[2].table()};
}

TEST(ServerLearning, AJoinerBeginsWithTheTablesOfTheOthers) {
  const auto tables = tables_with_a_joiner(false, 1);
  EXPECT_FALSE(tables[0].empty());
  EXPECT_EQ(tables[1], tables[0]);
  EXPECT_EQ(tables[2], tables[0]);
}

TEST(ServerLearning, WithoutStepsCodecsLearnToo) {
  for (const std::vector<uint32_t>& table : tables_with_a_joiner(true, 1)) EXPECT_FALSE(table.empty());
  const auto later = tables_with_a_joiner(true, 40);
  EXPECT_NE(later[0], tables_with_a_joiner(true, 1)[0]);  // it goes on learning
}

TEST(ServerLearning, WhatAServerCannotLearnIsRefusedByName) {
  const NoisyQuadratic problem(Profile::normal, 1);
  const auto refusal = [&](const std::string& up, const std::string& down) -> std::string {
    ServerFixture server(quadratic_hub(1, kOneShard));
    try {
      QuadraticWorker(server, problem, NoisyQuadratic::signature(up, down), 0);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_NE(refusal("dqsgd:budget=4,mode=paper", "fp32").find("up is dqsgd"), std::string::npos);
  EXPECT_NE(refusal("fp32", "dqsgd:budget=4,mode=paper").find("down is dqsgd"), std::string::npos);
  EXPECT_NE(refusal("fp32", "fft:schedule=rate").find("follows the learning rate"), std::string::npos);
  EXPECT_EQ(refusal("fft:schedule=rate", "fp32"), "");
}

}  // namespace
}  // namespace gradwire::server
