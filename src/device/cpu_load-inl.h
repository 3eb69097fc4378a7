// SPDX-License-Identifier: Apache-2.0
// How the CPU driver reads and writes a caller's tensors, block by block, for any lane L: element types, error feedback
// on the way in, residuals on the way out. Included once per target (no include guard).

template <class L>
struct TensorAccess {
  using F = typename L::F;
  using U = typename L::U;

  // --- loading -------------------------------------------------------------------------------------------------

  template <DType kType>
  static GW_BODY F widen(const void* data, uint64_t i) {
    if constexpr (kType == DType::f32) return L::load(static_cast<const float*>(data) + i);
    const U h = L::load_16(static_cast<const uint16_t*>(data) + i);
    if constexpr (kType == DType::bf16) return L::from_bits(L::template shl<16>(h));
    const U sign = L::template shl<16>(L::and_u(h, L::set_u(0x8000u))), magnitude = L::and_u(h, L::set_u(0x7fffu));
    const U shifted = L::template shl<13>(magnitude);
    const U value = L::bits(L::mul(L::from_bits(shifted), L::set(0x1p112f)));
    return L::from_bits(L::or_u(
        sign, L::select_u(L::less_u(magnitude, L::set_u(0x7c00u)), value, L::or_u(shifted, L::set_u(kInfBits)))));
  }
  static float widen_one(const void* data, DType dtype, uint64_t i) {
    if (dtype == DType::f32) return static_cast<const float*>(data)[i];
    const uint16_t h = static_cast<const uint16_t*>(data)[i];
    return dtype == DType::f16 ? f16_to_f32(h) : bf16_to_f32(h);
  }

  template <DType kType>
  static void load_plain(const Span& s, uint64_t at, uint64_t whole, float* x) {
    for (uint64_t i = 0; i < whole; i += L::kWidth) L::store(widen<kType>(s.in, at + i), x + i);
  }
  template <DType kType, DType kResidual>
  static void load_feedback(const Span& s, uint64_t at, uint64_t whole, float* x) {
    const F scale = L::set(s.loss_scale);
    for (uint64_t i = 0; i < whole; i += L::kWidth)
      L::store(L::add(widen<kType>(s.in, at + i), L::mul(widen<kResidual>(s.before, at + i), scale)), x + i);
  }
  template <DType kType>
  static void load_type(const Span& s, uint64_t at, uint64_t whole, float* x) {
    if (!s.before)
      load_plain<kType>(s, at, whole, x);
    else if (s.residual == DType::f32)
      load_feedback<kType, DType::f32>(s, at, whole, x);
    else
      load_feedback<kType, DType::bf16>(s, at, whole, x);
  }

  static const float* load(const Span& s, uint64_t block, float* x) {
    const uint64_t at = block * kBlock, n = s.elements_of(block), whole = n / L::kWidth * L::kWidth;
    if (s.dtype == DType::f32 && !s.before && n == kBlock) return static_cast<const float*>(s.in) + at;
    if (s.dtype == DType::f32)
      load_type<DType::f32>(s, at, whole, x);
    else if (s.dtype == DType::f16)
      load_type<DType::f16>(s, at, whole, x);
    else
      load_type<DType::bf16>(s, at, whole, x);
    for (uint64_t i = whole; i < n; ++i) {
      x[i] = widen_one(s.in, s.dtype, at + i);
      if (s.before) x[i] += widen_one(s.before, s.residual, at + i) * s.loss_scale;
    }
    for (uint64_t i = n; i < kBlock; ++i) x[i] = 0;
    return x;
  }

  // --- storing -------------------------------------------------------------------------------------------------

  static GW_BODY U narrow_bf16(F x) {  // nearest even; NaN stays NaN
    const U bits = L::bits(x), magnitude = L::and_u(bits, L::set_u(0x7fffffffu));
    const U odd = L::and_u(L::template shr<16>(bits), L::set_u(1));
    const U rounded = L::template shr<16>(L::add_u(L::add_u(bits, L::set_u(0x7fffu)), odd));
    return L::select_u(L::less_u(L::set_u(kInfBits), magnitude), L::set_u(kMarkerBf16), rounded);
  }

  static void put(const Span& s, uint64_t block, const float* x) {
    const uint64_t at = block * kBlock, n = s.elements_of(block);
    if (s.dtype == DType::f32) {
      float* out = static_cast<float*>(s.out) + at;
      const uint64_t whole = n / L::kWidth * L::kWidth;
      if (s.add) {
        for (uint64_t i = 0; i < whole; i += L::kWidth) L::store(L::add(L::load(out + i), L::load(x + i)), out + i);
        for (uint64_t i = whole; i < n; ++i) out[i] += x[i];
      } else {
        std::memcpy(out, x, n * sizeof(float));
      }
      return;
    }
    uint16_t* out = static_cast<uint16_t*>(s.out) + at;
    if (s.dtype == DType::f16)
      for (uint64_t i = 0; i < n; ++i) out[i] = f32_to_f16(x[i]);
    else
      for (uint64_t i = 0; i < n; ++i) out[i] = f32_to_bf16(x[i]);
  }

  // A NaN means the unit was marked: its residual stays. kMarked: there may be one.
  template <bool kStream, bool kMarked>
  static void put_residual_f32(const float* x, const float* before, float* after, uint64_t n) {
    const U inf = L::set_u(kInfBits), mask = L::set_u(0x7fffffffu);
    const uint64_t whole = n / L::kWidth * L::kWidth;
    for (uint64_t i = 0; i < whole; i += L::kWidth) {
      F r = L::load(x + i);
      if constexpr (kMarked) r = L::select(L::less_u(inf, L::and_u(L::bits(r), mask)), L::load(before + i), r);
      if constexpr (kStream)
        L::stream(r, after + i);
      else
        L::store(r, after + i);
    }
    for (uint64_t i = whole; i < n; ++i) after[i] = x[i] != x[i] ? before[i] : x[i];
  }

  static void put_residual(const Span& s, uint64_t block, const float* x) { put_residual_of(s, block, x, true); }

  static void put_residual_of(const Span& s, uint64_t block, const float* x, bool marked) {
    const uint64_t at = block * kBlock, n = s.elements_of(block);
    if (s.residual == DType::f32) {
      const float* before = static_cast<const float*>(s.before) + at;
      float* after = static_cast<float*>(s.after) + at;
      const bool stream = s.stream && reinterpret_cast<uintptr_t>(after) % 64 == 0;
      if (marked)
        stream ? put_residual_f32<true, true>(x, before, after, n) : put_residual_f32<false, true>(x, before, after, n);
      else
        stream ? put_residual_f32<true, false>(x, before, after, n)
               : put_residual_f32<false, false>(x, before, after, n);
      return;
    }
    const uint16_t* before = static_cast<const uint16_t*>(s.before) + at;
    uint16_t* after = static_cast<uint16_t*>(s.after) + at;
    const uint64_t whole = n / L::kWidth * L::kWidth;
    const U inf = L::set_u(kInfBits), mask = L::set_u(0x7fffffffu);
    for (uint64_t i = 0; i < whole; i += L::kWidth) {
      const F r = L::load(x + i);
      const typename L::M marked = L::less_u(inf, L::and_u(L::bits(r), mask));
      L::store_16(L::select_u(marked, L::load_16(before + i), narrow_bf16(r)), after + i);
    }
    for (uint64_t i = whole; i < n; ++i) after[i] = x[i] != x[i] ? before[i] : f32_to_bf16(x[i]);
  }
};
