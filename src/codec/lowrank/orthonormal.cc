// SPDX-License-Identifier: Apache-2.0
// Cholesky's factorisation of the products of all pairs of rows, in double, is inverted and applied; and all that is
// done twice, which is as exact as f32 can show (Fukaya et al., CholeskyQR2, 2014).
#include "codec/lowrank/orthonormal.h"

#include <cmath>

#include "core/bits.h"

namespace gradwire {
namespace {

constexpr double kShift = 1e-10, kDependent = 1e-8;  // of a squared length

double product(const double* a, const double* b, size_t n) {
  double parts[8] = {};
  const size_t whole = n / 8 * 8;
  for (size_t j = 0; j < whole; j += 8)
    for (size_t k = 0; k < 8; ++k) parts[k] += a[j + k] * b[j + k];
  for (size_t j = whole; j < n; ++j) parts[j - whole] += a[j] * b[j];
  return ((parts[0] + parts[4]) + (parts[2] + parts[6])) + ((parts[1] + parts[5]) + (parts[3] + parts[7]));
}

struct Transform {
  std::vector<double> by;  // rank x rank, lower triangle
  std::vector<bool> lost;  // rows that it makes zero
};

// What makes rows with these products orthonormal.
Transform transform_of(const std::vector<double>& gram, size_t rank) {
  Transform result{std::vector<double>(rank * rank), std::vector<bool>(rank)};
  std::vector<double> scale(rank), root(rank * rank);
  const auto at = [rank](size_t i, size_t k) { return i * rank + k; };
  for (size_t i = 0; i < rank; ++i) scale[i] = gram[at(i, i)] > 0 ? 1 / std::sqrt(gram[at(i, i)]) : 0;
  for (size_t i = 0; i < rank; ++i) {
    for (size_t k = 0; k <= i; ++k) {
      double left = gram[at(i, k)] * scale[i] * scale[k];
      if (i == k) left += (scale[i] > 0 ? 0 : 1) + kShift;
      for (size_t j = 0; j < k; ++j) left -= root[at(i, j)] * root[at(k, j)];
      // A row that is replaced says nothing about those behind it.
      root[at(i, k)] = i == k ? std::sqrt(left > 0 ? left : kShift) : result.lost[k] ? 0 : left / root[at(k, k)];
    }
    result.lost[i] = scale[i] == 0 || !(root[at(i, i)] * root[at(i, i)] > kDependent);
  }
  // Row i of the inverse, times the scales, by substitution.
  for (size_t i = 0; i < rank; ++i) {
    for (size_t k = 0; k <= i; ++k) {
      double left = i == k ? scale[i] : 0;
      for (size_t j = k; j < i; ++j) left -= root[at(i, j)] * result.by[at(j, k)];
      result.by[at(i, k)] = left / root[at(i, i)];
    }
  }
  for (size_t i = 0; i < rank; ++i)
    for (size_t k = 0; result.lost[i] && k <= i; ++k) result.by[at(i, k)] = 0;
  return result;
}

}  // namespace

void make_orthonormal(std::span<float> factor, uint32_t rows, std::span<const float> start) {
  const size_t rank = rows, n = factor.size() / rank;
  std::vector<double> wide(factor.begin(), factor.end()), gram(rank * rank);
  for (const bool again : {false, true}) {
    for (size_t i = 0; i < rank; ++i)
      for (size_t k = 0; k <= i; ++k) gram[i * rank + k] = product(&wide[i * n], &wide[k * n], n);
    const Transform made = transform_of(gram, rank);
    for (size_t i = rank; i-- > 0;) {  // the last first: row i is made of the rows up to i
      double* const row = &wide[i * n];
      const double own = made.by[i * rank + i];
      for (size_t j = 0; j < n; ++j) row[j] *= own;
      for (size_t k = 0; k < i; ++k) {
        const double by = made.by[i * rank + k];
        const double* const other = &wide[k * n];
        for (size_t j = 0; j < n; ++j) row[j] += by * other[j];
      }
      for (size_t j = 0; !again && made.lost[i] && j < n; ++j) row[j] = start[i * n + j];
    }
  }
  for (size_t j = 0; j < factor.size(); ++j) factor[j] = static_cast<float>(wide[j]);
}

std::vector<float> starting_factor(uint64_t key, uint32_t rank, uint64_t size) {
  std::vector<float> factor(rank * size);
  for (uint64_t i = 0; i < factor.size(); ++i) {
    // A sum of four draws is close enough to a normal one: rows then point in any direction alike.
    const uint64_t bits = mix64(mix64(key) + i * 0x9e3779b97f4a7c15ull);
    const auto sum =
        static_cast<int64_t>((bits & 0xffff) + (bits >> 16 & 0xffff) + (bits >> 32 & 0xffff) + (bits >> 48));
    factor[i] = static_cast<float>(sum - 2 * 65535) / 65536.0f;
  }
  std::vector<float> units(factor.size());  // what replaces a row that depends on others: one of the axes
  for (uint64_t r = 0; r < rank; ++r) units[r * size + r] = 1;
  make_orthonormal(factor, rank, units);
  return factor;
}

}  // namespace gradwire
