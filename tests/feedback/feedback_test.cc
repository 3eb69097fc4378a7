// SPDX-License-Identifier: Apache-2.0
// Residuals against the promises of feedback.h: a step is taken or left as a whole, by exactly the elements that were
// begun; a file holds them bit for bit, is replaced whole or not at all, and is refused when a bit of it is wrong;
// another world owes what the old one owed. And the per-tensor rules.
//
// Most tests write "new residuals" by hand through the pointers that begin() gives an encoder.
#include "gradwire/feedback.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>
#include <xxhash.h>

#include <cmath>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <numeric>
#include <random>

#include "core/bits.h"
#include "feedback/owners.h"
#include "gradwire/error.h"
#include "gradwire/rules.h"

namespace gradwire {
namespace {

namespace fs = std::filesystem;

TensorSpec piece(const std::string& name, uint64_t count, uint64_t first = 0) {
  return {.name = name, .count = count, .codec = {}, .first = first};
}

// What an Error said, or a failure of the test if there was none.
Error error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "no error";
  return {ErrorKind::device, ""};
}

#define EXPECT_REFUSED(wanted_kind, wanted_field, words, ...)                    \
  do {                                                                           \
    const Error e = error_of([&] { __VA_ARGS__; });                              \
    EXPECT_EQ(e.kind(), ErrorKind::wanted_kind) << e.what();                     \
    EXPECT_EQ(e.field(), wanted_field) << e.what();                              \
    EXPECT_NE(std::string(e.what()).find(words), std::string::npos) << e.what(); \
  } while (false)

// Writes `value(i)` for element i of the tensor as the new residual of a piece that was begun.
void write(ErrorFeedback::Pointers& pointers, size_t tensor, const TensorSpec& spec, DType dtype,
           const std::function<float(uint64_t)>& value) {
  for (uint64_t i = 0; i < spec.count; ++i) {
    const float x = value(spec.first + i);
    if (dtype == DType::f32)
      static_cast<float*>(pointers.after[tensor])[i] = x;
    else
      static_cast<uint16_t*>(pointers.after[tensor])[i] = f32_to_bf16(x);
  }
}

void step(ErrorFeedback& feedback, Direction direction, uint64_t number, const TensorSpec& spec, DType dtype,
          const std::function<float(uint64_t)>& value, bool commit = true) {
  auto pointers = feedback.begin(direction, number, std::span(&spec, 1));
  write(*pointers, 0, spec, dtype, value);
  if (commit) feedback.commit(number);
}

// ---- steps

TEST(Feedback, RoomIsZeroAndAddingAgainChangesNothing) {
  ErrorFeedback feedback;
  feedback.add(Direction::up, "a", 3);
  EXPECT_EQ(feedback.residual(Direction::up, "a"), (std::vector<float>{0, 0, 0}));
  step(feedback, Direction::up, 1, piece("a", 3), DType::f32, [](uint64_t i) { return 1.0f + i; });
  feedback.add(Direction::up, "a", 3);
  EXPECT_EQ(feedback.residual(Direction::up, "a"), (std::vector<float>{1, 2, 3}));
}

TEST(Feedback, AddingWithOtherNumbersIsRefused) {
  ErrorFeedback feedback;
  feedback.add(Direction::down, "a", 10, 100);
  EXPECT_REFUSED(usage, "count", "'a'", feedback.add(Direction::down, "a", 11, 100));
  EXPECT_REFUSED(usage, "count", "'a'", feedback.add(Direction::down, "a", 5, 102));
  EXPECT_REFUSED(usage, "first", "'a'", feedback.add(Direction::down, "a", 10, 95));
  EXPECT_REFUSED(usage, "first", "'a'", feedback.add(Direction::down, "a", 10, 105));
  EXPECT_REFUSED(usage, "count", "memory", feedback.add(Direction::down, "b", UINT64_MAX / 2, 1));
  feedback.add(Direction::down, "a", 10, 110);
  feedback.add(Direction::up, "a", 7, 98);
}

TEST(Feedback, HalfPrecisionIsNoResidualType) { EXPECT_REFUSED(usage, "residual", "f16", ErrorFeedback{DType::f16}); }

TEST(Feedback, CommitTakesTheNewResidualRollbackKeepsTheOld) {
  for (DType dtype : {DType::f32, DType::bf16}) {
    ErrorFeedback feedback(dtype);
    feedback.add(Direction::up, "a", 2);
    const TensorSpec a = piece("a", 2);
    step(feedback, Direction::up, 7, a, dtype, [](uint64_t i) { return 1.0f + i; });
    const uint64_t hash = feedback.hash();
    step(
        feedback, Direction::up, 8, a, dtype, [](uint64_t) { return 9.0f; }, false);
    EXPECT_EQ(feedback.hash(), hash) << "an undecided step shows";
    feedback.rollback(8);
    EXPECT_EQ(feedback.hash(), hash);
    EXPECT_EQ(feedback.residual(Direction::up, "a"), (std::vector<float>{1, 2}));
    step(feedback, Direction::up, 9, a, dtype, [](uint64_t) { return 4.0f; });
    EXPECT_EQ(feedback.residual(Direction::up, "a"), (std::vector<float>{4, 4}));
    EXPECT_NE(feedback.hash(), hash);
  }
}

TEST(Feedback, EncodeReadsWhatWasCommitted) {
  ErrorFeedback feedback;
  feedback.add(Direction::up, "a", 4);
  const TensorSpec a = piece("a", 4), tail = piece("a", 2, 2);
  for (uint64_t s = 0; s < 5; ++s) {
    auto pointers = feedback.begin(Direction::up, s, std::span(&a, 1), 8.0f);
    EXPECT_EQ(pointers->residuals.loss_scale, 8.0f);
    EXPECT_EQ(static_cast<const float*>(pointers->residuals.before[0])[3], s ? 10.0f * (s - 1) + 3 : 0.0f);
    write(*pointers, 0, a, DType::f32, [&](uint64_t i) { return 10.0f * s + i; });
    feedback.commit(s);
  }
  auto pointers = feedback.begin(Direction::up, 9, std::span(&tail, 1));
  EXPECT_EQ(static_cast<const float*>(pointers->before[0])[0], 42.0f);
}

TEST(Feedback, OnlyTensorsBegunInTheStepChange) {
  ErrorFeedback feedback;
  for (const char* name : {"a", "b"}) {
    feedback.add(Direction::up, name, 2);
    step(feedback, Direction::up, 1, piece(name, 2), DType::f32, [](uint64_t) { return 1.0f; });
  }
  step(feedback, Direction::up, 2, piece("b", 2), DType::f32, [](uint64_t) { return 2.0f; });
  EXPECT_EQ(feedback.residual(Direction::up, "a"), (std::vector<float>{1, 1}));
  EXPECT_EQ(feedback.residual(Direction::up, "b"), (std::vector<float>{2, 2}));
}

// Elements that were not begun keep what they had, whatever lay in the buffer behind.
TEST(Feedback, OnlyElementsBegunInTheStepChange) {
  const uint64_t n = 700'000;  // above one chunk of a copy
  std::mt19937 random(5);
  for (DType dtype : {DType::f32, DType::bf16}) {
    ErrorFeedback feedback(dtype);
    feedback.add(Direction::up, "a", n, 1000);
    std::vector<float> expected(n, 0.0f);
    for (uint64_t s = 0; s < 12; ++s) {
      uint64_t at = 0;
      while (at < n) {
        const uint64_t count = std::min<uint64_t>(n - at, 1 + random() % 400'000);
        if (random() % 3) {
          const TensorSpec a = piece("a", count, 1000 + at);
          const auto value = [&](uint64_t i) { return static_cast<float>((i + s) % 128); };
          step(feedback, Direction::up, s, a, dtype, value, false);
          if (s % 4 != 3)
            for (uint64_t i = 0; i < count; ++i) expected[at + i] = value(1000 + at + i);
        }
        at += count;
      }
      s % 4 == 3 ? feedback.rollback(s) : feedback.commit(s);
      ASSERT_EQ(feedback.residual(Direction::up, "a", 1000), expected) << "step " << s;
    }
  }
}

TEST(Feedback, ElementsBegunTwiceInAStepAreRefused) {
  ErrorFeedback feedback;
  feedback.add(Direction::up, "a", 10);
  const TensorSpec middle = piece("a", 4, 3);
  feedback.begin(Direction::up, 1, std::span(&middle, 1));
  for (auto [first, count] : {std::pair{0, 10}, {3, 4}, {6, 1}, {2, 2}, {3, 1}, {0, 4}}) {
    const TensorSpec again = piece("a", count, first);
    EXPECT_REFUSED(usage, "step", "begun before in step 1", feedback.begin(Direction::up, 1, std::span(&again, 1)));
  }
  for (auto [first, count] : {std::pair{0, 3}, {7, 3}}) {
    const TensorSpec rest = piece("a", count, first);
    feedback.begin(Direction::up, 1, std::span(&rest, 1));
  }
}

TEST(Feedback, AnotherStepIsRefusedWhileOneIsOpen) {
  ErrorFeedback feedback;
  feedback.add(Direction::up, "a", 1);
  const TensorSpec a = piece("a", 1);
  feedback.begin(Direction::up, 41, std::span(&a, 1));
  EXPECT_REFUSED(usage, "step", "step 41 is open", feedback.begin(Direction::up, 42, std::span(&a, 1)));
  EXPECT_REFUSED(usage, "step", "step 41 is open", feedback.commit(42));
  EXPECT_REFUSED(usage, "step", "step 41 is open", feedback.rollback(40));
  EXPECT_REFUSED(usage, "step", "step 41 is open", feedback.save("unused"));
  EXPECT_FALSE(fs::exists("unused"));
  EXPECT_REFUSED(usage, "step", "step 41 is open", ErrorFeedback::redistribute(std::span(&feedback, 1), 2));
  feedback.rollback(41);
  feedback.begin(Direction::up, 42, std::span(&a, 1));
}

TEST(Feedback, TensorsThatWereNotAddedHaveNoneAndOpenNoStep) {
  ErrorFeedback feedback;
  feedback.add(Direction::up, "a", 1);
  const TensorSpec list[] = {piece("b", 5), piece("a", 0)};
  auto pointers = feedback.begin(Direction::up, 1, list);
  EXPECT_EQ(pointers->before, (std::vector<const void*>{nullptr, nullptr}));
  EXPECT_EQ(pointers->after, (std::vector<void*>{nullptr, nullptr}));
  const TensorSpec a = piece("a", 1);
  EXPECT_EQ(feedback.begin(Direction::down, 2, std::span(&a, 1))->before[0], nullptr) << "the other side";
  feedback.commit(3);
}

TEST(Feedback, PiecesThatCrossTheEndsAreRefused) {
  ErrorFeedback feedback;
  feedback.add(Direction::down, "a", 10, 100);
  for (auto [first, count] : {std::pair{99, 2}, {109, 2}, {100, 11}, {50, 100}}) {
    const TensorSpec a = piece("a", count, first);
    EXPECT_REFUSED(usage, "first", "'a'", feedback.begin(Direction::down, 1, std::span(&a, 1)));
  }
}

TEST(Feedback, ABeginThatFailsBeginsNothing) {
  ErrorFeedback feedback;
  feedback.add(Direction::up, "a", 2);
  feedback.add(Direction::up, "b", 2);
  const TensorSpec bad[] = {piece("a", 2), piece("b", 3)};
  EXPECT_REFUSED(usage, "first", "'b'", feedback.begin(Direction::up, 1, bad));
  step(feedback, Direction::up, 2, bad[0], DType::f32, [](uint64_t) { return 5.0f; });
  EXPECT_EQ(feedback.residual(Direction::up, "a"), (std::vector<float>{5, 5}));
  EXPECT_EQ(feedback.residual(Direction::up, "b"), (std::vector<float>{0, 0}));
}

TEST(Feedback, LossScaleMustBeFiniteAndPositive) {
  ErrorFeedback feedback;
  for (float scale : {0.0f, -1.0f, INFINITY, NAN})
    EXPECT_REFUSED(usage, "loss_scale", "loss_scale", feedback.begin(Direction::up, 1, {}, scale));
}

TEST(Feedback, HashTellsStatesApart) {
  const auto hash = [](DType dtype, Direction direction, const std::string& name, uint64_t count, uint64_t first,
                       float value) {
    ErrorFeedback feedback(dtype);
    feedback.add(direction, name, count, first);
    step(feedback, direction, 1, piece(name, count, first), dtype, [&](uint64_t) { return value; });
    return feedback.hash();
  };
  const uint64_t base = hash(DType::f32, Direction::up, "a", 4, 0, 1);
  EXPECT_EQ(base, hash(DType::f32, Direction::up, "a", 4, 0, 1));
  EXPECT_NE(base, hash(DType::bf16, Direction::up, "a", 4, 0, 1));
  EXPECT_NE(base, hash(DType::f32, Direction::down, "a", 4, 0, 1));
  EXPECT_NE(base, hash(DType::f32, Direction::up, "b", 4, 0, 1));
  EXPECT_NE(base, hash(DType::f32, Direction::up, "a", 5, 0, 1));
  EXPECT_NE(base, hash(DType::f32, Direction::up, "a", 4, 1, 1));
  EXPECT_NE(base, hash(DType::f32, Direction::up, "a", 4, 0, -1));
}

// ---- another world

// The debt of a world in units of the mean, by element: (1/W) sum of up + sum of down.
std::vector<double> debt(std::span<const ErrorFeedback> ranks, const std::string& name, uint64_t count) {
  std::vector<double> sum(count, 0.0);
  const int world = static_cast<int>(ranks.size());
  for (const ErrorFeedback& rank : ranks) {
    const std::vector<float> up = rank.residual(Direction::up, name);
    for (uint64_t i = 0; i < count; ++i) sum[i] += static_cast<double>(up[i]) / world;
  }
  for (const OwnedRun& run : owners(name, count, world)) {
    const std::vector<float> down = ranks[static_cast<size_t>(run.owner)].residual(Direction::down, name, run.first);
    for (uint64_t i = 0; i < run.count; ++i) sum[run.first + i] += down[i];
  }
  return sum;
}

// up: every new rank holds the mean of the old ones, m, rounded once to u(m), so the debt moves by |u(m) - m|: at most
// 2^-24 |m| in f32 and 2^-8 |m| in bf16, or half the smallest subnormal. down is copied. Averaging W2 equal floats in
// double and adding down costs a few 2^-53 of the magnitudes more.
TEST(Feedback, AnotherWorldOwesTheSame) {
  const std::map<std::string, uint64_t> sizes{{"tiny", 1}, {"small", 3}, {"large", 5 * kTileElements + 77}};
  std::mt19937 random(11);
  std::normal_distribution<float> normal;
  for (DType dtype : {DType::f32, DType::bf16})
    for (auto [from, to] : {std::pair{4, 3}, {4, 6}, {1, 5}, {5, 1}, {7, 7}, {2, 9}}) {
      std::vector<ErrorFeedback> ranks;
      for (int r = 0; r < from; ++r) {
        ErrorFeedback& rank = ranks.emplace_back(dtype);
        for (const auto& [name, count] : sizes) {
          rank.add(Direction::up, name, count);
          step(rank, Direction::up, 1, piece(name, count), dtype, [&](uint64_t) { return normal(random); });
          for (const OwnedRun& run : owners(name, count, from))
            if (run.owner == r) {
              rank.add(Direction::down, name, run.count, run.first);
              step(rank, Direction::down, 2, piece(name, run.count, run.first), dtype,
                   [&](uint64_t) { return normal(random); });
            }
        }
      }
      const std::vector<ErrorFeedback> fresh = ErrorFeedback::redistribute(ranks, to);
      ASSERT_EQ(fresh.size(), static_cast<size_t>(to));
      const double unit = dtype == DType::f32 ? 0x1p-24 : 0x1p-8;
      for (const auto& [name, count] : sizes) {
        const std::vector<double> before = debt(ranks, name, count), after = debt(fresh, name, count);
        const std::vector<float> up = fresh[0].residual(Direction::up, name);
        for (uint64_t i = 0; i < count; ++i)
          ASSERT_NEAR(before[i], after[i], unit * std::abs(up[i]) * 1.01 + 1e-13) << name << " " << i;
      }
    }
}

TEST(Feedback, AnotherWorldStartsAllRanksAlikeUpAndHoldsNoMoreThanItsShardsDown) {
  const uint64_t count = 3 * kTileElements + 5;
  std::vector<ErrorFeedback> ranks;
  for (int r = 0; r < 2; ++r) {
    ranks.emplace_back().add(Direction::up, "a", count);
    step(ranks.back(), Direction::up, 1, piece("a", count), DType::f32,
         [&](uint64_t i) { return static_cast<float>(i % 7 + r); });
    for (const OwnedRun& run : owners("b", count, 2))
      if (run.owner == r) {
        ranks.back().add(Direction::down, "b", run.count, run.first);
        step(ranks.back(), Direction::down, 2, piece("b", run.count, run.first), DType::f32,
             [](uint64_t i) { return static_cast<float>(i); });
      }
  }
  const std::vector<ErrorFeedback> fresh = ErrorFeedback::redistribute(ranks, 3);
  for (const ErrorFeedback& rank : fresh) {
    EXPECT_EQ(rank.residual(Direction::up, "a"), fresh[0].residual(Direction::up, "a"));
    EXPECT_EQ(rank.residual(Direction::up, "a")[9], 2.5f);
  }
  uint64_t covered = 0;
  for (const OwnedRun& run : owners("b", count, 3)) {
    const std::vector<float> down = fresh[static_cast<size_t>(run.owner)].residual(Direction::down, "b", run.first);
    ASSERT_EQ(down.size(), run.count);
    EXPECT_EQ(down.front(), static_cast<float>(run.first));
    EXPECT_EQ(down.back(), static_cast<float>(run.first + run.count - 1));
    covered += run.count;
  }
  EXPECT_EQ(covered, count);
}

// bf16 has 8 significant bits. The mean of these four is 1 + 2^-8 + 2^-32, just above the tie between 1 and 1 + 2^-7;
// rounded to f32 first it would be the tie itself, and then go down to even.
TEST(Feedback, MeansAreRoundedOnce) {
  std::vector<ErrorFeedback> ranks;
  for (float value : {4.0f, 0x1p-6f, 0x1p-30f, 0.0f}) {
    ranks.emplace_back(DType::bf16).add(Direction::up, "a", 1);
    step(ranks.back(), Direction::up, 1, piece("a", 1), DType::bf16, [&](uint64_t) { return value; });
  }
  EXPECT_EQ(ErrorFeedback::redistribute(ranks, 1)[0].residual(Direction::up, "a")[0], 1 + 0x1p-7f);
}

TEST(Feedback, StatesThatDoNotFitTogetherAreRefused) {
  const auto state = [](Direction direction, uint64_t count, uint64_t first, DType dtype = DType::f32) {
    ErrorFeedback feedback(dtype);
    feedback.add(direction, "a", count, first);
    return feedback;
  };
  const auto refused = [](const std::string& field, ErrorFeedback a, ErrorFeedback b) {
    std::vector<ErrorFeedback> ranks;
    ranks.push_back(std::move(a));
    ranks.push_back(std::move(b));
    EXPECT_REFUSED(usage, field, "rank", ErrorFeedback::redistribute(ranks, 2));
  };
  refused("ranks", state(Direction::up, 4, 0), state(Direction::up, 5, 0));
  refused("ranks", state(Direction::up, 4, 0), ErrorFeedback());
  refused("ranks", ErrorFeedback(), state(Direction::up, 4, 0));
  refused("residual", state(Direction::up, 4, 0), state(Direction::up, 4, 0, DType::bf16));
  const auto hole = [&](uint64_t first, uint64_t second) {
    std::vector<ErrorFeedback> ranks;
    ranks.push_back(state(Direction::down, 4, first));
    ranks.push_back(state(Direction::down, 4, second));
    EXPECT_REFUSED(usage, "ranks", "exactly once", ErrorFeedback::redistribute(ranks, 2));
  };
  hole(0, 5);
  hole(0, 3);
  hole(0, 0);
  hole(1, 5);
  EXPECT_REFUSED(usage, "ranks", "one of every rank", ErrorFeedback::redistribute({}, 2));
  const ErrorFeedback one;
  EXPECT_REFUSED(usage, "new_world", "at least 1", ErrorFeedback::redistribute(std::span(&one, 1), 0));
}

// 3200 small tensors on 4 nodes of 4 ranks: 200 for each rank, with a standard deviation of 14. If place and owner
// were drawn alike, four ranks would have them all.
TEST(Feedback, SmallTensorsAreSpreadOverAllRanksOfAllNodes) {
  const int nodes = 4, places = 4;
  std::vector<int> owned(static_cast<size_t>(nodes * places));
  for (int t = 0; t < 3200; ++t) {
    const std::string name = "layer" + std::to_string(t) + ".bias";
    for (int place = 0; place < places; ++place)
      for (const OwnedRun& run : owners(name, piece_of(name, 100, place, places).count, nodes, places))
        ++owned[static_cast<size_t>(run.owner * places + place)];
  }
  EXPECT_EQ(std::accumulate(owned.begin(), owned.end(), 0), 3200);
  for (int count : owned) EXPECT_NEAR(count, 200, 6 * 14);
}

TEST(Feedback, StatesOfNodesThatDoNotFitTogetherAreRefused) {
  const auto states = [](int world, int nodes) {
    std::vector<ErrorFeedback> ranks(2);
    for (ErrorFeedback& rank : ranks) rank.add(Direction::up, "a", 3 * kTileElements);
    return ErrorFeedback::redistribute(ranks, world, nodes);
  };
  std::vector<ErrorFeedback> four = states(4, 2), six = states(6, 3);
  EXPECT_EQ(ErrorFeedback::redistribute(four, 6, 3).size(), 6u);
  EXPECT_REFUSED(usage, "ranks", "3 states of 2 nodes of 2 ranks",
                 ErrorFeedback::redistribute(std::span(four).first(3), 2));
  EXPECT_REFUSED(usage, "new_nodes", "new_nodes is 3", ErrorFeedback::redistribute(four, 4, 3));
  EXPECT_REFUSED(usage, "new_nodes", "new_nodes is -1", ErrorFeedback::redistribute(four, 4, -1));
  std::swap(four[1], six[1]);
  EXPECT_REFUSED(usage, "ranks", "rank 1 is of 3 nodes of 2 ranks", ErrorFeedback::redistribute(four, 2));
  std::vector<ErrorFeedback> again = states(4, 2);
  four[1] = std::move(again[0]);
  EXPECT_REFUSED(usage, "ranks", "position 0 stands twice", ErrorFeedback::redistribute(four, 2));
  const uint32_t words[] = {2, 2, 4, 0};
  four[1].set_extra("nodes", std::as_bytes(std::span(words)));
  EXPECT_REFUSED(frame, "nodes", "position 4", ErrorFeedback::redistribute(four, 2));
}

// ---- the file

class FeedbackFile : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() / ("gradwire_feedback_" + std::to_string(::getpid()));
    fs::create_directories(folder_);
    path_ = (folder_ / "residuals").string();
  }
  void TearDown() override { fs::remove_all(folder_); }

