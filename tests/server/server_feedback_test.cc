// SPDX-License-Identifier: Apache-2.0
// Error feedback over a parameter server follows the rule of the collectives: it is on where the codec asks for it,
// unless the user decides. In a closed loop, an unbiased codec with few bits is as good as over a Reducer; with
// feedback, which runs in the same loops, its residual grows until nothing is left of the descent.
#include <fmt/format.h>

#include <cmath>

#include "server/quadratic_excess.h"
#include "server/quadratic_worker.h"

namespace gradwire::server {
namespace {

using Feedback = ReduceOptions::Feedback;
using QuadraticProfile = NoisyQuadratic::Profile;

Signature feedback_signature(const std::string& up, Feedback feedback) {
  Signature signature = NoisyQuadratic::signature(up);
  signature.feedback = feedback;
  return signature;
}

QuadraticWorkers start_workers(ServerFixture& server, const NoisyQuadratic& problem, const Signature& signature,
                               uint64_t count) {
  QuadraticWorkers workers;
  for (uint64_t i = 0; i < count; ++i)
    workers.push_back(std::make_unique<QuadraticWorker>(server, problem, signature, i));
  return workers;
}

// ---- The closed loop

double excess_of_server(const NoisyQuadratic& problem, const Signature& signature) {
  Excess excess(problem);
  ServerFixture server(quadratic_hub(4, kTwoShards));
  QuadraticWorkers workers = start_workers(server, problem, signature, 4);
  work_until(workers, kLoopSteps, [&] { excess.see(workers[0]->step, workers[0]->weights); });
  EXPECT_EQ(workers[3]->weights, workers[0]->weights);
  expect_ledger(*server.hub());
  return excess.mean();
}

void expect_as_good_as_a_reducer(const char* up, QuadraticProfile profile, uint64_t seed) {
  const NoisyQuadratic problem(profile, seed);
  const double server = excess_of_server(problem, NoisyQuadratic::signature(up)),
               reducer = excess_over_reducer(problem, NoisyQuadratic::signature(up)),
               fed_back = excess_over_reducer(problem, feedback_signature(up, Feedback::on));
  const std::string figures = fmt::format("{} profile {} seed {}: server {:.4g}, reducer {:.4g}, with feedback {:.4g}",
                                          up, static_cast<int>(profile), seed, server, reducer, fed_back);
  std::printf("%s\n", figures.c_str());
  EXPECT_LT(server, 1.02 * reducer) << figures;
  EXPECT_FALSE(fed_back < 10 * server) << figures;  // it may have ceased to be finite
}

TEST(ServerFeedback, AnUnbiasedCodecWithFewBitsIsAsGoodAsOverAReducer) {
  for (const QuadraticProfile profile :
       {QuadraticProfile::normal, QuadraticProfile::sparse, QuadraticProfile::layered}) {
    for (const uint64_t seed : {1, 2}) expect_as_good_as_a_reducer("qsgd:bits=2", profile, seed);
  }
  expect_as_good_as_a_reducer("terngrad", QuadraticProfile::normal, 1);
}

// ---- The user's choice

TEST(ServerFeedback, EveryChoiceGivesTheWeightsOfAReducerBitForBit) {
  const NoisyQuadratic problem(QuadraticProfile::layered, 2);
  constexpr uint64_t kChoiceSteps = 40;
  for (const char* up :
       {"qsgd:bits=2", "loggrid:k=2", "bf16", "layer0=topk:ratio=0.1,bits=2;*=terngrad", "optquant:bits=2"})
    for (const Feedback feedback : {Feedback::codec, Feedback::on, Feedback::off}) {
      SCOPED_TRACE(fmt::format("{} {}", up, static_cast<int>(feedback)));
      const Signature signature = feedback_signature(up, feedback);
      NoisyQuadratic::Tensors expected;
      descend_over_reducer(problem, signature, 3, kChoiceSteps,
                           [&](uint64_t, const NoisyQuadratic::Tensors& weights) { expected = weights; });
      ServerFixture server(quadratic_hub(3, kOneShard));
      QuadraticWorkers workers = start_workers(server, problem, signature, 3);
      work_until(workers, kChoiceSteps);
      for (const auto& worker : workers) EXPECT_TRUE(worker->weights == expected);
      expect_ledger(*server.hub());
    }
}

TEST(ServerFeedback, ARestartChangesNoBitWithoutIt) {
  const NoisyQuadratic problem(QuadraticProfile::layered, 3);
  for (const bool updates : {false, true}) {
    Signature signature = feedback_signature("qsgd:bits=2", updates ? Feedback::off : Feedback::codec);
    signature.sends_updates = updates;
    signature.down = "unigrid:bits=8";
    expect_restarts_change_nothing({11, 30}, 45,
                                   [&](ServerFixture& server) { return start_workers(server, problem, signature, 2); });
  }
}

// ---- Late updates

double norm_of(std::span<const float> values) {
  double sum = 0;
  for (const float value : values) sum += static_cast<double>(value) * static_cast<double>(value);
  return std::sqrt(sum);
}

// Without feedback, too, an update that comes too late comes back whole: ten in a row are their sum. If the decoded
// messages came back instead, each would be encoded again with those before it, and the error would exceed the sum.
TEST(ServerFeedback, LateUpdatesComeBackWholeWithoutIt) {
  const NoisyQuadratic problem(QuadraticProfile::normal, 1);
  const Signature signature = NoisyQuadratic::signature("qsgd:bits=2");
  HubOptions options = quadratic_hub(1, kTwoShards);
  options.deadline_s = 0.05;
  ServerFixture server(options);
  QuadraticWorkers workers = start_workers(server, problem, signature, 2);
  QuadraticWorker &quick = *workers[0], &slow = *workers[1];
  const Plan plan(specs_of(signature, shard_layouts(signature, kTwoShards)[0], ShardMessage::up));
  const auto runner = make_runner(plan, {});
  std::vector<std::byte> message(plan.message_bytes());
  std::vector<float> sum(NoisyQuadratic::kElements), naive = sum;
  for (uint64_t turn = 0; turn < 10; ++turn) {
    quick.work();  // closes at the deadline without the other
    problem.update(slow.number, slow.step, slow.weights, slow.update);
    for (size_t k = 0; k < sum.size(); ++k) sum[k] += slow.update[0][k];
    for (size_t k = 0; k < sum.size(); ++k) naive[k] += slow.update[0][k];
    const void* const in[] = {naive.data()};
    void* const out[] = {naive.data()};
    runner->encode(in, {.step = turn}, message);
    runner->decode(message, out);
    slow.send(slow.update);
  }
  EXPECT_EQ(slow.client.counts().late, 10 * 2u);
  EXPECT_EQ(slow.client.counts().applied, 0u);
  for (size_t k = 0; k < sum.size(); ++k) ASSERT_NEAR(slow.client.residual(0)[k], sum[k], 1e-4);
  for (size_t k = 0; k < sum.size(); ++k) naive[k] -= sum[k];
  EXPECT_GT(norm_of(naive), 2 * norm_of(sum));
  EXPECT_EQ(norm_of(quick.client.residual(0)), 0);  // nothing waits where nothing was late
  work_until(workers, slow.step + 3);
  EXPECT_EQ(slow.weights, quick.weights);
  expect_ledger(*server.hub());
  EXPECT_TRUE(slow.client.leave(kPatience));
  EXPECT_TRUE(quick.client.leave(kPatience));
  expect_ledger(*server.hub());
}

// A server that was killed has forgotten two updates of a worker, and closes their steps without it. Both come back,
// the older one without what compression changed in it. The ledger knows.
TEST(ServerFeedback, ForgottenUpdatesThatComeTooLateAreAccountedForWithoutIt) {
  const NoisyQuadratic problem(QuadraticProfile::sparse, 1);
  HubOptions options = quadratic_hub(1, kTwoShards);
  options.return_s = 0;
  options.checkpoint = scratch_file("forgotten.gwc");
  options.save_every = 4;
  ServerFixture server(options);
  QuadraticWorkers workers = start_workers(server, problem, NoisyQuadratic::signature("qsgd:bits=2"), 2);
  QuadraticWorker &quick = *workers[0], &slow = *workers[1];
  work_until(workers, 4);
  ASSERT_TRUE(eventually([&] { return server.hub()->status()["durable_step"] >= 4; }));
  work_until(workers, 6);
  const uint64_t late = slow.client.counts().late;
  server.kill();
  server.start();
  while (quick.step < 8) quick.work();  // sends again what was forgotten, and goes on alone
  slow.work();
  EXPECT_EQ(slow.client.counts().late, late + 3 * 2);  // two that were forgotten and a new one
  EXPECT_GT(norm_of(slow.client.residual(0)), 0);
  expect_ledger(*server.hub());
  work_until(workers, slow.step + 3);
  EXPECT_EQ(slow.weights, quick.weights);
  expect_ledger(*server.hub());
}

}  // namespace
}  // namespace gradwire::server
