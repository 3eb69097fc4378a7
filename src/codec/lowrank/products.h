// SPDX-License-Identifier: Apache-2.0
// The products of lowrank over whole matrices on the CPU, for a Reducer and for PyTorch's hook.
//
// M = factor * gradient + decay * residual is never stored. Memory is what limits these loops: reading the gradient and
// the residual once more costs less than writing M and reading it again.
#pragma once

#include <cstdint>

#include "core/pool.h"
#include "gradwire/tensor.h"

namespace gradwire {

// The matrix M of a step. Rows stand one after the other.
struct LowRankMatrix {
  uint64_t rows = 0, columns = 0;
  uint32_t rank = 0;
  const void* gradient = nullptr;  // of the type `dtype`
  DType dtype = DType::f32;
  const float* residual = nullptr;
  float factor = 1, decay = 1;
};

// A product of factors: left has `rank` rows of `rows` elements, right has `rank` rows of `columns`.
struct LowRankProduct {
  const float* left;
  const float* right;
};

void project_rows(Pool& pool, const LowRankMatrix& m, const float* q, float* x);     // x = q M^T: rank x rows
void project_columns(Pool& pool, const LowRankMatrix& m, const float* p, float* x);  // x = p M: rank x columns

// left = M - own, and out = scale * result. `out` is of the matrix's type and may be the memory of the gradient.
// Returns whether a value did not fit into that type.
bool split_product(Pool& pool, const LowRankMatrix& m, const LowRankProduct& own, const LowRankProduct& result,
                   float scale, float* left, void* out);

}  // namespace gradwire
