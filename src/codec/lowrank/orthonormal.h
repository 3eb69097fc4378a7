// SPDX-License-Identifier: Apache-2.0
// Factors of lowrank with orthonormal rows, and those that it begins with.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace gradwire {

// `factor` has `rank` rows. They become orthonormal and span what they spanned before. A row that is zero, or that the
// rows before it span but for an angle of 1e-4, becomes that of `start` in its place, made orthogonal to the others.
// Values that are not finite give anything. The arithmetic is a fixed list of operations: equal factors on all ranks
// stay equal.
void make_orthonormal(std::span<float> factor, uint32_t rank, std::span<const float> start);

// Orthonormal rows that follow from `key` alone, such as the hash of a name: every rank of any world has the same.
std::vector<float> starting_factor(uint64_t key, uint32_t rank, uint64_t size);

}  // namespace gradwire
