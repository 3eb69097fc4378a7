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

// What is done to a value by itself, on a GPU too.
template <class L>
struct LevelSteps {
  using F = typename L::F;
  using U = typename L::U;

  // A magnitude as an integer, still a float.
  static GW_BODY F units(F x, Grid grid) {
    const F v = L::from_bits(L::and_u(L::bits(x), L::set_u(0x7fffffffu))), whole = L::set(0x1p23f);
    const F t = L::mul(L::mul(L::mul(v, L::set(grid.pre)), L::set(grid.grid)), L::set(kSumScale));
    return L::sub(L::add(t, whole), whole);  // to the nearest integer
  }

  // The number of the nearest level. Level i is nearest from low + rise * (i^2 - i + 1/2) on, which is where the root
  // of what is above a quarter is rounded to i.
  static GW_BODY U nearest(F units, float from, float times, uint32_t top) {
    const F u = L::mul(L::sub(units, L::set(from)), L::set(times));
    const F root = square_root(L::max(L::sub(u, L::set(0.25f)), L::set(0)));
    return L::min_u(L::as_u(L::round(root)), L::set_u(top));
  }
};

template <class L>
struct KeptLevels {
  using F = typename L::F;
  using U = typename L::U;
  using Steps = LevelSteps<L>;

  static void level_codes(const float* x, const uint32_t* indices, uint32_t k, uint32_t bits, uint32_t absmax,
                          uint32_t* scales, float* work, uint32_t* codes) {
    const uint32_t top = (1u << (bits - 1)) - 1;  // the number of the highest level
    const double count = k, total = static_cast<double>(load(x, indices, k, absmax, work));
    KeptFit fit{total / count, 0};
    if (top > 0) {
      fit = start(work, k, top);
      for (int round = 0; round < kLevelRounds; ++round) {
        choose(work, k, top, fit, codes);
        KeptSums sums;
        for (uint32_t j = 0; j < k; ++j) sums.add(codes[j], work[j]);
        refine_levels(fit, sums, count, total);
      }
    }
    choose(work, k, top, fit, codes);
    for (uint32_t j = 0; j < k; ++j) codes[j] |= float_bits(x[indices[j]]) >> 31 << (bits - 1);
    scales[0] = low_scale(fit, absmax);
    if (top > 0) scales[1] = rise_scale(fit, top, absmax);
  }

 private:
  // Magnitudes in the units of the fit; the last is repeated to the end of a vector. Returns their sum.
  static uint64_t load(const float* x, const uint32_t* indices, uint32_t k, uint32_t absmax, float* work) {
    const Grid grid = grid_for(absmax);
    for (uint32_t j = 0; j < k; ++j) work[j] = x[indices[j]];
    for (uint32_t j = k; j % L::kWidth; ++j) work[j] = work[k - 1];
    for (uint32_t j = 0; j < k; j += L::kWidth) L::store(Steps::units(L::load(work + j), grid), work + j);
    uint64_t sum = 0;
    for (uint32_t j = 0; j < k; ++j) sum += static_cast<uint32_t>(static_cast<int32_t>(work[j]));
    return sum;
  }

  static KeptFit start(const float* work, uint32_t k, uint32_t top) {
    U least = L::set_u(0xffffffffu), most = L::set_u(0);  // patterns of floats that are not negative
    for (uint32_t j = 0; j < k; j += L::kWidth) {
      const U q = L::bits(L::load(work + j));
      least = L::min_u(least, q);
      most = L::max_u(most, q);
    }
    const uint32_t lowest = ~L::reduce_max(L::xor_u(least, L::set_u(0xffffffffu)));
    return first_levels(bits_float(lowest), bits_float(L::reduce_max(most)), top);
  }

  static void choose(const float* work, uint32_t k, uint32_t top, const KeptFit& fit, uint32_t* codes) {
    const float from = fit.from(), times = fit.times();
    for (uint32_t j = 0; j < k; j += L::kWidth)
      L::store_u(Steps::nearest(L::load(work + j), from, times, top), codes + j);
  }
};
