// SPDX-License-Identifier: Apache-2.0
// What the collectives compute: for every codec, world, length and method all ranks hold the same bits, exact where the
// codec is and within a derived bound where it is an unbiased quantiser; types, rules, operations, threads, order of
// calls and the caller's floating-point mode do not get in the way.
#include <cmath>
#include <set>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "collective/collective_fixture.h"

namespace gradwire {
namespace {

using namespace test;

// ---- shards

TEST(Shards, CoverEveryElementOnceAtGrainBoundaries) {
  for (int world : {1, 2, 3, 4, 7, 64})
    for (uint64_t count : {uint64_t{0}, uint64_t{1}, kTileElements - 1, kTileElements, kTileElements + 1,
                           7 * kTileElements, 100 * kTileElements + 5}) {
      const std::vector<NamedTensor> list{{"a", count}};
      uint64_t next = 0;
      std::set<int> owners;
      for (const Shard& shard : shards(list, world)) {
        EXPECT_EQ(shard.first, next);
        EXPECT_EQ(shard.first % kTileElements, 0u);
        EXPECT_GT(shard.count, 0u);
        EXPECT_TRUE(shard.owner >= 0 && shard.owner < world);
        EXPECT_TRUE(owners.insert(shard.owner).second) << "an owner has two pieces of one tensor";
        next += shard.count;
      }
      EXPECT_EQ(next, count);
    }
}

TEST(Shards, OfOneTensorDifferByAtMostAGrain) {
  for (uint64_t tiles = 4; tiles < 40; ++tiles) {
    const std::vector<NamedTensor> list{{"a", tiles * kTileElements}};
    const std::vector<Shard> cut = shards(list, 4);
    EXPECT_EQ(cut.size(), 4u);
    for (const Shard& shard : cut) {
      EXPECT_GE(shard.count, tiles / 4 * kTileElements);
      EXPECT_LE(shard.count, (tiles + 3) / 4 * kTileElements);
    }
  }
}

TEST(Shards, DoNotDependOnTheRestOfTheList) {
  const std::vector<NamedTensor> all = resnet50();
  const std::vector<Shard> together = shards(all, 4);
  std::vector<Shard> apart;
  for (size_t i = 0; i < all.size(); ++i)
    for (Shard shard : shards(std::span(&all[i], 1), 4)) {
      shard.tensor = i;
      apart.push_back(shard);
    }
  ASSERT_EQ(together.size(), apart.size());
  for (size_t i = 0; i < apart.size(); ++i) {
    EXPECT_EQ(together[i].tensor, apart[i].tensor);
    EXPECT_EQ(together[i].first, apart[i].first);
    EXPECT_EQ(together[i].count, apart[i].count);
    EXPECT_EQ(together[i].owner, apart[i].owner);
  }
}

TEST(Shards, AModelIsBalanced) {
  const std::vector<NamedTensor> model = resnet50();
  ASSERT_EQ(model.size(), 161u);
  for (int world : {2, 3, 4, 8}) {
    std::vector<uint64_t> held(static_cast<size_t>(world));
    uint64_t total = 0;
    for (const Shard& shard : shards(model, world)) {
      held[static_cast<size_t>(shard.owner)] += shard.count;
      total += shard.count;
    }
    EXPECT_EQ(total, 25'557'032u);
    for (uint64_t n : held)
      EXPECT_LE(static_cast<double>(n) * world / static_cast<double>(total), 1.1) << "world " << world;
  }
}

// ---- values

// Small integers, so that sums are exact in any order.
TensorValues integers(const std::vector<NamedTensor>& tensors, int rank) {
  TensorValues data(tensors);
  data.fill([&](size_t t, uint64_t i) {
    return static_cast<float>((i * 7 + static_cast<uint64_t>(rank) * 5 + t) % 17) - 8.0f;
  });
  return data;
}

// How far one reduction of values in [-8, 8] may be from the mean. With s levels on each side, random rounding of qsgd
// moves a value by less than one step, at most 8/s; a mean of W such errors is no larger. scatter rounds the mean, at
// most 8 in magnitude like the values it is made of, once more, to nearest: half a step. Casts round to 11 or 8
// significant bits: integers are exact, the mean that scatter casts is off by half a unit in the last place. What the
// f32 arithmetic between adds is far below a thousandth of these. No claim for the others.
double bound_for(const Codec& codec, Method method) {
  const bool twice = method == Method::scatter;
  if (codec.name() == "qsgd")
    return 1.001 * (twice ? 1.5 : 1.0) * 8.0 / ((1 << (std::stoi(codec.get("bits")) - 1)) - 1);
  if (codec.name() == "fp16") return twice ? 8 * 0x1p-11 : 0;
  if (codec.name() == "bf16") return twice ? 8 * 0x1p-8 : 0;
  return codec.traits().lossless ? 0 : INFINITY;
}

class EveryCodec : public testing::TestWithParam<std::string> {};

TEST_P(EveryCodec, IsIdenticalOnAllRanksAndWithinItsBound) {
  const Codec codec = Codec::parse(GetParam());
  for (int world : kWorlds)
    for (uint64_t count : {uint64_t{0}, uint64_t{1}, static_cast<uint64_t>(world) - 1, uint64_t{10007},
                           lighter<uint64_t>(200003, 30003)})
      for (Method method : kMethods) {
        const std::string what =
            std::to_string(world) + " ranks, " + std::to_string(count) + " elements, " + name_of(method);
        const std::vector<NamedTensor> tensors{{"layer.weight", count}};
        const auto results = reduce(world, tensors, {.method = method, .up = codec.str()},
                                    [&](int rank) { return integers(tensors, rank); });
        expect_identical(results, what);
        std::vector<TensorValues> inputs;
        for (int r = 0; r < world; ++r) inputs.push_back(integers(tensors, r));
        const double bound = bound_for(codec, method);
        for (uint64_t i = 0; i < count; ++i) {
          float sum = 0;
          for (const TensorValues& input : inputs) sum += input.get(0, i);
          const float mean = sum / static_cast<float>(world), got = results[0].get(0, i);
          ASSERT_TRUE(std::isfinite(got)) << what;
          ASSERT_LE(std::abs(static_cast<double>(got) - mean), bound) << what << ", element " << i;
        }
      }
}

INSTANTIATE_TEST_SUITE_P(Registry, EveryCodec, testing::ValuesIn(all_specs()),
                         [](const auto& info) { return info.param; });

// Were the ranks to draw the same random bits, the errors of equal gradients would not average out.
TEST(Collective, RoundingErrorsOfRanksCancel) {
  const std::vector<NamedTensor> tensors{{"a", 200003}};
  const auto squared_error = [&](int world) {
    const auto results = reduce(world, tensors, {.method = Method::gather, .up = "qsgd:bits=4"},
                                [&](int) { return gradients(tensors, 0, 0); });
    const TensorValues in = gradients(tensors, 0, 0);
    double sum = 0;
    for (uint64_t i = 0; i < tensors[0].count; ++i) sum += std::pow(results[0].get(0, i) - in.get(0, i), 2);
    return sum;
  };
  // 1/4 for independent errors, and half of it where the errors of two ranks with the same value have a correlation of
  // -1/2, as those of opposite draws have if fractions are uniform.
  EXPECT_NEAR(squared_error(4) / squared_error(1), 0.125, 0.01);
}

const std::vector<NamedTensor> kMixed{{"conv.weight", lighter(100'003, 35'003), DType::f32, 4},
                                      {"conv.bias", 64, DType::f32, 1},
                                      {"half.weight", lighter(70'001, 7'001), DType::f16, 2},
                                      {"empty", 0, DType::f32, 2},
                                      {"brain.weight", lighter(40'000, 4'000), DType::bf16, 2},
                                      {"scalar", 1, DType::f32, 0},
                                      {"half.bias", 33, DType::f16, 1},
                                      {"norm", 1000, DType::bf16, 1}};

TEST(Collective, ListsOfAllSizesAndTypesWork) {
  for (int world : {1, 2, 3, 7})
    for (Method method : kMethods) {
      const auto results =
          reduce(world, kMixed, {.method = method, .up = "fp32"}, [&](int rank) { return integers(kMixed, rank); });
      expect_identical(results, name_of(method));
      for (size_t t = 0; t < kMixed.size(); ++t)
        for (uint64_t i = 0; i < kMixed[t].count; ++i) {
          float sum = 0;
          for (int r = 0; r < world; ++r)
            sum += static_cast<float>((i * 7 + static_cast<uint64_t>(r) * 5 + t) % 17) - 8.0f;
          TensorValues expected({{"", 1, kMixed[t].dtype}});
          expected.set(0, 0, sum / static_cast<float>(world));
          ASSERT_EQ(results[0].get(t, i), expected.get(0, 0)) << kMixed[t].name << " " << i;
        }
    }
}

TEST(Collective, OutputMayBeTheInput) {
  for (const std::string& codec : all_specs())
    for (Method method : kMethods) {
      const ReduceOptions options{.method = method, .up = codec};
      const auto apart = reduce(3, kMixed, options, [&](int rank) { return gradients(kMixed, rank, 1); });
      std::vector<TensorValues> in_place;
      for (int r = 0; r < 3; ++r) in_place.push_back(gradients(kMixed, r, 1));
      run_loopback(3, [&](Engine& engine) {
        TensorValues& data = in_place[static_cast<size_t>(engine.rank())];
        Reducer reducer(engine, kMixed, options);
        reducer.run(3, data.in(), data.out());
      });
      expect_identical(in_place, codec);
      EXPECT_TRUE(in_place[0] == apart[0]) << codec << " " << name_of(method);
    }
}

TEST(Collective, RulesChooseTheCodec) {
  for (Method method : kMethods) {
    const auto results = reduce(3, kMixed, {.method = method, .up = "conv.*=fp32;1d=fp32;*=qsgd:bits=2"},
                                [&](int rank) { return integers(kMixed, rank); });
    expect_identical(results, name_of(method));
    const auto exact =
        reduce(3, kMixed, {.method = method, .up = "fp32"}, [&](int rank) { return integers(kMixed, rank); });
    for (size_t t = 0; t < kMixed.size(); ++t) {
      const bool rough = kMixed[t].name == "half.weight" || kMixed[t].name == "brain.weight";
      EXPECT_EQ(results[0].bytes[t] != exact[0].bytes[t], rough) << kMixed[t].name;
    }
  }
}

TEST(Collective, SumIsWorldTimesTheMean) {
  for (Method method : kMethods) {
    const auto results = reduce(4, kMixed, {.method = method, .op = Op::sum, .up = "fp32"},
                                [&](int rank) { return integers(kMixed, rank); });
    const auto means =
        reduce(4, kMixed, {.method = method, .up = "fp32"}, [&](int rank) { return integers(kMixed, rank); });
    for (uint64_t i = 0; i < kMixed[0].count; ++i) ASSERT_EQ(results[0].get(0, i), 4 * means[0].get(0, i));
  }
}

// Division, not multiplication with a rounded reciprocal: 1/49 is not a float, 49 n / 49 is.
TEST(Collective, TheMeanOfEqualValuesIsThatValue) {
  const std::vector<NamedTensor> tensors{{"a", 5000}};
  for (Method method : kMethods) {
    const auto results = reduce(7, tensors, {.method = method, .up = "fp32"}, [&](int) {
      TensorValues data(tensors);
      data.fill([](size_t, uint64_t i) { return static_cast<float>(i); });
      return data;
    });
    for (uint64_t i = 0; i < 5000; ++i) ASSERT_EQ(results[6].get(0, i), static_cast<float>(i));
  }
}

TEST(Collective, ThreadsAndVectorsDoNotMatter) {
  const auto run = [&](Method method, const std::string& codec, int threads, const std::string& simd) {
    return reduce(2, kMixed, {.method = method, .up = codec, .device = {.threads = threads, .simd = simd}},
                  [&](int rank) { return gradients(kMixed, rank, 1); })[0];
  };
  for (const std::string& codec : all_specs())
    for (Method method : kMethods) {
      const TensorValues base = run(method, codec, 1, "");
      EXPECT_TRUE(base == run(method, codec, 3, "")) << codec;
      EXPECT_TRUE(base == run(method, codec, 1, "scalar")) << codec;
    }
}

#if defined(__x86_64__)
TEST(Collective, OneRanksFlushToZeroDoesNotMatter) {
  const std::vector<NamedTensor> tensors{{"a", 3000}};
  for (Method method : kMethods)
    for (const char* codec : {"fp32", "qsgd:bits=8"}) {
      std::vector<TensorValues> results(3, TensorValues(tensors));
      run_loopback(3, [&](Engine& engine) {
        if (engine.rank() == 1) _mm_setcsr(_mm_getcsr() | 0x8040);
        TensorValues in(tensors);
        in.fill([](size_t, uint64_t i) { return static_cast<float>(i) * 0x1p-149f; });  // subnormal
        Reducer reducer(engine, tensors, {.method = method, .up = codec});
        reducer.run(0, in.in(), results[static_cast<size_t>(engine.rank())].out());
        if (engine.rank() == 1) _mm_setcsr(_mm_getcsr() & ~0x8040u);
      });
      expect_identical(results, codec);
      EXPECT_GT(results[1].get(0, 2999), 0.0f) << codec;
    }
}
#endif

TEST(Collective, FourBitScatterMovesASeventhOfTheBytes) {
  const std::vector<NamedTensor> model = resnet50();
  const int world = 4;
  std::map<std::string, uint64_t> total;
  for (const char* codec : {"fp32", "qsgd:bits=4"}) {
    PerRank<uint64_t> bytes(world);
    run_loopback(world,
                 [&](Engine& engine) { bytes.of(engine) = Reducer(engine, model, {.up = codec}).message_bytes(); });
    for (uint64_t n : bytes.values) total[codec] += n;
  }
  EXPECT_LE(total["qsgd:bits=4"] * 7, total["fp32"]);
  // fp32 is what it must be: (W-1)/W of the elements there and back for each rank, and little more.
  const double exact = 2.0 * (world - 1) * 4 * 25'557'032;
  EXPECT_NEAR(static_cast<double>(total["fp32"]), exact, 0.005 * exact);
}

TEST(Collective, WhatItSaysItSendsIsWhatTheEngineSends) {
  for (int world : {1, 3, 4})
    for (Method method : kMethods)
      run_loopback(world, [&](Engine& engine) {
        Reducer reducer(engine, kMixed, {.method = method});
        TensorValues data = gradients(kMixed, engine.rank(), 0);
        for (uint64_t step = 0; step < 2; ++step) {
          const uint64_t before = engine.bytes_sent();
          reducer.run(step, data.in(), data.out());
          EXPECT_EQ(engine.bytes_sent() - before, reducer.message_bytes());
        }
      });
}

// ---- asynchrony

TEST(Collective, ReducersOnOneEngineRunInTheOrderOfTheCalls) {
  const std::vector<NamedTensor> a{{"a", 50'000}}, b{{"b", 20'000}}, c{{"c", 10}};
  run_loopback(4, [&](Engine& engine) {
    Reducer first(engine, a, {.up = "fp32"}), second(engine, b, {.method = Method::gather, .up = "fp32"}),
        third(engine, c, {.up = "fp32"});
    for (uint64_t step = 0; step < 20; ++step) {
      TensorValues x = integers(a, engine.rank()), y = integers(b, engine.rank()), z = integers(c, engine.rank());
      Handle one = first.start(step, x.in(), x.out());
      Handle two = second.start(step, y.in(), y.out());
      Handle three = third.start(step, z.in(), z.out());
      three.wait();
      one.wait();
      two.wait();
      float sum = 0;
      for (int r = 0; r < 4; ++r) sum += integers(a, r).get(0, 4321);
      EXPECT_EQ(x.get(0, 4321), sum / 4);
      for (const auto& [tensor, data] : {std::pair{&b, &y}, {&c, &z}}) {
        float s = 0;
        for (int r = 0; r < 4; ++r) s += integers(*tensor, r).get(0, 9);
        EXPECT_EQ(data->get(0, 9), s / 4);
      }
    }
  });
}

TEST(Collective, ADroppedHandleAndAnEarlyEndAreSafe) {
  const std::vector<NamedTensor> tensors{{"a", 100'000}};
  std::vector<TensorValues> data;
  for (int r = 0; r < 3; ++r) data.push_back(integers(tensors, r));
  run_loopback(3, [&](Engine& engine) {
    TensorValues& mine = data[static_cast<size_t>(engine.rank())];
    Handle kept;
    {
      Reducer reducer(engine, tensors, {.up = "fp32"});
      kept = reducer.start(0, mine.in(), mine.out());
      reducer.start(1, mine.in(), mine.out());  // dropped at once: waits
    }
    kept.wait();
  });
  expect_identical(data, "after the reducers are gone");
}

// ---- the halves

TEST(Collective, TheHalvesMakeTheWhole) {
  const ReduceOptions options{.up = "*.bias=fp32;*=qsgd:bits=3", .feedback = Feedback::on, .seed = 77};
  for (int world : {1, 3, 4})
    run_loopback(world, [&](Engine& engine) {
      Reducer reducer(engine, kMixed, options);
      ErrorFeedback feedback;
      for (uint64_t step = 0; step < 3; ++step) {
        const TensorValues in = gradients(kMixed, engine.rank(), step);
        TensorValues whole(kMixed), halves(kMixed);
        reducer.run(step, in.in(), whole.out());
        uint64_t elements = 0;
        for (const Shard& shard : shards(kMixed, world)) elements += shard.owner == engine.rank() ? shard.count : 0;
        std::vector<float> mine(elements);
        reduce_scatter(engine, kMixed, options, step, in.in(), mine, &feedback);
        all_gather(engine, kMixed, options, step, mine, halves.out(), &feedback);
        feedback.commit(step);
        EXPECT_TRUE(whole == halves) << "world " << world << ", step " << step;
        EXPECT_EQ(feedback.hash(), reducer.feedback().hash());
      }
    });
}

TEST(Collective, BroadcastGivesEverybodyWhatTheCodecLeaves) {
  for (const std::string& codec : all_specs())
    for (int root : {0, 2}) {
      std::vector<TensorValues> data;
      for (int r = 0; r < 3; ++r) data.push_back(gradients(kMixed, r, 0));
      const TensorValues original = data[static_cast<size_t>(root)];
      run_loopback(3, [&](Engine& engine) {
        TensorValues& mine = data[static_cast<size_t>(engine.rank())];
        broadcast(engine, kMixed, {.up = "fp32", .down = codec}, 5, root, mine.out());
      });
      expect_identical(data, codec);
      if (codec == "fp32") {
        EXPECT_TRUE(data[0] == original);
      } else {
        EXPECT_NE(data[0].bytes[0], original.bytes[0]) << codec << " left f32 as it was";
      }
    }
}

TEST(Collective, BroadcastPaysItsDebts) {
  const std::vector<NamedTensor> tensors{{"a", 5000}};
  const int steps = 40;
  run_loopback(3, [&](Engine& engine) {
    ErrorFeedback feedback;
    std::vector<double> sum(5000, 0.0);
    const TensorValues original = gradients(tensors, 0, 0);
    for (uint64_t step = 0; step < steps; ++step) {
      TensorValues data = original;
      broadcast(engine, tensors, {.up = "qsgd:bits=2"}, step, 1, data.out(), &feedback);
      feedback.commit(step);
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += data.get(0, i);
    }
    // The mean of what arrived is off by the last residual over the number of steps. With 2 bits there is one level a
    // side, the largest |x + e| of the bucket; |x| < 0.05 here and nearest rounding leaves |e| <= |level| / 2, so
    // levels stay below 0.1 and residuals below 0.05.
    for (size_t i = 0; i < sum.size(); ++i) ASSERT_NEAR(sum[i] / steps, original.get(0, i), 0.05 / steps);
  });
}

// ---- one call, and spans

TEST(AllReduce, OneCallGivesTheMeanInPlace) {
  const std::vector<NamedTensor> tensors{{"data", 70'001}};
  for (const char* codec : {"fp32", "qsgd:bits=8", "topk:ratio=0.1", "dqsgd:mode=paper"}) {
    PerRank<std::vector<float>> results(3);
    run_loopback(3, [&](Engine& engine) {
      const TensorValues in = gradients(tensors, engine.rank(), 0);
      std::vector<float>& data = results.of(engine);
      for (uint64_t i = 0; i < tensors[0].count; ++i) data.push_back(in.get(0, i));
      all_reduce(engine, data, codec);
    });
    EXPECT_EQ(results[1], results[0]) << codec;
    EXPECT_EQ(results[2], results[0]) << codec;
    // It is a Reducer without error feedback, also on the way down.
    const ReduceOptions options{.up = codec, .feedback = Feedback::off, .owner_feedback = Feedback::off};
    const std::vector<TensorValues> expected = reduce(
        3, tensors, options, [&](int rank) { return gradients(tensors, rank, 0); }, 0);
    for (uint64_t i = 0; i < tensors[0].count; ++i) ASSERT_EQ(results[0][i], expected[0].get(0, i)) << codec << i;
  }
}

TEST(AllReduce, OptionsMayAskForTheSum) {
  run_loopback(4, [](Engine& engine) {
    std::vector<float> data(1000, static_cast<float>(engine.rank() + 1));
    all_reduce(engine, data, {.op = Op::sum, .up = "fp32"});
    for (float x : data) ASSERT_EQ(x, 10.0f);
  });
}

TEST(Spans, AreCheckedAgainstTheTensors) {
  run_loopback(2, [](Engine& engine) {
    Reducer reducer(engine, {{"a", 3}, {"b", 5}}, {.up = "fp32"});
    const auto r = static_cast<float>(engine.rank());
    const std::vector<float> a(3, r), b(5, 10 * r);
    std::vector<float> mean_a(3), mean_b(5);
    const std::span<const float> in[] = {a, b};
    const std::span<float> out[] = {mean_a, mean_b}, short_out[] = {mean_a, std::span(mean_b).first(4)};
    reducer.run(0, in, out);
    EXPECT_EQ(mean_a, std::vector<float>(3, 0.5f));
    EXPECT_EQ(mean_b, std::vector<float>(5, 5.0f));
    // All ranks learn of it, and can go on.
    const bool odd = engine.rank() == 1;
    const Outcome outcome = outcome_of([&] { reducer.run(1, in, Reducer::FloatOutputs(odd ? short_out : out)); });
    EXPECT_EQ(outcome.field, odd ? "out" : "ready") << outcome.text;
    EXPECT_NE(outcome.text.find("4 elements"), std::string::npos) << outcome.text;
    reducer.run(1, in, out);

    Reducer half(engine, {{"h", 4, DType::f16}}, {.up = "fp32"});
    std::vector<float> data(4);
    EXPECT_EQ(outcome_of([&] { half.run(0, data, data); }).field, "in");
  });
}

}  // namespace
}  // namespace gradwire
