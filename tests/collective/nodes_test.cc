// SPDX-License-Identifier: Apache-2.0
// Reductions of two levels: plain within a node, compressed between nodes. They must give what ranks that are whole
// nodes would give, and keep all that one level promises.
#include <atomic>
#include <chrono>
#include <cmath>

#include "collective/nodes_fixture.h"
#include "engine/counting_engine.h"
#include "gradwire/coder.h"

namespace gradwire {
namespace {

using namespace test;

// Ranks that are whole nodes: their results as f32, over some steps, and the tables that their codecs have learned.
struct NodeRun {
  std::vector<TensorValues> results;
  std::vector<uint32_t> tables;
};

std::vector<uint32_t> tables_of(const Reducer& reducer) {
  std::vector<uint32_t> words;
  for (Direction direction : {Direction::up, Direction::down})
    for (const Codec& codec : reducer.codecs(direction))
      words.insert(words.end(), codec.table().begin(), codec.table().end());
  return words;
}

TEST(TwoLevels, GiveTheBitsOfRanksThatAreNodes) {
  const uint64_t steps = 3;
  for (const TestLayout& layout : kLayouts)
    for (const std::string& codec : all_specs())
      for (Method method : kMethods) {
        if (Codec::parse(codec).traits().unit == 0) continue;  // what is one unit depends on where tensors are cut
        if (codec != "qsgd" && (layout.world() > 4 || kThreadSanitizer)) continue;
        const std::string what = codec + " " + name_of(method) + " " + layout.str();
        ReduceOptions one{.method = method, .up = codec, .seed = 7, .steps = steps};
        // Random bits on the way down are those of an owner, and these differ.
        if (method == Method::scatter && (codec == "terngrad" || codec == "dqsgd")) one.down = "unigrid";
        ReduceOptions two = one;
        two.nodes = layout.nodes;
        NodeRun expected;
        run_loopback(layout.nodes, [&](Engine& engine) {
          TensorValues in = node_mean(kTwoLevelModel, layout, engine.rank(), 0);
          Reducer reducer(engine, in.tensors, one);
          for (uint64_t step = 0; step < steps; ++step) {
            in = node_mean(kTwoLevelModel, layout, engine.rank(), step);
            TensorValues out(in.tensors);
            reducer.run(step, in.in(), out.out());
            if (engine.rank() == 0) expected.results.push_back(out);
          }
          if (engine.rank() == 0) expected.tables = tables_of(reducer);
        });
        run_loopback(layout.world(), [&](Engine& engine) {
          Reducer reducer(engine, kTwoLevelModel, two);
          for (uint64_t step = 0; step < steps; ++step) {
            TensorValues data = gradients(kTwoLevelModel, engine.rank(), step), rounded(kTwoLevelModel);
            reducer.run(step, data.in(), data.out());
            rounded.fill([&](size_t t, uint64_t i) { return expected.results[step].get(t, i); });
            EXPECT_TRUE(data == rounded) << what << ", rank " << engine.rank() << ", step " << step;
          }
          EXPECT_EQ(tables_of(reducer), expected.tables) << what;
        });
      }
}

TEST(TwoLevels, AllRanksHoldTheSameBitsWithEveryCodec) {
  const TestLayout layout{2, 2};
  for (const std::string& codec : all_specs())
    for (Op op : {Op::mean, Op::sum}) {
      std::vector<TensorValues> results(4, TensorValues(kTwoLevelModel));
      run_loopback(layout.world(), [&](Engine& engine) {
        Reducer reducer(engine, kTwoLevelModel, {.op = op, .up = codec, .feedback = Feedback::on, .nodes = 2});
        for (uint64_t step = 0; step < 2; ++step)
          reducer.run(step, gradients(kTwoLevelModel, engine.rank(), step).in(),
                      results[static_cast<size_t>(engine.rank())].out());
      });
      expect_identical(results, codec);
    }
}

// With u = 2^-24: W - 1 sums and two divisions are off by at most (W + 1) u of the sum of magnitudes, here below
// 0.035 each. The exact mean is taken in double.
TEST(TwoLevels, WithoutCompressionTheResultIsTheMean) {
  const std::vector<NamedTensor> tensors{{"w", lighter(70'001, 33'001)}, {"b", 3}};
  for (const TestLayout& layout : kLayouts)
    for (Op op : {Op::mean, Op::sum}) {
      const int world = layout.world();
      std::vector<TensorValues> in;
      for (int r = 0; r < world; ++r) in.push_back(gradients(tensors, r, 0));
      const auto out = reduce(
          world, tensors, {.op = op, .up = "fp32", .nodes = layout.nodes}, [&](int rank) { return in[rank]; }, 0);
      expect_identical(out, layout.str());
      const double scale = op == Op::sum ? world : 1, allowed = (world + 1) * 0x1p-24 * 0.035 * scale;
      for (size_t t = 0; t < tensors.size(); ++t)
        for (uint64_t i = 0; i < tensors[t].count; ++i) {
          double mean = 0;
          for (const TensorValues& one : in) mean += static_cast<double>(one.get(t, i)) / world;
          ASSERT_NEAR(out[0].get(t, i), mean * scale, allowed) << layout.str() << " " << t << " " << i;
        }
    }
}

TEST(TwoLevels, OneRankPerNodeIsOneLevel) {
  run_loopback(3, [&](Engine& engine) {
    TensorValues one = gradients(kTwoLevelModel, engine.rank(), 0), two = one;
    Reducer first(engine, kTwoLevelModel, {.up = "qsgd:bits=3"});
    Reducer second(engine, kTwoLevelModel, {.up = "qsgd:bits=3", .nodes = 3});
    first.run(0, one.in(), one.out());
    second.run(0, two.in(), two.out());
    EXPECT_TRUE(one == two);
    EXPECT_EQ(first.feedback().hash(), second.feedback().hash());
    EXPECT_EQ(first.node_bytes(), first.message_bytes());
    EXPECT_EQ(second.node_bytes(), first.node_bytes());
  });
}

// ---- what leaves a node

TEST(TwoLevels, NodeBytesAreWhatCrosses) {
  const std::vector<NamedTensor> tensors{{"w", lighter<uint64_t>(16, 2) * kTileElements}, {"b", 5, DType::f16, 1}};
  for (const TestLayout& layout : kLayouts)
    for (const char* codec : {"qsgd:bits=4", "fp32", "dqsgd:mode=paper"})
      for (Method method : kMethods)
        run_loopback(layout.world(), [&](Engine& loopback) {
          CountingEngine engine(loopback, consecutive(layout));
          Reducer reducer(engine, tensors, {.method = method, .up = codec, .nodes = layout.nodes});
          TensorValues data = gradients(tensors, engine.rank(), 0);
          const uint64_t left = engine.bytes_left_node(), sent = engine.bytes_sent();
          reducer.run(0, data.in(), data.out());
          if (Codec::parse(codec).traits().learns) {  // statistics come on top: here they cross once for every node
            EXPECT_GT(engine.bytes_left_node() - left, reducer.node_bytes());
            return;
          }
          EXPECT_EQ(engine.bytes_left_node() - left, reducer.node_bytes()) << codec << " " << layout.str();
          EXPECT_EQ(engine.bytes_sent() - sent, reducer.message_bytes()) << codec << " " << layout.str();
        });
}

// Each of L ranks sends 1/L of the tensors to other nodes. On one level each sends to L ranks of every other node.
// Heads of messages and agreement make a difference of less than a hundredth here.
TEST(TwoLevels, OneLthOfTheBytesLeavesANode) {
  const std::vector<NamedTensor> tensors{{"w", lighter<uint64_t>(16, 4) * kTileElements}};
  for (const TestLayout& layout : kLayouts) {
    PerRank<uint64_t> one(layout.world()), two(layout.world());
    run_loopback(layout.world(), [&](Engine& loopback) {
      for (int nodes : {0, layout.nodes}) {
        CountingEngine engine(loopback, consecutive(layout));
        Reducer reducer(engine, tensors, {.up = "qsgd:bits=4", .nodes = nodes});
        TensorValues data = gradients(tensors, engine.rank(), 0);
        const uint64_t left = engine.bytes_left_node();
        reducer.run(0, data.in(), data.out());
        (nodes == 0 ? one : two).of(engine) = engine.bytes_left_node() - left;
      }
    });
    uint64_t sum_one = 0, sum_two = 0;
    for (int r = 0; r < layout.world(); ++r) sum_one += one[r], sum_two += two[r];
    EXPECT_NEAR(static_cast<double>(sum_one) / static_cast<double>(sum_two), layout.per_node, 0.01 * layout.per_node)
        << layout.str();
  }
}

// ---- steps that are skipped, and failures

TEST(TwoLevels, ANanOnOneRankReachesAllAndChangesNoResidual) {
  const TestLayout layout{2, 2};
  for (const char* codec : {"onebit", "qsgd:bits=4", "optquant:bits=2"})
    for (Method method : kMethods)
      for (float poison : {std::nanf(""), HUGE_VALF})
        for (size_t tensor : {size_t{0}, size_t{3}, size_t{6}}) {
          if (std::isinf(poison) && (tensor != 0 || method == Method::gather)) continue;
          if (kThreadSanitizer && (codec != std::string("onebit") || tensor != 3 || std::isinf(poison))) continue;
          std::vector<TensorValues> results(4, TensorValues(kTwoLevelModel));
          run_loopback(layout.world(), [&](Engine& engine) {
            Reducer reducer(engine, kTwoLevelModel,
                            {.method = method, .up = codec, .feedback = Feedback::on, .nodes = 2});
            TensorValues& out = results[static_cast<size_t>(engine.rank())];
            for (uint64_t step = 0; step < 2; ++step)
              reducer.run(step, gradients(kTwoLevelModel, engine.rank(), step).in(), out.out());
            const uint64_t before = reducer.feedback().hash();
            TensorValues in = gradients(kTwoLevelModel, engine.rank(), 2);
            if (engine.rank() == 3) in.set(tensor, in.tensors[tensor].count - 1, poison);
            reducer.run(2, in.in(), out.out());
            EXPECT_EQ(reducer.feedback().hash(), before) << codec;
            EXPECT_EQ(reducer.skipped(), 1u) << codec << ", rank " << engine.rank();
            EXPECT_FALSE(std::isfinite(out.get(tensor, in.tensors[tensor].count - 1))) << codec;
            reducer.run(3, gradients(kTwoLevelModel, engine.rank(), 3).in(), out.out());
            EXPECT_NE(reducer.feedback().hash(), before);
            EXPECT_EQ(reducer.skipped(), 1u);
          });
          expect_identical(results, codec);
        }
}

// The sums of ranks and nodes fit in f32, and their sum does not fit in f16.
TEST(TwoLevels, AResultThatOverflowsItsTypeIsSeenOnAllRanks) {
  const std::vector<NamedTensor> tensors{{"half", 100, DType::f16}, {"w", 2 * kTileElements}};
  run_loopback(4, [&](Engine& engine) {
    Reducer reducer(engine, tensors, {.op = Op::sum, .up = "onebit", .nodes = 2});
    TensorValues in = gradients(tensors, engine.rank(), 0), out(tensors);
    for (uint64_t i = 0; i < tensors[0].count; ++i) in.set(0, i, 30'000);
    reducer.run(0, in.in(), out.out());
    EXPECT_EQ(reducer.skipped(), 1u) << engine.rank();
  });
}

TEST(TwoLevels, WhatMakesNoSenseIsRefusedByNameOnAllRanks) {
  const auto refused = [&](int world, const std::function<int(int rank)>& nodes, std::vector<int> found, ErrorKind kind,
                           const std::string& words) {
    for (const Outcome& result : outcomes(world, [&](Engine& loopback) {
           CountingEngine engine(loopback, found.empty() ? std::vector<int>(static_cast<size_t>(world), -1) : found);
           Reducer reducer(engine, {{"a", 100}}, {.nodes = nodes(engine.rank())});
         })) {
      EXPECT_EQ(result.kind, kind) << result.text;
      EXPECT_EQ(result.field, "nodes") << result.text;
      EXPECT_TRUE(mentions(result, words)) << result.text;
    }
  };
  const int kAuto = ReduceOptions::kAutoNodes;
  refused(
      4, [](int) { return 3; }, {}, ErrorKind::usage,
      "nodes is 3, which does not divide the 4 ranks; allowed are 1, 2, 4");
  refused(
      4, [](int) { return -2; }, {}, ErrorKind::usage, "nodes is -2");
  refused(
      3, [&](int) { return kAuto; }, {}, ErrorKind::usage, "does not know which ranks share a node");
  refused(
      4, [&](int) { return kAuto; }, {5, 5, 5, 9}, ErrorKind::usage, "that of rank 0 has 3, that of rank 3 has 1");
  refused(
      4, [](int rank) { return rank == 2 ? 4 : 2; }, {}, ErrorKind::mismatch, "rank 2 disagrees");
  refused(
      4, [&](int rank) { return rank == 1 ? kAuto : 2; }, {0, 0, 1, 1}, ErrorKind::mismatch, "'auto' on rank 1");
  refused(
      4, [](int rank) { return rank == 3 ? 0 : 2; }, {}, ErrorKind::mismatch, "'0' on rank 3");
}

TEST(TwoLevels, OthersThanAReducerRefuseNodes) {
  const std::vector<NamedTensor> tensors{{"a", 100}};
  const ReduceOptions options{.nodes = 1};
  run_loopback(1, [&](Engine& engine) {
    TensorValues data = gradients(tensors, 0, 0);
    std::vector<float> shard(100);
    const std::function<void()> calls[] = {[&] { reduce_scatter(engine, tensors, options, 0, data.in(), shard); },
                                           [&] { all_gather(engine, tensors, options, 0, shard, data.out()); },
                                           [&] { broadcast(engine, tensors, options, 0, 0, data.out()); },
                                           [&] { ModelCoder coder(tensors, {.reduce = options}); }};
    for (const auto& call : calls) {
      const Outcome result = outcome_of(call);
      EXPECT_EQ(result.kind, ErrorKind::usage);
      EXPECT_EQ(result.field, "nodes") << result.text;
    }
    all_reduce(engine, shard, options);
  });
}

TEST(TwoLevels, AStalledRankIsNamedByItsNumberAmongAllRanks) {
  std::atomic<int> failed = 0;
  const auto results = outcomes(4, [&](Engine& engine) {
    Reducer reducer(engine, {{"a", 100}}, {.nodes = 2});
    engine.set_timeout(std::chrono::milliseconds(engine.rank() == 1 ? 1'000 : 60'000));
    TensorValues data = gradients({{"a", 100}}, 0, 0);
    if (engine.rank() == 3) {
      while (failed < 3) std::this_thread::yield();
      return reducer.run(0, data.in(), data.out());
    }
    try {
      reducer.run(0, data.in(), data.out());
    } catch (...) {
      ++failed;
      throw;
    }
  });
  for (const Outcome& result : results) {
    EXPECT_EQ(result.kind, ErrorKind::engine) << result.text;
    EXPECT_EQ(result.rank, 3) << result.text;
  }
}

// ---- nodes that are found

TEST(TwoLevels, NodesThatAreFoundMayHaveAnyRanks) {
  const std::vector<int> found{7, 3, 7, 3};  // ranks 0 and 2, and ranks 1 and 3
  const int order[] = {0, 2, 1, 3};          // node after node
  std::vector<TensorValues> results(4, TensorValues(kTwoLevelModel)), expected = results;
  PerRank<uint64_t> hashes(4), expected_hashes(4);
  const auto run = [&](Engine& engine, int as, int nodes, TensorValues& out, uint64_t& hash) {
    Reducer reducer(engine, kTwoLevelModel, {.up = "onebit", .nodes = nodes});
    for (uint64_t step = 0; step < 3; ++step) reducer.run(step, gradients(kTwoLevelModel, as, step).in(), out.out());
    hash = reducer.feedback().hash();
    EXPECT_EQ(order[reducer.position()], nodes == 2 ? order[engine.rank()] : engine.rank());
  };
  run_loopback(4, [&](Engine& loopback) {
    CountingEngine engine(loopback, found);
    const int rank = engine.rank();
    run(engine, rank, ReduceOptions::kAutoNodes, results[static_cast<size_t>(rank)], hashes[rank]);
  });
  run_loopback(4, [&](Engine& engine) {
    const int as = order[engine.rank()];
    run(engine, as, 2, expected[static_cast<size_t>(as)], expected_hashes[as]);
  });
  for (int r = 0; r < 4; ++r) {
    EXPECT_TRUE(results[r] == expected[r]) << r;
    EXPECT_EQ(hashes[r], expected_hashes[r]) << r;
  }
}

}  // namespace
}  // namespace gradwire
