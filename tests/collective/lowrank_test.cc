// SPDX-License-Identifier: Apache-2.0
// Matrices that travel as factors: what a Reducer computes is compared with the rule in double precision; nothing is
// lost; all ranks hold the same bits; states, refusals and values that are not finite are as with codecs.
#include "codec/lowrank/lowrank.h"

#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <limits>

#include "codec/lowrank/orthonormal.h"
#include "collective/collective_fixture.h"

namespace gradwire {
namespace {

using namespace test;

// A model: matrices that lowrank fits, one that it does not fit, and vectors.
const std::vector<NamedTensor> kModel{{"embed", 120 * 40, DType::f32, 2, 120},
                                      {"conv", 48 * 3 * 3 * 16, DType::f32, 4, 48},
                                      {"conv.bias", 48, DType::f32, 1},
                                      {"half", 64 * 70, DType::f16, 2, 64},
                                      {"thin", 2 * 300, DType::f32, 2, 2},
                                      {"brain", 33 * 65, DType::bf16, 2, 33},
                                      {"scale", 1, DType::f32, 0}};

ReduceOptions with(const std::string& codec, Method method = Method::scatter) {
  return {.method = method, .up = codec, .seed = 5};
}

using Wide = std::vector<double>;

// The rule in double precision, for one matrix on all ranks, with factors that are sent exactly.
struct Reference {
  uint64_t n, m;
  LowRank codec;
  Wide p, q;
  std::vector<Wide> residual;

  Reference(const NamedTensor& tensor, const LowRank& c, int world)
      : n(tensor.rows), m(tensor.count / tensor.rows), codec(c), residual(static_cast<size_t>(world)) {
    const auto start = [&](const char* which, uint64_t size) {
      const std::vector<float> rows = starting_factor(hash_name(tensor.name + "/" + which), codec.rank, size);
      return Wide(rows.begin(), rows.end());
    };
    p = start("P", n);
    q = start("Q", m);
    for (Wide& one : residual) one.resize(n * m);
  }

  static void orthonormalize(Wide& rows, uint64_t rank) {  // Gram and Schmidt's way, twice
    const uint64_t size = rows.size() / rank;
    for (int again = 0; again < 2; ++again)
      for (uint64_t r = 0; r < rank; ++r) {
        for (uint64_t k = 0; k < r; ++k) {
          double along = 0;
          for (uint64_t j = 0; j < size; ++j) along += rows[r * size + j] * rows[k * size + j];
          for (uint64_t j = 0; j < size; ++j) rows[r * size + j] -= along * rows[k * size + j];
        }
        double square = 0;
        for (uint64_t j = 0; j < size; ++j) square += rows[r * size + j] * rows[r * size + j];
        for (uint64_t j = 0; j < size; ++j) rows[r * size + j] /= std::sqrt(square);
      }
  }
  Wide times_q(const Wide& matrix) const {  // rank x n
    Wide x(codec.rank * n);
    for (uint64_t r = 0; r < codec.rank; ++r)
      for (uint64_t i = 0; i < n; ++i)
        for (uint64_t j = 0; j < m; ++j) x[r * n + i] += q[r * m + j] * matrix[i * m + j];
    return x;
  }
  Wide times_p(const Wide& matrix) const {  // rank x m
    Wide x(codec.rank * m);
    for (uint64_t r = 0; r < codec.rank; ++r)
      for (uint64_t i = 0; i < n; ++i)
        for (uint64_t j = 0; j < m; ++j) x[r * m + j] += p[r * n + i] * matrix[i * m + j];
    return x;
  }
  Wide product(const Wide& left, const Wide& right) const {
    Wide out(n * m);
    for (uint64_t r = 0; r < codec.rank; ++r)
      for (uint64_t i = 0; i < n; ++i)
        for (uint64_t j = 0; j < m; ++j) out[i * m + j] += left[r * n + i] * right[r * m + j];
    return out;
  }
  static Wide mean(const std::vector<Wide>& all) {
    Wide sum(all[0].size());
    for (const Wide& one : all)
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += one[i] / static_cast<double>(all.size());
    return sum;
  }

