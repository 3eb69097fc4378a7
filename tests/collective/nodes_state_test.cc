// SPDX-License-Identifier: Apache-2.0
// Residuals on two levels: what is owed survives other nodes, a stopped run goes on bit for bit, and a long run ends
// where one level ends.
#include <algorithm>
#include <cmath>

#include "collective/nodes_fixture.h"
#include "engine/counting_engine.h"
#include "support/scratch_folder.h"

namespace gradwire {
namespace {

using namespace test;

// ---- states

// Given, received and owed, in units of the mean, of one tensor.
struct NodeBooks {
  explicit NodeBooks(uint64_t count) : given(count), received(count), owed(count) {}
  std::vector<double> given, received, owed;
  double most = 0;
  std::mutex mutex;

  void post(Engine& engine, const TensorValues& in, const TensorValues& out, Op op) {
    std::lock_guard lock(mutex);
    for (size_t i = 0; i < given.size(); ++i) {
      given[i] += in.get(0, i) / engine.size();
      if (engine.rank() == 0) received[i] += out.get(0, i) / (op == Op::sum ? engine.size() : 1);
      most = std::max(most, std::abs(static_cast<double>(in.get(0, i))));
    }
  }
  void owe(const ErrorFeedback& feedback, int workers) {
    std::lock_guard lock(mutex);
    for (const ErrorFeedback::Entry& entry : feedback.entries()) {
      const std::vector<float> values = feedback.residual(entry.direction, entry.name, entry.first);
      for (size_t i = 0; i < values.size(); ++i) {
        owed[entry.first + i] += values[i] / (entry.direction == Direction::up ? workers : 1.0);
        most = std::max(most, std::abs(static_cast<double>(values[i])));
      }
    }
  }
  // As Books of collective_state_test.cc: less than u B (W + 7) for each step, where B bounds all that is added. The
  // sum within a node is W terms more and two divisions.
  void check(int steps, int world, const std::string& what) const {
    const double allowed = steps * 0x1p-24 * 3 * most * (2 * world + 9);
    double worst = 0, debt = 0;
    for (size_t i = 0; i < given.size(); ++i) {
      worst = std::max(worst, std::abs(given[i] - received[i] - owed[i]));
      debt = std::max(debt, std::abs(owed[i]));
    }
    EXPECT_LE(worst, allowed) << what;
    EXPECT_GT(debt, 100 * allowed) << what << ": nothing is owed";
  }
};

TEST(TwoLevels, WhatIsOwedSurvivesOtherNodes) {
  const std::vector<NamedTensor> tensors{{"a", lighter<uint64_t>(5, 2) * kTileElements + 77}};
  const int steps = 3;
  struct Move {
    TestLayout from, to;
  };
  const TestLayout one_level{4, 1};
  for (const Move& move : {Move{{2, 2}, {2, 4}},
                           {{2, 4}, {2, 2}},
                           {{2, 2}, {3, 2}},
                           {{3, 2}, {2, 3}},
                           {{2, 2}, {4, 1}},
                           {one_level, {2, 2}},
                           {{2, 2}, {2, 2}}})
    for (Op op : {Op::mean, Op::sum})
      for (Method method : kMethods) {
        if (op == Op::sum && method == Method::gather) continue;
        if (kThreadSanitizer && (op == Op::mean || method == Method::gather || move.to.world() > 4)) continue;
        NodeBooks books(tensors[0].count);
        const auto run = [&](const TestLayout& layout, uint64_t first, std::vector<ErrorFeedback>& states, bool last) {
          run_loopback(layout.world(), [&](Engine& engine) {
            Reducer reducer(
                engine, tensors,
                {.method = method, .op = op, .up = "onebit", .nodes = layout.per_node == 1 ? 0 : layout.nodes});
            ErrorFeedback& mine = states[static_cast<size_t>(reducer.position())];
            if (first > 0) reducer.feedback() = std::move(mine);
            for (uint64_t step = first; step < first + steps; ++step) {
              const TensorValues in = gradients(tensors, engine.rank(), step);
              TensorValues out(tensors);
              reducer.run(step, in.in(), out.out());
              books.post(engine, in, out, op);
            }
            if (last) books.owe(reducer.feedback(), layout.nodes);
            mine = std::move(reducer.feedback());
          });
        };
        std::vector<ErrorFeedback> states(static_cast<size_t>(move.from.world()));
        run(move.from, 0, states, false);
        std::vector<ErrorFeedback> fresh =
            ErrorFeedback::redistribute(states, move.to.world(), move.to.per_node == 1 ? 0 : move.to.nodes);
        run(move.to, steps, fresh, true);
        books.check(2 * steps + 1, std::max(move.from.world(), move.to.world()),
                    move.from.str() + " to " + move.to.str() + " " + name_of(method));
      }
}

// With one node nothing is compressed, so nothing is owed after a step: what was owed before it arrives with it.
TEST(TwoLevels, OneNodeIsPlainAndPaysWhatIsOwed) {
  const std::vector<NamedTensor> tensors{{"a", 2 * kTileElements + 5}, {"b", 3}};
  const TestLayout layout{1, 3};
  std::vector<ErrorFeedback> owing;
  for (int r = 0; r < 2; ++r) {
    ErrorFeedback& state = owing.emplace_back();
    state.add(Direction::up, "b", 3);
    state.set_residual(Direction::up, "b", 0, std::vector<float>{1.0f + r, 0, 2});
  }
  owing[0].add(Direction::down, "b", 3);
  owing[0].set_residual(Direction::down, "b", 0, std::vector<float>{0.5f, 0, 0});
  for (const char* codec : {"onebit", "optquant:bits=2"}) {
    std::vector<ErrorFeedback> states = ErrorFeedback::redistribute(owing, 3, 1);
    run_loopback(3, [&](Engine& loopback) {
      CountingEngine engine(loopback, {0, 0, 0});
      Reducer reducer(engine, tensors, {.up = codec, .feedback = Feedback::on, .nodes = ReduceOptions::kAutoNodes});
      reducer.feedback() = std::move(states[static_cast<size_t>(engine.rank())]);
      TensorValues mean = node_mean(tensors, layout, 0, 0), data = gradients(tensors, engine.rank(), 0);
      reducer.run(0, data.in(), data.out());
      mean.set(1, 0, mean.get(1, 0) + 1.5f + 0.5f);
      mean.set(1, 2, mean.get(1, 2) + 2);
      for (size_t t = 0; t < 2; ++t)
        for (uint64_t i = 0; i < tensors[t].count; ++i)
          ASSERT_NEAR(data.get(t, i), mean.get(t, i), t == 0 ? 0 : 0x1p-22) << codec << " " << t << " " << i;
      data = gradients(tensors, engine.rank(), 1);
      reducer.run(1, data.in(), data.out());
      EXPECT_TRUE(data == node_mean(tensors, layout, 0, 1));
      EXPECT_EQ(reducer.node_bytes(), 0u);
      EXPECT_EQ(engine.bytes_left_node(), 0u);
    });
  }
}

TEST(TwoLevels, AStoppedRunGoesOnBitForBit) {
  const ScratchFolder folder;
  const TestLayout layout{2, 2};
  for (const char* codec : {"onebit", "optquant:bits=3", "dqsgd:budget=4,steps=6", "*.bias=fp32;*=topk"})
    for (DType residual : {DType::f32, DType::bf16}) {
      if (kThreadSanitizer && (residual == DType::bf16 || codec == std::string("optquant:bits=3"))) continue;
      const ReduceOptions options{.up = codec, .feedback = Feedback::on, .residual = residual, .steps = 6, .nodes = 2};
      const auto path = [&](const Engine& engine) { return (folder.path() / std::to_string(engine.rank())).string(); };
      std::vector<TensorValues> whole(4, TensorValues(kTwoLevelModel)), resumed = whole;
      PerRank<uint64_t> hashes(4);
      run_loopback(layout.world(), [&](Engine& engine) {
        Reducer reducer(engine, kTwoLevelModel, options);
        for (uint64_t step = 0; step < 6; ++step) {
          reducer.run(step, gradients(kTwoLevelModel, engine.rank(), step).in(),
                      whole[static_cast<size_t>(engine.rank())].out());
          if (step == 2) reducer.feedback().save(path(engine));
        }
        hashes.of(engine) = reducer.feedback().hash();
      });
      run_loopback(layout.world(), [&](Engine& engine) {
        Reducer reducer(engine, kTwoLevelModel, options);
        reducer.feedback() = ErrorFeedback::load(path(engine));
        for (uint64_t step = 3; step < 6; ++step)
          reducer.run(step, gradients(kTwoLevelModel, engine.rank(), step).in(),
                      resumed[static_cast<size_t>(engine.rank())].out());
        EXPECT_EQ(hashes.of(engine), reducer.feedback().hash()) << codec;
      });
      for (int r = 0; r < 4; ++r) EXPECT_TRUE(whole[r] == resumed[r]) << codec << " rank " << r;
    }
}

TEST(TwoLevels, AStateOfOtherNodesIsRefusedOnAllRanks) {
  const std::vector<NamedTensor> tensors{{"a", 100}};
  const auto refused = [&](int then, int now, int swapped, const std::string& words) {
    std::vector<ErrorFeedback> states(4);
    run_loopback(4, [&](Engine& engine) {
      Reducer reducer(engine, tensors, {.up = "onebit", .nodes = then});
      states[static_cast<size_t>(engine.rank())] = std::move(reducer.feedback());
    });
    const auto results = outcomes(4, [&](Engine& engine) {
      Reducer reducer(engine, tensors, {.up = "onebit", .nodes = now});
      reducer.feedback() = std::move(states[static_cast<size_t>((engine.rank() + swapped) % 4)]);
      TensorValues data = gradients(tensors, 0, 0);
      reducer.run(0, data.in(), data.out());
    });
    for (const Outcome& result : results) {
      EXPECT_TRUE(result.threw && mentions(result, words)) << result.text;
      EXPECT_EQ(result.field, "nodes");
    }
  };
  refused(2, 0, 0, "the state is of 2 nodes of 2 ranks, and this reducer has one level");
  refused(0, 2, 0, "the state is of one level, and this reducer has 2 nodes of 2 ranks");
  refused(1, 2, 0, "the state is of 1 nodes of 4 ranks");
  refused(2, 2, 1, "position");
}

// Several reducers learn as one from all pieces that all ranks have.
TEST(TwoLevels, ReducersOfOneModelLearnTogether) {
  const std::vector<NamedTensor> first{{"a", 40'000}}, second{{"b", 3'000}, {"c", 70'000}};
  std::vector<NamedTensor> all = first;
  all.insert(all.end(), second.begin(), second.end());
  const auto table_of = [](const Reducer& reducer, size_t tensor) {
    const Codec codec = reducer.codecs(Direction::up)[tensor];
    return std::vector<uint32_t>(codec.table().begin(), codec.table().end());
  };
  std::vector<uint32_t> expected;
  run_loopback(4, [&](Engine& engine) {
    Reducer reducer(engine, all, {.up = "optquant:bits=2", .commit = Commit::manual, .nodes = 2});
    TensorValues data = gradients(all, engine.rank(), 0);
    for (uint64_t step = 0; step < 2; ++step) {
      reducer.run(step, gradients(all, engine.rank(), step).in(), data.out());
      reducer.commit(step);
    }
    if (engine.rank() == 0) expected = table_of(reducer, 0);
  });
  run_loopback(4, [&](Engine& engine) {
    const ReduceOptions options{.up = "optquant:bits=2", .commit = Commit::manual, .nodes = 2, .model = all};
    Reducer a(engine, first, options), b(engine, second, options);
    Reducer* const both[] = {&a, &b};
    for (uint64_t step = 0; step < 2; ++step) {
      TensorValues one = gradients(first, engine.rank(), step), two = gradients(second, engine.rank(), step);
      a.run(step, one.in(), one.out());
      b.run(step, two.in(), two.out());
      Reducer::learn_together(both, step);
      a.commit(step);
      b.commit(step);
    }
    EXPECT_FALSE(expected.empty());
    EXPECT_EQ(table_of(a, 0), expected);
    EXPECT_EQ(table_of(b, 1), expected);
  });
}

// ---- a closed loop

// Descends a quadratic on two nodes of two ranks, where the gradients of the nodes differ by a constant that cancels in
// their mean, and are noisy. Returns the mean squared distance from the minimum over the last tenth of the steps.
double distance_after(const ReduceOptions& options, uint64_t seed, uint64_t steps) {
  const std::vector<NamedTensor> tensors{{"x", 96}, {"y", 32}};
  const uint64_t last = steps / 10;
  double distance = 0;
  run_loopback(4, [&](Engine& engine) {
    Reducer reducer(engine, tensors, options);
    const auto minimum = [](uint64_t i) { return static_cast<float>(1 + i % 5) / 8; };
    const float side = engine.rank() < 2 ? 0.5f : -0.5f;
    TensorValues at(tensors), in(tensors), mean(tensors);
    at.fill([](size_t, uint64_t) { return 0.0f; });
    for (uint64_t step = 0; step < steps; ++step) {
      const TensorValues noise = gradients(tensors, engine.rank(), seed * 100'000 + step);
      in.fill([&](size_t t, uint64_t i) {
        return at.get(t, i) - minimum(i) + noise.get(t, i) + (i % 3 == 0 ? side : -0.3f * side);
      });
      reducer.run(step, in.in(), mean.out());
      at.fill([&](size_t t, uint64_t i) { return at.get(t, i) - 0.05f * mean.get(t, i); });
      if (engine.rank() != 0 || step < steps - last) continue;
      for (size_t t = 0; t < tensors.size(); ++t)
        for (uint64_t i = 0; i < tensors[t].count; ++i) {
          const double off = static_cast<double>(at.get(t, i)) - minimum(i);
          distance += off * off / 128 / static_cast<double>(last);
        }
    }
  });
  return distance;
}

// With feedback what is owed stays of the size of a gradient, so the iterate is off by the learning rate times that:
// the same bound for one level and for two. It is the mean of squares of the nodes' constants times 0.05^2. One level
// has twice as many senders, whose errors average out. Without feedback the same codec stops far from the minimum.
TEST(TwoLevels, ALongRunWithFeedbackEndsWhereOneLevelDoes) {
  const uint64_t steps = lighter<uint64_t>(1000, 30);
  const double bound = 0.05 * 0.05 * (0.5 * 0.5 / 3 + 0.15 * 0.15 * 2 / 3);
  for (uint64_t seed : {1, 2, 3}) {
    const double one = distance_after({.up = "onebit"}, seed, steps),
                 two = distance_after({.up = "onebit", .nodes = 2}, seed, steps),
                 naive = distance_after(
                     {.up = "onebit", .feedback = Feedback::off, .owner_feedback = Feedback::off, .nodes = 2}, seed,
                     steps);
    if (kThreadSanitizer) continue;  // so few steps end nowhere
    EXPECT_LE(one, bound) << "seed " << seed;
    EXPECT_LE(two, bound) << "seed " << seed;
    EXPECT_GE(naive, 20 * bound) << "seed " << seed;
  }
}

}  // namespace
}  // namespace gradwire
