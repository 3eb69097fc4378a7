// SPDX-License-Identifier: Apache-2.0
// The passes of the transform on a CPU, and a unit of the codec `fft` made of them, for any lane L. Numbers lie as two
// arrays, real and imaginary. The first pass works on kWidth neighbours at once and writes them transposed, 16 results
// of one neighbour together; every later one then has at least 16 numbers in a row that are treated alike.
//
// Included once per target, after transform-inl.h (no include guard). L has, beyond the words of lane.h: load_pairs,
// store_pairs, load_reversed, store_rows, mask_bits. GW_UNROLL before a loop: its arrays shall be registers.

template <class L>
struct FftDriver {
  using F = typename L::F;
  using U = typename L::U;
  using P = FftParts<L>;
  using C = typename P::C;
  static constexpr uint32_t kWidth = L::kWidth;

  // --- passes ----------------------------------------------------------------------------------------------------

  // The first pass; load(i) gives the numbers i to i + kWidth. Where there are fewer neighbours than a vector is wide,
  // the rest of it holds whatever is there, and is not written.
  template <class Load>
  static GW_BODY void first_pass(const FftPlan& plan, float* re, float* im, Load load) {
    const uint32_t apart = plan.bins / 16;
    const float *wr = fft_table().re + plan.at[0], *wi = fft_table().im + plan.at[0];
    for (uint32_t p = 0; p < apart; p += kWidth) {
      C a[16];
      GW_UNROLL for (uint32_t i = 0; i < 16; ++i) a[i] = load(p + apart * i);
      P::template butterfly<16>(a);
      F rows[16];
      const uint32_t count = apart < kWidth ? apart : kWidth;
      GW_UNROLL for (uint32_t k = 1; k < 16; ++k) a[k] =
          P::times(a[k], L::load(wr + (k - 1) * apart + p), L::load(wi + (k - 1) * apart + p));
      GW_UNROLL for (uint32_t k = 0; k < 16; ++k) rows[k] = a[k].r;
      L::store_rows(rows, re + p * 16, count);
      GW_UNROLL for (uint32_t k = 0; k < 16; ++k) rows[k] = a[k].i;
      L::store_rows(rows, im + p * 16, count);
    }
  }

  template <int kRadix, bool kLast>
  static void pass(uint32_t left, uint32_t stride, uint32_t at, const float* re, const float* im, float* to_re,
                   float* to_im) {
    const uint32_t apart = left / kRadix;
    const float *wr = fft_table().re + at, *wi = fft_table().im + at;
    for (uint32_t p = 0; p < apart; ++p)
      for (uint32_t q = 0; q < stride; q += kWidth) {
        C a[kRadix];
        GW_UNROLL for (uint32_t i = 0; i < kRadix; ++i) {
          const uint32_t from = q + stride * (p + apart * i);
          a[i] = {L::load(re + from), L::load(im + from)};
        }
        P::template butterfly<kRadix>(a);
        GW_UNROLL for (uint32_t k = 0; k < kRadix; ++k) {
          if (!kLast && k > 0) a[k] = P::times(a[k], L::set(wr[(k - 1) * apart + p]), L::set(wi[(k - 1) * apart + p]));
          const uint32_t to = q + stride * (kRadix * p + k);
          L::store(a[k].r, to_re + to);
          L::store(a[k].i, to_im + to);
        }
      }
  }

  template <bool kLast>
  static void any_pass(const FftPlan& plan, uint32_t i, uint32_t stride, const float* re, const float* im, float* to_re,
                       float* to_im) {
    const uint32_t left = plan.bins / stride;
    switch (plan.radix[i]) {
      case 2:
        return pass<2, kLast>(left, stride, plan.at[i], re, im, to_re, to_im);
      case 4:
        return pass<4, kLast>(left, stride, plan.at[i], re, im, to_re, to_im);
      case 8:
        return pass<8, kLast>(left, stride, plan.at[i], re, im, to_re, to_im);
      default:
        return pass<16, kLast>(left, stride, plan.at[i], re, im, to_re, to_im);
    }
  }