  static ErrorFeedback filled(DType dtype, float salt = 0) {
    ErrorFeedback feedback(dtype);
    const auto put = [&](Direction direction, const std::string& name, uint64_t count, uint64_t first) {
      feedback.add(direction, name, count, first);
      step(feedback, direction, 1, piece(name, count, first), dtype, [&](uint64_t i) {
        return std::ldexp(static_cast<float>(i % 251) - 100 + salt, static_cast<int>(i % 60) - 30);
      });
    };
    put(Direction::up, "layer1.weight", 5, 0);
    put(Direction::up, "", 3, 0);
    put(Direction::down, "layer1.weight", 2, 32768);
    put(Direction::down, "layer1.weight", 4, 65536);
    put(Direction::down, std::string("\xc3\xa9\0x", 4), 1, 7);
    return feedback;
  }

  std::vector<char> bytes() const {
    std::ifstream file(path_, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  void put_bytes(const std::vector<char>& data) const {
    std::ofstream file(path_, std::ios::binary | std::ios::trunc);
    file.write(data.data(), static_cast<std::streamsize>(data.size()));
  }
  size_t files() const {
    return static_cast<size_t>(std::distance(fs::directory_iterator(folder_), fs::directory_iterator()));
  }
  // Puts both checksums of the head right again after `bytes` were changed.
  static void reseal(std::vector<char>& data) {
    uint64_t table_bytes;
    std::memcpy(&table_bytes, data.data() + 24, 8);
    const uint64_t parts[2] = {XXH64(data.data(), 40, 0),
                               XXH64(data.data() + 48, std::min<uint64_t>(table_bytes, data.size() - 48), 0)};
    const uint64_t check = XXH64(parts, sizeof parts, 0);
    std::memcpy(data.data() + 40, &check, 8);
  }

  fs::path folder_;
  std::string path_;
};

TEST_F(FeedbackFile, ComesBackBitForBit) {
  for (DType dtype : {DType::f32, DType::bf16}) {
    ErrorFeedback saved = filled(dtype);
    saved.add(Direction::up, "big", 1'500'001);  // several chunks
    step(saved, Direction::up, 2, piece("big", 1'500'001), dtype,
         [](uint64_t i) { return static_cast<float>(i % 1009) - 500; });
    saved.save(path_);
    ErrorFeedback loaded = ErrorFeedback::load(path_);
    EXPECT_EQ(loaded.hash(), saved.hash());
    EXPECT_EQ(loaded.residual(Direction::down, "layer1.weight", 65536),
              saved.residual(Direction::down, "layer1.weight", 65536));
    // It goes on from there.
    for (ErrorFeedback* feedback : {&saved, &loaded})
      step(*feedback, Direction::up, 3, piece("layer1.weight", 2, 1), dtype,
           [](uint64_t i) { return static_cast<float>(i); });
    EXPECT_EQ(loaded.hash(), saved.hash());
    EXPECT_EQ(files(), 1u) << "a temporary file was left";
  }
  ErrorFeedback().save(path_);
  EXPECT_EQ(ErrorFeedback::load(path_).hash(), ErrorFeedback().hash());
}

TEST_F(FeedbackFile, CutAtAnyByteIsRefused) {
  for (DType dtype : {DType::f32, DType::bf16}) {
    filled(dtype).save(path_);
    const std::vector<char> whole = bytes();
    for (size_t n = whole.size(); n-- > 0;) {
      fs::resize_file(path_, n);
      EXPECT_REFUSED(io, "file_bytes", path_, ErrorFeedback::load(path_));
    }
    std::vector<char> longer = whole;
    longer.push_back(0);
    put_bytes(longer);
    EXPECT_REFUSED(io, "file_bytes", path_, ErrorFeedback::load(path_));
  }
}

TEST_F(FeedbackFile, AnyFlippedBitIsRefused) {
  for (DType dtype : {DType::f32, DType::bf16}) {
    filled(dtype).save(path_);
    const std::vector<char> whole = bytes();
    std::fstream file(path_, std::ios::binary | std::ios::in | std::ios::out);
    const auto put = [&](size_t at, int byte) {
      file.seekp(static_cast<std::streamoff>(at)).put(static_cast<char>(byte)).flush();
    };
    for (size_t bit = 0; bit < whole.size() * 8; ++bit) {
      put(bit / 8, whole[bit / 8] ^ 1 << bit % 8);
      const Error e = error_of([&] { ErrorFeedback::load(path_); });
      ASSERT_EQ(e.kind(), ErrorKind::io) << "bit " << bit << ": " << e.what();
      ASSERT_FALSE(e.field().empty());
      ASSERT_NE(std::string(e.what()).find(path_), std::string::npos) << e.what();
      put(bit / 8, whole[bit / 8]);
    }
    EXPECT_EQ(ErrorFeedback::load(path_).hash(), filled(dtype).hash());
  }
}

// With the head's checksum put right, the checks behind it must hold by themselves. Flips of the bodies' lengths and
// places are caught one by one or, where the table still makes sense, by a body's checksum.
TEST_F(FeedbackFile, AnyFlippedBitOfTheHeadIsRefusedBehindItsChecksum) {
  filled(DType::f32).save(path_);
  const std::vector<char> whole = bytes();
  uint64_t table_bytes;
  std::memcpy(&table_bytes, whole.data() + 24, 8);
  size_t accepted = 0;
  for (size_t bit = 0; bit < (48 + table_bytes) * 8; ++bit) {
    std::vector<char> bad = whole;
    bad[bit / 8] = static_cast<char>(bad[bit / 8] ^ 1 << bit % 8);
    reseal(bad);
    put_bytes(bad);
    try {
      ErrorFeedback::load(path_);
      ++accepted;  // another name or first element, say: a lie that no reader can know
    } catch (const Error& e) {
      ASSERT_EQ(e.kind(), ErrorKind::io) << "bit " << bit << ": " << e.what();
      ASSERT_NE(std::string(e.what()).find(path_), std::string::npos) << e.what();
    }
  }
  EXPECT_LT(accepted, table_bytes * 8);
}

TEST_F(FeedbackFile, LiesAreNamed) {
  filled(DType::f32).save(path_);
  const std::vector<char> whole = bytes();
  const auto lie = [&](size_t at, auto value, const char* field, const char* words) {
    std::vector<char> bad = whole;
    std::memcpy(bad.data() + at, &value, sizeof value);
    reseal(bad);
    put_bytes(bad);
    EXPECT_REFUSED(io, field, words, ErrorFeedback::load(path_));
  };
  lie(0, 'x', "magic", "not a residual file");
  lie(8, uint32_t{2}, "version", "reads 1");
  lie(12, uint32_t{1}, "dtype", "allowed");
  lie(16, UINT64_MAX, "entries", "at most");
  lie(16, uint64_t{1}, "table_bytes", "after the last entry");
  lie(16, uint64_t{6}, "entries", "ends after 5");
  lie(24, UINT64_MAX - 7, "table_bytes", "allowed");
  lie(24, uint64_t{12}, "table_bytes", "allowed");
  lie(32, uint64_t{48}, "file_bytes", "says 48");
  // The first entry: ("up", "").
  lie(48, uint32_t{3}, "direction", "allowed");
  lie(52, UINT32_MAX, "name_bytes", "left");
  lie(56, UINT64_MAX - 1, "first", "past 2^64");
  lie(64, UINT64_MAX, "count", "left");
  lie(64, UINT64_MAX / 4 + 2, "count", "left");  // times 4 it would be 4
  lie(64, uint64_t{1} << 40, "count", "left");
  lie(64, uint64_t{1}, "file_bytes", "after the last body");
}

TEST_F(FeedbackFile, WhatIsNoFileIsRefused) {
  EXPECT_REFUSED(io, "path", path_, ErrorFeedback::load(path_));
  EXPECT_REFUSED(io, "path", folder_.string(), ErrorFeedback::load(folder_.string()));
  EXPECT_REFUSED(io, "path", "/dev/zero", ErrorFeedback::load("/dev/zero"));
}

TEST_F(FeedbackFile, AWriteThatFailsLeavesTheOldFile) {
  filled(DType::f32).save(path_);
  const std::vector<char> old = bytes();
  // A limit on the size of files stands for a disk that is full: write() comes up short, then fails.
  rlimit before;
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  for (rlim_t room : {rlim_t{0}, rlim_t{20}, static_cast<rlim_t>(old.size() - 1)}) {
    rlimit tight = before;
    tight.rlim_cur = room;
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &tight), 0);
    const Error e = error_of([&] { filled(DType::f32, 1).save(path_); });
    ::setrlimit(RLIMIT_FSIZE, &before);
    EXPECT_EQ(e.kind(), ErrorKind::io);
    EXPECT_EQ(e.field(), "write");
    EXPECT_NE(std::string(e.what()).find(path_), std::string::npos) << e.what();
    EXPECT_EQ(bytes(), old);
    EXPECT_EQ(files(), 1u) << "a temporary file was left";
  }
  std::signal(SIGXFSZ, handler);
  filled(DType::f32, 1).save(path_);
  EXPECT_NE(bytes(), old);
  EXPECT_EQ(ErrorFeedback::load(path_).hash(), filled(DType::f32, 1).hash());
}

