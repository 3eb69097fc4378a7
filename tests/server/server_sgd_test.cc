// SPDX-License-Identifier: Apache-2.0
// SGD with momentum over a parameter server: workers send gradients, and the server makes the step. The rule in double
// precision, the same steps over a Reducer, and what becomes of the momentum when workers or the server die.
#include "gradwire/collective.h"
#include "optim/adam.h"
#include "server/quadratic_worker.h"
#include "server/untrusted_worker.h"

namespace gradwire::server {
namespace {

using Tensors = NoisyQuadratic::Tensors;

constexpr ServerSgd kSgd{.momentum = 0.9, .weight_decay = 5e-4};
double rate_of(uint64_t step) { return 0.05 / (1 + 0.02 * static_cast<double>(step)); }

Signature sgd_signature(const std::string& up = "fp32", const std::string& down = "fp32") {
  Signature signature = NoisyQuadratic::signature(up, down);
  signature.sgd = kSgd;
  return signature;
}

const NoisyQuadratic& quadratic() {
  static const NoisyQuadratic one(NoisyQuadratic::Profile::layered, 4);
  return one;
}

struct SgdWorker : QuadraticWorker {  // what the quadratic calls an update is a gradient here
  SgdWorker(ServerFixture& server, const Signature& signature, uint64_t which)
      : QuadraticWorker(server, quadratic(), signature, which, rate_of) {}
};

QuadraticWorkers sgd_workers(ServerFixture& server, const Signature& signature, uint64_t count) {
  QuadraticWorkers workers;
  for (uint64_t i = 0; i < count; ++i)
    workers.push_back(std::make_unique<QuadraticWorker>(server, quadratic(), signature, i, rate_of));
  return workers;
}

HubOptions sgd_hub(uint32_t min_workers) { return quadratic_hub(min_workers, kTwoShards); }

// The same training as `gradwire train` does it without a server.
Tensors descend_over_reducer(const std::string& up, int world, uint64_t steps) {
  Tensors result;
  run_loopback(world, [&](Engine& engine) {
    ReduceOptions options{.method = ReduceOptions::Method::gather, .up = up};
    std::vector<NamedTensor> tensors;
    for (const Variable& one : sgd_signature().parameters) tensors.push_back({one.name, one.count()});
    Reducer reducer(engine, tensors, options);
    const Elementwise device(Device{});
    Tensors weights = NoisyQuadratic::zeros(), momentum = weights, gradient = weights;
    for (uint64_t step = 0; step < steps; ++step) {
      quadratic().update(static_cast<uint64_t>(engine.rank()), step, weights, gradient);
      std::vector<const void*> in;
      std::vector<void*> out;
      std::vector<OptimizerSpan> spans;
      for (size_t i = 0; i < gradient.size(); ++i) {
        in.push_back(gradient[i].data());
        out.push_back(gradient[i].data());
        spans.push_back({.gradient = gradient[i].data(),
                         .first = momentum[i].data(),
                         .second = nullptr,
                         .shared = nullptr,
                         .out = weights[i].data(),
                         .count = weights[i].size()});
      }
      reducer.run(step, in, out);
      sgd_step(device, spans, {.momentum = kSgd.momentum, .weight_decay = kSgd.weight_decay}, rate_of(step), 1);
    }
    if (engine.rank() == 0) result = weights;
  });
  return result;
}

TEST(ServerSgd, OneWorkerFollowsTheRuleInDoublePrecision) {
  ServerFixture server(sgd_hub(1));
  SgdWorker worker(server, sgd_signature(), 0);
  std::vector<std::vector<double>> x(NoisyQuadratic::kTensors, std::vector<double>(NoisyQuadratic::kElements)), v = x;
  for (uint64_t step = 0; step < 60; ++step) {
    Tensors gradient = NoisyQuadratic::zeros();
    quadratic().update(0, step, worker.weights, gradient);
    for (size_t i = 0; i < x.size(); ++i)
      for (size_t k = 0; k < x[i].size(); ++k) {
        v[i][k] = kSgd.momentum * v[i][k] + static_cast<double>(gradient[i][k]) + kSgd.weight_decay * x[i][k];
        x[i][k] -= rate_of(step) * v[i][k];
      }
    worker.work();
  }
  // 60 roundings of a weight near 1 in f32, of which the momentum repeats a part.
  for (size_t i = 0; i < x.size(); ++i)
    for (size_t k = 0; k < x[i].size(); ++k) ASSERT_NEAR(worker.weights[i][k], x[i][k], 4e-6);
  expect_ledger(*server.hub());
}

TEST(ServerSgd, WorkersEndWithTheWeightsOfAReducerBitForBit) {
  for (const char* up : {"fp32", "qsgd:bits=4", "loggrid:k=2"}) {
    SCOPED_TRACE(up);
    ServerFixture server(sgd_hub(3));
    QuadraticWorkers workers = sgd_workers(server, sgd_signature(up), 3);
    work_until(workers, 80);
    const Tensors expected = descend_over_reducer(up, 3, 80);
    for (const auto& worker : workers) EXPECT_TRUE(worker->weights == expected);
    expect_ledger(*server.hub());
  }
}

TEST(ServerSgd, ARestartKeepsTheMomentum) {
  for (const bool updates : {false, true}) {
    Signature signature = sgd_signature("loggrid:k=2", updates ? "loggrid:k=6" : "unigrid:bits=8");
    signature.sends_updates = updates;
    expect_restarts_change_nothing({21}, 40, [&](ServerFixture& server) { return sgd_workers(server, signature, 2); });
  }
}

TEST(ServerSgd, OneWhoJoinsWhenAllHaveDiedFindsTheMomentum) {
  HubOptions options = sgd_hub(1);
  options.checkpoint = scratch_file("sgd_joiner.gwc");
  options.save_every = 1;
  options.return_s = 0;
  ServerFixture server(options);
  Signature signature = sgd_signature();
  signature.sgd->weight_decay = 0;
  Tensors weights, before;
  {
    SgdWorker worker(server, signature, 0);
    for (int i = 0; i < 20; ++i) {
      before = worker.weights;
      worker.work();
    }
    weights = worker.weights;
    ASSERT_TRUE(eventually([&] { return server.hub()->status()["durable_step"] >= 20; }));
  }
  server.kill();
  server.start();
  SgdWorker joiner(server, signature, 1);
  ASSERT_TRUE(joiner.weights == weights);
  const Tensors nothing = NoisyQuadratic::zeros();
  joiner.send(nothing);  // without a gradient, the momentum alone moves the weights
  const double ratio = kSgd.momentum * rate_of(20) / rate_of(19);
  for (size_t i = 0; i < weights.size(); ++i)
    for (size_t k = 0; k < weights[i].size(); ++k)
      ASSERT_NEAR(joiner.weights[i][k] - weights[i][k], ratio * (weights[i][k] - before[i][k]), 1e-6);
}

TEST(ServerSgd, AResidualThatComesLateCountsAsAGradient) {
  ServerFixture server(sgd_hub(1));
  Signature signature = sgd_signature("topk:ratio=0.01"), exact = sgd_signature();
  signature.sgd = exact.sgd = {.momentum = 0, .weight_decay = 0};
  SgdWorker worker(server, signature, 0);
  worker.work();
  ASSERT_TRUE(worker.client.leave(kPatience));
  SgdWorker next(server, signature, 1);
  Tensors gradient = NoisyQuadratic::zeros();
  quadratic().update(0, 0, NoisyQuadratic::zeros(), gradient);
  for (size_t i = 0; i < gradient.size(); ++i)
    for (size_t k = 0; k < gradient[i].size(); ++k) ASSERT_NEAR(next.weights[i][k], -rate_of(0) * gradient[i][k], 1e-6);
  expect_ledger(*server.hub());
}

TEST(ServerSgd, WhatDoesNotFitIsRefusedByName) {
  HubOptions options = sgd_hub(1);
  ServerFixture server(options);
  SgdWorker first(server, sgd_signature(), 0);
  const auto refusal = [](ServerFixture& where, const Signature& signature) -> std::string {
    try {
      SgdWorker(where, signature, 1);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  Signature other = sgd_signature();
  other.sgd->momentum = 0.5;
  EXPECT_NE(refusal(server, other).find("momentum 0.9 and weight decay 0.0005 at the server, sgd with momentum 0.5"),
            std::string::npos);
  EXPECT_NE(refusal(server, NoisyQuadratic::signature("fp32")).find("qadam here"), std::string::npos);
  options.async = true;
  ServerFixture async(options);
  EXPECT_NE(refusal(async, sgd_signature()).find("momentum of sgd needs steps"), std::string::npos);
  for (const char* text : {"1", "{}", R"({"momentum":2,"weight_decay":0})", R"({"momentum":0.9})",
                           R"({"momentum":"x","weight_decay":0})", R"({"momentum":0,"weight_decay":-1})"}) {
    nlohmann::json altered = sgd_signature().json();
    altered["sgd"] = nlohmann::json::parse(text);
    EXPECT_THROW(Signature::parse(altered), Error) << text;
  }
}

TEST(ServerSgd, OneWhoLiesAboutTheRateDoesNotDecideIt) {
  for (const float rate : {-1.0f, 2e6f, std::nanf(""), INFINITY})
    EXPECT_THROW(read_frame_head(write_head({.kind = FrameKind::update, .sequence = 1, .rate = rate}, 0), 0), Error);
  const Signature signature = sgd_signature();
  ServerFixture server(sgd_hub(3)), honest(sgd_hub(3));
  const auto run = [&](ServerFixture& where, float rate) {
    QuadraticWorkers workers = sgd_workers(where, signature, 2);
    UntrustedWorker liar(where);
    liar.hello(signature);
    EXPECT_TRUE(liar.hears(FrameKind::welcome));
    const std::vector<ShardLayout> layouts = shard_layouts(signature, NoisyQuadratic::kElements);
    for (uint32_t p = 0; p < layouts.size(); ++p) {
      const Plan plan(specs_of(signature, layouts[p], ShardMessage::up));
      const std::vector<float> zeros(NoisyQuadratic::kElements);
      const void* const in[] = {zeros.data()};
      std::vector<std::byte> message(plan.message_bytes());
      make_runner(plan, {})->encode(in, {}, message);
      liar.say({.kind = FrameKind::update, .shard = p, .sequence = 1, .rate = rate}, make_blob(std::move(message)));
    }
    work_until(workers, 1);
    return workers[0]->weights;
  };
  EXPECT_TRUE(run(server, 1e6f) == run(honest, static_cast<float>(rate_of(0))));
}

}  // namespace
}  // namespace gradwire::server
