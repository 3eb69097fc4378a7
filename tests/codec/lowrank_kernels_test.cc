// SPDX-License-Identifier: Apache-2.0
// The arithmetic of lowrank: every vector target computes the bits of the reference loop, which computes products;
// factors become orthonormal, whatever they were.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "codec/lowrank/kernels.h"
#include "codec/lowrank/lowrank.h"
#include "codec/lowrank/orthonormal.h"
#include "codec/lowrank/products.h"
#include "gradwire/error.h"

namespace gradwire {
namespace {

std::vector<float> normals(size_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

struct Products {
  std::vector<float> loaded, x_p, x_q, residual, result;
};

void add_all_rows(const LowRankKernels& k, const std::vector<float>& m, const std::vector<float>& p, size_t rows,
                  size_t columns, uint32_t rank, std::vector<float>& x) {
  for (size_t i = 0; i < rows; i += 4) {
    const float* some[4] = {};
    for (size_t at = 0; at < 4 && i + at < rows; ++at) some[at] = &m[(i + at) * columns];
    k.add_rows(some, std::min<size_t>(4, rows - i), &p[i], rows, rank, columns, x.data(), columns);
  }
}

// All products of a matrix and its factors, with one table of loops.
Products products_of(const LowRankKernels& k, size_t rows, size_t columns, uint32_t rank) {
  const std::vector<float> gradient = normals(rows * columns, 1), before = normals(rows * columns, 2);
  const std::vector<float> p = normals(rank * rows, 3), q = normals(rank * columns, 4);
  Products all{std::vector<float>(rows * columns),
               std::vector<float>(rank * rows),
               std::vector<float>(rank * columns),
               {},
               std::vector<float>(rows * columns)};
  k.combine(gradient.data(), 0.25f, before.data(), 0.9f, gradient.size(), all.loaded.data());
  for (size_t i = 0; i < rows; ++i) k.dots(&all.loaded[i * columns], q.data(), rank, columns, &all.x_p[i], rows);
  add_all_rows(k, all.loaded, p, rows, columns, rank, all.x_q);
  all.residual.resize(rows * columns);
  for (size_t i = 0; i < rows; ++i) {
    k.subtract(&all.loaded[i * columns], &p[i], rows, q.data(), rank, columns, &all.residual[i * columns], false);
    k.expand(&all.result[i * columns], 3.0f, &p[i], rows, q.data(), rank, columns, false);
  }
  return all;
}

TEST(LowRankKernels, EveryTargetComputesTheBitsOfTheReferenceLoop) {
  ASSERT_STREQ(lowrank_kernels()[0].name, "scalar");
  for (const size_t rows : {1, 3, 4, 9, 33})
    for (const size_t columns : {1, 15, 16, 17, 47, 64, 131})
      for (const uint32_t rank : {1, 2, 3, 4, 5, 7, 64}) {
        const Products reference = products_of(lowrank_kernels()[0], rows, columns, rank);
        for (const LowRankKernels& target : lowrank_kernels().subspan(1)) {
          const Products found = products_of(target, rows, columns, rank);
          EXPECT_TRUE(same_bits(found.loaded, reference.loaded)) << target.name;
          EXPECT_TRUE(same_bits(found.x_p, reference.x_p)) << target.name << " " << columns << " " << rank;
          EXPECT_TRUE(same_bits(found.x_q, reference.x_q)) << target.name << " " << columns << " " << rank;
          EXPECT_TRUE(same_bits(found.residual, reference.residual)) << target.name;
          EXPECT_TRUE(same_bits(found.result, reference.result)) << target.name;
        }
      }
}

TEST(LowRankKernels, AreProductsOfMatrices) {
  const size_t rows = 21, columns = 77;
  const uint32_t rank = 6;
  const std::vector<float> gradient = normals(rows * columns, 1), before = normals(rows * columns, 2);
  const std::vector<float> p = normals(rank * rows, 3), q = normals(rank * columns, 4);
  const Products found = products_of(lowrank_kernels()[0], rows, columns, rank);
  const auto m = [&](size_t i, size_t j) {
    return 0.25 * gradient[i * columns + j] + 0.9f * static_cast<double>(before[i * columns + j]);
  };
  // The terms are of the order of 1, there are at most 77 of them, and each costs a few roundings to 2^-24.
  const double tolerance = 77 * 4 * std::ldexp(1, -24) * 8;
  for (uint32_t r = 0; r < rank; ++r) {
    for (size_t i = 0; i < rows; ++i) {
      double sum = 0;
      for (size_t j = 0; j < columns; ++j) sum += q[r * columns + j] * m(i, j);
      EXPECT_NEAR(found.x_p[r * rows + i], sum, tolerance);
    }
    for (size_t j = 0; j < columns; ++j) {
      double sum = 0;
      for (size_t i = 0; i < rows; ++i) sum += p[r * rows + i] * m(i, j);
      EXPECT_NEAR(found.x_q[r * columns + j], sum, tolerance);
    }
  }
  for (size_t i = 0; i < rows; ++i)
    for (size_t j = 0; j < columns; ++j) {
      double sum = 0;
      for (uint32_t r = 0; r < rank; ++r) sum += static_cast<double>(p[r * rows + i]) * q[r * columns + j];
      EXPECT_NEAR(found.residual[i * columns + j], m(i, j) - sum, tolerance);
      EXPECT_NEAR(found.result[i * columns + j], 3 * sum, tolerance);
    }
}

// Whole matrices, one of them large enough to be written past the caches.
TEST(LowRankMatrix, HasTheBitsOfItsRowsForAnyNumberOfThreads) {
  const uint32_t rank = 3;
  for (const auto& [rows, columns] : std::vector<std::pair<size_t, size_t>>{{37, 53}, {600, 1024}, {301, 1100}}) {
    const size_t count = rows * columns;
    const std::vector<float> gradient = normals(count, 1), residual = normals(count, 2), p = normals(rank * rows, 3),
                             q = normals(rank * columns, 4), own = normals(rank * columns, 5);
    const LowRankKernels& k = lowrank_kernels()[0];
    std::vector<float> m(count), x_p(rank * rows), x_q(rank * columns), left(count), result(count);
    k.combine(gradient.data(), 2.0f, residual.data(), 0.5f, count, m.data());
    for (size_t i = 0; i < rows; ++i) {
      k.dots(&m[i * columns], q.data(), rank, columns, &x_p[i], rows);
      k.subtract(&m[i * columns], &p[i], rows, own.data(), rank, columns, &left[i * columns], false);
      k.expand(&result[i * columns], 4.0f, &p[i], rows, q.data(), rank, columns, false);
    }
    add_all_rows(k, m, p, rows, columns, rank, x_q);
    for (const int threads : {1, 3}) {
      Pool pool(threads);
      std::vector<float> in = gradient, found_p(x_p.size()), found_q(x_q.size());
      // As allocators for tensors do it.
      const std::unique_ptr<float, decltype(&std::free)> found(
          static_cast<float*>(std::aligned_alloc(64, (count * sizeof(float) + 63) / 64 * 64)), &std::free);
      LowRankMatrix matrix{.rows = rows,
                           .columns = columns,
                           .rank = rank,
                           .gradient = in.data(),
                           .residual = residual.data(),
                           .factor = 2,
                           .decay = 0.5f};
      for (const bool stored : {false, true}) {
        in = gradient;
        project_rows(pool, matrix, q.data(), found_p.data(), stored ? found.get() : nullptr);
        const LowRankMatrix later = stored ? stored_matrix(matrix, found.get()) : matrix;
        project_columns(pool, later, p.data(), found_q.data());
        EXPECT_FALSE(split_product(pool, later, {p.data(), own.data()}, {p.data(), q.data()}, 4, found.get(), in.data(),
                                   DType::f32));
        EXPECT_TRUE(same_bits(found_p, x_p));
        EXPECT_TRUE(same_bits(found_q, x_q));
        EXPECT_TRUE(same_bits(in, result));
        EXPECT_TRUE(same_bits(std::vector<float>(found.get(), found.get() + count), left));
      }
    }
  }
}

double product(const std::vector<float>& f, size_t n, size_t a, const std::vector<float>& g, size_t b) {
  double sum = 0;
  for (size_t j = 0; j < n; ++j) sum += static_cast<double>(f[a * n + j]) * g[b * n + j];
  return sum;
}

void expect_orthonormal(const std::vector<float>& factor, uint32_t rank, const std::string& what) {
  const size_t n = factor.size() / rank;
  for (uint32_t a = 0; a < rank; ++a)
    for (uint32_t b = 0; b <= a; ++b)
      EXPECT_NEAR(product(factor, n, a, factor, b), a == b, 1e-6) << what << ": rows " << a << " and " << b;
}

TEST(Orthonormal, RowsSpanWhatTheySpannedBefore) {
  for (const uint32_t rank : {1, 2, 4, 17, 64}) {
    const size_t n = 200;
    std::vector<float> factor = normals(rank * n, rank);
    // Rows of very different lengths, and one that is nearly another.
    for (uint32_t r = 0; r < rank; ++r)
      for (size_t j = 0; j < n; ++j) factor[r * n + j] *= std::pow(10.0f, static_cast<float>(r % 9) - 4);
    if (rank > 2)
      for (size_t j = 0; j < n; ++j) factor[n + j] = factor[j] * 2 + factor[n + j] * 1e-6f;
    const std::vector<float> before = factor, start = starting_factor(7, rank, n);
    make_orthonormal(factor, rank, start);
    expect_orthonormal(factor, rank, "rank " + std::to_string(rank));
    for (uint32_t r = 0; r < rank; ++r) {  // what is left of a row outside of the new rows
      double left = product(before, n, r, before, r);
      const double whole = left;
      for (uint32_t k = 0; k < rank; ++k) left -= std::pow(product(before, n, r, factor, k), 2);
      EXPECT_LT(left, 1e-6 * whole) << "rank " << rank << ", row " << r;
    }
  }
}

TEST(Orthonormal, ZerosAndDependentRowsGiveWayToTheStart) {
  const uint32_t rank = 4;
  const size_t n = 50;
  const std::vector<float> start = starting_factor(1, rank, n);
  expect_orthonormal(start, rank, "start");
  std::vector<float> zeros(rank * n);
  make_orthonormal(zeros, rank, start);
  expect_orthonormal(zeros, rank, "zeros");
  for (size_t j = 0; j < zeros.size(); ++j) EXPECT_NEAR(zeros[j], start[j], 1e-6);
  std::vector<float> alike = normals(rank * n, 5);
  for (size_t j = 0; j < n; ++j) alike[2 * n + j] = alike[j] - 3 * alike[n + j];
  make_orthonormal(alike, rank, start);
  expect_orthonormal(alike, rank, "a row that others span");
  std::vector<float> tiny = normals(rank * n, 6), huge = tiny;
  for (float& x : tiny) x *= 1e-38f;
  for (float& x : huge) x *= 1e37f;
  make_orthonormal(tiny, rank, start);
  make_orthonormal(huge, rank, start);
  expect_orthonormal(tiny, rank, "tiny");
  expect_orthonormal(huge, rank, "huge");
  std::vector<float> bad = normals(rank * n, 7);
  bad[3] = std::numeric_limits<float>::quiet_NaN();
  bad[n] = std::numeric_limits<float>::infinity();
  make_orthonormal(bad, rank, start);  // ends
  EXPECT_NE(starting_factor(1, rank, n), starting_factor(2, rank, n));
}

TEST(LowRankText, IsReadAndWritten) {
  EXPECT_EQ(LowRank::parse("lowrank").str(), "lowrank:rank=4,bits=8,alternate=off");
  EXPECT_EQ(LowRank::parse("lowrank:alternate=on,rank=64,bits=32").str(), "lowrank:rank=64,bits=32,alternate=on");
  for (const char* bad : {"lowrank:rank=0", "lowrank:rank=65", "lowrank:bits=5", "lowrank:alternate=yes",
                          "lowrank:rank=4,rank=4", "lowrank:width=3", "lowrank:", "lowrank:rank"})
    EXPECT_THROW(LowRank::parse(bad), Error) << bad;
  EXPECT_TRUE(LowRank::parse("lowrank:rank=4,bits=8").fits(100, 100));
  EXPECT_FALSE(LowRank::parse("lowrank:rank=4").fits(3, 1000000));       // more rows of a factor than of the matrix
  EXPECT_FALSE(LowRank::parse("lowrank:rank=4,bits=32").fits(4, 1000));  // factors are more to send
}

}  // namespace
}  // namespace gradwire
