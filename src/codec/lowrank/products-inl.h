// SPDX-License-Identifier: Apache-2.0
// The loops of kernels.h for any lane L. Included once per target (no include guard).

template <class L>
struct LowRankProducts {
  using F = typename L::F;
  static constexpr size_t kWidth = L::kWidth;
  static constexpr size_t kParts = 16;  // of a sum over columns, whatever the width of a vector is
  static constexpr uint32_t kMostRank = 64;

  static void combine(const float* gradient, float factor, const float* residual, float decay, size_t n, float* out) {
    const F by = L::set(factor), keep = L::set(decay);
    const size_t whole = n / kWidth * kWidth;
    for (size_t j = 0; j < whole; j += kWidth)
      L::store(L::add(L::mul(L::load(gradient + j), by), L::mul(L::load(residual + j), keep)), out + j);
    for (size_t j = whole; j < n; ++j) out[j] = gradient[j] * factor + residual[j] * decay;
  }

  static void dots(const float* row, const float* q, uint32_t rank, size_t columns, float* x, size_t stride) {
    uint32_t r = 0;
    for (; r + 4 <= rank; r += 4) dots_of<4>(row, q + r * columns, columns, x + r * stride, stride);
    if (rank - r == 3) dots_of<3>(row, q + r * columns, columns, x + r * stride, stride);
    if (rank - r == 2) dots_of<2>(row, q + r * columns, columns, x + r * stride, stride);
    if (rank - r == 1) dots_of<1>(row, q + r * columns, columns, x + r * stride, stride);
  }

  // Four rows at once read and write x once.
  static void add_rows(const float* matrix, size_t rows, const float* p, size_t stride, uint32_t rank, size_t columns,
                       float* x, size_t x_stride) {
    if (rows == 4) return add_rows_of<4>(matrix, p, stride, rank, columns, x, x_stride);
    for (size_t i = 0; i < rows; ++i) add_rows_of<1>(matrix + i * columns, p + i, stride, rank, columns, x, x_stride);
  }

  static void subtract(const float* row, const float* p, size_t stride, const float* q, uint32_t rank, size_t columns,
                       float* out, bool stream) {
    float own[kMostRank];
    gather(p, stride, rank, own);
    const size_t whole = columns / kWidth * kWidth;
    if (stream)
      for (size_t j = 0; j < whole; j += kWidth)
        L::stream(L::sub(L::load(row + j), product(own, q + j, rank, columns)), out + j);
    else
      for (size_t j = 0; j < whole; j += kWidth)
        L::store(L::sub(L::load(row + j), product(own, q + j, rank, columns)), out + j);
    for (size_t j = whole; j < columns; ++j) out[j] = row[j] - product_of_one(own, q + j, rank, columns);
  }

  static void expand(float* out, float scale, const float* p, size_t stride, const float* q, uint32_t rank,
                     size_t columns) {
    float own[kMostRank];
    gather(p, stride, rank, own);
    const F by = L::set(scale);
    const size_t whole = columns / kWidth * kWidth;
    for (size_t j = 0; j < whole; j += kWidth) L::store(L::mul(product(own, q + j, rank, columns), by), out + j);
    for (size_t j = whole; j < columns; ++j) out[j] = product_of_one(own, q + j, rank, columns) * scale;
  }

  static LowRankKernels kernels(const char* name) { return {name, combine, dots, add_rows, subtract, expand}; }

 private:
  template <int R>
  static GW_BODY void dots_of(const float* row, const float* q, size_t columns, float* x, size_t stride) {
    constexpr size_t kVectors = kParts / kWidth;
    F sums[R][kVectors];
    for (int r = 0; r < R; ++r)
      for (size_t v = 0; v < kVectors; ++v) sums[r][v] = L::set(0);
    const auto add = [&](const float* from, const float* factor, size_t factor_stride) GW_LAMBDA {
      for (size_t v = 0; v < kVectors; ++v) {
        const F value = L::load(from + v * kWidth);
        for (int r = 0; r < R; ++r) {
          const F other = L::load(factor + static_cast<size_t>(r) * factor_stride + v * kWidth);
          sums[r][v] = L::add(sums[r][v], L::mul(value, other));
        }
      }
    };
    const size_t whole = columns / kParts * kParts;
    for (size_t j = 0; j < whole; j += kParts) add(row + j, q + j, columns);
    if (whole < columns) {  // the rest, filled up with zeros
      float last[kParts] = {}, others[R * kParts] = {};
      for (size_t j = whole; j < columns; ++j) {
        last[j - whole] = row[j];
        for (size_t r = 0; r < R; ++r) others[r * kParts + j - whole] = q[r * columns + j];
      }
      add(last, others, kParts);
    }
    for (int r = 0; r < R; ++r) {
      float parts[kParts];
      for (size_t v = 0; v < kVectors; ++v) L::store(sums[r][v], parts + v * kWidth);
      for (size_t half = kParts / 2; half > 0; half /= 2)
        for (size_t k = 0; k < half; ++k) parts[k] += parts[k + half];
      x[static_cast<size_t>(r) * stride] = parts[0];
    }
  }

  template <size_t kRows>
  static GW_BODY void add_rows_of(const float* matrix, const float* p, size_t stride, uint32_t rank, size_t columns,
                                  float* x, size_t x_stride) {
    const size_t whole = columns / kWidth * kWidth;
    for (uint32_t r = 0; r < rank; ++r) {
      F by[kRows];
      for (size_t i = 0; i < kRows; ++i) by[i] = L::set(p[r * stride + i]);
      float* const to = x + r * x_stride;
      for (size_t j = 0; j < whole; j += kWidth) {
        F sum = L::load(to + j);
        for (size_t i = 0; i < kRows; ++i) sum = L::add(sum, L::mul(by[i], L::load(matrix + i * columns + j)));
        L::store(sum, to + j);
      }
      for (size_t j = whole; j < columns; ++j)
        for (size_t i = 0; i < kRows; ++i) to[j] += p[r * stride + i] * matrix[i * columns + j];
    }
  }

  static GW_BODY void gather(const float* p, size_t stride, uint32_t rank, float* own) {
    for (uint32_t r = 0; r < rank; ++r) own[r] = p[r * stride];
  }
  static GW_BODY F product(const float* p, const float* q, uint32_t rank, size_t columns) {
    F sum = L::mul(L::set(p[0]), L::load(q));
    for (uint32_t r = 1; r < rank; ++r) sum = L::add(sum, L::mul(L::set(p[r]), L::load(q + r * columns)));
    return sum;
  }
  static GW_BODY float product_of_one(const float* p, const float* q, uint32_t rank, size_t columns) {
    float sum = p[0] * q[0];
    for (uint32_t r = 1; r < rank; ++r) sum += p[r] * q[r * columns];
    return sum;
  }
};