  Wide step(uint64_t number, const std::vector<Wide>& gradients) {
    std::vector<Wide> x;
    for (size_t w = 0; w < residual.size(); ++w)
      for (size_t i = 0; i < n * m; ++i) residual[w][i] += gradients[w][i];
    const bool by_p = codec.sends_p(number);
    if (by_p) {
      for (const Wide& one : residual) x.push_back(times_q(one));
      p = mean(x);
    }
    if (!codec.alternate) orthonormalize(p, codec.rank);
    const bool result_by_p = codec.alternate && by_p;
    if (!result_by_p) {
      x.clear();
      for (const Wide& one : residual) x.push_back(times_p(one));
      q = mean(x);
    }
    const Wide result = product(p, q);
    for (size_t w = 0; w < residual.size(); ++w) {
      const Wide own = result_by_p ? product(x[w], q) : product(p, x[w]);
      for (size_t i = 0; i < n * m; ++i) residual[w][i] -= own[i];
    }
    if (result_by_p)
      orthonormalize(p, codec.rank);
    else
      orthonormalize(q, codec.rank);
    return result;
  }
};

// What all ranks have at the end of some steps of one reducer each.
struct Trained {
  std::vector<TensorValues> results;                   // per rank, of the last step
  std::vector<std::map<std::string, Wide>> residuals;  // per rank
  std::vector<uint64_t> hashes;
};

Trained train(int world, const std::vector<NamedTensor>& tensors, const ReduceOptions& options, uint64_t steps,
              const std::function<void(uint64_t, const std::vector<TensorValues>&)>& after = {}) {
  Trained all{std::vector<TensorValues>(static_cast<size_t>(world), TensorValues(tensors)),
              std::vector<std::map<std::string, Wide>>(static_cast<size_t>(world)),
              std::vector<uint64_t>(static_cast<size_t>(world))};
  std::vector<std::vector<TensorValues>> seen(steps, all.results);
  run_loopback(world, [&](Engine& engine) {
    const auto me = static_cast<size_t>(engine.rank());
    Reducer reducer(engine, tensors, options);
    for (uint64_t step = 0; step < steps; ++step) {
      const TensorValues in = gradients(tensors, engine.rank(), step);
      reducer.run(step, in.in(), seen[step][me].out());
    }
    for (size_t t = 0; t < tensors.size(); ++t)
      if (reducer.feedback().holds(Direction::up, tensors[t].name, tensors[t].count)) {
        const std::vector<float> values = reducer.feedback().residual(Direction::up, tensors[t].name);
        all.residuals[me][tensors[t].name] = Wide(values.begin(), values.end());
      }
    all.hashes[me] = reducer.feedback().hash();
  });
  for (uint64_t step = 0; step < steps; ++step)
    if (after) after(step, seen[step]);
  if (steps) all.results = seen[steps - 1];
  return all;
}

TEST(LowRank, FollowsTheRuleInDoublePrecision) {
  const std::vector<NamedTensor> tensors{{"a", 40 * 27, DType::f32, 2, 40}, {"b", 30 * 64, DType::f32, 2, 30}};
  for (const char* spec : {"lowrank:rank=3,bits=32", "lowrank:rank=3,bits=32,alternate=on"})
    for (const int world : {1, 2, 3, 4})
      for (const Method method : kMethods) {
        std::vector<Reference> references;
        for (const NamedTensor& one : tensors) references.emplace_back(one, LowRank::parse(spec), world);
        train(world, tensors, with(spec, method), 6, [&](uint64_t step, const std::vector<TensorValues>& found) {
          expect_identical(found, spec);
          for (size_t t = 0; t < tensors.size(); ++t) {
            std::vector<Wide> all;
            for (int rank = 0; rank < world; ++rank) {
              const TensorValues values = gradients(tensors, rank, step);
              Wide wide;
              for (uint64_t i = 0; i < tensors[t].count; ++i) wide.push_back(values.get(t, i));
              all.push_back(wide);
            }
            const Wide expected = references[t].step(step, all);
            double error = 0, square = 0;
            for (uint64_t i = 0; i < expected.size(); ++i) {
              error += std::pow(found[0].get(t, i) - expected[i], 2);
              square += expected[i] * expected[i];
            }
            // Directions of nearly equal strength turn easily: a hundred roundings may show, and no more.
            EXPECT_LT(error, square * 1e-9) << spec << ", " << world << " ranks, " << name_of(method) << ", " << step;
          }
        });
      }
}

// In every step the mean over the ranks of result + new residual is that of gradient + old residual, so over all steps
// the results add up to the gradients, less the residuals that are left.
TEST(LowRank, LosesNothingForAnyNumberOfBits) {
  const uint64_t steps = 12;
  std::vector<std::string> all_bits = {"4", "8", "16", "32"};
  if (kThreadSanitizer) all_bits = {"8"};
  for (const int world : {2, 3})
    for (const Method method : kMethods)
      for (const std::string& bits : all_bits)
        for (const char* alternate : {"on", "off"})
          for (const Op op : {Op::mean, Op::sum}) {
            const std::string spec =
                std::string("2d=lowrank:rank=4,bits=") + bits + ",alternate=" + alternate + ";*=fp32";
            ReduceOptions options = with(spec, method);
            options.op = op;
            std::vector<Wide> sums;
            for (const NamedTensor& one : kModel) sums.emplace_back(one.count);
            const double per = op == Op::sum ? 1.0 / world : 1.0;
            const Trained end =
                train(world, kModel, options, steps, [&](uint64_t, const std::vector<TensorValues>& found) {
                  expect_identical(found, spec);
                  for (size_t t = 0; t < kModel.size(); ++t)
                    for (uint64_t i = 0; i < kModel[t].count; ++i) sums[t][i] += per * found[0].get(t, i);
                });
            for (size_t t = 0; t < kModel.size(); ++t) {
              double worst = 0;
              for (uint64_t i = 0; i < kModel[t].count; ++i) {
                double expected = 0;
                for (int rank = 0; rank < world; ++rank) {
                  const auto& residuals = end.residuals[static_cast<size_t>(rank)];
                  if (const auto found = residuals.find(kModel[t].name); found != residuals.end())
                    expected -= found->second[i] / world;
                }
                for (uint64_t step = 0; step < steps; ++step)
                  for (int rank = 0; rank < world; ++rank)
                    expected += static_cast<double>(gradients({kModel[t]}, rank, step).get(0, i)) / world;
                worst = std::max(worst, std::abs(sums[t][i] - expected));
                if (i > 40) break;  // some elements are enough
              }
              // Values are of the order of 0.03, each step rounds a few times; results in half precision round to their
              // own type, which nobody feeds back.
              const double tolerance = kModel[t].dtype == DType::f32   ? 1e-6
                                       : kModel[t].dtype == DType::f16 ? 3e-4
                                                                       : 3e-3;
              EXPECT_LT(worst, tolerance)
                  << spec << " " << kModel[t].name << ", " << world << " ranks, " << name_of(method);
            }
          }
}

TEST(LowRank, ThreadsAndGroupsChangeNoBit) {
  for (const char* spec : {"2d=lowrank:rank=4;*=qsgd:bits=4", "2d=lowrank:rank=2,bits=4,alternate=on;*=fp32",
                           "conv*=lowrank:alternate=on;2d=lowrank:bits=16;*=onebit"}) {
    const Trained base = train(3, kModel, with(spec), 5);
    ReduceOptions threads = with(spec);
    threads.device.threads = 3;
    const Trained other = train(3, kModel, threads, 5);
    EXPECT_EQ(base.hashes, other.hashes) << spec;
    EXPECT_TRUE(base.results[0] == other.results[0]) << spec;
    const std::vector<NamedTensor> first(kModel.begin(), kModel.begin() + 3), rest(kModel.begin() + 3, kModel.end());
    const Trained a = train(3, first, with(spec), 5), b = train(3, rest, with(spec), 5);
    for (size_t t = 0; t < kModel.size(); ++t)
      EXPECT_EQ(base.results[0].bytes[t], t < 3 ? a.results[0].bytes[t] : b.results[0].bytes[t - 3])
          << spec << " " << kModel[t].name;
  }
}

TEST(LowRank, LossScaleAndDecayAreThoseOfCodecs) {
  const std::vector<NamedTensor> tensors{{"w", 40 * 30, DType::f32, 2, 40}};
  ReduceOptions options = with("lowrank:rank=2,bits=32");
  options.decay = 0.5f;
  std::vector<TensorValues> plain, scaled;
  for (const float scale : {1.0f, 1024.0f}) {
    run_loopback(2, [&](Engine& engine) {
      Reducer reducer(engine, tensors, options);
      TensorValues out(tensors);
      for (uint64_t step = 0; step < 4; ++step) {
        TensorValues in = gradients(tensors, engine.rank(), step);
        in.fill([&, own = in](size_t t, uint64_t i) { return own.get(t, i) * scale; });
        reducer.run(step, in.in(), out.out(), scale);
      }
      if (engine.rank() == 0) (scale == 1 ? plain : scaled).push_back(out);
    });
  }
  for (uint64_t i = 0; i < tensors[0].count; ++i) EXPECT_EQ(plain[0].get(0, i) * 1024.0f, scaled[0].get(0, i));
}

TEST(LowRank, ANanOnOneRankReachesAllAndChangesNothing) {
  const char* spec = "2d=lowrank:rank=4;*=onebit";
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    PerRank<std::vector<uint64_t>> hashes(3);
    std::vector<TensorValues> last(3, TensorValues(kModel));
    run_loopback(3, [&](Engine& engine) {
      Reducer reducer(engine, kModel, with(spec));
      TensorValues out(kModel);
      for (uint64_t step = 0; step < 5; ++step) {
        TensorValues in = gradients(kModel, engine.rank(), step);
        if (step == 2 && engine.rank() == 1) in.set(1, 77, bad);
        reducer.run(step, in.in(), out.out());
        hashes.of(engine).push_back(reducer.feedback().hash());
        if (step != 2) continue;
        for (uint64_t i = 0; i < kModel[1].count; ++i) EXPECT_TRUE(std::isnan(out.get(1, i)));
        EXPECT_FALSE(std::isnan(out.get(0, 0)));
      }
      EXPECT_EQ(reducer.skipped(), 1u);
      last[static_cast<size_t>(engine.rank())] = out;
    });
    expect_identical(last, spec);
    for (int rank = 0; rank < 3; ++rank) {
      EXPECT_EQ(hashes[rank][2], hashes[rank][1]);
      EXPECT_NE(hashes[rank][3], hashes[rank][2]);
    }
  }
}

TEST(LowRank, ValuesThatFitNoHalfAreNotFinite) {
  const std::vector<NamedTensor> tensors{{"w", 32 * 32, DType::f16, 2, 32}};
  run_loopback(2, [&](Engine& engine) {
    Reducer reducer(engine, tensors, with("lowrank:rank=1,bits=32"));
    TensorValues in(tensors), out(tensors);
    in.fill([](size_t, uint64_t) { return 40000.0f; });
    reducer.run(0, in.in(), out.out());  // rank one describes it whole
    EXPECT_NEAR(out.get(0, 5), 40000.0f, 64);
    const uint64_t before = reducer.feedback().hash();
    ReduceOptions sum = with("lowrank:rank=1,bits=32");
    sum.op = Op::sum;
    Reducer adds(engine, tensors, sum);
    adds.run(0, in.in(), out.out());  // 80000 is too large for an f16
    EXPECT_TRUE(std::isnan(out.get(0, 5)));
    EXPECT_EQ(adds.skipped(), 1u);
    EXPECT_EQ(reducer.feedback().hash(), before);
  });
}

TEST(LowRank, RollbackRestoresFactorsAndResiduals) {
  ReduceOptions manual = with("2d=lowrank:alternate=on;*=fp32");
  manual.commit = Commit::manual;
  run_loopback(2, [&](Engine& engine) {
    Reducer reducer(engine, kModel, manual), straight(engine, kModel, manual);
    TensorValues out(kModel), other(kModel);
    for (uint64_t step = 0; step < 6; ++step) {
      const TensorValues in = gradients(kModel, engine.rank(), step),
                         wrong = gradients(kModel, engine.rank(), step + 50);
      reducer.run(step, wrong.in(), out.out());
      reducer.rollback(step);
      reducer.run(step, in.in(), out.out());
      reducer.commit(step);
      straight.run(step, in.in(), other.out());
      straight.commit(step);
      EXPECT_TRUE(out == other) << step;
    }
    EXPECT_EQ(reducer.feedback().hash(), straight.feedback().hash());
  });
}

TEST(LowRank, AStateGoesOnBitForBit) {
  const ReduceOptions options = with("2d=lowrank:rank=4,alternate=on;*=onebit");
  const auto folder = std::filesystem::temp_directory_path() / ("lowrank_state_" + std::to_string(getpid()));
  std::filesystem::create_directory(folder);
  run_loopback(3, [&](Engine& engine) {
    const std::string path = (folder / std::to_string(engine.rank())).string();
    Reducer reducer(engine, kModel, options);
    TensorValues out(kModel), other(kModel);
    for (uint64_t step = 0; step < 7; ++step) {
      const TensorValues in = gradients(kModel, engine.rank(), step);
      if (step == 3) reducer.feedback().save(path);
      reducer.run(step, in.in(), out.out());
    }
    Reducer resumed(engine, kModel, options);
    resumed.feedback() = ErrorFeedback::load(path);
    for (uint64_t step = 3; step < 7; ++step) {
      const TensorValues in = gradients(kModel, engine.rank(), step);
      resumed.run(step, in.in(), other.out());
    }
    EXPECT_TRUE(out == other);
    EXPECT_EQ(reducer.feedback().hash(), resumed.feedback().hash());
  });
  std::filesystem::remove_all(folder);
}

// What is kept is the mean of the residuals, and the factors go along: the first step of the new world has no need to
// find them again.
TEST(LowRank, AnotherWorldKeepsResidualsAndFactors) {
  const ReduceOptions options = with("2d=lowrank:rank=4;*=fp32");
  std::vector<ErrorFeedback> states(3);
  run_loopback(3, [&](Engine& engine) {
    Reducer reducer(engine, kModel, options);
    TensorValues out(kModel);
    for (uint64_t step = 0; step < 4; ++step) {
      const TensorValues in = gradients(kModel, engine.rank(), step);
      reducer.run(step, in.in(), out.out());
    }
    states[static_cast<size_t>(engine.rank())] = std::move(reducer.feedback());
  });
  std::vector<ErrorFeedback> moved = ErrorFeedback::redistribute(states, 2);
  for (const NamedTensor& one : {kModel[0], kModel[1]}) {
    std::vector<std::vector<float>> before, after;
    for (const ErrorFeedback& state : states) before.push_back(state.residual(Direction::up, one.name));
    for (const ErrorFeedback& state : moved) after.push_back(state.residual(Direction::up, one.name));
    for (uint64_t i = 0; i < one.count; ++i)
      EXPECT_NEAR((after[0][i] + after[1][i]) / 2, (before[0][i] + before[1][i] + before[2][i]) / 3, 1e-6);
  }
  run_loopback(2, [&](Engine& engine) {
    Reducer reducer(engine, kModel, options);
    reducer.feedback() = std::move(moved[static_cast<size_t>(engine.rank())]);
    EXPECT_EQ(reducer.feedback().extras().at("lowrank/embed"), states[0].extras().at("lowrank/embed"));
    TensorValues out(kModel);
    const TensorValues in = gradients(kModel, engine.rank(), 4);
    reducer.run(4, in.in(), out.out());
  });
}

// Runs the body on two ranks and expects every one to be refused with these words.
void expect_refused(const std::string& words, const std::function<void(Engine&)>& body) {
  for (const Outcome& outcome : outcomes(2, body))
    EXPECT_TRUE(mentions(outcome, words)) << outcome.text << " for " << words;
}

TEST(LowRankRefusals, NameWhatDoesNotGoTogether) {
  const std::vector<NamedTensor> tensors{{"w", 1200, DType::f32, 2, 40}};
  const auto refused = [&](const std::string& words, const std::function<void(ReduceOptions&)>& change,
                           std::vector<NamedTensor> list) {
    ReduceOptions options = with("lowrank:rank=2");
    change(options);
    expect_refused(words, [&](Engine& engine) { Reducer reducer(engine, list, options); });
  };
  refused(
      "lowrank works on one level", [](ReduceOptions& o) { o.nodes = 2; }, tensors);
  refused(
      "down is 'qsgd'", [](ReduceOptions& o) { o.down = "qsgd"; }, tensors);
  refused(
      "would be lost for ever", [](ReduceOptions& o) { o.feedback = Feedback::off; }, tensors);
  refused(
      "residual is bf16", [](ReduceOptions& o) { o.residual = DType::bf16; }, tensors);
  refused(
      "rank is '65'", [](ReduceOptions& o) { o.up = "lowrank:rank=65"; }, tensors);
  refused(
      "rule 1 '2d=lowrank:bits=3'", [](ReduceOptions& o) { o.up = "2d=lowrank:bits=3;*=fp32"; }, tensors);
  refused("number of rows is not known", [](ReduceOptions&) {}, {{"w", 1200}});
  refused("1200 elements in 7 rows", [](ReduceOptions&) {}, {{"w", 1200, DType::f32, 2, 7}});
  refused("must not contain", [](ReduceOptions&) {}, {{"w*", 1200, DType::f32, 2, 40}});
  refused(
      "lowrank is no codec of messages", [](ReduceOptions& o) { o.up = "fp32", o.down = "lowrank"; }, tensors);
}

TEST(LowRankRefusals, RanksThatDisagreeAreNamed) {
  for (const auto& [words, change] :
       std::vector<std::pair<std::string, std::function<void(NamedTensor&, ReduceOptions&)>>>{
           {"count", [](NamedTensor&tensor, ReduceOptions&) { tensor.rows = 30; }},
           {"lowrank:rank=3", [](NamedTensor&, ReduceOptions&options) { options.up = "lowrank:rank=3"; }},
           {"alternate=on", [](NamedTensor&, ReduceOptions&options) { options.up = "lowrank:rank=2,alternate=on"; }}})
    expect_refused(words, [&, change = change](Engine& engine) {
      NamedTensor tensor{"w", 1200, DType::f32, 2, 40};
      ReduceOptions options = with("lowrank:rank=2");
      if (engine.rank() == 1) change(tensor, options);
      Reducer reducer(engine, {tensor}, options);
    });
}

TEST(LowRankRefusals, AStateWithoutFactorsIsNamedOnAllRanks) {
  const std::vector<NamedTensor> tensors{{"w", 1200, DType::f32, 2, 40}};
  expect_refused("the state has no factors of tensor 'w'", [&](Engine& engine) {
    Reducer reducer(engine, tensors, with("lowrank:rank=2"));
    if (engine.rank() == 1) reducer.feedback() = ErrorFeedback();
    TensorValues data = gradients(tensors, engine.rank(), 0);
    reducer.run(0, data.in(), data.out());
  });
  // Ranks whose factors differ would not hold the same bits.
  expect_refused("rank 1", [&](Engine& engine) {
    Reducer reducer(engine, tensors, with("lowrank:rank=2"));
    if (engine.rank() == 1) {
      std::vector<std::byte> other = reducer.feedback().extras().at("lowrank/w");
      std::swap(other[0], other[4]);
      reducer.feedback().set_extra("lowrank/w", other);
    }
    TensorValues data = gradients(tensors, engine.rank(), 0);
    reducer.run(0, data.in(), data.out());
  });
}

TEST(LowRank, SendsWhatTheFactorsTake) {
  const std::vector<NamedTensor> tensors{{"w", 512 * 1024, DType::f32, 2, 512}};
  run_loopback(4, [&](Engine& engine) {
    TensorValues data(tensors);
    for (const char* spec : {"lowrank:rank=4", "lowrank:rank=4,alternate=on"}) {
      Reducer reducer(engine, tensors, with(spec));
      uint64_t sent = 0;
      for (uint64_t step = 0; step < 2; ++step) {
        reducer.run(step, data.in(), data.out());
        sent += reducer.message_bytes();
      }
      const double steps = std::string(spec) == "lowrank:rank=4" ? 2 : 1;  // of which one sends both factors
      const double codes = 4 * (512 + 1024) * 1.0 * steps;
      EXPECT_EQ(reducer.encoded_bytes(Direction::up)[0], static_cast<uint64_t>(codes / 2 * (1 + 4.0 / 128)));
      // Up and down, to three others each, with scales; and 14 to 28 messages with a head.
      EXPECT_LT(static_cast<double>(sent), codes * 1.5 * (1 + 4.0 / 128) + 28 * 1024);
      EXPECT_LT(static_cast<double>(sent), 0.05 * 2 * 512 * 1024 * 4);
    }
  });
}

}  // namespace
}  // namespace gradwire
