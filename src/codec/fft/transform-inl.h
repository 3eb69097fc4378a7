// SPDX-License-Identifier: Apache-2.0
// The transform over lanes: butterflies, the step between complex and real, and the search for the weight of the last
// bin that is kept. The passes of the CPU (cpu-inl.h) and of the GPU (cuda_team.cuh) are made of these; they may visit
// things in another order, but the operations are these, each rounded by itself.
//
// Included once per target (no include guard); GW_BODY is how that place spells "inline", GW_QUOTIENT a division that
// need not be exact.

template <class L>
struct FftParts {
  using F = typename L::F;
  using U = typename L::U;
  struct C {
    F r, i;
  };

  static GW_BODY C times(C a, F wr, F wi) {
    return {L::sub(L::mul(a.r, wr), L::mul(a.i, wi)), L::add(L::mul(a.r, wi), L::mul(a.i, wr))};
  }

  // In place, forward (exp(-2 pi i / 4) = -i); outputs in order.
  static GW_BODY void four(C& a, C& b, C& c, C& d) {
    const C p{L::add(a.r, c.r), L::add(a.i, c.i)}, m{L::sub(a.r, c.r), L::sub(a.i, c.i)};
    const C q{L::add(b.r, d.r), L::add(b.i, d.i)}, n{L::sub(b.r, d.r), L::sub(b.i, d.i)};
    a = {L::add(p.r, q.r), L::add(p.i, q.i)};
    b = {L::add(m.r, n.i), L::sub(m.i, n.r)};
    c = {L::sub(p.r, q.r), L::sub(p.i, q.i)};
    d = {L::sub(m.r, n.i), L::add(m.i, n.r)};
  }
  static GW_BODY void two(C& a, C& b) {
    const C p{L::add(a.r, b.r), L::add(a.i, b.i)};
    b = {L::sub(a.r, b.r), L::sub(a.i, b.i)};
    a = p;
  }

  // By exp(-2 pi i j / 8), j = 1, 2, 3.
  static GW_BODY C eighth1(C a) {
    const F h = L::set(0x1.6a09e6p-1f);
    return {L::mul(L::add(a.r, a.i), h), L::mul(L::sub(a.i, a.r), h)};
  }
  static GW_BODY C eighth2(C a) { return {a.i, L::sub(L::set(0.0f), a.r)}; }
  static GW_BODY C eighth3(C a) {
    return {L::mul(L::sub(a.i, a.r), L::set(0x1.6a09e6p-1f)), L::mul(L::add(a.r, a.i), L::set(-0x1.6a09e6p-1f))};
  }

  template <int kRadix>
  static GW_BODY void butterfly(C (&a)[kRadix]) {
    if constexpr (kRadix == 2) {
      two(a[0], a[1]);
    } else if constexpr (kRadix == 4) {
      four(a[0], a[1], a[2], a[3]);
    } else if constexpr (kRadix == 8) {
      two(a[0], a[4]);
      two(a[1], a[5]);
      two(a[2], a[6]);
      two(a[3], a[7]);
      a[5] = eighth1(a[5]);
      a[6] = eighth2(a[6]);
      a[7] = eighth3(a[7]);
      four(a[0], a[1], a[2], a[3]);
      four(a[4], a[5], a[6], a[7]);
      const C b1 = a[1], b2 = a[2], b3 = a[3];
      a[1] = a[4];
      a[2] = b1;
      a[3] = a[5];
      a[4] = b2;
      a[5] = a[6];
      a[6] = b3;
    } else {
      static_assert(kRadix == 16);
      four(a[0], a[4], a[8], a[12]);
      four(a[1], a[5], a[9], a[13]);
      four(a[2], a[6], a[10], a[14]);
      four(a[3], a[7], a[11], a[15]);
      const F c = L::set(0x1.d906bcp-1f), s = L::set(0x1.87de2ap-2f);  // of an eighth of pi
      const F minus_c = L::set(-0x1.d906bcp-1f), minus_s = L::set(-0x1.87de2ap-2f);
      a[5] = times(a[5], c, minus_s);
      a[9] = eighth1(a[9]);
      a[13] = times(a[13], s, minus_c);
      a[6] = eighth1(a[6]);
      a[10] = eighth2(a[10]);
      a[14] = eighth3(a[14]);
      a[7] = times(a[7], s, minus_c);
      a[11] = eighth3(a[11]);
      a[15] = times(a[15], minus_c, s);
      four(a[0], a[1], a[2], a[3]);
      four(a[4], a[5], a[6], a[7]);
      four(a[8], a[9], a[10], a[11]);
      four(a[12], a[13], a[14], a[15]);
      exchange(a[1], a[4]);
      exchange(a[2], a[8]);
      exchange(a[3], a[12]);
      exchange(a[6], a[9]);
      exchange(a[7], a[13]);
      exchange(a[11], a[14]);
    }
  }
  static GW_BODY void exchange(C& a, C& b) {
    const C t = a;
    a = b;
    b = t;
  }