TEST_F(FeedbackFile, APlaceThatCannotBeWrittenIsNamed) {
  const std::string nowhere = (folder_ / "missing" / "residuals").string();
  EXPECT_REFUSED(io, "path", nowhere, ErrorFeedback().save(nowhere));
  fs::create_directories(path_ + "/full");  // a folder stands where the file should
  EXPECT_REFUSED(io, "path", path_, ErrorFeedback().save(path_));
  EXPECT_EQ(files(), 1u) << "a temporary file was left";
}

// ---- rules

TEST(Rules, APlainSpecIsOneRule) {
  const Rules rules = Rules::parse(" qsgd:bits=3 ");
  EXPECT_EQ(rules.codec_for("anything", 1, 4096), Codec::parse("qsgd:bits=3"));
  EXPECT_EQ(rules.str(), Codec::parse("qsgd:bits=3").str());
  EXPECT_EQ(Rules::parse("fp32").codec_for("", 0, 4096), Codec());
}

TEST(Rules, TheFirstThatMatchesWins) {
  const Rules rules = Rules::parse("*.bias=fp32; 1d = fp16 ;layer?.*=qsgd:bits=8;*=qsgd:bits=4");
  EXPECT_EQ(rules.codec_for("layer1.bias", 1, 4096).name(), "fp32");
  EXPECT_EQ(rules.codec_for("layer1.norm", 1, 4096).name(), "fp16");
  EXPECT_EQ(rules.codec_for("scalar", 0, 4096).name(), "fp16");
  EXPECT_EQ(rules.codec_for("layer1.weight", 2, 4096).get("bits"), "8");
  EXPECT_EQ(rules.codec_for("layer12.weight", 2, 4096).get("bits"), "4");
  EXPECT_EQ(rules.codec_for("bias", 2, 4096).get("bits"), "4");
}