  struct Planes {
    float *re, *im, *other_re, *other_im;
  };
  // The passes after the first, from re, im; returns where the numbers are in the end.
  static Planes later_passes(const FftPlan& plan, Planes at) {
    uint32_t stride = 16;
    for (uint32_t i = 1; i < plan.passes; ++i) {
      if (i + 1 == plan.passes)
        any_pass<true>(plan, i, stride, at.re, at.im, at.other_re, at.other_im);
      else
        any_pass<false>(plan, i, stride, at.re, at.im, at.other_re, at.other_im);
      stride *= plan.radix[i];
      at = {at.other_re, at.other_im, at.re, at.im};
    }
    return at;
  }

  // --- real values -----------------------------------------------------------------------------------------------

  static void forward(const float* x, uint32_t size, float pre, float grid, const FftWork& w) {
    const uint32_t bins = size / 2;
    const FftPlan& plan = fft_plan_of(bins);
    if (bins / 16 < kWidth) {  // the first pass reads beyond the end
      std::memcpy(w.weight, x, size * sizeof(float));
      for (uint32_t i = 0; i < 2 * kWidth; ++i) w.weight[size + i] = 0;
      x = w.weight;
    }
    // An even number of passes ends where it began, an odd one in the other place; bins shall end up in re, im.
    Planes at = plan.passes % 2 ? Planes{w.re1, w.im1, w.re, w.im} : Planes{w.re, w.im, w.re1, w.im1};
    const F p = L::set(pre), g = L::set(grid);
    first_pass(plan, at.re, at.im, [&](uint32_t i) {
      C a;
      L::load_pairs(x + 2 * i, a.r, a.i);
      return C{L::mul(L::mul(a.r, p), g), L::mul(L::mul(a.i, p), g)};
    });
    at = later_passes(plan, at);
    at.re[bins] = at.re[0];
    at.im[bins] = at.im[0];
    split<true>(plan, at.re, at.im, at.other_re, at.other_im, w.weight);
    at.other_im[0] = 2 * (at.re[0] - at.im[0]);
    const float r = at.other_re[0], i = at.other_im[0];
    w.weight[0] = 0.5f * (r * r + i * i);
  }

  template <bool kForward>
  static GW_BODY void split(const FftPlan& plan, const float* re, const float* im, float* to_re, float* to_im,
                            float* weight) {
    const float *c = fft_table().re + plan.split, *s = fft_table().im + plan.split;
    for (uint32_t j = 0; j < plan.bins; j += kWidth) {
      const uint32_t mirror = plan.bins - j - kWidth + 1;
      const C a{L::load(re + j), L::load(im + j)}, b{L::load_reversed(re + mirror), L::load_reversed(im + mirror)};
      const C out = kForward ? P::real_of(a, b, L::load(c + j), L::load(s + j))
                             : P::complex_of(a, b, L::load(c + j), L::load(s + j));
      L::store(out.r, to_re + j);
      L::store(out.i, to_im + j);
      if constexpr (kForward) L::store(P::weight(out), weight + j);
    }
  }

  static void inverse(uint32_t size, float scale, float* out, const FftWork& w) {
    const uint32_t bins = size / 2;
    const FftPlan& plan = fft_plan_of(bins);
    w.re[bins] = w.im[bins] = 0;
    split<false>(plan, w.re, w.im, w.re1, w.im1, nullptr);
    w.re1[0] = w.re[0] + w.im[0];
    w.im1[0] = w.re[0] - w.im[0];
    for (uint32_t i = 0; i < kWidth; ++i) w.re1[bins + i] = w.im1[bins + i] = 0;  // read, not used
    // With the planes exchanged the transform is the inverse one, its planes exchanged.
    const float *from_re = w.im1, *from_im = w.re1;
    first_pass(plan, w.im, w.re, [&](uint32_t i) { return C{L::load(from_re + i), L::load(from_im + i)}; });
    const Planes at = later_passes(plan, {w.im, w.re, w.im1, w.re1});
    const F times = L::set(scale);
    for (uint32_t i = 0; i < bins; i += kWidth)
      L::store_pairs(P::clamp(L::mul(L::load(at.im + i), times), kMost),
                     P::clamp(L::mul(L::load(at.re + i), times), kMost), out + 2 * i);
  }
  static constexpr float kMost = 0x1.fffffep127f;

  // --- units -----------------------------------------------------------------------------------------------------