  // Bin j of the real transform, doubled, from numbers j and bins - j of the complex one (c, s: the table's split). Bin
  // 0 comes out with its first part only; the second is twice the difference of number 0's parts.
  static GW_BODY C real_of(C a, C b, F c, F s) {
    const F er = L::add(a.r, b.r), ei = L::sub(a.i, b.i), fr = L::sub(a.r, b.r), fi = L::add(a.i, b.i);
    return {L::add(er, L::sub(L::mul(c, fi), L::mul(s, fr))), L::sub(ei, L::add(L::mul(c, fr), L::mul(s, fi)))};
  }
  // The way back: number j of the complex transform from bins j and bins - j. Number 0 is sum and difference of bin 0's
  // parts.
  static GW_BODY C complex_of(C a, C b, F c, F s) {
    const F er = L::add(a.r, b.r), ei = L::sub(a.i, b.i), fr = L::sub(a.r, b.r), fi = L::add(a.i, b.i);
    return {L::sub(er, L::add(L::mul(s, fr), L::mul(c, fi))), L::add(ei, L::sub(L::mul(c, fr), L::mul(s, fi)))};
  }

  // What a bin counts when the strongest are chosen; of bin 0, whose parts have no mirror image, half of this.
  static GW_BODY F weight(C a) { return L::add(L::mul(a.r, a.r), L::mul(a.i, a.i)); }

  static GW_BODY F clamp(F x, float limit) { return L::max(L::min(x, L::set(limit)), L::set(-limit)); }
};

// Weights at or above `least` are kept, and of those exactly one below it, the first `equals`; as bit patterns.
struct FftThreshold {
  uint32_t least, equals;
};

// count(t) is how many of `bins` weights reach t; `top` is the largest, `guess` any pattern to begin with. Where the
// search goes through depends on the guess, where it ends does not: if some t is reached by exactly `kept` weights, any
// such t chooses the same bins.
template <class Count>
GW_BODY FftThreshold fft_threshold(uint32_t bins, uint32_t kept, uint32_t top, uint32_t guess, Count count) {
  uint32_t low = 0, high = top + 1, at_low = bins, at_high = 0;  // how many reach low: at least kept; high: fewer
  if (kept >= bins) return {0, 0};
  uint32_t t = guess < top ? guess : top, step = 1u << 20, tries = 0;
  if (t == 0) t = top - (top >> 5);
  bool below = false, above = false;  // whether low and high are weights that were counted
  while (high - low > 1) {
    if (t <= low) t = low + 1;
    if (t >= high) t = high - 1;
    const uint32_t reached = count(t);
    if (reached == kept) return {t, 0};
    if (reached > kept) {
      low = t;
      at_low = reached;
      below = true;
    } else {
      high = t;
      at_high = reached;
      above = true;
    }
    if (!below) {
      t = high > step ? high - step : 0;
      step *= 4;
    } else if (!above) {
      t = high - low > step ? low + step : high;
      step *= 4;
    } else if (++tries % 3 == 0) {
      t = low + (high - low) / 2;
    } else {
      const float share = GW_QUOTIENT(static_cast<float>(at_low - kept), static_cast<float>(at_low - at_high));
      t = low + static_cast<uint32_t>(static_cast<float>(high - low) * share);
    }
  }
  return {high, kept - at_high};
}

// The power of two that values are multiplied by before the transform, pre * grid, as an exponent.
GW_BODY int fft_power(Grid g) {
  const uint32_t exponent = float_bits(g.grid) >> 23;  // 0: the subnormal 2^-127
  return (exponent ? static_cast<int>(exponent) - 127 : -127) + (g.pre == 1.0f ? 0 : 100);
}

// Where to look first for a chunk's threshold, and what to remember of it for the next: weights as if nothing had been
// multiplied. 0: nothing is known.
GW_BODY uint32_t fft_guess(uint32_t memory, uint32_t top, int power) {
  const uint32_t t = memory ? memory + (static_cast<uint32_t>(2 * power) << 23) : top - (2u << 23);
  return t < top ? t : top;
}
GW_BODY uint32_t fft_memory(FftThreshold threshold, int power) {
  return threshold.least - (static_cast<uint32_t>(2 * power) << 23);
}

// What the kept parts are multiplied by, and what the receiver multiplies by; `most` is the largest of them. Bins are
// doubled, and the inverse is not normalised: hence 2 * size.
struct FftScale {
  float times, side;
};
GW_BODY FftScale fft_scale(float most, uint32_t size, int power) {
  if (most == 0.0f) return {0.0f, 0.0f};
  // Exact but for the last step, which may round to a subnormal.
  int twice = 1;
  while (1u << twice < 2 * size) ++twice;
  const float side = static_cast<float>(static_cast<double>(most) * fft_power_of_two(-power - twice));
  return {1.0f / most, float_bits(side) < kInfBits ? side : 0x1.fffffep127f};
}
