// SPDX-License-Identifier: Apache-2.0
// Residuals through whole reductions: how tensors are grouped changes nothing; a skipped step changes nothing, on any
// rank; what is not sent now is sent later, also across a restart and in a world of another size.
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <random>

#include "collective/collective_fixture.h"

namespace gradwire {
namespace {

using namespace test;

// Every residual of a rank, by direction and name.
using ResidualMap = std::map<std::pair<Direction, std::string>, std::vector<float>>;

void collect(ResidualMap& residuals, Reducer& reducer, const std::vector<NamedTensor>& tensors, const Engine& engine,
             Method method) {
  for (const NamedTensor& t : tensors)
    if (t.count > 0) residuals[{Direction::up, t.name}] = reducer.feedback().residual(Direction::up, t.name);
  if (method == Method::gather) return;
  for (const Shard& shard : shards(tensors, engine.size()))
    if (shard.owner == engine.rank())
      residuals[{Direction::down, tensors[shard.tensor].name}] =
          reducer.feedback().residual(Direction::down, tensors[shard.tensor].name, shard.first);
}

const std::vector<NamedTensor> kModel{{"embed", lighter(100'003, 35'003), DType::f32, 2},
                                      {"a.weight", lighter(40'000, 4'000), DType::f32, 2},
                                      {"a.bias", 17, DType::f32, 1},
                                      {"b.weight", lighter(32'768, 4'096), DType::f16, 2},
                                      {"b.bias", 1, DType::f32, 1},
                                      {"c.weight", 5'000, DType::bf16, 2},
                                      {"c.bias", 2, DType::bf16, 1},
                                      {"d.weight", lighter(70'001, 9'001), DType::f32, 2},
                                      {"none", 0, DType::f32, 2},
                                      {"d.bias", 1023, DType::f32, 1}};

TEST(Grouping, AndOrderDoNotMatter) {
  const int world = 3, steps = 3;
  std::mt19937 random(2024);
  for (const char* codec :
       {"qsgd:bits=3", "onebit", "topk:ratio=0.05", "topk:ratio=0.05,bits=2", "*.bias=fp16;*=terngrad"})
    for (Method method : kMethods) {
      const ReduceOptions options{.method = method, .up = codec, .feedback = Feedback::on, .seed = 9};
      std::map<std::string, std::vector<std::byte>> base_values;
      std::vector<ResidualMap> base_residuals(world);
      for (int round = 0; round < 3; ++round) {
        // Round 0 is one reducer in the order of the model; the others deal the tensors to up to four, shuffled.
        std::vector<std::vector<NamedTensor>> groups(round == 0 ? 1 : 1 + random() % 4);
        std::vector<NamedTensor> order = kModel;
        if (round > 0) std::shuffle(order.begin(), order.end(), random);
        for (const NamedTensor& t : order) groups[random() % groups.size()].push_back(t);
        std::vector<std::map<std::string, std::vector<std::byte>>> values(world);
        std::vector<ResidualMap> residuals(world);
        run_loopback(world, [&](Engine& engine) {
          const auto me = static_cast<size_t>(engine.rank());
          std::vector<std::unique_ptr<Reducer>> reducers;
          for (const auto& group : groups) reducers.push_back(std::make_unique<Reducer>(engine, group, options));
          for (uint64_t step = 0; step < steps; ++step) {
            for (size_t g = 0; g < groups.size(); ++g) {
              TensorValues data = gradients(groups[g], engine.rank(), step);
              reducers[g]->run(step, data.in(), data.out());
              for (size_t t = 0; t < groups[g].size(); ++t) {
                auto& all = values[me][groups[g][t].name];
                all.insert(all.end(), data.bytes[t].begin(), data.bytes[t].end());
              }
            }
          }
          for (size_t g = 0; g < groups.size(); ++g) collect(residuals[me], *reducers[g], groups[g], engine, method);
        });
        if (round == 0) {
          base_values = values[0];
          base_residuals = residuals;
        }
        for (int r = 0; r < world; ++r) {
          EXPECT_EQ(values[r], base_values)
              << codec << ", " << name_of(method) << ", round " << round << ", rank " << r;
          EXPECT_EQ(residuals[r], base_residuals[r])
              << codec << ", " << name_of(method) << ", round " << round << ", rank " << r;
        }
      }
    }
}

// ---- skipped steps

TEST(SkippedStep, ChangesNoResidualOnAnyRank) {
  const std::vector<NamedTensor> tensors{{"a", lighter(100'003, 43'003)}, {"b", 500}};
  const int world = 3;
  const uint64_t where = 40'000;
  for (const std::string& spec : all_specs())
    for (Method method : kMethods) {
      const bool manual = method == Method::gather;  // one method decides by hand, the other by itself
      const std::string what = spec + " " + name_of(method);
      const ReduceOptions options{.method = method,
                                  .up = spec,
                                  .feedback = Feedback::on,
                                  .commit = manual ? Commit::manual : Commit::if_finite};
      const uint64_t unit = Codec::parse(spec).traits().unit;
      std::vector<TensorValues> bad(world, TensorValues(tensors)), after(world, TensorValues(tensors)),
          control(world, TensorValues(tensors));
      run_loopback(world, [&](Engine& engine) {
        const auto me = static_cast<size_t>(engine.rank());
        Reducer reducer(engine, tensors, options);
        TensorValues scratch = gradients(tensors, engine.rank(), 0);
        reducer.run(0, scratch.in(), scratch.out());
        if (manual) reducer.commit(0);
        const uint64_t before = reducer.feedback().hash();
        scratch = gradients(tensors, engine.rank(), 1);
        if (engine.rank() == 1) scratch.set(0, where, INFINITY);
        reducer.run(1, scratch.in(), bad[me].out());
        if (manual) reducer.rollback(1);
        // A lossless codec leaves no residual, so there is nothing to skip.
        EXPECT_EQ(reducer.skipped(), manual || spec == "fp32" ? 0u : 1u) << what;
        EXPECT_EQ(reducer.feedback().hash(), before) << what << ", rank " << me;
        scratch = gradients(tensors, engine.rank(), 2);
        reducer.run(2, scratch.in(), after[me].out());
      });
      expect_identical(bad, what);
      for (uint64_t i = 0; i < tensors[0].count; ++i)
        ASSERT_EQ(std::isnan(bad[0].get(0, i)), i / unit == where / unit) << what << ", element " << i;
      for (uint64_t i = 0; i < tensors[1].count; ++i) ASSERT_FALSE(std::isnan(bad[0].get(1, i))) << what;

      run_loopback(world, [&](Engine& engine) {  // as if step 1 had never been
        Reducer reducer(engine, tensors, options);
        TensorValues scratch = gradients(tensors, engine.rank(), 0);
        reducer.run(0, scratch.in(), scratch.out());
        if (manual) reducer.commit(0);
        scratch = gradients(tensors, engine.rank(), 2);
        reducer.run(2, scratch.in(), control[static_cast<size_t>(engine.rank())].out());
      });
      expect_identical(after, what);
      EXPECT_TRUE(after[0] == control[0]) << what;
    }
}

// What the scales of messages say spares the look at every result only where it proves them finite: not where a sum of
// finite values overflows, and not where a result is rounded to half precision.
TEST(SkippedStep, ResultsThatOverflowAreSeenThoughEveryValueSentIsFinite) {
  struct Large {
    DType dtype;
    float value;
  };
  for (const std::string& spec : all_specs()) {
    if (Codec::parse(spec).traits().lossless) continue;  // leaves no residual: nothing to skip
    for (const Large& large : {Large{DType::f32, 3e38f}, Large{DType::f32, 1e29f}, Large{DType::f16, 6e4f}})
      for (Method method : kMethods) {
        const std::vector<NamedTensor> tensors{{"a", 5000, large.dtype}};
        run_loopback(3, [&](Engine& engine) {
          Reducer reducer(engine, tensors, {.method = method, .op = Op::sum, .up = spec, .feedback = Feedback::on});
          TensorValues data(tensors);
          data.fill([&](size_t, uint64_t i) { return i % 2 ? large.value : -large.value; });
          reducer.run(0, data.in(), data.out());
          bool finite = true;
          for (uint64_t i = 0; i < tensors[0].count; ++i) finite &= std::isfinite(data.get(0, i));
          EXPECT_EQ(reducer.skipped(), finite ? 0u : 1u)
              << spec << ", " << name_of(method) << ", " << large.value << " as " << name_of(large.dtype);
          if (spec == "qsgd") {
            EXPECT_EQ(finite, large.value == 1e29f);
          }
        });
      }
  }
}

TEST(SkippedStep, LossScaleLeavesResidualsUnscaled) {
  const std::vector<NamedTensor> tensors{{"a", 40'000}};
  for (Method method : kMethods)
    for (Op op : {Op::mean, Op::sum}) {
      std::vector<uint64_t> hashes;
      for (float scale : {1.0f, 1024.0f})  // a power of two: exact
        run_loopback(2, [&](Engine& engine) {
          Reducer reducer(engine, tensors, {.method = method, .op = op, .up = "onebit"});
          for (uint64_t step = 0; step < 3; ++step) {
            TensorValues data = gradients(tensors, engine.rank(), step);
            data.fill([copy = data, scale](size_t t, uint64_t i) { return copy.get(t, i) * scale; });
            reducer.run(step, data.in(), data.out(), scale);
          }
          if (engine.rank() == 0) hashes.push_back(reducer.feedback().hash());
        });
      EXPECT_EQ(hashes[0], hashes[1]) << name_of(method);
    }
}

// ---- debts are paid

// What all ranks together received, owe and were given, by element, summed in double; and the largest magnitudes.
struct Books {
  explicit Books(uint64_t count) : given(count), received(count), residuals(count) {}
  std::vector<double> given, received, residuals;
  double gradient = 0, up = 0, down = 0;
  std::mutex mutex;

  // In units of the mean: called by every rank after a step was committed.
  void post(Engine& engine, const TensorValues& in, const TensorValues& out, bool last, ErrorFeedback& feedback,
            Method method, float per) {
    std::lock_guard lock(mutex);
    const double share = 1.0 / engine.size();
    for (size_t i = 0; i < given.size(); ++i) {
      given[i] += share * in.get(0, i);
      gradient = std::max(gradient, std::abs(static_cast<double>(in.get(0, i))));
      if (engine.rank() == 0) received[i] += out.get(0, i) / per;
    }
    const std::vector<float> e = feedback.residual(Direction::up, in.tensors[0].name);
    for (size_t i = 0; i < e.size(); ++i) {
      up = std::max(up, std::abs(static_cast<double>(e[i])));
      if (last) residuals[i] += share * e[i];
    }
    if (method == Method::gather) return;
    for (const Shard& shard : shards(in.tensors, engine.size()))
      if (shard.owner == engine.rank()) {
        const std::vector<float> f = feedback.residual(Direction::down, in.tensors[0].name, shard.first);
        for (size_t i = 0; i < f.size(); ++i) {
          down = std::max(down, std::abs(static_cast<double>(f[i])));
          if (last) residuals[shard.first + i] += f[i];
        }
      }
  }

  // Let u = 2^-24. At each step a rank computes x = g + e (off by u|x|) and e' = x - d (off by u|e'|). The owner adds W
  // values d (W - 1 sums of at most W max|d|, off by u each) and divides (u max|d|); with y the mean it then
  // does the same as a rank. With B >= |x|, |y|, |d|, |e|, |f|, a step's books are off by u B (2 + (W-1) + 1 + 2) in
  // units of the mean, less than u B (W + 5). |d| <= max|x| but for rounding (the 1.01), |x| <= |g| + |e|, and |y| <=
  // max|d| + |f|. A sum instead of a mean scales before rounding: one more u B up and down each. bf16 residuals
  // are rounded once more when stored, by 2^-8 of their magnitude.
  double tolerance(int world, int steps, DType residual) const {
    const double bound = 1.01 * (gradient + up + down);
    return steps * (0x1p-24 * bound * (world + 7) + (residual == DType::bf16 ? 0x1p-8 * (up + down) : 0.0));
  }

  void check(int world, int steps, DType residual, const std::string& what) const {
    const double allowed = tolerance(world, steps, residual);
    double worst = 0;
    for (size_t i = 0; i < given.size(); ++i) worst = std::max(worst, std::abs(given[i] - received[i] - residuals[i]));
    EXPECT_LE(worst, allowed) << what;
    EXPECT_GT(up + down, 0.0) << what << ": no residual was ever left";
  }
};

TEST(Debts, WhatArrivesAndWhatIsOwedAreWhatWasGiven) {
  const std::vector<NamedTensor> tensors{{"a", lighter(35'000, 5'000)}};
  const int world = 3, steps = 6;
  for (const char* codec : {"qsgd:bits=2", "qsgd:bits=4,rounding=nearest", "onebit", "topk", "terngrad", "fp16"})
    for (Method method : kMethods)
      for (Op op : {Op::mean, Op::sum})
        for (DType residual : {DType::f32, DType::bf16}) {
          Books books(tensors[0].count);
          run_loopback(world, [&](Engine& engine) {
            Reducer reducer(engine, tensors,
                            {.method = method, .op = op, .up = codec, .feedback = Feedback::on, .residual = residual});
            for (uint64_t step = 0; step < steps; ++step) {
              const TensorValues in = gradients(tensors, engine.rank(), step);
              TensorValues out(tensors);
              reducer.run(step, in.in(), out.out());
              books.post(engine, in, out, step + 1 == steps, reducer.feedback(), method, op == Op::sum ? world : 1);
            }
          });
          books.check(world, steps, residual,
                      std::string(codec) + " " + name_of(method) + (op == Op::sum ? " sum " : " mean ") +
                          std::string(gradwire::name_of(residual)));
        }
}

TEST(Debts, SurviveAnotherWorldSize) {
  const std::vector<NamedTensor> tensors{{"a", lighter(70'000, 9'000)}};
  const int steps = 4;
  for (const char* codec : {"onebit", "topk"})
    for (auto [from, to] : {std::pair{4, 3}, {4, 6}, {1, 5}, {5, 1}}) {
      Books books(tensors[0].count);
      PerRank<ErrorFeedback> states(from);
      const auto run = [&](int world, uint64_t first, std::vector<ErrorFeedback>& feedback, bool last) {
        run_loopback(world, [&](Engine& engine) {
          Reducer reducer(engine, tensors, {.up = codec});
          ErrorFeedback& mine = feedback[static_cast<size_t>(engine.rank())];
          if (first > 0) reducer.feedback() = std::move(mine);
          for (uint64_t step = first; step < first + steps; ++step) {
            const TensorValues in = gradients(tensors, engine.rank(), step);
            TensorValues out(tensors);
            reducer.run(step, in.in(), out.out());
            books.post(engine, in, out, last && step + 1 == first + steps, reducer.feedback(), Method::scatter, 1);
          }
          mine = std::move(reducer.feedback());
        });
      };
      run(from, 0, states.values, false);
      std::vector<ErrorFeedback> fresh = ErrorFeedback::redistribute(states.values, to);
      run(to, steps, fresh, true);
      // Moving the debt rounds once more: well within one step's allowance.
      books.check(std::max(from, to), 2 * steps + 1, DType::f32,
                  std::string(codec) + " " + std::to_string(from) + " to " + std::to_string(to));
    }
}

// ---- restart

TEST(Restart, GoesOnBitForBit) {
  namespace fs = std::filesystem;
  const fs::path folder = fs::temp_directory_path() / ("gradwire_restart_" + std::to_string(::getpid()));
  fs::create_directories(folder);
  const int world = 3;
  for (Method method : kMethods)
    for (DType residual : {DType::f32, DType::bf16})
      for (const char* codec : {"qsgd:bits=3", "onebit", "*.bias=fp32;*=topk"}) {
        const ReduceOptions options{.method = method, .up = codec, .feedback = Feedback::on, .residual = residual};
        const auto path = [&](const Engine& engine) { return (folder / std::to_string(engine.rank())).string(); };
        std::vector<TensorValues> whole(world, TensorValues(kModel)), resumed(world, TensorValues(kModel));
        PerRank<uint64_t> hashes(world);
        run_loopback(world, [&](Engine& engine) {
          Reducer reducer(engine, kModel, options);
          for (uint64_t step = 0; step < 6; ++step) {
            const TensorValues in = gradients(kModel, engine.rank(), step);
            reducer.run(step, in.in(), whole[static_cast<size_t>(engine.rank())].out());
            if (step == 2) reducer.feedback().save(path(engine));
          }
          hashes.of(engine) = reducer.feedback().hash();
        });
        run_loopback(world, [&](Engine& engine) {
          Reducer reducer(engine, kModel, options);
          reducer.feedback() = ErrorFeedback::load(path(engine));
          for (uint64_t step = 3; step < 6; ++step) {
            const TensorValues in = gradients(kModel, engine.rank(), step);
            reducer.run(step, in.in(), resumed[static_cast<size_t>(engine.rank())].out());
          }
          EXPECT_EQ(hashes.of(engine), reducer.feedback().hash());
        });
        for (int r = 0; r < world; ++r) EXPECT_TRUE(whole[r] == resumed[r]) << codec << " rank " << r;
      }
  fs::remove_all(folder);
}

// A file of other tensors would otherwise silently mean no feedback.
TEST(Restart, AStateOfOtherShapesIsRefusedOnAllRanks) {
  const auto results = outcomes(2, [&](Engine& engine) {
    Reducer reducer(engine, {{"a", 100}}, {.up = "onebit"});
    if (engine.rank() == 1) {
      ErrorFeedback other;
      other.add(Direction::up, "a", 50);
      reducer.feedback() = std::move(other);
    }
    TensorValues data = gradients({{"a", 100}}, 0, 0);
    reducer.run(0, data.in(), data.out());
  });
  EXPECT_EQ(results[1].kind, ErrorKind::usage);
  EXPECT_EQ(results[1].field, "count") << results[1].text;
  EXPECT_EQ(results[0].kind, ErrorKind::mismatch);
  EXPECT_EQ(results[0].rank, 1);
}

}  // namespace
}  // namespace gradwire