  static GW_BODY uint32_t top_of(const float* x, uint32_t n) {  // the largest magnitude's pattern
    const U mask = L::set_u(0x7fffffffu);
    U top0 = L::set_u(0), top1 = top0;
    uint32_t i = 0;
    for (; i + 2 * kWidth <= n; i += 2 * kWidth) {
      top0 = L::max_u(top0, L::and_u(L::bits(L::load(x + i)), mask));
      top1 = L::max_u(top1, L::and_u(L::bits(L::load(x + i + kWidth)), mask));
    }
    for (; i < n; i += kWidth) top0 = L::max_u(top0, L::and_u(L::bits(L::load(x + i)), mask));
    return L::reduce_max(L::max_u(top0, top1));
  }

  static GW_BODY uint32_t reached(const float* weight, uint32_t bins, uint32_t least) {
    const U t = L::set_u(least), one = L::set_u(1), zero = L::set_u(0);
    U sum0 = zero, sum1 = zero;
    for (uint32_t i = 0; i < bins; i += 2 * kWidth) {
      sum0 = L::add_u(sum0, L::select_u(L::not_less_u(L::bits(L::load(weight + i)), t), one, zero));
      sum1 = L::add_u(sum1, L::select_u(L::not_less_u(L::bits(L::load(weight + i + kWidth)), t), one, zero));
    }
    return static_cast<uint32_t>(L::reduce_add(L::add_u(sum0, sum1)));
  }

  static void choose(const float* weight, uint32_t bins, uint32_t kept, int power, uint32_t& memory, uint32_t* bitmap) {
    const uint32_t top = top_of(weight, bins);
    const FftThreshold threshold = fft_threshold(bins, kept, top, fft_guess(memory, top, power),
                                                 [&](uint32_t t) { return reached(weight, bins, t); });
    memory = fft_memory(threshold, power);
    const U least = L::set_u(threshold.least);
    for (uint32_t word = 0; word < bins / 32; ++word) {
      uint32_t bits = 0;
      for (uint32_t i = 0; i < 32; i += kWidth)
        bits |= L::mask_bits(L::not_less_u(L::bits(L::load(weight + word * 32 + i)), least)) << i;
      bitmap[word] = bits;
    }
    uint32_t equals = threshold.equals;
    for (uint32_t j = 0; equals > 0; ++j)
      if (float_bits(weight[j]) == threshold.least - 1) {
        bitmap[j / 32] |= 1u << (j % 32);
        --equals;
      }
  }

  // Calls visit(number, bin) for the bins of a bitmap.
  template <class Visit>
  static GW_BODY void for_kept(const uint32_t* bitmap, uint32_t bins, Visit visit) {
    uint32_t n = 0;
    for (uint32_t word = 0; word < bins / 32; ++word)
      for (uint32_t bits = bitmap[word]; bits; bits &= bits - 1)
        visit(n++, word * 32 + static_cast<uint32_t>(std::countr_zero(bits)));
  }

  static void encode(const FftScheme& scheme, const RangeFloat& range, const float* x, uint32_t size, uint32_t* words,
                     float* rest, float unscale, uint32_t& memory, const FftWork& w) {
    const uint32_t bins = size / 2, kept = fft_kept(scheme, bins), code_words = fft_code_words(scheme, kept);
    uint32_t *bitmap = words, *codes = words + bins / 32, *side = codes + code_words;
    const uint32_t top = top_of(x, size);
    if (top >= kInfBits) {
      for (uint32_t* word = words; word < side; ++word) *word = 0;
      *side = kMarker;
      if (rest)
        for (uint32_t i = 0; i < size; ++i) rest[i] = bits_float(kMarker);
      return;
    }
    const Grid grid = grid_for(top);
    forward(x, size, grid.pre, grid.grid, w);
    choose(w.weight, bins, kept, fft_power(grid), memory, bitmap);

    for_kept(bitmap, bins, [&](uint32_t n, uint32_t bin) {
      w.pairs[2 * n] = w.re[bin];
      w.pairs[2 * n + 1] = w.im[bin];
    });
    const uint32_t whole = (2 * kept + kWidth - 1) / kWidth * kWidth;
    for (uint32_t i = 2 * kept; i < whole; ++i) w.pairs[i] = 0;
    const float most = bits_float(top_of(w.pairs, whole));
    const FftScale scale = fft_scale(most, size, fft_power(grid));
    *side = float_bits(scale.side);
    const F times = L::set(scale.times);
    if (scheme.bits == 32) {
      for (uint32_t i = 0; i < whole; i += kWidth)
        L::store(P::clamp(L::mul(L::load(w.pairs + i), times), 1.0f), w.pairs + i);
      std::memcpy(codes, w.pairs, 2 * kept * sizeof(float));
    } else {
      for (uint32_t i = 0; i < whole; i += kWidth) {
        const U code = RangeLanes<L>::encode(L::mul(L::load(w.pairs + i), times), range);
        L::store_u(code, w.codes + i);
        if (rest) L::store(RangeLanes<L>::decode(code, range), w.pairs + i);
      }
      pack(w.codes, kept, scheme.bits, codes);
    }
    if (!rest) return;
    spread(bitmap, bins, w);
    float* decoded = w.pairs;  // their parts are in their bins by now; `rest` may be where the values are
    inverse(size, scale.side, decoded, w);
    const F back = L::set(unscale);
    for (uint32_t i = 0; i < size; i += kWidth)
      L::store(L::mul(L::sub(L::load(x + i), L::load(decoded + i)), back), rest + i);
  }

