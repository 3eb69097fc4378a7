// SPDX-License-Identifier: Apache-2.0
// The statistics that scales come from, on a GPU: of a warp's block, and of whole tensors, whose blocks meet in integer
// atomics. params.h says why the order of summation is free.
//
// Included by the files of kernels inside an anonymous namespace, after cuda_load.cuh.

__device__ __forceinline__ uint32_t block_max(const float (&x)[32]) {
  uint32_t top = 0;
#pragma unroll
  for (int row = 0; row < 32; ++row) top = max(top, float_bits(x[row]) & 0x7fffffffu);
  return __reduce_max_sync(kFull, top);
}

// Sums over the warp's block; all lanes get the result. Adding 1.5 * 2^23 rounds to the nearest integer, ties to even
// as the CPU does, and leaves it in the low bits. Additions have more units than conversions. What is added in front of
// it is taken away once, from the sum.
template <SumKind kKind>
__device__ __forceinline__ Sums warp_sums_of(const float (&x)[32], Grid grid) {
  constexpr float kRound = 0x1.8p23f;
  constexpr uint32_t kInFront = 0x4b400000u;  // its bits
  const float scaled = grid.grid * kSumScale;
  uint32_t first = 0, second = 0, negative = 0;
#pragma unroll
  for (int row = 0; row < 32; ++row) {
    if constexpr (kKind == SumKind::squares || kKind == SumKind::moments) {
      const float t = x[row] * grid.pre * grid.grid;
      second += float_bits(fmaf(t * t, kSquareScale, kRound));
    }
    if constexpr (kKind == SumKind::moments || kKind == SumKind::by_sign) {
      const uint32_t q = float_bits(fmaf(x[row] * grid.pre, scaled, kRound));
      first += q;
      if (kKind == SumKind::by_sign && x[row] < 0.0f) {
        second += q;
        ++negative;
      }
    }
  }
  first -= 32 * kInFront;
  if constexpr (kKind == SumKind::by_sign) {
    second = negative * kInFront - second;  // minus the sum of what is below zero
    first += second;                        // the sum of the rest
  } else {
    second -= 32 * kInFront;
  }
  Sums sums;
  if constexpr (kKind != SumKind::squares)
    sums.first = static_cast<int32_t>(__reduce_add_sync(kFull, first));  // at most 2^30 in magnitude
  sums.second = __reduce_add_sync(kFull, second);
  if constexpr (kKind == SumKind::by_sign) sums.negative = __reduce_add_sync(kFull, negative);
  return sums;
}

__device__ __forceinline__ Sums warp_sums(SumKind kind, const float (&x)[32], Grid grid) {
  if (kind == SumKind::squares) return warp_sums_of<SumKind::squares>(x, grid);
  if (kind == SumKind::moments) return warp_sums_of<SumKind::moments>(x, grid);
  return warp_sums_of<SumKind::by_sign>(x, grid);
}

// --- kernels: whole tensors ----------------------------------------------------------------------------------------

template <bool kFeedback>
__global__ void __launch_bounds__(256) whole_max(const __grid_constant__ CudaJob job) {
  const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  for (uint64_t i = blockIdx.x * 8ull + warp; i < job.items; i += gridDim.x * 8ull) {
    const Item item = item_of(job, i);
    float x[32];
    load_block<kFeedback>(job, item.piece, item.number, lane, x);
    const uint32_t top = block_max(x);
    uint32_t* to = job.tops + item.slot;
    if (lane == 0 && top > *reinterpret_cast<volatile uint32_t*>(to)) atomicMax(to, top);
  }
}

template <bool kFeedback>
__global__ void __launch_bounds__(256) whole_sums(const __grid_constant__ CudaJob job) {
  const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  for (uint64_t i = blockIdx.x * 8ull + warp; i < job.items; i += gridDim.x * 8ull) {
    const Item item = item_of(job, i);
    const uint32_t top = job.tops[item.slot];
    if (top >= kInfBits) continue;
    float x[32];
    load_block<kFeedback>(job, item.piece, item.number, lane, x);
    const Sums sums = warp_sums(job.scheme.sums, x, grid_for(top));
    CudaSums* to = job.sums + item.slot;
    if (lane == 0) {
      atomicAdd(&to->first, static_cast<unsigned long long>(sums.first));
      atomicAdd(&to->second, static_cast<unsigned long long>(sums.second));
      if (sums.negative) atomicAdd(&to->negative, static_cast<unsigned long long>(sums.negative));
    }
  }
}