TEST(Rules, SmallTensorsByTheirCount) {
  const Rules rules = Rules::parse("<1024=fp32;*=qsgd:bits=4");
  EXPECT_EQ(rules.codec_for("w", 2, 1023).name(), "fp32");
  EXPECT_EQ(rules.codec_for("w", 2, 1024).name(), "qsgd");
  EXPECT_EQ(Rules::parse(rules.str()).str(), rules.str());
  for (const char* bad :
       {"<=fp32;*=fp32", "<0=fp32;*=fp32", "<x=fp32;*=fp32", "<-3=fp32;*=fp32", "<99999999999999999999=fp32;*=fp32"})
    EXPECT_REFUSED(usage, "rules", "number of elements", Rules::parse(bad));
}

TEST(Rules, MatricesByTheirDimensions) {
  const Rules rules = Rules::parse("a*=fp16;2d=qsgd:bits=4;*=fp32");
  EXPECT_EQ(rules.codec_for("w", 2, 4096).name(), "qsgd");
  EXPECT_EQ(rules.codec_for("w", 4, 4096).name(), "qsgd");
  EXPECT_EQ(rules.codec_for("w", 1, 4096).name(), "fp32");
  EXPECT_EQ(rules.codec_for("w", 0, 4096).name(), "fp32");
  EXPECT_EQ(rules.codec_for("a", 2, 4096).name(), "fp16");
  EXPECT_EQ(Rules::parse(rules.str()).str(), rules.str());
}

