// SPDX-License-Identifier: Apache-2.0
// A model that several reducers carry learns as one: what a codec decides does not depend on how the tensors were dealt
// to the reducers.
#include <gtest/gtest.h>

#include "collective/collective_fixture.h"

namespace gradwire::test {
namespace {

const std::vector<NamedTensor> kWhole{{"a", 40'003}, {"b", 5'000}, {"c", 20'033}, {"d", 9}};
constexpr uint64_t kSteps = 12;

// Norms that change from step to step, in each tensor at another time.
TensorValues uneven_gradients(const std::vector<NamedTensor>& tensors, int rank, uint64_t step) {
  TensorValues data = gradients(tensors, rank, step);
  data.fill([&, copy = data](size_t t, uint64_t i) {
    return copy.get(t, i) * (step % 5 == static_cast<uint64_t>(tensors[t].name[0] - 'a') ? 30.0f : 1.0f);
  });
  return data;
}

// The table of every tensor by name, after every step, on rank 0.
using TablesByStep = std::vector<std::map<std::string, std::vector<uint32_t>>>;

TablesByStep learn_in(const std::vector<std::vector<NamedTensor>>& groups, const std::string& codec, Method method,
                      bool together) {
  std::vector<TablesByStep> seen(3);
  run_loopback(3, [&](Engine& engine) {
    std::vector<std::unique_ptr<Reducer>> reducers;
    std::vector<Reducer*> all;
    for (const auto& group : groups) {
      ReduceOptions options{.method = method, .up = codec, .commit = Commit::manual, .steps = kSteps};
      if (together) options.model = kWhole;
      reducers.push_back(std::make_unique<Reducer>(engine, group, options));
      all.push_back(reducers.back().get());
    }
    TablesByStep& mine = seen[static_cast<size_t>(engine.rank())];
    for (uint64_t step = 0; step < kSteps; ++step) {
      mine.emplace_back();
      for (size_t g = 0; g < groups.size(); ++g) {
        TensorValues data = uneven_gradients(groups[g], engine.rank(), step);
        all[g]->run(step, data.in(), data.out());
        for (Direction direction : {Direction::up, Direction::down}) {
          const std::vector<Codec> codecs = all[g]->codecs(direction);
          for (size_t t = 0; t < groups[g].size(); ++t)
            mine.back()[groups[g][t].name + (direction == Direction::up ? " up" : " down")].assign(
                codecs[t].table().begin(), codecs[t].table().end());
        }
      }
      if (together) Reducer::learn_together(all, step);
      for (Reducer* reducer : all) step == 7 ? reducer->rollback(step) : reducer->commit(step);
    }
  });
  for (int rank = 1; rank < 3; ++rank) EXPECT_EQ(seen[static_cast<size_t>(rank)], seen[0]) << codec;
  return seen[0];
}

TEST(LearnTogether, HowTensorsWereDealtToReducersDoesNotMatter) {
  const std::vector<std::vector<NamedTensor>> one{kWhole}, three{{kWhole[0]}, {kWhole[3], kWhole[1]}, {kWhole[2]}};
  for (const char* codec : {"dqsgd:budget=3.5", "dqsgd:error=0.01,eta=0.1,smooth=1", "d=fp32;*=dqsgd:budget=3"})
    for (Method method : kMethods) {
      const std::string what = std::string(codec) + " " + name_of(method);
      const TablesByStep alone = learn_in(one, codec, method, false);
      EXPECT_TRUE(learn_in(three, codec, method, true) == alone) << what;
      EXPECT_TRUE(learn_in(one, codec, method, true) == alone) << what;
      EXPECT_TRUE(learn_in(three, codec, method, false) != alone) << what << ": the test tells nothing";
    }
}

TEST(LearnTogether, ReducersOfOneModelHoldOneTable) {
  const std::vector<std::vector<NamedTensor>> groups{{kWhole[0]}, {kWhole[1], kWhole[2]}, {kWhole[3]}};
  for (const char* codec : {"optquant:bits=3,refit=2", "rangefloat:bits=6,refit=2"}) {
    const TablesByStep seen = learn_in(groups, codec, Method::gather, true);
    for (const auto& step : seen)
      for (const auto& [name, table] : step)
        if (name.ends_with(" up")) {
          EXPECT_EQ(table, step.at("a up")) << codec << ", " << name;
        }
    EXPECT_NE(seen.front(), seen.back()) << codec;
  }
}

TEST(LearnTogether, MisuseIsRefusedByName) {
  run_loopback(1, [](Engine& engine) {
    const auto field = [&](const std::vector<NamedTensor>& tensors, const ReduceOptions& options) {
      try {
        Reducer reducer(engine, tensors, options);
        Reducer* list[] = {&reducer};
        Reducer::learn_together(list, 0);
      } catch (const Error& e) {
        return std::string(e.field());
      }
      return std::string();
    };
    EXPECT_EQ(field(kWhole, {.up = "dqsgd", .model = kWhole}), "model");           // commits by itself
    EXPECT_EQ(field(kWhole, {.up = "dqsgd", .commit = Commit::manual}), "model");  // not told the model
    EXPECT_EQ(field(kWhole, {.up = "dqsgd:mode=paper", .commit = Commit::manual, .model = kWhole}), "model");
    EXPECT_EQ(field(kWhole, {.up = "dqsgd", .commit = Commit::manual, .model = kWhole}), "");
  });
}

}  // namespace
}  // namespace gradwire::test
