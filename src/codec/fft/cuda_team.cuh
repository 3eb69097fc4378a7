// SPDX-License-Identifier: Apache-2.0
// The transform and the choice of the strongest bins on a GPU, by one team of threads: a warp for up to 1024 values,
// two or four warps beyond. A thread holds 16 complex numbers; between passes they go through shared memory, one place
// in 17 left free against bank conflicts. Bin t + kTeam * i is slot i of thread t, so a word of the bitmap is one
// ballot.
//
// Included by cuda.cu inside an anonymous namespace, after cuda_load.cuh and transform-inl.h.

using FftC = FftParts<ScalarLane>::C;
using FftP = FftParts<ScalarLane>;

template <int kBins>
struct FftTeam {
  static constexpr int kTeam = kBins <= 512 ? 32 : kBins / 16, kBlockThreads = kTeam == 32 ? 128 : kTeam;
  static constexpr int kSlots = kBins / kTeam, kWords = kBins / 32, kLast = kBins <= 256 ? 1 : 2;
  static constexpr bool kExact = kBins == 16 * kTeam;  // a slot is an input of the first pass and an output of the last
  static constexpr FftPlan kPlan = fft_plan(kBins);
  static_assert(kPlan.passes == kLast + 1);

  static constexpr size_t kPlaces = kBins + kBins / 16;
  // Numbers, counts before each word of the bitmap, partial results of the warps, the unit's words; in front of them,
  // where `with_staged`, room for the values of a unit: those of the unit to come, or what the residual is made of.
  static GW_HD constexpr size_t shared_bytes(uint32_t words, bool with_staged) {
    return (with_staged ? kBins * 8 : 0) + (kPlaces * 8 + (64 + 8 + words + 1) * 4 + 15) / 16 * 16;
  }

  float2 *staged, *numbers;
  uint32_t *before, *parts, *words;
  uint32_t t, turn = 0;

  __device__ __forceinline__ FftTeam(char* shared, bool with_staged, uint32_t thread)
      : staged(reinterpret_cast<float2*>(shared)),
        numbers(staged + (with_staged ? kBins : 0)),
        before(reinterpret_cast<uint32_t*>(numbers + kPlaces)),
        parts(before + 64),
        words(parts + 8),
        t(thread) {}

  __device__ __forceinline__ void sync() const {
    if constexpr (kTeam == 32)
      __syncwarp();
    else
      __barrier_sync_count(1, kTeam);  // there is one such team in a thread block
  }
  // Warps' results meet in two sets of places by turns, so that one barrier is enough.
  template <class Combine>
  __device__ __forceinline__ uint32_t meet(uint32_t mine, Combine combine) {
    if constexpr (kTeam == 32) {
      return mine;
    } else {
      uint32_t* place = parts + turn * 4;
      turn ^= 1;
      if (t % 32 == 0) place[t / 32] = mine;
      sync();
      uint32_t all = place[0];
#pragma unroll
      for (int w = 1; w < kTeam / 32; ++w) all = combine(all, place[w]);
      return all;
    }
  }
  __device__ __forceinline__ uint32_t team_max(uint32_t x) {
    return meet(__reduce_max_sync(kFull, x), [](uint32_t a, uint32_t b) { return a > b ? a : b; });
  }
  __device__ __forceinline__ uint32_t team_sum(uint32_t x) {
    return meet(__reduce_add_sync(kFull, x), [](uint32_t a, uint32_t b) { return a + b; });
  }

  static __device__ __forceinline__ uint32_t place(uint32_t i) { return i + (i >> 4); }
  __device__ __forceinline__ void put(uint32_t i, FftC a) const { numbers[place(i)] = make_float2(a.r, a.i); }
  __device__ __forceinline__ FftC get(uint32_t i) const {
    const float2 v = numbers[place(i)];
    return {v.x, v.y};
  }
  __device__ __forceinline__ uint32_t bin(int slot) const { return t + kTeam * slot; }

  // --- passes ----------------------------------------------------------------------------------------------------

  // Values of a unit on their way to shared memory while the one before them is worked on.
  __device__ __forceinline__ void fetch(const float* from) const {
    float4* to = reinterpret_cast<float4*>(staged);
#pragma unroll
    for (uint32_t i = 0; i < kBins / 2; i += kTeam)
      if (kBins / 2 >= kTeam || t < kBins / 2)
        __pipeline_memcpy_async(to + i + t, reinterpret_cast<const float4*>(from) + i + t, 16);
    __pipeline_commit();
  }

