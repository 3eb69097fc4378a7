// SPDX-License-Identifier: Apache-2.0
// Ranks that disagree, fail, stall, die or receive damaged bytes: everybody is told who and what, before data move
// where that is possible, and nobody hangs or gets wrong data.
#include <chrono>
#include <latch>
#include <optional>

#include "collective/collective_fixture.h"
#include "core/clock.h"
#include "engine/forwarding_engine.h"

namespace gradwire {
namespace {

using namespace test;
using namespace std::chrono_literals;

const std::vector<NamedTensor> kList{{"a", 5000, DType::f32, 2}, {"b", 40'000, DType::f32, 1}, {"c", 3, DType::f16, 1}};

void expect_mismatch(const std::vector<Outcome>& results, int rank, const std::string& field, const std::string& theirs,
                     const std::string& ours) {
  for (size_t r = 0; r < results.size(); ++r) {
    EXPECT_TRUE(results[r].threw) << field << ": rank " << r;
    EXPECT_EQ(results[r].kind, ErrorKind::mismatch) << results[r].text;
    EXPECT_EQ(results[r].field, field) << results[r].text;
    EXPECT_EQ(results[r].rank, rank) << results[r].text;
    EXPECT_TRUE(mentions(results[r], "rank " + std::to_string(rank))) << results[r].text;
    EXPECT_TRUE(mentions(results[r], theirs)) << results[r].text;
    EXPECT_TRUE(mentions(results[r], ours)) << results[r].text;
  }
}

// `odd` builds otherwise than the rest; all are told, next to nothing was sent, and the engine still serves.
void expect_disagreement(int odd, const std::string& field, const std::string& theirs, const std::string& ours,
                         const std::vector<NamedTensor>& other_list, const ReduceOptions& other_options) {
  PerRank<int> usable(4);
  const auto results = outcomes(4, [&](Engine& engine) {
    std::optional<Error> error;
    try {
      if (engine.rank() == odd)
        Reducer(engine, other_list, other_options);
      else
        Reducer(engine, kList, ReduceOptions{});
    } catch (const Error& e) {
      error = e;
    }
    EXPECT_LT(engine.bytes_sent(), 10'000u);
    Reducer again(engine, kList, {.up = "fp32"});
    TensorValues data = gradients(kList, engine.rank(), 0);
    again.run(1, data.in(), data.out());
    usable.of(engine) = 1;
    if (error) throw *error;
  });
  expect_mismatch(results, odd, field, theirs, ours);
  for (int u : usable.values) EXPECT_TRUE(u);
}

TEST(Disagreement, AboutTheOptionsIsNamed) {
  expect_disagreement(2, "up", "qsgd:bits=3", "qsgd:bits=4", kList, {.up = "qsgd:bits=3"});
  expect_disagreement(1, "down", "fp16", "as up", kList, {.down = "fp16"});
  expect_disagreement(3, "op", "sum", "mean", kList, {.op = Op::sum});
  expect_disagreement(1, "collective", "gather", "scatter", kList, {.method = Method::gather});
  expect_disagreement(2, "seed", "5", "0", kList, {.seed = 5});
  expect_disagreement(2, "feedback", "on", "codec", kList, {.feedback = Feedback::on});
  expect_disagreement(2, "feedback", "bf16", "f32", kList, {.residual = DType::bf16});
}

TEST(Disagreement, OfRankZeroIsRankZeros) { expect_disagreement(0, "up", "fp32", "qsgd", kList, {.up = "fp32"}); }

TEST(Disagreement, AboutTheTensorsIsNamed) {
  std::vector<NamedTensor> list = kList;
  list.push_back({"d", 1});
  expect_disagreement(2, "tensors", "'4'", "'3'", list, {});
  list = kList;
  list[1].name = "B";
  expect_disagreement(2, "name", "'B'", "'b'", list, {});
  list = kList;
  list[2].count = 4;
  expect_disagreement(1, "count", "'4'", "'3'", list, {});
  list = kList;
  list[0].dtype = DType::bf16;
  expect_disagreement(3, "dtype", "bf16", "f32", list, {});
  list = kList;
  std::swap(list[0], list[1]);
  expect_disagreement(2, "name", "'b'", "'a'", list, {});
}

TEST(Disagreement, AboutWhatARuleMatchesIsNamed) {
  const auto results = outcomes(3, [&](Engine& engine) {
    std::vector<NamedTensor> list = kList;
    if (engine.rank() == 1) list[0].dimensions = 1;
    Reducer(engine, list, {.up = "1d=fp32;*=qsgd"});
  });
  expect_mismatch(results, 1, "codec", "fp32", "qsgd");
}

TEST(Disagreement, OfSeveralRanksNamesThemAll) {
  const auto results =
      outcomes(5, [&](Engine& engine) { Reducer(engine, kList, {.up = engine.rank() % 2 ? "fp16" : "fp32"}); });
  for (const Outcome& result : results) {
    EXPECT_TRUE(mentions(result, "ranks 1, 3 disagree with rank 0")) << result.text;
    EXPECT_EQ(result.rank, 1);
  }
}

// step, loss scale, or another list: found before data move, so the residuals stay and the reducer goes on.
TEST(Disagreement, AboutTheStepIsNamedBeforeDataMove) {
  const auto check = [](const std::string& field, const std::string& theirs, const std::string& ours,
                        const std::function<void(Reducer&, Reducer&, TensorValues&, bool odd)>& run) {
    PerRank<uint64_t> sent(3);
    PerRank<int> usable(3);
    const auto results = outcomes(3, [&](Engine& engine) {
      Reducer reducer(engine, kList, {.up = "onebit"}), other(engine, {{"z", 5}}, {.up = "onebit"});
      TensorValues data = gradients(kList, engine.rank(), 0);
      reducer.run(0, data.in(), data.out());
      const uint64_t hash = reducer.feedback().hash(), before = engine.bytes_sent();
      std::optional<Error> error;
      try {
        run(reducer, other, data, engine.rank() == 2);
      } catch (const Error& e) {
        error = e;
      }
      sent.of(engine) = engine.bytes_sent() - before;
      EXPECT_EQ(reducer.feedback().hash(), hash);
      reducer.run(1, data.in(), data.out());
      EXPECT_NE(reducer.feedback().hash(), hash);
      usable.of(engine) = 1;
      if (error) throw *error;
    });
    expect_mismatch(results, 2, field, theirs, ours);
    for (uint64_t bytes : sent.values) EXPECT_LE(bytes, 300u) << field;
    for (int u : usable.values) EXPECT_TRUE(u) << field;
  };
  check("step", "'8'", "'7'", [](Reducer& reducer, Reducer&, TensorValues& data, bool odd) {
    reducer.run(odd ? 8 : 7, data.in(), data.out());
  });
  check("loss_scale", "'2'", "'1'", [](Reducer& reducer, Reducer&, TensorValues& data, bool odd) {
    reducer.run(7, data.in(), data.out(), odd ? 2.0f : 1.0f);
  });
  check("handshake", "another", "rank 0", [](Reducer& reducer, Reducer& other, TensorValues& data, bool odd) {
    const std::vector<const void*> in = data.in();
    const std::vector<void*> out = data.out();
    (odd ? other : reducer).run(7, std::span(in).first(odd ? 1 : 3), std::span(out).first(odd ? 1 : 3));
  });
}

TEST(Disagreement, OfTheHalvesIsNamed) {
  const auto results = outcomes(2, [&](Engine& engine) {
    TensorValues data = gradients(kList, 0, 0);
    broadcast(engine, kList, {}, 4, engine.rank(), data.out());
  });
  for (const Outcome& result : results) EXPECT_EQ(result.field, "root") << result.text;
  const auto steps = outcomes(3, [&](Engine& engine) {
    TensorValues data = gradients(kList, 0, 0);
    broadcast(engine, kList, {}, engine.rank() == 1 ? 5 : 4, 0, data.out());
  });
  expect_mismatch(steps, 1, "step", "'5'", "'4'");
}

// ---- one rank cannot

// The rank's own error on that rank, a mismatch that quotes it on the others, and all can go on.
void expect_one_fails(const std::function<void(Engine&, Reducer&, TensorValues&, bool fails)>& body,
                      const std::string& field, const std::string& words) {
  PerRank<int> usable(3);
  const auto results = outcomes(3, [&](Engine& engine) {
    Reducer reducer(engine, kList, {.up = "onebit", .commit = Commit::manual});
    TensorValues data = gradients(kList, engine.rank(), 0);
    std::optional<Error> error;
    try {
      body(engine, reducer, data, engine.rank() == 1);
    } catch (const Error& e) {
      error = e;
    }
    reducer.rollback(6);
    reducer.run(9, data.in(), data.out());
    usable.of(engine) = 1;
    if (error) throw *error;
  });
  for (size_t r = 0; r < results.size(); ++r) {
    EXPECT_EQ(results[r].kind, r == 1 ? ErrorKind::usage : ErrorKind::mismatch) << results[r].text;
    EXPECT_EQ(results[r].field, r == 1 ? field : "ready") << results[r].text;
    EXPECT_TRUE(mentions(results[r], words)) << results[r].text;
    EXPECT_TRUE(usable[static_cast<int>(r)]);
    EXPECT_EQ(results[r].rank, r == 1 ? -1 : 1) << results[r].text;
  }
}

TEST(OneRank, WithAMissingPointerStopsAllAtOnce) {
  expect_one_fails(
      [](Engine&, Reducer& reducer, TensorValues& data, bool fails) {
        std::vector<void*> out = data.out();
        if (fails) out[1] = nullptr;
        reducer.run(5, data.in(), out);
      },
      "out", "'b'");
  expect_one_fails(
      [](Engine&, Reducer& reducer, TensorValues& data, bool fails) {
        const auto in = data.in();
        reducer.run(5, std::span(in).first(fails ? 2 : 3), data.out());
      },
      "in", "3 tensors");
}

TEST(OneRank, WithAnOpenStepStopsAllAtOnce) {
  expect_one_fails(
      [](Engine&, Reducer& reducer, TensorValues& data, bool fails) {
        reducer.run(6, data.in(), data.out());
        if (!fails) reducer.commit(6);
        reducer.run(7, data.in(), data.out());
      },
      "step", "step 6 is open");
}

TEST(OneRank, WithABadSpecStopsAllAtOnce) {
  expect_one_fails([](Engine& engine, Reducer&, TensorValues&,
                      bool fails) { Reducer(engine, kList, {.up = fails ? "qsgd:bits=99" : "qsgd:bits=4"}); },
                   "bits", "bits");
  expect_one_fails(
      [](Engine& engine, Reducer&, TensorValues&, bool fails) {
        Reducer(engine, {{"a", 1}, {fails ? "a" : "b", 2}}, {});
      },
      "name", "stands twice");
}

TEST(OneRank, WithABadHalfStopsAllAtOnce) {
  expect_one_fails(
      [](Engine& engine, Reducer&, TensorValues& data, bool fails) {
        uint64_t elements = fails ? 1 : 0;
        for (const Shard& shard : shards(kList, 3)) elements += shard.owner == engine.rank() ? shard.count : 0;
        std::vector<float> out(elements);
        reduce_scatter(engine, kList, {}, 5, data.in(), out);
      },
      "out", "this rank's shards");
  expect_one_fails([](Engine& engine, Reducer&, TensorValues& data,
                      bool fails) { broadcast(engine, kList, {}, 5, fails ? 3 : 0, data.out()); },
                   "root", "allowed are 0 to 2");
}

TEST(OneRank, BadArgumentsInAWorldOfOneAreUsage) {
  const auto engines = make_loopback(1);
  EXPECT_EQ(outcome_of([&] { Reducer(*engines[0], kList, {.up = "nonsense"}); }).kind, ErrorKind::usage);
  EXPECT_EQ(outcome_of([&] { Reducer(*engines[0], kList, {.residual = DType::f16}); }).field, "residual");
  Reducer reducer(*engines[0], kList, {.up = "onebit", .commit = Commit::manual});
  TensorValues data = gradients(kList, 0, 0);
  EXPECT_EQ(outcome_of([&] { reducer.run(0, data.in(), {}); }).field, "out");
  EXPECT_EQ(outcome_of([&] { reducer.run(0, data.in(), data.out(), 0.0f); }).field, "loss_scale");
  reducer.run(0, data.in(), data.out());
  EXPECT_EQ(outcome_of([&] { reducer.run(0, data.in(), data.out()); }).field, "step");
  reducer.commit(0);
}

TEST(Options, WithoutAMeaningAreRefusedByName) {
  const auto engines = make_loopback(1);
  const auto refused = [&](const ReduceOptions& options) {
    const Outcome outcome = outcome_of([&] { Reducer(*engines[0], kList, options); });
    return outcome.threw && outcome.kind == ErrorKind::usage ? outcome.field : "no";
  };
  EXPECT_EQ(refused({.method = Method::gather, .down = "fp32"}), "down");
  EXPECT_EQ(refused({.method = Method::gather}), "no");
  EXPECT_EQ(refused({.feedback = Feedback::off, .owner_feedback = Feedback::off, .residual = DType::bf16}), "residual");
  EXPECT_EQ(refused({.feedback = Feedback::off, .residual = DType::bf16}), "no");

  // A reducer that decides by itself has nothing for the caller to decide.
  Reducer reducer(*engines[0], kList, {.up = "onebit"});
  EXPECT_EQ(outcome_of([&] { reducer.commit(0); }).field, "commit");
  EXPECT_EQ(outcome_of([&] { reducer.rollback(0); }).field, "commit");

  std::vector<float> data(10);
  EXPECT_EQ(outcome_of([&] { all_reduce(*engines[0], data, {.feedback = Feedback::on}); }).field, "feedback");
  EXPECT_EQ(outcome_of([&] { all_reduce(*engines[0], data, {.commit = Commit::manual}); }).field, "commit");
}

// ---- a rank is gone

TEST(LostRank, ThatNeverComesIsNamedWithinTheTimeout) {
  std::latch others_done(2);
  const auto results = outcomes(3, [&](Engine& engine) {
    engine.set_timeout(300ms);
    Reducer reducer(engine, kList, {.up = "onebit"});
    TensorValues data = gradients(kList, engine.rank(), 0);
    reducer.run(0, data.in(), data.out());
    if (engine.rank() == 2) {
      others_done.wait();  // alive, but busy with something else
      return;
    }
    const uint64_t hash = reducer.feedback().hash();
    const auto start = SteadyClock::now();
    const Outcome first = outcome_of([&] { reducer.run(1, data.in(), data.out()); });
    const Outcome second = outcome_of([&] { reducer.run(2, data.in(), data.out()); });
    EXPECT_LT(SteadyClock::now() - start, 10s);
    EXPECT_EQ(first.text, second.text) << "the engine stays poisoned with the same words";
    EXPECT_EQ(reducer.feedback().hash(), hash);
    others_done.count_down();
    if (first.threw) throw Error(first.kind, first.text, first.field, first.rank);
  });
  for (int r : {0, 1}) {
    EXPECT_EQ(results[r].kind, ErrorKind::engine) << results[r].text;
    EXPECT_EQ(results[r].rank, 2) << results[r].text;
  }
}

TEST(LostRank, ThatThrowsEndsAllAtOnce) {
  const auto start = SteadyClock::now();
  const Outcome result = outcome_of([&] {
    run_loopback(4, [&](Engine& engine) {
      Reducer reducer(engine, kList, {.up = "onebit"});
      TensorValues data = gradients(kList, engine.rank(), 0);
      for (uint64_t step = 0; step < 5; ++step) {
        if (step == 3 && engine.rank() == 1) throw Error(ErrorKind::io, "the disk is full", "", 1);
        Handle handle = reducer.start(step, data.in(), data.out());
        handle.wait();
      }
    });
  });
  EXPECT_EQ(result.text, "the disk is full");
  EXPECT_LT(SteadyClock::now() - start, 30s) << "the others waited for the time-out";
}

// ---- damaged bytes

// Hands everything on, and lets a test change what arrived.
class Meddler final : public ForwardingEngine {
 public:
  using Meddle = std::function<void(std::span<const Bytes> received)>;
  Meddler(Engine& inner, Meddle meddle) : ForwardingEngine(inner), meddle_(std::move(meddle)) {}
  Handle all_to_all(std::span<const ConstBytes> send, std::span<const Bytes> recv) override {
    return wrap(ForwardingEngine::all_to_all(send, recv), recv);
  }
  Handle all_gather(ConstBytes mine, std::span<const Bytes> recv) override {
    return wrap(ForwardingEngine::all_gather(mine, recv), recv);
  }

 private:
  struct Wrapped final : Handle::State {
    Wrapped(Handle h, std::vector<Bytes> r, Meddle& m) : handle(std::move(h)), received(std::move(r)), meddle(m) {}
    void wait() override {
      handle.wait();
      meddle(received);
    }
    Handle handle;
    std::vector<Bytes> received;
    Meddle& meddle;
  };
  Handle wrap(Handle handle, std::span<const Bytes> recv) {
    return Handle(std::make_unique<Wrapped>(std::move(handle), std::vector<Bytes>(recv.begin(), recv.end()), meddle_));
  }

  Meddle meddle_;
};

// Rank 1 refuses what it got in step 1; the others hear of it there or, where they were already done, in step 2.
void expect_refusal(Method method, const std::string& field,
                    const std::function<Meddler::Meddle(uint64_t& step)>& make) {
  const auto results = outcomes(3, [&](Engine& engine) {
    uint64_t step = 0;
    Meddler meddler(
        engine, engine.rank() == 1 ? make(step) : [](std::span<const Bytes>) {});
    Reducer reducer(meddler, kList, {.method = method, .up = "onebit"});
    const TensorValues in = gradients(kList, engine.rank(), 0);
    TensorValues out(kList);
    for (; step < 3; ++step) {
      const uint64_t hash = reducer.feedback().hash();
      try {
        reducer.run(step, in.in(), out.out());
      } catch (...) {
        EXPECT_EQ(reducer.feedback().hash(), hash);
        throw;
      }
    }
  });
  EXPECT_EQ(results[1].kind, ErrorKind::frame) << results[1].text;
  EXPECT_EQ(results[1].field, field) << results[1].text;
  for (int r : {0, 2}) {
    EXPECT_EQ(results[r].kind, ErrorKind::engine) << results[r].text;
    EXPECT_EQ(results[r].rank, 1) << results[r].text;
    EXPECT_TRUE(mentions(results[r], "rank 1 failed")) << results[r].text;
  }
}

// Messages, as opposed to the small fixed-size records that ranks agree by.
bool is_message(Bytes bytes) { return bytes.size() > 128; }

TEST(DamagedBytes, AreRefusedAndPoison) {
  for (Method method : kMethods)
    expect_refusal(method, "body_check", [](uint64_t& step) {
      return [&step](std::span<const Bytes> received) {
        if (step == 1 && is_message(received[2])) received[2][received[2].size() - 5] ^= std::byte{4};
      };
    });
}

TEST(DamagedBytes, AMessageOfAnotherStepOrRankIsRefused) {
  for (Method method : kMethods) {
    expect_refusal(method, "step", [](uint64_t& step) {
      auto old = std::make_shared<std::map<size_t, std::vector<std::byte>>>();
      return [&step, old](std::span<const Bytes> received) {
        const Bytes it = received[2];
        if (!is_message(it)) return;
        if (step == 0) old->emplace(it.size(), std::vector<std::byte>(it.begin(), it.end()));
        if (step == 1 && old->count(it.size())) std::copy_n(old->at(it.size()).begin(), it.size(), it.begin());
      };
    });
    expect_refusal(method, "rank", [](uint64_t& step) {
      return [&step](std::span<const Bytes> received) {
        if (step == 1 && is_message(received[2]) && received[0].size() == received[2].size())
          std::copy_n(received[0].begin(), received[0].size(), received[2].begin());
      };
    });
  }
}

}  // namespace
}  // namespace gradwire