  static GW_BODY void pack(const uint32_t* codes, uint32_t pairs, uint32_t bits, uint32_t* words) {
    uint64_t buffer = 0;
    uint32_t filled = 0;
    for (uint32_t j = 0; j < pairs; ++j) {
      buffer |= (uint64_t{codes[2 * j]} | uint64_t{codes[2 * j + 1]} << bits) << filled;
      filled += 2 * bits;
      if (filled >= 32) {
        *words++ = static_cast<uint32_t>(buffer);
        buffer >>= 32;
        filled -= 32;
      }
    }
    if (filled) *words = static_cast<uint32_t>(buffer);
  }

  // The kept parts in w.pairs to their bins, zero elsewhere.
  static GW_BODY void spread(const uint32_t* bitmap, uint32_t bins, const FftWork& w) {
    const F zero = L::set(0.0f);
    for (uint32_t i = 0; i < bins; i += kWidth) {
      L::store(zero, w.re + i);
      L::store(zero, w.im + i);
    }
    for_kept(bitmap, bins, [&](uint32_t n, uint32_t bin) {
      w.re[bin] = w.pairs[2 * n];
      w.im[bin] = w.pairs[2 * n + 1];
    });
  }

  static void decode(const FftScheme& scheme, const RangeFloat& range, const uint32_t* words, uint32_t size, float* out,
                     const FftWork& w) {
    const uint32_t bins = size / 2, kept = fft_kept(scheme, bins);
    const uint32_t *bitmap = words, *codes = words + bins / 32, *side = codes + fft_code_words(scheme, kept);
    if (*side == kMarker) {
      for (uint32_t i = 0; i < size; ++i) out[i] = bits_float(kMarker);
      return;
    }
    if (scheme.bits == 32) {
      std::memcpy(w.pairs, codes, 2 * kept * sizeof(float));
    } else {
      const uint32_t bits = scheme.bits;
      const uint64_t mask = (uint64_t{1} << bits) - 1;
      for (uint32_t j = 0; j < kept;
           ++j) {  // the word after the last code is the side value, so a pair of words can be read
        const uint32_t at = j * 2 * bits;
        const uint64_t pair = (codes[at / 32] | uint64_t{codes[at / 32 + 1]} << 32) >> (at % 32);
        w.codes[2 * j] = static_cast<uint32_t>(pair & mask);
        w.codes[2 * j + 1] = static_cast<uint32_t>(pair >> bits & mask);
      }
      const uint32_t whole = (2 * kept + kWidth - 1) / kWidth * kWidth;
      for (uint32_t i = 2 * kept; i < whole; ++i) w.codes[i] = 0;
      for (uint32_t i = 0; i < whole; i += kWidth)
        L::store(RangeLanes<L>::decode(L::load_u(w.codes + i), range), w.pairs + i);
    }
    spread(bitmap, bins, w);
    inverse(size, bits_float(*side), out, w);
  }

  static FftKernels kernels(const char* name) { return {name, forward, inverse, encode, decode}; }
};
