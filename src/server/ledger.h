// SPDX-License-Identifier: Apache-2.0
// The ledger shows whether everything that workers computed is accounted for:
//
//     computed = applied to the weights + held back by workers (residuals) + lost with workers that were killed
//
// It cannot keep every element, so it keeps one number for each tensor: the sum of its elements with pseudorandom
// signs, which are a function of the name and the index. The sum is linear, and so is everything that happens to an
// update, so the equation must hold for the sums. An update that is dropped or counted twice shifts them, in
// expectation, by the root of the update's sum of squares. `squares` is the sum of squares of everything that was
// computed, so sqrt(squares) is the scale by which a difference is judged. The rounding of f32 is of the order of 1e-7
// of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace gradwire::server {

// The sum of +-x[i]; the signs are those from element `first` on, a multiple of 1024. Added in a fixed order.
double signed_sum(std::span<const float> values, uint64_t name_hash, uint64_t first);
double square_sum(std::span<const float> values);

struct Ledger {
  double computed = 0, applied = 0, held = 0, lost = 0, squares = 0;

  double difference() const { return computed - applied - held - lost; }
  // The scale of a difference: sqrt(squares), or |computed| where that is more, as when all updates point one way.
  double magnitude() const;
  double relative() const;  // |difference| / magnitude; 0 while nothing was computed
};

}  // namespace gradwire::server
