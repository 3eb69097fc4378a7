// SPDX-License-Identifier: Apache-2.0
// What learning promises: all ranks learn the same, from integers, for the same step; a restored run goes on bit for
// bit; a skipped step teaches nothing; messages carry what a decoder needs.
#include "gradwire/learn.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>

#include "codec/test_devices.h"
#include "collective/collective_fixture.h"
#include "gradwire/message.h"

namespace gradwire::test {
namespace {

const std::vector<NamedTensor> kTensors{{"a", 70'003}, {"b", 5000}, {"c", 33}};
const char* const kLearners[] = {"optquant:bits=3,refit=3",
                                 "optquant:bits=2,mode=biased,refit=2",
                                 "casq:bits=2,refit=3,start=2",
                                 "casq:bits=1,refit=0",  // its tables take turns
                                 "casq:bits=1,mode=paper,refit=2",
                                 "casq:bits=2,mode=paper,counts=on,refit=2",
                                 "dqsgd:budget=3.5,min=2,steps=8",
                                 "dqsgd:budget=3,mode=paper,steps=8,fall=50",
                                 "rangefloat:bits=6,refit=2",
                                 "fft:theta=0.8,refit=2",
                                 "fft:schedule=step,until=3",
                                 "fft:schedule=rate,smooth=4"};

double rate_of(uint64_t step) { return 0.1 / static_cast<double>(1 + step); }

std::vector<std::vector<uint32_t>> tables(const Reducer& reducer, Direction direction) {
  std::vector<std::vector<uint32_t>> all;
  for (const Codec& codec : reducer.codecs(direction)) all.emplace_back(codec.table().begin(), codec.table().end());
  return all;
}

TEST(Learning, RanksLearnTheSameAndTheTablesMove) {
  for (const char* spec : kLearners)
    for (Method method : kMethods) {
      const std::string what = std::string(spec) + " " + name_of(method);
      std::vector<TensorValues> results(3, TensorValues(kTensors));
      std::vector<std::vector<std::vector<std::vector<uint32_t>>>> seen(3);  // rank, step, tensor
      run_loopback(3, [&](Engine& engine) {
        const auto me = static_cast<size_t>(engine.rank());
        Reducer reducer(engine, kTensors, {.method = method, .up = spec});
        for (uint64_t step = 0; step < 6; ++step) {
          reducer.set_rate(rate_of(step));
          const TensorValues in = gradients(kTensors, engine.rank(), step);
          reducer.run(step, in.in(), results[me].out());
          seen[me].push_back(tables(reducer, Direction::up));
        }
      });
      expect_identical(results, what);
      EXPECT_EQ(seen[0], seen[1]) << what;
      EXPECT_EQ(seen[0], seen[2]) << what;
      EXPECT_NE(seen[0].front(), seen[0].back()) << what << ": nothing was learned";
    }
}

TEST(Learning, ARestoredRunGoesOnBitForBit) {
  const std::string path = ::testing::TempDir() + "gradwire_learn_" + std::to_string(::getpid());
  for (const char* spec : kLearners)
    for (Method method : kMethods) {
      const std::string what = std::string(spec) + " " + name_of(method);
      const ReduceOptions options{.method = method, .up = spec};
      const uint64_t steps = 7, stop = 3;
      std::vector<TensorValues> straight(2, TensorValues(kTensors)), resumed(2, TensorValues(kTensors));
      const auto run = [&](Reducer& reducer, Engine& engine, uint64_t from, uint64_t to,
                           std::vector<TensorValues>& out) {
        for (uint64_t step = from; step < to; ++step) {
          reducer.set_rate(rate_of(step));
          reducer.run(step, gradients(kTensors, engine.rank(), step).in(),
                      out[static_cast<size_t>(engine.rank())].out());
        }
      };
      std::vector<uint64_t> hashes(2);
      run_loopback(2, [&](Engine& engine) {
        Reducer reducer(engine, kTensors, options);
        run(reducer, engine, 0, steps, straight);
        hashes[static_cast<size_t>(engine.rank())] = reducer.feedback().hash();
      });
      run_loopback(2, [&](Engine& engine) {
        Reducer reducer(engine, kTensors, options);
        run(reducer, engine, 0, stop, resumed);
        reducer.feedback().save(path + std::to_string(engine.rank()));
      });
      run_loopback(2, [&](Engine& engine) {
        Reducer reducer(engine, kTensors, options);
        reducer.feedback() = ErrorFeedback::load(path + std::to_string(engine.rank()));
        run(reducer, engine, stop, steps, resumed);
        EXPECT_EQ(reducer.feedback().hash(), hashes[static_cast<size_t>(engine.rank())]) << what;
      });
      EXPECT_TRUE(straight[0] == resumed[0]) << what;
      for (int rank : {0, 1}) std::remove((path + std::to_string(rank)).c_str());
    }
}

TEST(Learning, AStateOfAnotherKindIsRefused) {
  Learner levels(Codec::parse("optquant:bits=3"), 1000, 2), bits(Codec::parse("dqsgd:steps=10"), 1000, 2);
  std::vector<std::byte> junk(64, std::byte{0x7f});
  EXPECT_THROW(levels.restore(junk), Error);
  EXPECT_THROW(bits.restore(junk), Error);
  EXPECT_THROW(levels.restore(std::span(junk).first(7)), Error);
  try {
    levels.restore(junk);
  } catch (const Error& error) {
    EXPECT_EQ(error.field(), "learned");
  }
  levels.restore(levels.save());
  bits.restore(bits.save());
  EXPECT_THROW(Learner(Codec::parse("qsgd"), 1, 1), Error);
}

TEST(Learning, EvidenceIsTheSameInAnyOrderOfRanks) {
  for (const char* spec :
       {"optquant:bits=3,refit=1", "casq:bits=2,refit=1", "rangefloat:refit=1", "fft:refit=1", "dqsgd:steps=10"}) {
    const Codec codec = Codec::parse(spec);
    std::vector<std::vector<std::byte>> evidence;
    for (int rank = 0; rank < 4; ++rank) {  // of very different scale
      Learner learner(codec, 50'000, 4);
      TensorValues data = gradients({{"a", 50'000}}, rank, 0);
      for (uint64_t i = 0; i < 50'000; ++i)
        data.set(0, i, data.get(0, i) * std::pow(10.0f, static_cast<float>(rank) - 2));
      const Plan plan({{"a", 50'000, DType::f32, learner.codec(0)}});
      const auto runner = make_runner(plan, {});
      std::vector<std::byte> message(plan.message_bytes());
      runner->encode(data.in(), {}, message);
      const uint32_t which[] = {0};
      learner.observe(*runner, which, 0, data.in(), nullptr, message);
      runner->wait();
      learner.collect();
      evidence.emplace_back(learner.stats_bytes());
      learner.take_stats(evidence.back());
    }
    std::vector<std::byte> state;
    std::vector<size_t> order = {0, 1, 2, 3};
    do {
      Learner learner(codec, 50'000, 4);
      std::vector<std::span<const std::byte>> ranks;
      for (size_t r : order) ranks.emplace_back(evidence[r]);
      learner.learn(0, ranks);
      if (state.empty()) state = learner.save();
      EXPECT_EQ(learner.save(), state) << spec;
    } while (std::next_permutation(order.begin(), order.end()));
  }
}

TEST(Learning, NotANumberIsLeftOut) {
  for (const char* spec : {"optquant:bits=3", "casq:bits=2", "rangefloat", "fft"}) {
    std::vector<float> x = values_of(gradients({{"a", 100'000}}, 0, 0).bytes[0]);
    const Codec clean = fit(Codec::parse(spec), x.data(), x.size(), DType::f32);
    x[50'000] = NAN;
    const Codec with = fit(Codec::parse(spec), x.data(), x.size(), DType::f32);
    EXPECT_FALSE(clean.table().empty()) << spec;
    EXPECT_FALSE(with.table().empty()) << spec;
    std::fill(x.begin(), x.end(), NAN);
    EXPECT_TRUE(fit(Codec::parse(spec), x.data(), x.size(), DType::f32).table().empty()) << spec;
  }
}

TEST(Learning, WarmingUpIsExact) {
  std::vector<TensorValues> results(2, TensorValues(kTensors));
  run_loopback(2, [&](Engine& engine) {
    Reducer reducer(engine, kTensors, {.method = Method::gather, .up = "casq:bits=2,start=2"});
    for (uint64_t step = 0; step < 3; ++step) {
      const TensorValues mine = gradients(kTensors, engine.rank(), step), a = gradients(kTensors, 0, step),
                         b = gradients(kTensors, 1, step);
      TensorValues& out = results[static_cast<size_t>(engine.rank())];
      reducer.run(step, mine.in(), out.out());
      bool exact = true;
      for (uint64_t i = 0; i < kTensors[0].count; ++i) exact &= out.get(0, i) == (a.get(0, i) + b.get(0, i)) / 2;
      EXPECT_EQ(exact, step < 2) << "step " << step;
      EXPECT_EQ(reducer.codecs(Direction::up)[0].name(), step < 2 ? "fp32" : "casq");
    }
  });
}

TEST(Learning, AMessageCarriesItsTable) {
  const std::vector<float> x = values_of(gradients({{"a", 70'000}}, 0, 0).bytes[0]);
  for (const char* spec : {"optquant:bits=3", "casq:bits=2", "rangefloat", "fft", "dqsgd"}) {
    const Codec codec = fit(Codec::parse(spec), x.data(), x.size(), DType::f32);
    const Plan plan({{"a", x.size(), DType::f32, codec}});
    const Raw message = TestDevice(Device{}).encode(plan, {raw_of(x)}, {});
    const Head head = read_head(message);
    EXPECT_EQ(head.tensors[0].codec, codec) << spec;
    const Plan received({head.tensors[0]});
    EXPECT_EQ(TestDevice(Device{}).decode(received, message), TestDevice(Device{}).decode(plan, message)) << spec;
    if (codec == Codec::parse(spec)) continue;
    const Plan other({{"a", x.size(), DType::f32, Codec::parse(spec)}});  // without the table
    EXPECT_THROW(TestDevice(Device{}).decode(other, message), Error) << spec;
  }
}

// dqsgd: a gradient of zeros costs a header where the step's own norm is known.
TEST(Learning, ZeroGradientsCostAHeader) {
  const std::vector<float> zeros(100'000);
  const Codec codec = fit(Codec::parse("dqsgd"), zeros.data(), zeros.size(), DType::f32);
  EXPECT_EQ(codec.bytes(zeros.size()), 0u);
  std::vector<uint64_t> bytes;
  run_loopback(1, [&](Engine& engine) {
    Reducer reducer(engine, kTensors, {.method = Method::gather, .up = "dqsgd:mode=paper,steps=5"});
    for (uint64_t step = 0; step < 3; ++step) {
      TensorValues in = gradients(kTensors, 0, step), out(kTensors);
      if (step == 1) in.fill([](size_t, uint64_t) { return 0.0f; });
      reducer.run(step, in.in(), out.out());
      bytes.push_back(reducer.codecs(Direction::up)[0].bytes(kTensors[0].count));
      for (uint64_t i = 0; step == 1 && i < kTensors[0].count; ++i) ASSERT_EQ(out.get(0, i), 0.0f);
    }
  });
  EXPECT_GT(bytes[0], 0u);
  EXPECT_EQ(bytes[1], 0u);
  EXPECT_GT(bytes[2], 0u);
}

// The width that follows the norm keeps the budget, whatever the messages of a run are.
TEST(Learning, TheBudgetOfDqsgdHolds) {
  for (const char* mode : {"lag", "paper"}) {
    const uint64_t steps = 60;
    double spent = 0;
    int least = 99, most = 0;
    run_loopback(2, [&](Engine& engine) {
      Reducer reducer(engine, kTensors,
                      {.method = Method::gather, .up = std::string("dqsgd:budget=4,steps=60,fall=100,mode=") + mode});
      for (uint64_t step = 0; step < steps; ++step) {
        TensorValues in = gradients(kTensors, engine.rank(), step), out(kTensors);
        const float scale = std::exp(-0.08f * static_cast<float>(step));
        for (size_t t = 0; t < kTensors.size(); ++t)
          for (uint64_t i = 0; i < kTensors[t].count; ++i) in.set(t, i, in.get(t, i) * scale);
        reducer.run(step, in.in(), out.out());
        if (engine.rank() != 0) continue;
        const int bits = static_cast<int>(reducer.codecs(Direction::up)[0].table()[0]);
        spent += bits;
        least = std::min(least, bits);
        most = std::max(most, bits);
      }
    });
    EXPECT_LE(spent / steps, 4.0) << mode;
    EXPECT_GE(spent / steps, 0.97 * 4) << mode;
    EXPECT_GT(most, least) << mode << ": one width all along";
  }
}

TEST(Learning, ThetaFollowsItsSchedule) {
  const Learner step(Codec::parse("fft:theta=0.9,schedule=step,until=130"), 1000, 1),
      rate(Codec::parse("fft:theta=0.9,schedule=rate,smooth=2"), 1000, 1);
  EXPECT_DOUBLE_EQ(1 - step.codec(129).bytes(1 << 20) / static_cast<double>(step.codec(130).bytes(1 << 20)),
                   1 - step.codec(0).bytes(1 << 20) / static_cast<double>(step.codec(500).bytes(1 << 20)));
  EXPECT_LT(step.codec(129).bytes(1 << 20), step.codec(130).bytes(1 << 20));
  // theta^2 = L eta, at most theta.
  for (double eta : {0.4, 0.1, 0.01, 0.0}) {
    const double theta = std::min(0.9, std::sqrt(2 * eta));
    const Codec same = Codec::parse("fft").with("theta", std::to_string(theta));
    EXPECT_NEAR(static_cast<double>(rate.codec(0, eta).bytes(1 << 20)), static_cast<double>(same.bytes(1 << 20)),
                same.bytes(1 << 20) * 0.001)
        << eta;
    EXPECT_NE(rate.plan().find(2 * eta <= 0.25 ? "holds" : "says nothing"), std::string::npos) << rate.plan();
  }
  try {
    rate.codec(0);
    ADD_FAILURE() << "a schedule that follows the learning rate goes on without one";
  } catch (const Error& e) {
    EXPECT_EQ(e.field(), "rate");
  }
}

}  // namespace
}  // namespace gradwire::test