TEST(Rules, PrintAsTheyParse) {
  const Rules rules = Rules::parse("*.bias=fp32;1d=fp16;<64=fp32;*=qsgd:bits=4");
  EXPECT_EQ(Rules::parse(rules.str()).str(), rules.str());
  EXPECT_EQ(rules.str(), "*.bias=fp32;1d=fp16;<64=fp32;*=" + Codec::parse("qsgd:bits=4").str());
}

TEST(Rules, RoundToNearestWhereTheirCodecsCan) {
  const Rules rules = Rules::parse("1d=fp32;a*=topk:ratio=0.1;*=qsgd:bits=2").nearest();
  EXPECT_EQ(rules.codec_for("w", 2, 4096), Codec::parse("qsgd:bits=2,rounding=nearest"));
  EXPECT_EQ(rules.codec_for("a", 2, 4096), Codec::parse("topk:ratio=0.1"));
  EXPECT_EQ(rules.codec_for("w", 1, 4096), Codec());
  EXPECT_EQ(rules.nearest().str(), rules.str());
}

TEST(Rules, Globs) {
  const auto matches = [](const std::string& pattern, const std::string& name) {
    return Rules::parse(pattern + "=fp16;*=fp32").codec_for(name, 2, 4096).name() == "fp16";
  };
  EXPECT_TRUE(matches("a*c", "ac"));
  EXPECT_TRUE(matches("a*c", "abcbc"));
  EXPECT_FALSE(matches("a*c", "abcb"));
  EXPECT_TRUE(matches("**x", "x"));
  EXPECT_TRUE(matches("?", "x"));
  EXPECT_FALSE(matches("?", ""));
  EXPECT_FALSE(matches("abc", "abcd"));
  EXPECT_TRUE(matches("[0].w", "[0].w")) << "brackets are plain characters";
  // Would take exponential time by naive recursion.
  EXPECT_FALSE(matches("*a*a*a*a*a*a*a*a*a*a*a*a*b", std::string(4000, 'a')));
}

