// SPDX-License-Identifier: Apache-2.0
// The CPU driver, for any body B and any lane L: random bits, packing, tails and checksums here; loading, feedback and
// statistics in the files it includes. Included once per target (no include guard); GW_BODY is how that place spells
// "inline".
//
// A block is a grid of 32 rows x 32 lanes: element i stands in row i / 32, lane i % 32. The codes of one lane, row
// after row, form a string of 32 * bits bits = `bits` words; word q of lane l is word q * 32 + l of the block. So
// packing needs shifts and ors within lanes only, whatever the vector's width.

// Each of these needs the ones before it.
// clang-format off
#include "device/cpu_load-inl.h"
#include "device/cpu_stats-inl.h"
#include "device/cpu_pack-inl.h"
// clang-format on

template <class L>
struct Driver {
  using F = typename L::F;
  using U = typename L::U;
  using Access = TensorAccess<L>;
  using Stats = BlockStats<L>;

  // --- one block -----------------------------------------------------------------------------------------------

  // What the random bits of a block come from: block_key() and rank_mask() of core/random.h.
  struct Draw {
    uint64_t key;
    uint32_t mask;
  };

  // random_word(), the counter already keyed, with the rank's mask.
  static GW_BODY U random(U counter, U key1, U mask) {
    U x = counter;
    x = L::xor_u(x, L::template shr<16>(x));
    x = L::add_u(L::mul_u(x, L::set_u(0x7feb352du)), key1);
    x = L::xor_u(x, L::template shr<15>(x));
    x = L::mul_u(x, L::set_u(0x846ca68bu));
    return L::xor_u(L::xor_u(x, L::template shr<16>(x)), mask);
  }

  // Vectors that make a line of the cache, where they are one or two.
  static constexpr int kLineVectors = sizeof(F) == 64 ? 1 : sizeof(F) == 32 ? 2 : 0;

  // What the rows of one group of lanes share.
  struct Rows {
    const float* x;
    float* residual;
    const UnitParams* params;  // [1] or [32]
    float unscale;
    uint32_t* words;
    uint32_t lane;
    bool nearest;
    bool stream;  // the residual
    uint32_t row;
    U counter, key1, mask, rnd, word;
  };

  // After so many rows (an even number) the codes of a lane end at the end of a word: the part that is unrolled.
  template <class B>
  static constexpr int kPeriod = B::kCodeBits % 2    ? 32
                                 : B::kCodeBits % 4  ? 16
                                 : B::kCodeBits == 4 ? 8
                                 : B::kCodeBits == 8 ? 4
                                                     : 2;

  // kOne: one unit, not tiny; else parameters row by row.
  template <class B, bool kOne, bool kFeedback, int kRow>
  static GW_BODY void encode_row(Rows& r) {
    constexpr int kBits = B::kCodeBits, kPlace = kRow * kBits % 32, kWord = kRow * kBits / 32;
    const uint32_t row = r.row + kRow;
    const UnitParams& p = r.params[kOne ? 0 : row];
    U rnd = r.word;  // any value: bodies without chance ignore it
    if constexpr (B::kRandom) {
      if constexpr (kRow % 2 == 0) {
        if (!r.nearest) r.rnd = random(r.counter, r.key1, r.mask);
        r.counter = L::add_u(r.counter, L::set_u(32 * kWeyl));
        rnd = L::and_u(r.rnd, L::set_u(0xffffu));
      } else {
        rnd = L::template shr<16>(r.rnd);
      }
    }
    const F x = L::load(r.x + row * 32 + r.lane);
    const U code = B::template encode<L, !kOne>(x, p, rnd);
    if constexpr (kFeedback) {
      const F left = L::mul(L::sub(x, B::template decode<L>(code, p)), L::set(r.unscale));
      if (kLineVectors && r.stream)
        L::stream(left, r.residual + row * 32 + r.lane);
      else
        L::store(left, r.residual + row * 32 + r.lane);
    }
    if constexpr (kPlace == 0)
      r.word = code;
    else
      r.word = L::or_u(r.word, L::template shl<kPlace>(code));
    if constexpr (kPlace + kBits >= 32) L::store_u(r.word, r.words + kWord * 32 + r.lane);
    if constexpr (kPlace + kBits > 32) r.word = L::template shr<32 - kPlace>(code);
  }

  template <class B, bool kOne, bool kFeedback, int... kRow>
  static GW_BODY void encode_period(Rows& r, std::integer_sequence<int, kRow...>) {
    (encode_row<B, kOne, kFeedback, kRow>(r), ...);
  }

