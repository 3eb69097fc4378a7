// SPDX-License-Identifier: Apache-2.0
// The strongest values of a tile, for any lane L. Included once per target (no include guard).

template <class L>
struct TopkLanes {
  using U = typename L::U;

  // A sample guesses a magnitude that a little more than k values reach. Those are gathered in one pass, and the k
  // strongest of them are found exactly. A guess that was too high is lowered and tried again; zero always works.
  static void select(const float* x, uint32_t elements, uint32_t k, uint32_t* indices, Scratch& scratch) {
    uint32_t guess = guess_from_sample(x, elements, k, scratch.codes), found = 0;
    while ((found = gather(x, elements, guess, scratch.codes)) < k) {
      guess = guess > (8u << 23) ? guess - (1u << 23) : 0;  // half the magnitude
      if (found < k / 2) guess = 0;
    }
    uint64_t* keys = scratch.keys;
    for (uint32_t j = 0; j < found; ++j) keys[j] = key_of(x, scratch.codes[j]);
    uint64_t least = 0;
    if (found > k) {
      std::nth_element(keys, keys + (k - 1), keys + found, std::greater<>());
      least = keys[k - 1];
    }
    uint32_t kept = 0;
    for (uint32_t j = 0; j < found; ++j) {
      const uint32_t i = scratch.codes[j];
      if (key_of(x, i) >= least) indices[kept++] = i;
    }
  }

  static TopkKernels kernels(const char* name) { return {name, select, KeptLevels<L>::level_codes}; }

 private:
  // The order in which elements are chosen: the larger magnitude first, then the lower index.
  static uint64_t key_of(const float* x, uint32_t i) {
    return uint64_t{float_bits(x[i]) & 0x7fffffffu} << 32 | (0xffffffffu - i);
  }

  // About a thousand values are looked at. Where that is no saving, or where so much is kept that a sample tells
  // little, everything is gathered.
  static uint32_t guess_from_sample(const float* x, uint32_t elements, uint32_t k, uint32_t* sample) {
    const uint32_t stride = elements / 1024;
    if (stride <= 1 || k >= elements / 4) return 0;
    uint32_t m = 0;
    for (uint32_t i = stride / 2; i < elements; i += stride) sample[m++] = float_bits(x[i]) & 0x7fffffffu;
    const uint32_t expected = static_cast<uint32_t>(uint64_t{k} * m / elements);
    uint32_t rank = expected + expected / 4 + 4;
    rank = rank < m ? rank : m - 1;
    std::nth_element(sample, sample + rank, sample + m, std::greater<>());
    return sample[rank];
  }

  // The indices of the values whose magnitude reaches `least`, in order; returns how many there are.
  static uint32_t gather(const float* x, uint32_t elements, uint32_t least, uint32_t* indices) {
    const U mask = L::set_u(0x7fffffffu), bound = L::set_u(least);
    uint32_t found = 0;
    const uint32_t whole = elements / L::kWidth * L::kWidth;
    for (uint32_t i = 0; i < whole; i += L::kWidth) {
      const U magnitude = L::and_u(L::bits(L::load(x + i)), mask);
      found += static_cast<uint32_t>(L::compress_indices(L::not_less_u(magnitude, bound), i, indices + found));
    }
    for (uint32_t i = whole; i < elements; ++i)
      if ((float_bits(x[i]) & 0x7fffffffu) >= least) indices[found++] = i;
    return found;
  }
};
