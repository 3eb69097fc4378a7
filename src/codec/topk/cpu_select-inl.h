// SPDX-License-Identifier: Apache-2.0
// The strongest values of a tile, for any lane L. Included once per target, like cpu_driver-inl.h (no include guard).

template <class L>
struct Selection {
  using U = typename L::U;

  // A sample guesses a magnitude that a little more than k values reach; those are gathered in one pass, and the
  // k strongest of them found exactly. A guess that was too high is lowered and tried again; zero always works.
  static void select(const float* x, uint32_t elements, uint32_t k, uint32_t* indices, Scratch& scratch) {
    const U mask = L::set_u(0x7fffffffu);
    uint32_t guess = 0;
    uint32_t stride = elements / 1024;
    if (stride > 1 && k < elements / 4) {
      uint32_t* sample = scratch.codes;
      uint32_t m = 0;
      for (uint32_t i = stride / 2; i < elements; i += stride) sample[m++] = float_bits(x[i]) & 0x7fffffffu;
      const uint32_t expected = static_cast<uint32_t>(uint64_t{k} * m / elements);
      uint32_t rank = expected + expected / 4 + 4;
      rank = rank < m ? rank : m - 1;
      std::nth_element(sample, sample + rank, sample + m, std::greater<>());
      guess = sample[rank];
    }
    uint32_t found = 0;
    for (;;) {
      found = 0;
      const U least = L::set_u(guess);
      const uint32_t whole = elements / L::kWidth * L::kWidth;
      for (uint32_t i = 0; i < whole; i += L::kWidth) {
        const U magnitude = L::and_u(L::bits(L::load(x + i)), mask);
        found += static_cast<uint32_t>(L::compress_indices(L::not_less_u(magnitude, least), i, scratch.codes + found));
      }
      for (uint32_t i = whole; i < elements; ++i)
        if ((float_bits(x[i]) & 0x7fffffffu) >= guess) scratch.codes[found++] = i;
      if (found >= k) break;
      guess = guess > (8u << 23) ? guess - (1u << 23) : 0;  // half the magnitude
      if (found < k / 2) guess = 0;
    }
    uint64_t* keys = scratch.keys;  // magnitude first, then the lower index
    for (uint32_t j = 0; j < found; ++j) {
      const uint32_t i = scratch.codes[j];
      keys[j] = uint64_t{float_bits(x[i]) & 0x7fffffffu} << 32 | (0xffffffffu - i);
    }
    uint64_t least = 0;
    if (found > k) {
      std::nth_element(keys, keys + (k - 1), keys + found, std::greater<>());
      least = keys[k - 1];
    }
    uint32_t kept = 0;
    for (uint32_t j = 0; j < found; ++j) {
      const uint32_t i = scratch.codes[j];
      const uint64_t key = uint64_t{float_bits(x[i]) & 0x7fffffffu} << 32 | (0xffffffffu - i);
      if (key >= least) indices[kept++] = i;
    }
  }
};
