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
  static void add_rows(const float* const* rows, size_t count, const float* p, size_t stride, uint32_t rank,
                       size_t columns, float* x, size_t x_stride) {
    if (count == 4) return add_rows_of<4>(rows, p, stride, rank, columns, x, x_stride);
    for (size_t i = 0; i < count; ++i) add_rows_of<1>(rows + i, p + i, stride, rank, columns, x, x_stride);
  }

  static void subtract(const float* row, const float* p, size_t stride, const float* q, uint32_t rank, size_t columns,
                       float* out, bool stream) {
    const auto put = [&](F sum, size_t j) GW_LAMBDA {
      const F left = L::sub(L::load(row + j), sum);
      stream ? L::stream(left, out + j) : L::store(left, out + j);
    };
    const auto put_one = [&](float sum, size_t j) GW_LAMBDA { out[j] = row[j] - sum; };
    for_products(p, stride, q, rank, columns, put, put_one);
  }

  static void expand(float* out, float scale, const float* p, size_t stride, const float* q, uint32_t rank,
                     size_t columns, bool stream) {
    const F by = L::set(scale);
    const auto put = [&](F sum, size_t j) GW_LAMBDA {
      const F value = L::mul(sum, by);
      stream ? L::stream(value, out + j) : L::store(value, out + j);
    };
    const auto put_one = [&](float sum, size_t j) GW_LAMBDA { out[j] = sum * scale; };
    for_products(p, stride, q, rank, columns, put, put_one);
  }

  static void copy(const float* row, size_t columns, float* out, bool stream) {
    const size_t whole = stream ? columns / kWidth * kWidth : 0;
    for (size_t j = 0; j < whole; j += kWidth) L::stream(L::load(row + j), out + j);
    for (size_t j = whole; j < columns; ++j) out[j] = row[j];
  }

  static LowRankKernels kernels(const char* name) { return {name, combine, dots, add_rows, subtract, expand, copy}; }

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
  static GW_BODY void add_rows_of(const float* const* rows, const float* p, size_t stride, uint32_t rank,
                                  size_t columns, float* x, size_t x_stride) {
    const size_t whole = columns / kWidth * kWidth;
    for (uint32_t r = 0; r < rank; ++r) {
      F by[kRows];
      for (size_t i = 0; i < kRows; ++i) by[i] = L::set(p[r * stride + i]);
      float* const to = x + r * x_stride;
      for (size_t j = 0; j < whole; j += kWidth) {
        F sum = L::load(to + j);
        for (size_t i = 0; i < kRows; ++i) sum = L::add(sum, L::mul(by[i], L::load(rows[i] + j)));
        L::store(sum, to + j);
      }
      for (size_t j = whole; j < columns; ++j)
        for (size_t i = 0; i < kRows; ++i) to[j] += p[r * stride + i] * rows[i][j];
    }
  }

  // The sum over r of p[r * stride] * q[r * columns + j] for every j, several vectors side by side.
  template <class Put, class PutOne>
  static GW_BODY void for_products(const float* p, size_t stride, const float* q, uint32_t rank, size_t columns,
                                   const Put& put, const PutOne& put_one) {
    float own[kMostRank];
    for (uint32_t r = 0; r < rank; ++r) own[r] = p[r * stride];
    size_t j = 0;
    for (; j + 4 * kWidth <= columns; j += 4 * kWidth) {
      const F first = L::set(own[0]);
      F a = L::mul(first, L::load(q + j)), b = L::mul(first, L::load(q + j + kWidth)),
        c = L::mul(first, L::load(q + j + 2 * kWidth)), d = L::mul(first, L::load(q + j + 3 * kWidth));
      for (uint32_t r = 1; r < rank; ++r) {
        const F by = L::set(own[r]);
        const float* const from = q + r * columns + j;
        a = L::add(a, L::mul(by, L::load(from)));
        b = L::add(b, L::mul(by, L::load(from + kWidth)));
        c = L::add(c, L::mul(by, L::load(from + 2 * kWidth)));
        d = L::add(d, L::mul(by, L::load(from + 3 * kWidth)));
      }
      put(a, j);
      put(b, j + kWidth);
      put(c, j + 2 * kWidth);
      put(d, j + 3 * kWidth);
    }
    for (; j + kWidth <= columns; j += kWidth) {
      F sum = L::mul(L::set(own[0]), L::load(q + j));
      for (uint32_t r = 1; r < rank; ++r) sum = L::add(sum, L::mul(L::set(own[r]), L::load(q + r * columns + j)));
      put(sum, j);
    }
    for (; j < columns; ++j) {
      float sum = own[0] * q[j];
      for (uint32_t r = 1; r < rank; ++r) sum += own[r] * q[r * columns + j];
      put_one(sum, j);
    }
  }
};
