// SPDX-License-Identifier: Apache-2.0
// The loops of lowrank over a matrix, once per vector target. A matrix has `columns` elements a row, row after row. A
// factor has `rank` rows: element r of row i's factor is p[r * stride], for the first row of the matrix that a function
// is about, and q[r * columns + j] belongs to column j.
//
// All targets compute the same bits: a sum over columns has sixteen parts, added up in one order, and everything else
// is element by element.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace gradwire {

struct LowRankKernels {
  const char* name;
  // out = factor * gradient + decay * residual, for n elements. They may be the same memory.
  void (*combine)(const float* gradient, float factor, const float* residual, float decay, size_t n, float* out);
  // x[r * stride] = sum over j of q[r * columns + j] * row[j].
  void (*dots)(const float* row, const float* q, uint32_t rank, size_t columns, float* x, size_t stride);
  // x[r * x_stride + j] += sum over `count` rows i, at most four, of p[r * stride + i] * rows[i][j].
  void (*add_rows)(const float* const* rows, size_t count, const float* p, size_t stride, uint32_t rank, size_t columns,
                   float* x, size_t x_stride);
  // out[j] = row[j] - sum over r of p[r * stride] * q[r * columns + j]. `stream`: past the caches, where `out` is
  // aligned to 64 bytes.
  void (*subtract)(const float* row, const float* p, size_t stride, const float* q, uint32_t rank, size_t columns,
                   float* out, bool stream);
  // out[j] = scale * (the same sum).
  void (*expand)(float* out, float scale, const float* p, size_t stride, const float* q, uint32_t rank, size_t columns,
                 bool stream);
  void (*copy)(const float* row, size_t columns, float* out, bool stream);
};

// Those that this processor runs: the reference loop, then the vector targets, best first.
std::span<const LowRankKernels> lowrank_kernels();

}  // namespace gradwire
