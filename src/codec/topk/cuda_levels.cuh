// SPDX-License-Identifier: Apache-2.0
// Fitting the levels of a tile's kept values on a GPU, as levels-inl.h does on a CPU: each thread holds some values in
// registers, sums over the thread block are of integers, and every thread goes through the same few operations in
// double.
//
// Included by cuda.cu inside an anonymous namespace, after levels-inl.h.

// Sums and maxima of several numbers over the thread block at once; every thread gets them. One barrier: the two halves
// of `shared` take turns.
constexpr int kTotals = 5;
struct BlockTotals {
  uint32_t (*shared)[kTotals][32];  // [2]
  uint32_t turn = 0;

  // The first kSums of the values are added up, the largest of each other is found.
  template <int kSums, int kCount>
  __device__ __forceinline__ void reduce(uint32_t (&values)[kCount]) {
    static_assert(kCount <= kTotals);
    const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    uint32_t(&half)[kTotals][32] = shared[turn];
    turn ^= 1;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const uint32_t here = i < kSums ? __reduce_add_sync(kFull, values[i]) : __reduce_max_sync(kFull, values[i]);
      if (lane == 0) half[i][warp] = here;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      values[i] = i < kSums ? __reduce_add_sync(kFull, half[i][lane]) : __reduce_max_sync(kFull, half[i][lane]);
  }
};

// A sum of more than 32 bits travels in two parts. A thread adds up at most 32 values below 2^34 (the largest square,
// 127^2, times 2^20), so 1024 low parts are below 2^30, and as many high parts below 2^29.
__device__ __forceinline__ uint32_t low_part(uint64_t sum) { return static_cast<uint32_t>(sum) & 0xfffffu; }
__device__ __forceinline__ uint32_t high_part(uint64_t sum) { return static_cast<uint32_t>(sum >> 20); }
__device__ __forceinline__ uint64_t whole_sum(uint32_t low, uint32_t high) { return (uint64_t{high} << 20) + low; }

// Levels 0 to `top` for k values of the thread block: of this thread those x[i] whose bit i is set in `kept`.
template <int kValues>
__device__ __forceinline__ KeptFit fit_levels(const float (&x)[kValues], uint32_t kept, Grid grid, uint32_t k,
                                              uint32_t top, BlockTotals& totals) {
  using Steps = LevelSteps<ScalarLane>;
  uint32_t mine = 0, least = 0xffffffffu, most = 0;  // patterns of floats that are not negative
#pragma unroll
  for (int i = 0; i < kValues; ++i)
    if (kept >> i & 1) {
      const float q = Steps::units(x[i], grid);
      mine += static_cast<uint32_t>(static_cast<int32_t>(q));
      least = min(least, float_bits(q));
      most = max(most, float_bits(q));
    }
  uint32_t first[4] = {low_part(mine), high_part(mine), ~least, most};
  totals.reduce<2>(first);
  const double count = k, total = static_cast<double>(whole_sum(first[0], first[1]));
  KeptFit fit{total / count, 0};
  if (top == 0) return fit;
  fit = first_levels(bits_float(~first[2]), bits_float(first[3]), top);
#pragma unroll 1
  for (int round = 0; round < kLevelRounds; ++round) {
    const float from = fit.from(), times = fit.times();
    KeptSums sums;
#pragma unroll
    for (int i = 0; i < kValues; ++i)
      if (kept >> i & 1) {
        const float q = Steps::units(x[i], grid);
        sums.add(Steps::nearest(q, from, times, top), q);
      }
    uint32_t parts[5] = {static_cast<uint32_t>(sums.squares), low_part(sums.fourths), high_part(sums.fourths),
                         low_part(sums.products), high_part(sums.products)};
    totals.reduce<5>(parts);
    refine_levels(fit, {parts[0], whole_sum(parts[1], parts[2]), whole_sum(parts[3], parts[4])}, count, total);
  }
  return fit;
}
