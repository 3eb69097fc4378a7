// SPDX-License-Identifier: Apache-2.0
// The products of lowrank over whole matrices on the CPU, for a Reducer and for PyTorch's hook.
//
// Memory is what limits these loops. With one exchange in a step M = factor * gradient + decay * residual is read
// twice, and making it again costs less than writing it and reading it back. With two exchanges it is read three times,
// and is stored, in the place of the residual that the step will leave.
#pragma once

#include <cstdint>

#include "core/pool.h"
#include "gradwire/tensor.h"

namespace gradwire {

// The matrix M of a step. Rows stand one after the other. Without a residual M is the gradient itself, which is f32.
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

// M itself, after it was stored there.
LowRankMatrix stored_matrix(const LowRankMatrix& m, const float* stored);

// x = q M^T: rank x rows. Unless it is null, M is written to `stored`.
void project_rows(Pool& pool, const LowRankMatrix& m, const float* q, float* x, float* stored = nullptr);
void project_columns(Pool& pool, const LowRankMatrix& m, const float* p, float* x);  // x = p M: rank x columns

// left = M - own, and out = scale * result, of the type `dtype`. `left` may be where M is stored, and `out` where the
// gradient is. Returns whether a value did not fit into that type.
bool split_product(Pool& pool, const LowRankMatrix& m, const LowRankProduct& own, const LowRankProduct& result,
                   float scale, float* left, void* out, DType dtype);

}  // namespace gradwire
