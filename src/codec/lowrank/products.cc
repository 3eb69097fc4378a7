// SPDX-License-Identifier: Apache-2.0
#include "codec/lowrank/products.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <vector>

#include "codec/lowrank/kernels.h"
#include "core/bits.h"

namespace gradwire {
namespace {

constexpr uint64_t kRows = 32;              // that a thread takes at a time
constexpr uint64_t kStreamBytes = 1 << 20;  // a residual of this size is not in a cache when it is read again
constexpr uint64_t kColumns = 16 * 64;      // the same of columns: their sums stay in the first cache

const LowRankKernels& best() {
  static const LowRankKernels& kernels = lowrank_kernels()[lowrank_kernels().size() > 1 ? 1 : 0];
  return kernels;
}

// Elements [first, end) of row i of M.
void load_row(const LowRankMatrix& m, uint64_t i, uint64_t first, uint64_t end, float* to) {
  const uint64_t at = i * m.columns + first, count = end - first;
  const float* gradient = static_cast<const float*>(m.gradient) + at;
  if (m.dtype != DType::f32) {
    const uint16_t* const halves = static_cast<const uint16_t*>(m.gradient) + at;
    for (uint64_t j = 0; j < count; ++j) to[j] = m.dtype == DType::f16 ? f16_to_f32(halves[j]) : bf16_to_f32(halves[j]);
    gradient = to;
  }
  best().combine(gradient, m.factor, m.residual + at, m.decay, count, to);
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

// Calls body(i, scratch) for every row; `scratch` has room for two.
template <class Body>
void for_rows(Pool& pool, const LowRankMatrix& m, const Body& body) {
  std::vector<std::vector<float>> scratch(static_cast<size_t>(pool.threads()));
  for (std::vector<float>& one : scratch) one.resize(2 * m.columns);
  pool.run((m.rows + kRows - 1) / kRows, [&](size_t task, int worker) {
    float* const own = scratch[static_cast<size_t>(worker)].data();
    for (uint64_t i = task * kRows; i < std::min(m.rows, (task + 1) * kRows); ++i) body(i, own);
  });
}

}  // namespace

void project_rows(Pool& pool, const LowRankMatrix& m, const float* q, float* x) {
  for_rows(pool, m, [&](uint64_t i, float* row) {
    load_row(m, i, 0, m.columns, row);
    best().dots(row, q, m.rank, m.columns, x + i, m.rows);
  });
}

// Threads share the columns: the order in which rows are added is the same for any number of them.
void project_columns(Pool& pool, const LowRankMatrix& m, const float* p, float* x) {
  std::fill_n(x, m.rank * m.columns, 0.0f);
  pool.run((m.columns + kColumns - 1) / kColumns, [&](size_t task, int) {
    const uint64_t first = task * kColumns, end = std::min(m.columns, first + kColumns);
    constexpr uint64_t kTogether = 4;
    float rows[kTogether * kColumns];
    for (uint64_t i = 0; i < m.rows; i += kTogether) {
      const uint64_t count = std::min(kTogether, m.rows - i);
      for (uint64_t k = 0; k < count; ++k) load_row(m, i + k, first, end, rows + k * (end - first));
      best().add_rows(rows, count, p + i, m.rows, m.rank, end - first, x + first, m.columns);
    }
  });
}

bool split_product(Pool& pool, const LowRankMatrix& m, const LowRankProduct& own, const LowRankProduct& result,
                   float scale, float* left, void* out) {
  std::atomic<bool> overflow = false;
  const bool large = m.rows * m.columns * sizeof(float) >= kStreamBytes;
  for_rows(pool, m, [&](uint64_t i, float* row) {
    load_row(m, i, 0, m.columns, row);
    const uint64_t at = i * m.columns;
    const bool stream = large && reinterpret_cast<uintptr_t>(left + at) % 64 == 0;
    best().subtract(row, own.left + i, m.rows, own.right, m.rank, m.columns, left + at, stream);
    const bool narrow = m.dtype != DType::f32;
    float* const wide = narrow ? row + m.columns : static_cast<float*>(out) + at;
    best().expand(wide, scale, result.left + i, m.rows, result.right, m.rank, m.columns);
    if (narrow && narrow_row(wide, m.columns, m.dtype, static_cast<uint16_t*>(out) + at)) overflow = true;
  });
  return overflow;
}

}  // namespace gradwire
