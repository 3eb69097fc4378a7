// SPDX-License-Identifier: Apache-2.0
// The codes of casq on a GPU: the cluster numbers of a warp's block, in registers, made from thresholds or read from a
// message, and written to one. The words of a full block are those of its lanes; the codes of a partial block follow
// one another from bit 0 on.
//
// Included by cuda.cu inside an anonymous namespace, after cuda_pack.cuh.

// A 32 x 32 matrix of bits, one row per lane, transposed: bit l of lane i becomes bit i of lane l.
__device__ __forceinline__ uint32_t transpose(uint32_t bits, uint32_t lane) {
  constexpr uint32_t kLower[5] = {0x0000ffffu, 0x00ff00ffu, 0x0f0f0f0fu, 0x33333333u, 0x55555555u};
#pragma unroll
  for (int i = 0; i < 5; ++i) {
    const uint32_t d = 16u >> i, lower = kLower[i], other = __shfl_xor_sync(kFull, bits, d);
    bits = lane & d ? (bits & ~lower) | (other & ~lower) >> d : (bits & lower) | (other & lower) << d;
  }
  return bits;
}

// The codes of one lane of a block. In registers a code of 3 bits takes 4, so that none lies across two words.
template <int kBits>
struct BlockCodes {
  static constexpr int kCount = 1 << kBits, kField = kBits == 3 ? 4 : kBits;
  uint32_t word[kField] = {};

  __device__ __forceinline__ uint32_t at_front(int row) const {
    return word[row * kField / 32] >> (row * kField % 32);
  }  // others behind it
  __device__ __forceinline__ uint32_t at(int row) const { return at_front(row) & (kCount - 1u); }

  // `threshold` of lane i is the i-th.
  __device__ __forceinline__ void classify(const float (&x)[32], float threshold) {
#pragma unroll 1
    for (int i = 0; i + 1 < kCount; ++i) {
      const float t = __shfl_sync(kFull, threshold, i);
#pragma unroll
      for (int row = 0; row < 32; ++row) word[row * kField / 32] += x[row] < t ? 0u : 1u << (row * kField % 32);
    }
  }

  __device__ __forceinline__ void store_full(uint32_t* words, uint32_t row0, Check& check) const {
    if constexpr (kField == kBits) {
#pragma unroll
      for (int q = 0; q < kBits; ++q) {
        words[q * 32] = word[q];
        check.row(word[q], row0 + q);
      }
    } else {
      uint32_t codes[32];
#pragma unroll
      for (int row = 0; row < 32; ++row) codes[row] = at(row);
      pack_lane<kBits>(codes, words, row0, check);
    }
  }
  __device__ __forceinline__ void load_full(const uint32_t* words, uint32_t row0, Check& check) {
    if constexpr (kField == kBits) {
#pragma unroll
      for (int q = 0; q < kBits; ++q) {
        word[q] = __ldcs(words + q * 32);
        check.row(word[q], row0 + q);
      }
    } else {
      uint32_t codes[32];
      unpack_lane<kBits>(words, row0, codes, check);
#pragma unroll
      for (int row = 0; row < 32; ++row) word[row * kField / 32] |= codes[row] << (row * kField % 32);
    }
  }

  // The n codes of a partial block, from bit 0 of the tail on; `bytes` is room for 1024 in shared memory.
  __device__ __forceinline__ void store_tail(uint32_t* body, uint64_t tail, uint32_t n, uint32_t lane, uint8_t* bytes,
                                             Check& check) const {
    __syncwarp();
#pragma unroll
    for (int row = 0; row < 32; ++row) bytes[row * 32 + lane] = static_cast<uint8_t>(at(row));
    __syncwarp();
    for (uint32_t w = lane; w * 32 < n * kBits; w += 32) {
      uint32_t out = 0;
      for (uint32_t e = w * 32 / kBits; e < n && e * kBits < w * 32 + 32; ++e) {
        const int shift = static_cast<int>(e * kBits) - static_cast<int>(w * 32);
        out |= shift >= 0 ? uint32_t{bytes[e]} << shift : uint32_t{bytes[e]} >> -shift;
      }
      body[tail + w] = out;
      check.loose += word_part(out, tail + w);
    }
    __syncwarp();
  }
  // Returns status bits.
  __device__ __forceinline__ uint32_t load_tail(const uint32_t* body, uint64_t tail, uint32_t n, uint32_t lane,
                                                Check& check) {
    uint32_t problem = 0;
    for (uint32_t w = lane; w * 32 < n * kBits; w += 32) {
      const uint32_t found = body[tail + w], used = min(32u, n * kBits - w * 32);
      check.loose += word_part(found, tail + w);
      if (used < 32 && found >> used) problem = kBadPadding;
    }
#pragma unroll
    for (int row = 0; row < 32; ++row) {
      const uint32_t e = row * 32 + lane, bit = e * kBits;
      if (e >= n) continue;
      uint32_t code = body[tail + bit / 32] >> bit % 32;
      if (bit % 32 + kBits > 32) code |= body[tail + bit / 32 + 1] << (32 - bit % 32);
      word[row * kField / 32] |= (code & (kCount - 1u)) << (row * kField % 32);
    }
    return problem;
  }

  __device__ __forceinline__ void store(const CudaJob& job, const CudaPiece& piece, uint64_t block, uint32_t n,
                                        uint32_t lane, uint8_t* bytes, Check& check) const {
    if (n == kBlock)
      store_full(job.body + piece.region + block * kLane * kBits + lane,
                 static_cast<uint32_t>(piece.region / kLane + block * kBits), check);
    else
      store_tail(job.body, piece.region + full_words(job.scheme, piece.count), n, lane, bytes, check);
  }
  __device__ __forceinline__ uint32_t load(const CudaJob& job, const CudaPiece& piece, uint64_t block, uint32_t n,
                                           uint32_t lane, Check& check) {
    if (n < kBlock) return load_tail(job.body, piece.region + full_words(job.scheme, piece.count), n, lane, check);
    load_full(job.body + piece.region + block * kLane * kBits + lane,
              static_cast<uint32_t>(piece.region / kLane + block * kBits), check);
    return 0;
  }

  // plane[j] of lane r gets bit j of the codes of row r; bit l of it belongs to lane l.
  __device__ __forceinline__ void planes(uint32_t lane, uint32_t (&plane)[kBits]) const {
    uint32_t turned[kField];
#pragma unroll
    for (int q = 0; q < kField; ++q) turned[q] = transpose(word[q], lane);
#pragma unroll
    for (int j = 0; j < kBits; ++j) {
      const uint32_t from = lane * kField + j;
      plane[j] = 0;
#pragma unroll
      for (int q = 0; q < kField; ++q) {
        const uint32_t bits = __shfl_sync(kFull, turned[q], from & 31);
        if (from / 32 == q) plane[j] = bits;
      }
    }
  }
};

// What a marked unit leaves behind: codes that are zero, residuals that stay.
template <int kBits, bool kFeedback>
__device__ __forceinline__ void encode_marked(const CudaJob& job, const CudaPiece& piece, uint64_t block, uint32_t n,
                                              uint32_t lane) {
  const uint64_t at = piece.region + (n == kBlock ? block * kLane * kBits : full_words(job.scheme, piece.count));
  for (uint32_t w = lane; w * 32 < n * kBits; w += 32) job.body[at + w] = 0;
  if (kFeedback && job.before[piece.tensor] != nullptr)
    for (uint32_t e = lane; e < n; e += 32) store_residual(job, piece, block * kBlock + e, bits_float(kMarker));
}
