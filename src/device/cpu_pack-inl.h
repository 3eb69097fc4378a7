// SPDX-License-Identifier: Apache-2.0
// Codes, one a word, to where they stand in a message, and back, for any lane L; cpu_driver-inl.h says where that is.
// Included by it, once per target (no include guard).

template <class L>
struct Packing {
  using U = typename L::U;

  // Of a whole block.
  template <int kBits>
  static void pack(const uint32_t* codes, uint32_t* words) {
    for (uint32_t lane = 0; lane < kLane; lane += L::kWidth) {
      U word = L::set_u(0);
#pragma GCC unroll 32
      for (int row = 0; row < 32; ++row) {
        const int place = row * kBits % 32, q = row * kBits / 32;
        const U code = L::load_u(codes + row * 32 + lane);
        word = place == 0 ? code : L::or_u(word, L::shl_by(code, place));
        if (place + kBits >= 32) L::store_u(word, words + q * 32 + lane);
        if (place + kBits > 32) word = L::shr_by(code, 32 - place);
      }
    }
  }
  template <int kBits>
  static void unpack(const uint32_t* words, uint32_t* codes) {
    const U mask = L::set_u((1u << kBits) - 1);
    for (uint32_t lane = 0; lane < kLane; lane += L::kWidth)
#pragma GCC unroll 32
      for (int row = 0; row < 32; ++row) {
        const int place = row * kBits % 32, q = row * kBits / 32;
        U code = L::shr_by(L::load_u(words + q * 32 + lane), place);
        if (place + kBits > 32) code = L::or_u(code, L::shl_by(L::load_u(words + (q + 1) * 32 + lane), 32 - place));
        L::store_u(L::and_u(code, mask), codes + row * 32 + lane);
      }
  }
  static void pack_block(int bits, const uint32_t* codes, uint32_t* words) {
    static constexpr auto kPack = []<int... k>(std::integer_sequence<int, k...>) {
      return std::array<void (*)(const uint32_t*, uint32_t*), 16>{pack<k + 1>...};
    }
    (std::make_integer_sequence<int, 16>());
    if (bits) kPack[bits - 1](codes, words);
  }
  static void unpack_block(int bits, const uint32_t* words, uint32_t* codes) {
    static constexpr auto kUnpack = []<int... k>(std::integer_sequence<int, k...>) {
      return std::array<void (*)(const uint32_t*, uint32_t*), 16>{unpack<k + 1>...};
    }
    (std::make_integer_sequence<int, 16>());
    if (bits)
      kUnpack[bits - 1](words, codes);
    else
      std::memset(codes, 0, kBlock * sizeof(uint32_t));
  }

  // Of the last, partial block: one after another from bit 0 on.
  static void pack_tail(const uint32_t* codes, uint64_t n, int bits, uint32_t* words) {
    uint64_t buffer = 0;
    int filled = 0;
    for (uint64_t i = 0; i < n; ++i) {
      buffer |= uint64_t{codes[i]} << filled;
      filled += bits;
      if (filled >= 32) {
        *words++ = static_cast<uint32_t>(buffer);
        buffer >>= 32;
        filled -= 32;
      }
    }
    if (filled) *words = static_cast<uint32_t>(buffer);
  }

  static void unpack_tail(const uint32_t* words, uint64_t n, int bits, uint32_t* codes) {
    uint64_t buffer = 0;
    int filled = 0;
    for (uint64_t i = 0; i < n; ++i) {
      if (filled < bits) {
        buffer |= uint64_t{*words++} << filled;
        filled += 32;
      }
      codes[i] = static_cast<uint32_t>(buffer & ((uint64_t{1} << bits) - 1));
      buffer >>= bits;
      filled -= bits;
    }
  }
};