TEST(Rules, WhatIsWrongIsNamed) {
  EXPECT_REFUSED(usage, "rules", "last rule must be '*=SPEC'", Rules::parse("*.bias=fp32"));
  EXPECT_REFUSED(usage, "rules", "last rule must be '*=SPEC'", Rules::parse("1d=fp32;qsgd:bits=4"));
  EXPECT_REFUSED(usage, "rules", "it must be the last rule", Rules::parse("*=fp32;"));
  EXPECT_REFUSED(usage, "rules", "rule 1 '*=fp32'", Rules::parse("*=fp32;1d=fp16;*=fp32"));
  EXPECT_REFUSED(usage, "rules", "PATTERN=SPEC", Rules::parse("fp16;*=fp32"));
  EXPECT_REFUSED(usage, "rules", "PATTERN=SPEC", Rules::parse("=fp16;*=fp32"));
  EXPECT_REFUSED(usage, "bits", "rule 2 '*=qsgd:bits=99'", Rules::parse("1d=fp32;*=qsgd:bits=99"));
  EXPECT_EQ(error_of([] { Rules::parse(""); }).kind(), ErrorKind::usage);
  EXPECT_EQ(error_of([] { Rules::parse("nonsense:bits=4"); }).kind(), ErrorKind::usage);
}

}  // namespace
}  // namespace gradwire