  // Row by row, two groups of lanes side by side.
  template <class B, bool kOne, int... kRow>
  static GW_BODY void encode_two(Rows& r, Rows& t, std::integer_sequence<int, kRow...>) {
    ((encode_row<B, kOne, true, kRow>(r), encode_row<B, kOne, true, kRow>(t)), ...);
  }

  template <class B, bool kOne, bool kFeedback>
  static void encode_full(const float* x, float* residual, const UnitParams* params, float unscale, Draw draw,
                          const Scheme& scheme, bool stream, uint32_t* codes, uint32_t* words) {
    if constexpr (B::kCodeBits == 0) {
      make_codes<B, kOne, kFeedback>(x, residual, params, unscale, draw, scheme.nearest, kLane, codes);
      Packing<L>::pack_block(scheme.bits, codes, words);
    } else {
      encode_fused<B, kOne, kFeedback>(x, residual, params, unscale, draw, scheme.nearest, stream, words);
    }
  }

  static GW_BODY Rows rows(const float* x, float* residual, const UnitParams* params, float unscale, Draw draw,
                           bool nearest, bool stream, uint32_t* words, uint32_t lane) {
    Rows r{x, residual, params, unscale, words, lane, nearest, stream, 0, {}, {}, {}, {}, {}};
    r.counter = L::add_u(L::mul_u(L::iota(lane), L::set_u(kWeyl)), L::set_u(static_cast<uint32_t>(draw.key)));
    r.key1 = L::set_u(static_cast<uint32_t>(draw.key >> 32));
    r.mask = L::set_u(draw.mask);
    r.rnd = L::set_u(0x80008000u);
    r.word = L::set_u(0);
    return r;
  }

  // Packed as they are made, without a store in between.
  template <class B, bool kOne, bool kFeedback>
  static void encode_fused(const float* x, float* residual, const UnitParams* params, float unscale, Draw draw,
                           bool nearest, bool stream, uint32_t* words) {
    if constexpr (kFeedback && kLineVectors == 2) {
      if (stream) return encode_lines<B, kOne>(x, residual, params, unscale, draw, nearest, words);
    }
    for (uint32_t lane = 0; lane < kLane; lane += L::kWidth) {
      Rows r = rows(x, residual, params, unscale, draw, nearest, stream, words, lane);
      for (; r.row < 32; r.row += kPeriod<B>) {
        encode_period<B, kOne, kFeedback>(r, std::make_integer_sequence<int, kPeriod<B>>());
        r.words += kPeriod<B> * B::kCodeBits;  // as many words a lane as the period fills, times 32 lanes
      }
    }
  }

  // The same where two vectors make a line: its halves are streamed one after the other. With so much at hand at once
  // registers run short, which takes longer where nothing is streamed.
  template <class B, bool kOne>
  static void encode_lines(const float* x, float* residual, const UnitParams* params, float unscale, Draw draw,
                           bool nearest, uint32_t* words) {
    for (uint32_t lane = 0; lane < kLane; lane += 2 * L::kWidth) {
      Rows r = rows(x, residual, params, unscale, draw, nearest, true, words, lane),
           t = rows(x, residual, params, unscale, draw, nearest, true, words, lane + L::kWidth);
      for (; r.row < 32; r.row += kPeriod<B>, t.row += kPeriod<B>) {
        encode_two<B, kOne>(r, t, std::make_integer_sequence<int, kPeriod<B>>());
        r.words += kPeriod<B> * B::kCodeBits;
        t.words += kPeriod<B> * B::kCodeBits;
      }
    }
  }

  // The codes of the first rows of a block, one a word.
  template <class B, bool kOne, bool kFeedback>
  static void make_codes(const float* x, float* residual, const UnitParams* params, float unscale, Draw draw,
                         bool nearest, uint32_t rows, uint32_t* codes) {
    const U key0 = L::set_u(static_cast<uint32_t>(draw.key)), key1 = L::set_u(static_cast<uint32_t>(draw.key >> 32)),
            mask = L::set_u(draw.mask);
    for (uint32_t row = 0; row < rows; row += 2)
      for (uint32_t lane = 0; lane < kLane; lane += L::kWidth) {
        U rnd = L::set_u(0x80008000u);
        if (B::kRandom && !nearest)
          rnd = random(L::add_u(L::mul_u(L::iota(row / 2 * 32 + lane), L::set_u(kWeyl)), key0), key1, mask);
        for (uint32_t r = row; r < row + 2 && r < rows; ++r, rnd = L::template shr<16>(rnd)) {
          const UnitParams& p = params[kOne ? 0 : r];
          const F value = L::load(x + r * 32 + lane);
          const U code = B::template encode<L, !kOne>(value, p, L::and_u(rnd, L::set_u(0xffffu)));
          if constexpr (kFeedback)
            L::store(L::mul(L::sub(value, B::template decode<L>(code, p)), L::set(unscale)), residual + r * 32 + lane);
          L::store_u(code, codes + r * 32 + lane);
        }
      }
  }

