// SPDX-License-Identifier: Apache-2.0
// Promises of ResidualStore beyond those that ErrorFeedback tests: direct access to the values.
#include "feedback/residual_store.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "gradwire/error.h"

namespace gradwire {
namespace {

TEST(ResidualStore, GivesTheCurrentValuesThemselves) {
  ResidualStore store(DType::f32, Device{});
  const ResidualKey key{Direction::up, "w", 0};
  store.add(key, 4);
  store.floats(key)[1] = 2.5f;
  EXPECT_EQ(store.values(key), (std::vector<float>{0, 2.5f, 0, 0}));

  // A step that begins a part of the residual changes that part alone, and only when it is committed.
  const std::vector<TensorSpec> part{{.name = "w", .count = 2, .dtype = DType::f32, .codec = Codec(), .first = 2}};
  for (const bool commit : {false, true}) {
    const auto begun = store.begin(Direction::up, 7, part, 1.0f);
    EXPECT_EQ(store.open_step(), 7u);
    float* const after = static_cast<float*>(begun->after[0]);
    after[0] = 8;
    after[1] = 9;
    EXPECT_EQ(store.values(key), (std::vector<float>{0, 2.5f, 0, 0}));
    commit ? store.commit(7) : store.rollback(7);
    EXPECT_FALSE(store.open_step());
    EXPECT_EQ(store.values(key), commit ? (std::vector<float>{0, 2.5f, 8, 9}) : (std::vector<float>{0, 2.5f, 0, 0}));
  }
  EXPECT_EQ(store.bytes(), 2 * 4 * sizeof(float));
  EXPECT_THROW(store.floats({Direction::down, "w", 0}), Error);
}

TEST(ResidualStore, PlacesHoldUntilTheStoreIsAnother) {
  ResidualStore store(DType::f32, Device{});
  store.add({Direction::up, "w", 0}, 4);
  const std::vector<TensorSpec> list{{.name = "none", .count = 3, .dtype = DType::f32, .codec = Codec()},
                                     {.name = "w", .count = 2, .dtype = DType::f32, .codec = Codec(), .first = 2}};
  const ResidualPlaces places = store.places(Direction::up, list);
  ErrorFeedback::Pointers pointers;
  for (uint64_t step = 0; step < 3; ++step) {
    ASSERT_TRUE(store.holds(places));
    store.begin(places, step, 2.0f, pointers);
    EXPECT_EQ(pointers.before[0], nullptr);
    EXPECT_EQ(pointers.before[1], store.floats({Direction::up, "w", 0}).data() + 2);
    EXPECT_EQ(pointers.residuals.loss_scale, 2.0f);
    EXPECT_THROW(store.begin(places, step, 2.0f, pointers), Error);  // it was begun in this step
    store.commit(step);
  }
  ResidualStore moved = std::move(store);
  EXPECT_TRUE(moved.holds(places));
  moved.add({Direction::up, "v", 0}, 1);
  EXPECT_FALSE(moved.holds(places));
  EXPECT_FALSE(ResidualStore(DType::f32, Device{}).holds(moved.places(Direction::up, list)));
}

TEST(ResidualStore, CommitsIfAllResultsAreFinite) {
  ResidualStore store(DType::f32, Device{});
  const ResidualKey key{Direction::down, "w", 0};
  store.add(key, 1);
  FiniteCheck finite{Device{}};
  const std::vector<TensorSpec> whole{{.name = "w", .count = 1, .dtype = DType::f32, .codec = Codec()}};
  const float results[] = {1.0f, INFINITY, 3.0f};
  for (uint64_t step = 0; step < 3; ++step) {
    const auto begun = store.begin(Direction::down, step, whole, 1.0f);
    *static_cast<float*>(begun->after[0]) = static_cast<float>(step + 1);
    float result = results[step];
    const ResultSpan span{&result, 1, DType::f32};
    finite.check(Device{}, std::span(&span, 1));
    store.commit_if_finite(step, finite, Device{});
    finite.end_step(Device{});
    EXPECT_EQ(store.values(key)[0], step == 2 ? 3.0f : 1.0f);
  }
  EXPECT_EQ(finite.skipped(), 1u);
}

}  // namespace
}  // namespace gradwire
