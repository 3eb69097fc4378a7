// SPDX-License-Identifier: Apache-2.0
#include "codec/lowrank/products.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "codec/lowrank/kernels.h"
#include "core/bits.h"

namespace gradwire {
namespace {

constexpr uint64_t kRows = 32;          // that a thread takes at a time
constexpr uint64_t kColumns = 16 * 64;  // the same of columns: their sums stay in the first cache
constexpr uint64_t kStreamBytes = 1 << 20;

const LowRankKernels& best() {
  static const LowRankKernels& kernels = lowrank_kernels()[lowrank_kernels().size() > 1 ? 1 : 0];
  return kernels;
}

// Elements [first, end) of row i of M: where they are stored, or made in `scratch`.
const float* row_of(const LowRankMatrix& m, uint64_t i, uint64_t first, uint64_t end, float* scratch) {
  const uint64_t at = i * m.columns + first, count = end - first;
  const float* gradient = static_cast<const float*>(m.gradient) + at;
  if (!m.residual) return gradient;
  if (m.dtype != DType::f32) {
    const uint16_t* const halves = static_cast<const uint16_t*>(m.gradient) + at;
    for (uint64_t j = 0; j < count; ++j)
      scratch[j] = m.dtype == DType::f16 ? f16_to_f32(halves[j]) : bf16_to_f32(halves[j]);
    gradient = scratch;
  }
  best().combine(gradient, m.factor, m.residual + at, m.decay, count, scratch);
  return scratch;
}

// Returns whether a value became an infinity.
bool narrow_row(const float* row, uint64_t count, DType dtype, uint16_t* to) {
  const uint16_t infinity = dtype == DType::f16 ? 0x7c00 : 0x7f80;
  bool overflow = false;
  for (uint64_t j = 0; j < count; ++j) {
    to[j] = dtype == DType::f16 ? f32_to_f16(row[j]) : f32_to_bf16(row[j]);
    overflow |= (to[j] & infinity) == infinity;
  }
  return overflow;
}

// Whether what is written is better not kept in the caches: it is not there any more when it is read again.
bool is_large(const LowRankMatrix& m) { return m.rows * m.columns * sizeof(float) >= kStreamBytes; }
bool is_aligned(const float* row) { return reinterpret_cast<uintptr_t>(row) % 64 == 0; }

// Calls body(i, scratch) for every row; `scratch` has room for one.
template <class Body>
void for_rows(Pool& pool, const LowRankMatrix& m, const Body& body) {
  std::vector<std::vector<float>> scratch(static_cast<size_t>(pool.threads()));
  for (std::vector<float>& one : scratch) one.resize(m.columns);
  pool.run((m.rows + kRows - 1) / kRows, [&](size_t task, int worker) {
    float* const own = scratch[static_cast<size_t>(worker)].data();
    for (uint64_t i = task * kRows; i < std::min(m.rows, (task + 1) * kRows); ++i) body(i, own);
  });
}

}  // namespace

LowRankMatrix stored_matrix(const LowRankMatrix& m, const float* stored) {
  return {.rows = m.rows, .columns = m.columns, .rank = m.rank, .gradient = stored};
}

void project_rows(Pool& pool, const LowRankMatrix& m, const float* q, float* x, float* stored) {
  const bool large = is_large(m);
  for_rows(pool, m, [&](uint64_t i, float* scratch) {
    const float* const row = row_of(m, i, 0, m.columns, scratch);
    best().dots(row, q, m.rank, m.columns, x + i, m.rows);
    if (stored) best().copy(row, m.columns, stored + i * m.columns, large && is_aligned(stored + i * m.columns));
  });
}

// Threads share the columns: the order in which rows are added is the same for any number of them.
void project_columns(Pool& pool, const LowRankMatrix& m, const float* p, float* x) {
  std::fill_n(x, m.rank * m.columns, 0.0f);
  pool.run((m.columns + kColumns - 1) / kColumns, [&](size_t task, int) {
    const uint64_t first = task * kColumns, end = std::min(m.columns, first + kColumns);
    constexpr uint64_t kTogether = 4;
    float scratch[kTogether * kColumns];
    for (uint64_t i = 0; i < m.rows; i += kTogether) {
      const uint64_t count = std::min(kTogether, m.rows - i);
      const float* rows[kTogether] = {};
      for (uint64_t k = 0; k < count; ++k) rows[k] = row_of(m, i + k, first, end, scratch + k * kColumns);
      best().add_rows(rows, count, p + i, m.rows, m.rank, end - first, x + first, m.columns);
    }
  });
}

bool split_product(Pool& pool, const LowRankMatrix& m, const LowRankProduct& own, const LowRankProduct& result,
                   float scale, float* left, void* out, DType dtype) {
  std::atomic<bool> overflow = false;
  const bool large = is_large(m), narrow = dtype != DType::f32;
  for_rows(pool, m, [&](uint64_t i, float* scratch) {
    const float* const row = row_of(m, i, 0, m.columns, scratch);
    const uint64_t at = i * m.columns;
    // What was just read is in the cache anyway.
    const bool stream = large && row != left + at && is_aligned(left + at);
    best().subtract(row, own.left + i, m.rows, own.right, m.rank, m.columns, left + at, stream);
    float* const wide = narrow ? scratch : static_cast<float*>(out) + at;
    const bool past = large && !narrow && !m.residual && is_aligned(wide);  // else the gradient was just read there
    best().expand(wide, scale, result.left + i, m.rows, result.right, m.rank, m.columns, past);
    if (narrow && narrow_row(wide, m.columns, dtype, static_cast<uint16_t*>(out) + at)) overflow = true;
  });
  return overflow;
}

}  // namespace gradwire
