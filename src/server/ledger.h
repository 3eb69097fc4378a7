// SPDX-License-Identifier: Apache-2.0
// The ledger says whether everything that workers computed is somewhere:
//
//     computed = applied to the weights + held back by workers (residuals) + lost with workers that were killed
//
// It cannot keep every element, so it keeps one number of each tensor: the sum of its elements with signs that look
// random (a function of name and index). The sum is linear, as everything on the way of an update is, so the equation
// must hold for it. An update that is dropped or counted twice shifts it by about the root of the update's sum of
// squares, in expectation; `squares` collects these of all that was computed, so sqrt(squares) is the scale to judge a
// difference by. What f32 rounding does to it is of the order of 1e-7 of that.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace gradwire::server {

// Sum of +-x[i], with the signs of element `first` on, a multiple of 1024. Double, in a fixed order.
double signed_sum(std::span<const float> values, uint64_t name_hash, uint64_t first);
double square_sum(std::span<const float> values);

struct Ledger {
  double computed = 0, applied = 0, held = 0, lost = 0, squares = 0;

  double difference() const { return computed - applied - held - lost; }
  // What a difference is judged by: sqrt(squares), or what was computed where that is more, as when all updates point one way.
  double magnitude() const;
  double relative() const;  // |difference| / magnitude; 0 while nothing was computed
};

}  // namespace gradwire::server
