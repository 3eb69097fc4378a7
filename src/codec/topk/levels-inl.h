// SPDX-License-Identifier: Apache-2.0
// The levels of the kept values of a tile, for any lane L. Included once per target (no include guard), after
// square_root() of its floats, one IEEE operation.
//
// What is kept of a tile lies beyond a threshold, and most of it close to that. Level i of n is low + rise * i^2: many
// levels near the threshold, few towards the largest value. Two numbers say all of them, whatever n is. They are fitted
// as k-means fits its centres, in a few rounds: each value to its nearest level, then the two numbers by least squares.
// With two levels that is k-means itself.
//
// The fit works on integers, in units of 2^-19 of the power of two at or below the largest magnitude. Their sums are
// exact in any order, and what follows from the sums is a fixed list of operations in double.

template <class L>
struct KeptLevels {
  using F = typename L::F;
  using U = typename L::U;

  static void level_codes(const float* x, const uint32_t* indices, uint32_t k, uint32_t bits, uint32_t absmax,
                          uint32_t* scales, float* work, uint32_t* codes) {
    const uint32_t top = (1u << (bits - 1)) - 1;  // the number of the highest level
    const uint64_t sum = load(x, indices, k, absmax, work);
    const double count = k, total = static_cast<double>(sum);
    double low = total / count, rise = 0;
    if (top > 0) {
      start(work, k, top, low, rise);
      for (int round = 0; round < 4; ++round) {
        choose(work, k, top, low, rise, codes);
        refine(work, codes, k, count, total, low, rise);
      }
    }
    choose(work, k, top, low, rise, codes);
    for (uint32_t j = 0; j < k; ++j) codes[j] |= float_bits(x[indices[j]]) >> 31 << (bits - 1);
    scales[0] = scale(low, absmax);
    if (top > 0) scales[1] = scale(rise * static_cast<double>(top * top), absmax);
  }

 private:
  // Magnitudes as integers, still floats; the last is repeated to the end of a vector. Returns their sum.
  static uint64_t load(const float* x, const uint32_t* indices, uint32_t k, uint32_t absmax, float* work) {
    const Grid grid = grid_for(absmax);
    const F pre = L::set(grid.pre), fine = L::set(grid.grid), units = L::set(kSumScale), whole = L::set(0x1p23f);
    const U magnitude = L::set_u(0x7fffffffu);
    for (uint32_t j = 0; j < k; ++j) work[j] = x[indices[j]];
    for (uint32_t j = k; j % L::kWidth; ++j) work[j] = work[k - 1];
    for (uint32_t j = 0; j < k; j += L::kWidth) {
      const F v = L::from_bits(L::and_u(L::bits(L::load(work + j)), magnitude));
      const F t = L::mul(L::mul(L::mul(v, pre), fine), units);
      L::store(L::sub(L::add(t, whole), whole), work + j);  // to the nearest integer
    }
    uint64_t sum = 0;
    for (uint32_t j = 0; j < k; ++j) sum += static_cast<uint32_t>(static_cast<int32_t>(work[j]));
    return sum;
  }

  // From the least to the largest magnitude. With two levels half of that, since the upper one is a mean.
  static void start(const float* work, uint32_t k, uint32_t top, double& low, double& rise) {
    U least = L::set_u(0xffffffffu), most = L::set_u(0);  // patterns of floats that are not negative
    for (uint32_t j = 0; j < k; j += L::kWidth) {
      const U q = L::bits(L::load(work + j));
      least = L::min_u(least, q);
      most = L::max_u(most, q);
    }
    const float high = bits_float(L::reduce_max(most));
    low = bits_float(~L::reduce_max(L::xor_u(least, L::set_u(0xffffffffu))));
    rise = (high - low) / (top == 1 ? 2.0 : static_cast<double>(top * top));
  }

  // The numbers of the nearest levels. Level i is nearest from low + rise * (i^2 - i + 1/2) on, which is where the root
  // of what is above a quarter is rounded to i.
  static void choose(const float* work, uint32_t k, uint32_t top, double low, double rise, uint32_t* codes) {
    const F from = L::set(static_cast<float>(low)), zero = L::set(0), quarter = L::set(0.25f);
    const F times = L::set(rise >= 0x1p-20 ? static_cast<float>(1 / rise) : 0.0f);
    const U last = L::set_u(top);
    for (uint32_t j = 0; j < k; j += L::kWidth) {
      const F u = L::mul(L::sub(L::load(work + j), from), times);
      const F root = square_root(L::max(L::sub(u, quarter), zero));
      L::store_u(L::min_u(L::as_u(L::round(root)), last), codes + j);
    }
  }

  // Least squares: the sum of (q - low - rise * i^2)^2 is least.
  static void refine(const float* work, const uint32_t* codes, uint32_t k, double count, double total, double& low,
                     double& rise) {
    uint64_t squares = 0, fourths = 0, products = 0;
    for (uint32_t j = 0; j < k; ++j) {
      const uint32_t square = codes[j] * codes[j], q = static_cast<uint32_t>(static_cast<int32_t>(work[j]));
      squares += square;
      fourths += uint64_t{square} * square;
      products += uint64_t{square} * q;
    }
    const double a = static_cast<double>(squares), b = static_cast<double>(fourths), p = static_cast<double>(products);
    const double determinant = count * b - a * a;
    if (!(determinant > 0)) return;  // all at one level
    rise = (count * p - a * total) / determinant;
    if (!(rise > 0)) rise = 0;
    low = (total - rise * a) / count;
    if (!(low > 0)) low = 0;
  }

  static uint32_t scale(double units, uint32_t absmax) {
    const uint32_t bits = float_bits(static_cast<float>(units / static_cast<double>(kSumScale) * grid_step(absmax)));
    return bits < kInfBits ? bits : kInfBits - 1;
  }
};
