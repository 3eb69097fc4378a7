// SPDX-License-Identifier: Apache-2.0
// casq's passes over a tile, for any lane L. Included once per target, after cpu_load-inl.h (no include guard).
//
// Buckets go by rank, so the elements of a cluster, in order, are a list in which every bucket is a run. split() makes
// the lists and merge() takes them apart again, one vector and one cluster at a time: the lanes of a cluster are moved
// together, or spread out, and the cluster's place in its list moves on by as many.

template <class L>
struct CasqLanes {
  using F = typename L::F;
  using U = typename L::U;
  using M = typename L::M;

  static void classify(const float* x, uint64_t n, const float* thresholds, uint32_t count, uint32_t* codes) {
    for (uint64_t i = 0; i < n; i += L::kWidth) {
      const F value = L::load(x + i);
      U code = L::set_u(0);
      for (uint32_t t = 0; t < count; ++t)
        code = L::add_u(code, L::select_u(L::less(value, L::set(thresholds[t])), L::set_u(0), L::set_u(1)));
      L::store_u(code, codes + i);
    }
  }

  template <int kClusters>
  static void split_to(const float* x, uint64_t n, const float* thresholds, uint32_t* codes, float** lists) {
    F least[kClusters - 1];
    float* at[kClusters];
    for (int k = 0; k < kClusters; ++k) at[k] = lists[k];
    for (int t = 0; t + 1 < kClusters; ++t) least[t] = L::set(thresholds[t]);
    for (uint64_t i = 0; i < n; i += L::kWidth) {
      const F value = L::load(x + i);
      U code = L::set_u(0);
#pragma GCC unroll 15
      for (int t = 0; t + 1 < kClusters; ++t) code = L::count_not_less(code, value, least[t]);
      L::store_u(code, codes + i);
#pragma GCC unroll 16
      for (int k = 0; k < kClusters; ++k) at[k] += L::compress(value, L::equal_u(code, L::set_u(k)), at[k]);
    }
    for (int k = 0; k < kClusters; ++k) lists[k] = at[k];
  }
  static void split(int bits, const float* x, uint64_t n, const float* thresholds, uint32_t* codes, float** lists) {
    switch (bits) {
      case 1:
        return split_to<2>(x, n, thresholds, codes, lists);
      case 2:
        return split_to<4>(x, n, thresholds, codes, lists);
      case 3:
        return split_to<8>(x, n, thresholds, codes, lists);
      default:
        return split_to<16>(x, n, thresholds, codes, lists);
    }
  }

  template <int kClusters, bool kStream>
  static void merge_from(const uint32_t* codes, uint64_t n, const float** lists, float* out) {
    const float* at[kClusters];
    for (int k = 0; k < kClusters; ++k) at[k] = lists[k];
    for (uint64_t i = 0; i < n; i += L::kWidth) {
      const U code = L::load_u(codes + i);
      U value = L::set_u(0);
#pragma GCC unroll 16
      for (int k = 0; k < kClusters; ++k) {
        const M here = L::equal_u(code, L::set_u(k));
        value = L::or_u(value, L::bits(L::expand(at[k], here)));
        at[k] += L::count(here);
      }
      if constexpr (kStream)
        L::stream(L::from_bits(value), out + i);
      else
        L::store(L::from_bits(value), out + i);
    }
    for (int k = 0; k < kClusters; ++k) lists[k] = at[k];
  }
  template <int kClusters>
  static void merge_to(const uint32_t* codes, uint64_t n, const float** lists, float* out, bool stream) {
    stream ? merge_from<kClusters, true>(codes, n, lists, out) : merge_from<kClusters, false>(codes, n, lists, out);
  }
  static void merge(int bits, const uint32_t* codes, uint64_t n, const float** lists, float* out, bool stream) {
    switch (bits) {
      case 1:
        return merge_to<2>(codes, n, lists, out, stream);
      case 2:
        return merge_to<4>(codes, n, lists, out, stream);
      case 3:
        return merge_to<8>(codes, n, lists, out, stream);
      default:
        return merge_to<16>(codes, n, lists, out, stream);
    }
  }

  template <int kClusters>
  static void count_of(const uint32_t* codes, uint64_t n, uint32_t* counts) {
    U all[kClusters];
    for (int k = 0; k < kClusters; ++k) all[k] = L::set_u(0);
    const uint64_t whole = n / L::kWidth * L::kWidth;
    for (uint64_t i = 0; i < whole; i += L::kWidth) {
      const U code = L::load_u(codes + i);
#pragma GCC unroll 16
      for (int k = 0; k < kClusters; ++k) all[k] = L::count_equal(all[k], code, L::set_u(k));
    }
    for (int k = 0; k < kClusters; ++k) counts[k] = static_cast<uint32_t>(L::reduce_add(all[k]));
    for (uint64_t i = whole; i < n; ++i) ++counts[codes[i]];
  }
  static void count(int bits, const uint32_t* codes, uint64_t n, uint32_t* counts) {
    switch (bits) {
      case 1:
        return count_of<2>(codes, n, counts);
      case 2:
        return count_of<4>(codes, n, counts);
      case 3:
        return count_of<8>(codes, n, counts);
      default:
        return count_of<16>(codes, n, counts);
    }
  }

  static void round(const float* x, uint64_t n, Grid grid, float scale, int32_t* out) {
    const F pre = L::set(grid.pre), step = L::set(grid.grid), fine = L::set(scale);
    uint32_t* to = reinterpret_cast<uint32_t*>(out);
    for (uint64_t i = 0; i < n; i += L::kWidth)
      L::store_u(L::as_u(L::round(L::mul(L::mul(L::mul(L::load(x + i), pre), step), fine))), to + i);
  }

  // f32_to_f16() of values below 2^16, and then never 2 or more. The results stand in a message, so that exactly n of
  // them are written, and the last ones that do not fill a vector are made one by one.
  static void narrow_means(const float* x, uint64_t n, uint16_t* out) {
    const U least = L::set_u(0x38800000u), half = L::set_u(0x3f000000u);
    const uint64_t whole = n / L::kWidth * L::kWidth;
    for (uint64_t i = 0; i < whole; i += L::kWidth) {
      const U bits = L::bits(L::load(x + i)), sign = L::and_u(L::template shr<16>(bits), L::set_u(0x8000u));
      const U magnitude = L::and_u(bits, L::set_u(0x7fffffffu));
      const U small = L::sub_u(L::bits(L::add(L::from_bits(magnitude), L::from_bits(half))), half);
      const U odd = L::and_u(L::template shr<13>(magnitude), L::set_u(1));
      const U rounded = L::add_u(L::add_u(magnitude, L::set_u(0xfffu - 0x38000000u)), odd);
      const U h = L::select_u(L::less_u(magnitude, least), small, L::template shr<13>(rounded));
      L::store_16(L::or_u(sign, L::min_u(h, L::set_u(kTopMean))), out + i);
    }
    for (uint64_t i = whole; i < n; ++i) out[i] = mean_code(x[i]);
  }
  static void widen_means(const uint16_t* means, uint64_t n, float step, float* out) {
    const uint64_t whole = n / L::kWidth * L::kWidth;
    for (uint64_t i = 0; i < whole; i += L::kWidth)
      L::store(L::mul(TensorAccess<L>::template widen<DType::f16>(means, i), L::set(step)), out + i);
    for (uint64_t i = whole; i < n; ++i) out[i] = f16_to_f32(means[i]) * step;
  }

  static CasqKernels kernels(const char* name) {
    return {name, classify, split, merge, count, round, narrow_means, widen_means};
  }
};