  __device__ __forceinline__ bool first_works() const { return kExact || t < kBins / 16; }

  // a[i] is number t + kBins / 16 * i. No thread reads `numbers` any more.
  __device__ __forceinline__ void first_pass(FftC (&a)[16], const float2* table) const {
    if (first_works()) {
      FftP::butterfly<16>(a);
#pragma unroll
      for (int k = 1; k < 16; ++k) {
        const float2 w = __ldg(table + kPlan.at[0] + (k - 1) * (kBins / 16) + t);
        a[k] = FftP::times(a[k], w.x, w.y);
      }
#pragma unroll
      for (int k = 0; k < 16; ++k) put(16 * t + k, a[k]);
    }
    sync();
  }

  // The last pass leaves its results in the slots, and if kStore also in `numbers`.
  template <int kPass, bool kStore>
  __device__ __forceinline__ void pass(const float2* table, FftC (&slots)[kSlots]) const {
    constexpr int kRadix = kPlan.radix[kPass], kStride = kPass == 1 ? 16 : 16 * kPlan.radix[1], kAll = kBins / kRadix;
    constexpr int kEach = kAll < kTeam ? 1 : kAll / kTeam, kApart = kBins / kStride / kRadix;
    constexpr bool kEnd = kPass == kLast;
    FftC a[kEach][kRadix];
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const uint32_t b = t + kTeam * e;
      if (kAll >= kTeam || b < kAll) {
#pragma unroll
        for (int i = 0; i < kRadix; ++i) a[e][i] = get(b + kAll * i);
      }
    }
    sync();
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const uint32_t b = t + kTeam * e, p = b / kStride, q = b % kStride;
      if (kAll >= kTeam || b < kAll) {
        FftP::butterfly<kRadix>(a[e]);
#pragma unroll
        for (int k = 0; k < kRadix; ++k) {
          if constexpr (!kEnd) {
            if (k > 0) {
              const float2 w = __ldg(table + kPlan.at[kPass] + (k - 1) * kApart + p);
              a[e][k] = FftP::times(a[e][k], w.x, w.y);
            }
          }
          if constexpr (kEnd && kExact) slots[e + kEach * k] = a[e][k];
          if (!kEnd || !kExact || kStore) put(q + kStride * (kRadix * p + k), a[e][k]);
        }
      }
    }
    if (!kEnd || !kExact || kStore) sync();
    if constexpr (kEnd && !kExact) {
#pragma unroll
      for (int i = 0; i < kSlots; ++i) slots[i] = get(bin(i));
      if (!kStore) sync();
    }
  }
  template <bool kStore>
  __device__ __forceinline__ void later_passes(const float2* table, FftC (&slots)[kSlots]) const {
    if constexpr (kLast == 2) pass<1, true>(table, slots);
    pass<kLast, kStore>(table, slots);
  }

  // Doubled bins from the numbers that first_pass() wants.
  __device__ __forceinline__ void forward(FftC (&a)[16], const float2* table, FftC (&slots)[kSlots]) const {
    first_pass(a, table);
    later_passes<true>(table, slots);
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      const float2 w = __ldg(table + kPlan.split + bin(i));
      const FftC own = slots[i];
      slots[i] = FftP::real_of(own, get((kBins - bin(i)) & (kBins - 1)), w.x, w.y);
      if (i == 0 && t == 0) slots[i].i = 2 * (own.r - own.i);
    }
    sync();
  }

  // Bins to numbers, imaginary parts first: the forward passes on exchanged parts. Slots are values 2 j (.i) and 2 j +
  // 1 (.r), j = bin(i). No thread reads `numbers` any more.
  __device__ __forceinline__ void inverse(const float2* table, FftC (&slots)[kSlots]) const {
#pragma unroll
    for (int i = 0; i < kSlots; ++i) put(bin(i), slots[i]);
    sync();
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      const float2 w = __ldg(table + kPlan.split + bin(i));
      const FftC own = slots[i];
      const FftC z = FftP::complex_of(own, get((kBins - bin(i)) & (kBins - 1)), w.x, w.y);
      slots[i] = {z.i, z.r};
      if (i == 0 && t == 0) slots[i] = {own.r - own.i, own.r + own.i};
    }
    sync();
    FftC a[16];
    if constexpr (kExact) {
#pragma unroll
      for (int i = 0; i < 16; ++i) a[i] = slots[i];
    } else {
#pragma unroll
      for (int i = 0; i < kSlots; ++i) put(bin(i), slots[i]);
      sync();
      if (first_works()) {
#pragma unroll
        for (int i = 0; i < 16; ++i) a[i] = get(t + kBins / 16 * i);
      }
      sync();
    }
    first_pass(a, table);
    later_passes<false>(table, slots);
  }

  // --- bitmap ----------------------------------------------------------------------------------------------------

  __device__ __forceinline__ uint32_t word_of(int slot) const { return t / 32 + kTeam / 32 * slot; }

  // From the bitmap in `words` to the number of kept bins before each of its words; returns how many there are.
  __device__ __forceinline__ uint32_t count_before() {
    constexpr int kLaneWords = kWords > 32 ? 2 : 1;
    uint32_t all = 0;
    if (kTeam == 32 || t < 32) {
      uint32_t mine[kLaneWords], sum = 0;
#pragma unroll
      for (int i = 0; i < kLaneWords; ++i) {
        const uint32_t w = t * kLaneWords + i;
        mine[i] = sum;
        sum += w < kWords ? __popc(words[w]) : 0;
      }
      uint32_t scan = sum;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const uint32_t other = __shfl_up_sync(kFull, scan, d);
        if (t >= d) scan += other;
      }
#pragma unroll
      for (int i = 0; i < kLaneWords; ++i)
        if (t * kLaneWords + i < kWords) before[t * kLaneWords + i] = scan - sum + mine[i];
      all = __shfl_sync(kFull, scan, 31);
      if (kTeam > 32 && t == 0) parts[turn * 4] = all;
    }
    sync();
    if constexpr (kTeam > 32) {
      all = parts[turn * 4];
      turn ^= 1;
    }
    return all;
  }
  // The place of slot i's bin among the kept ones; ~0 if it is not kept.
  __device__ __forceinline__ uint32_t rank(int i) const {
    const uint32_t word = words[word_of(i)], bit = 1u << (t % 32);
    return word & bit ? before[word_of(i)] + __popc(word & (bit - 1)) : ~0u;
  }

  // Sets the bitmap: the `kept` strongest, lower bins first among equals.
  __device__ __forceinline__ void choose(const uint32_t (&weight)[kSlots], uint32_t kept, int power, uint32_t& memory) {
    uint32_t top = 0;
#pragma unroll
    for (int i = 0; i < kSlots; ++i) top = max(top, weight[i]);
    top = team_max(top);
    const FftThreshold threshold = fft_threshold(kBins, kept, top, fft_guess(memory, top, power), [&](uint32_t least) {
      uint32_t n = 0;
#pragma unroll
      for (int i = 0; i < kSlots; ++i) n += weight[i] >= least;
      return team_sum(n);
    });
    memory = fft_memory(threshold, power);
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      const uint32_t word = __ballot_sync(kFull, weight[i] >= threshold.least);
      if (t % 32 == 0) words[word_of(i)] = word;
    }
    sync();
    if (threshold.equals) {  // rare: count the equals as if they were the bitmap
      uint32_t stronger[kSlots];
#pragma unroll
      for (int i = 0; i < kSlots; ++i) stronger[i] = words[word_of(i)];
      sync();
#pragma unroll
      for (int i = 0; i < kSlots; ++i) {
        const uint32_t word = __ballot_sync(kFull, weight[i] == threshold.least - 1);
        if (t % 32 == 0) words[word_of(i)] = word;
      }
      sync();
      count_before();
      uint32_t full[kSlots];
#pragma unroll
      for (int i = 0; i < kSlots; ++i) full[i] = stronger[i] | __ballot_sync(kFull, rank(i) < threshold.equals);
      sync();
#pragma unroll
      for (int i = 0; i < kSlots; ++i)
        if (t % 32 == 0) words[word_of(i)] = full[i];
      sync();
    }
    count_before();
  }
};