  // The last, partial block: codes first, then packed one after another from bit 0 on.
  template <class B>
  static void encode_tail(const float* x, float* residual, const UnitParams* params, float unscale, Draw draw,
                          bool nearest, uint64_t n, int bits, uint32_t* codes, uint32_t* words) {
    const uint32_t rows = static_cast<uint32_t>(div_up(n, kLane));
    if (residual)
      make_codes<B, false, true>(x, residual, params, unscale, draw, nearest, rows, codes);
    else
      make_codes<B, false, false>(x, residual, params, unscale, draw, nearest, rows, codes);
    Packing<L>::pack_tail(codes, n, bits, words);
  }

  template <class B, bool kStream, int kRow>
  static GW_BODY void decode_row(const uint32_t* words, const UnitParams& p, float* out, U& seen) {
    constexpr int kBits = B::kCodeBits, kPlace = kRow * kBits % 32, kWord = kRow * kBits / 32;
    for (uint32_t lane = 0; lane < kLane; lane += L::kWidth) {
      U code = L::template shr<kPlace>(L::load_u(words + kWord * 32 + lane));
      if constexpr (kPlace + kBits > 32)
        code = L::or_u(code, L::template shl<32 - kPlace>(L::load_u(words + (kWord + 1) * 32 + lane)));
      if constexpr (kPlace + kBits != 32 && kBits < 32)
        code = L::and_u(code, L::set_u((uint32_t{1} << (kBits % 32)) - 1));
      seen = B::template check<L>(seen, code);
      const F value = B::template decode<L>(code, p);
      if constexpr (kStream)
        L::stream(value, out + kRow * 32 + lane);
      else
        L::store(value, out + kRow * 32 + lane);
    }
  }

  template <class B, bool kOne, bool kStream, int... kRow>
  static GW_BODY void decode_period(const uint32_t* words, const UnitParams* params, float* out, U& seen,
                                    std::integer_sequence<int, kRow...>) {
    (decode_row<B, kStream, kRow>(words, params[kOne ? 0 : kRow], out, seen), ...);
  }

  template <class B, bool kOne, bool kStream>
  static void decode_full(const uint32_t* words, const UnitParams* params, int bits, uint32_t* codes, float* out,
                          U& seen) {
    if constexpr (B::kCodeBits == 0) {
      Packing<L>::unpack_block(bits, words, codes);
      return decode_codes<B, kOne, kStream>(codes, params, kLane, out, seen);
    } else {
      decode_fused<B, kOne, kStream>(words, params, out, seen);
    }
  }

  template <class B, bool kOne, bool kStream>
  static void decode_fused(const uint32_t* words, const UnitParams* params, float* out, U& seen) {
    for (int row = 0; row < 32; row += kPeriod<B>)
      decode_period<B, kOne, kStream>(words + row * B::kCodeBits, params + (kOne ? 0 : row), out + row * 32, seen,
                                      std::make_integer_sequence<int, kPeriod<B>>());
  }

  template <class B>
  static uint32_t decode_tail(const uint32_t* words, const UnitParams* params, uint64_t n, int bits, uint32_t* codes,
                              float* out) {
    Packing<L>::unpack_tail(words, n, bits, codes);
    // The rest of the row gets a harmless code.
    for (uint64_t i = n; i < div_up(n, kLane) * kLane; ++i) codes[i] = 0;
    U seen = L::set_u(0);
    decode_codes<B, false, false>(codes, params, static_cast<uint32_t>(div_up(n, kLane)), out, seen);
    return L::reduce_max(seen);
  }

  template <class B, bool kOne, bool kStream>
  static void decode_codes(const uint32_t* codes, const UnitParams* params, uint32_t rows, float* out, U& seen) {
    for (uint32_t row = 0; row < rows; ++row)
      for (uint32_t lane = 0; lane < kLane; lane += L::kWidth) {
        const U code = L::load_u(codes + row * 32 + lane);
        seen = B::template check<L>(seen, code);
        const F value = B::template decode<L>(code, params[kOne ? 0 : row]);
        if constexpr (kStream)
          L::stream(value, out + row * 32 + lane);
        else
          L::store(value, out + row * 32 + lane);
      }
  }

