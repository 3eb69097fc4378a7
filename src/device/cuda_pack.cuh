// SPDX-License-Identifier: Apache-2.0
// What a thread adds to the checksum, and how it packs the codes of its lane. Included by the files of kernels inside
// an anonymous namespace, after cuda_head.cuh.

// Partial checksums of one thread: words in whole rows of its lane, and words anywhere.
struct Check {
  unsigned long long lane = 0, loose = 0;
  __device__ __forceinline__ void row(uint32_t word, uint64_t row) {
    lane += static_cast<unsigned long long>(word) * row_weight(static_cast<uint32_t>(row));
  }
  // Every thread of the grid calls this once.
  __device__ __forceinline__ void flush(unsigned long long* total) {
    unsigned long long h = lane * lane_weight(threadIdx.x & 31) + loose;
#pragma unroll
    for (int d = 16; d; d >>= 1) h += __shfl_xor_sync(kFull, h, d);
    if ((threadIdx.x & 31) == 0 && h) atomicAdd(total, h);
  }
};

// At the end of a kernel that decodes: what it found wrong, and its part of the checksum.
__device__ __forceinline__ void report(const CudaJob& job, uint32_t problem, Check& check) {
  problem = __reduce_or_sync(kFull, problem);
  if (problem && (threadIdx.x & 31) == 0) atomicOr(job.status, problem);
  check.flush(job.check);
}

// Codes of a lane, row after row, to the words of the block; and back. The width is known at run time only: the branch
// is the same for the whole grid.
template <int kBits>
__device__ __forceinline__ void pack_lane(const uint32_t (&code)[32], uint32_t* words, uint32_t row0, Check& check) {
  uint32_t word = 0;
#pragma unroll
  for (int row = 0; row < 32; ++row) {
    const int place = row * kBits % 32, q = row * kBits / 32;
    word = place == 0 ? code[row] : word + (code[row] << place);
    if (place + kBits >= 32) {
      words[q * 32] = word;
      check.row(word, row0 + q);
      word = place + kBits > 32 ? code[row] >> (32 - place) : 0;
    }
  }
}
template <int kBits>
__device__ __forceinline__ void unpack_lane(const uint32_t* words, uint32_t row0, uint32_t (&code)[32], Check& check) {
  uint32_t w[kBits];
#pragma unroll
  for (int q = 0; q < kBits; ++q) w[q] = __ldcs(words + q * 32);
#pragma unroll
  for (int q = 0; q < kBits; ++q) check.row(w[q], row0 + q);
#pragma unroll
  for (int row = 0; row < 32; ++row) {
    const int place = row * kBits % 32, q = row * kBits / 32;
    code[row] = w[q] >> place;
    if (place + kBits > 32) code[row] |= w[q + 1 < kBits ? q + 1 : q] << (32 - place & 31);
    code[row] &= (1u << kBits) - 1;
  }
}
#define GW_WIDTHS(GW_CASE) \
  GW_CASE(1)               \
  GW_CASE(2)               \
  GW_CASE(3)               \
  GW_CASE(4)               \
  GW_CASE(5)               \
  GW_CASE(6)               \
  GW_CASE(7) GW_CASE(8) GW_CASE(9) GW_CASE(10) GW_CASE(11) GW_CASE(12) GW_CASE(13) GW_CASE(14) GW_CASE(15) GW_CASE(16)
__device__ __forceinline__ void pack_block(int bits, const uint32_t (&code)[32], uint32_t* words, uint32_t row0,
                                           Check& check) {
#define GW_CASE(n)                          \
  case n:                                   \
    pack_lane<n>(code, words, row0, check); \
    break;
  switch (bits) { GW_WIDTHS(GW_CASE) }
#undef GW_CASE
}
__device__ __forceinline__ void unpack_block(int bits, const uint32_t* words, uint32_t row0, uint32_t (&code)[32],
                                             Check& check) {
#define GW_CASE(n)                            \
  case n:                                     \
    unpack_lane<n>(words, row0, code, check); \
    break;
  switch (bits) {
    GW_WIDTHS(GW_CASE)
    default:
#pragma unroll
      for (int row = 0; row < 32; ++row) code[row] = 0;
  }
#undef GW_CASE
}