  // --- spans ---------------------------------------------------------------------------------------------------

  static void sum_rows(const uint32_t* words, uint32_t rows, uint64_t first_row, LaneSums& check) {
    for (uint32_t row = 0; row < rows; ++row) {
      const uint32_t weight = row_weight(static_cast<uint32_t>(first_row + row));
      for (uint32_t lane = 0; lane < kLane; lane += L::kWidth)
        L::add_products(words + row * kLane + lane, weight, check.lane + lane);
    }
  }

  static uint64_t sum_words(const uint32_t* words, uint64_t count, uint64_t index) {
    LaneSums check;
    const uint64_t rows = count / kLane;
    for (uint64_t row = 0; row < rows; row += 1024)
      sum_rows(words + row * kLane, static_cast<uint32_t>(min_u64(1024, rows - row)), index / kLane + row, check);
    for (uint64_t i = rows * kLane; i < count; ++i) check.add_word(words[i], index + i);
    return check.total();
  }

  // The parameters of the units that lie in one block, spread over its rows; writes their scales and returns whether
  // one unit fills the block and needs no lifting.
  template <class B>
  static bool block_params(const Span& s, uint64_t block, const float* x, UnitParams* params, bool& marked,
                           LaneSums& check) {
    const Scheme& scheme = *s.scheme;
    marked = false;
    if (scheme.scale_words == 0) {
      for (uint32_t row = 0; row < 32; ++row) params[row] = UnitParams{};
      return true;
    }
    const uint64_t n = s.elements_of(block);
    const uint32_t unit_rows = scheme.unit / kLane;
    for (uint32_t row = 0; row * kLane < n; row += unit_rows) {
      const uint32_t end = row + unit_rows;
      const uint64_t unit = (block * kBlock + row * kLane) / scheme.unit;
      const uint32_t top = Stats::rows_max(x, row, end);
      Sums sums;
      if (scheme.sums != SumKind::none && top < kInfBits)
        Stats::rows_sums(scheme.sums, x, row, end, grid_for(top), sums);
      uint32_t scales[2] = {};
      B::make_scales(scheme, top, sums, min_u64(scheme.unit, n - row * kLane), scales);
      marked |= scales[0] == kMarker;
      const uint64_t at = scales_offset(scheme, s.count) + unit * scheme.scale_words;
      for (uint32_t w = 0; w < scheme.scale_words; ++w) {
        s.region[at + w] = scales[w];
        check.add_word(scales[w], s.region_index + at + w);
      }
      const UnitParams p = B::make_params(scheme, scales);
      if (unit_rows == kLane && p.pre == 1.0f && n == kBlock) {
        params[0] = p;
        return true;
      }
      for (uint32_t r = row; r < end && r < kLane; ++r) params[r] = p;
    }
    return false;
  }

  // A marked unit is encoded as zeros, and its residual comes out as NaN (its step is NaN), which put_residual() reads
  // as "keep what was there".
  static void clear_marked(const UnitParams* params, bool one, float* x) {
    for (uint32_t row = 0; row < 32; ++row)
      if (float_bits(params[one ? 0 : row].a) == kMarker)
        for (uint32_t lane = 0; lane < kLane; ++lane) x[row * kLane + lane] = 0;
  }

  // Where the residual of a full block goes as it is made, if it can. Streamed only in whole lines of the cache, and
  // with few words beside it: else it takes longer than by way of the scratch room.
  template <class B>
  static float* residual_place(const Span& s, uint64_t block) {
    if (s.residual != DType::f32) return nullptr;
    float* const after = static_cast<float*>(s.after) + block * kBlock;
    const bool streams =
        B::kCodeBits > 0 && B::kCodeBits < 8 && kLineVectors && reinterpret_cast<uintptr_t>(after) % 64 == 0;
    return streams || !s.stream ? after : nullptr;
  }

  template <class B>
  static void encode(const Span& s, const UnitParams* whole, Scratch& scratch, LaneSums& check) {
    const Scheme& scheme = *s.scheme;
    const float unscale = s.unscale;
    float* const residual =
        s.before ? scratch.x : nullptr;  // in place: with feedback x is always loaded into scratch.x
    UnitParams params[32];
    if (whole)
      for (UnitParams& p : params) p = *whole;
    for (uint64_t block = s.begin; block < s.end; ++block) {
      const uint64_t n = s.elements_of(block);
      const Draw draw{block_key(s.key, s.first_block + block), s.mask};
      const float* x = Access::load(s, block, scratch.x);
      bool marked = whole && float_bits(whole->a) == kMarker;
      const bool one = whole ? whole->pre == 1.0f : block_params<B>(s, block, x, params, marked, check);
      if (marked) {
        if (x != scratch.x) std::memcpy(scratch.x, x, sizeof(float) * kBlock);
        x = scratch.x;
        clear_marked(params, one, scratch.x);
      }
      const int bits = B::kCodeBits ? B::kCodeBits : scheme.bits;
      uint32_t* words = s.region + block * kLane * bits;
      // Where every element is a unit of its own, any of them may be marked.
      const bool looked_at = marked || scheme.scale_words == 0;
      float* const place = residual && one && n == kBlock && !looked_at ? residual_place<B>(s, block) : nullptr;
      if (n == kBlock) {
        const bool stream = place && s.stream;
        float* const to = place ? place : residual;
        uint32_t* codes = scratch.codes;
        if (residual && one)
          encode_full<B, true, true>(x, to, params, unscale, draw, scheme, stream, codes, words);
        else if (residual)
          encode_full<B, false, true>(x, to, params, unscale, draw, scheme, stream, codes, words);
        else if (one)
          encode_full<B, true, false>(x, to, params, unscale, draw, scheme, stream, codes, words);
        else
          encode_full<B, false, false>(x, to, params, unscale, draw, scheme, stream, codes, words);
        sum_rows(words, bits, s.region_index / kLane + block * bits, check);
      } else {
        if (one)
          for (UnitParams& p : params) p = params[0];
        encode_tail<B>(x, residual, params, unscale, draw, scheme.nearest, n, bits, scratch.codes, words);
        for (uint64_t i = 0; i < tail_words(scheme, s.count); ++i)
          check.add_word(words[i], s.region_index + full_words(scheme, s.count) + i);
      }
      if (residual && !place) Access::put_residual_of(s, block, residual, looked_at);
    }
  }

  template <class B>
  static bool decode(const Span& s, const UnitParams* whole, Scratch& scratch) {
    const Scheme& scheme = *s.scheme;
    UnitParams params[32];
    if (whole)
      for (UnitParams& p : params) p = *whole;
    bool bad = false;
    U seen = L::set_u(0);
    const bool direct = s.dtype == DType::f32 && !s.add;
    const bool stream = direct && s.stream && reinterpret_cast<uintptr_t>(s.out) % 64 == 0;
    for (uint64_t block = s.begin; block < s.end; ++block) {
      const uint64_t n = s.elements_of(block);
      bool one = true;
      if (!whole && scheme.scale_words != 0) {
        const uint32_t* scales = s.region + scales_offset(scheme, s.count);
        if (scheme.unit == kBlock) {
          params[0] = B::make_params(scheme, scales + block * scheme.scale_words);
        } else {
          one = false;
          for (uint32_t row = 0; row * kLane < n; ++row)
            params[row] =
                B::make_params(scheme, scales + (block * kBlock + row * kLane) / scheme.unit * scheme.scale_words);
        }
      }
      const int bits = B::kCodeBits ? B::kCodeBits : scheme.bits;
      const uint32_t* words = s.region + block * kLane * bits;
      float* out = direct ? static_cast<float*>(s.out) + block * kBlock : scratch.x;
      if (n == kBlock) {
        if (one && stream)
          decode_full<B, true, true>(words, params, bits, scratch.codes, out, seen);
        else if (one)
          decode_full<B, true, false>(words, params, bits, scratch.codes, out, seen);
        else
          decode_full<B, false, false>(words, params, bits, scratch.codes, out, seen);
        if (!direct) Access::put(s, block, scratch.x);
      } else {
        if (one)
          for (UnitParams& p : params) p = params[0];
        bad |= B::bad(decode_tail<B>(words, params, n, bits, scratch.codes, scratch.x), scheme);
        Access::put(s, block, scratch.x);
      }
    }
    return bad || B::bad(L::reduce_max(seen), scheme);
  }
};

// What the bodies' with_<name>() functions are given.
template <class L>
struct EncodeCall {
  const Span& span;
  const UnitParams* whole;
  Scratch& scratch;
  LaneSums& check;
  template <class B>
  GW_BODY void run() {
    Driver<L>::template encode<B>(span, whole, scratch, check);
  }
};
template <class L>
struct DecodeCall {
  const Span& span;
  const UnitParams* whole;
  Scratch& scratch;
  template <class B>
  GW_BODY bool run() {
    return Driver<L>::template decode<B>(span, whole, scratch);
  }
};
