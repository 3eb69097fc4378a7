// SPDX-License-Identifier: Apache-2.0
// casq's mode=paper on a GPU: whole tensors, buckets by hash. Statistics come first (cuda_stats.cuh). Then one pass
// writes the codes and adds every value to its bucket by atomics, one writes the means, and with feedback one more
// leaves the residuals.
//
// Included by cuda.cu inside an anonymous namespace, after cuda_codes.cuh.

// Workspace of a group: what the elements of every bucket add up to, and how many they are.
struct CasqWork {
  const uint64_t* first_bucket = nullptr;  // of each piece: its first entry in `sums` and `counts`
  unsigned long long* sums = nullptr;
  uint32_t* counts = nullptr;
  uint64_t buckets = 0;  // of all pieces
};

// The tensor that a warp is at. Lane k knows the buckets of cluster k.
struct HashPlace {
  uint32_t slot = 0xffffffffu, modulus = 1, start = 0;
  uint32_t top = 0;     // encoding: the largest magnitude of the tensor,
  float threshold = 0;  // and the threshold that this lane keeps

  __device__ __forceinline__ void go(const CudaJob& job, const Item& item, uint32_t lane) {
    if (item.slot == slot) return;
    slot = item.slot;
    uint64_t buckets[kMaxClusters], at = 0;
    hash_buckets(job.scheme, buckets_of(job.scheme, item.piece.count), buckets);
    for (uint32_t k = 0; k < clusters_of(job.scheme); ++k) {
      if (k == lane) {
        modulus = static_cast<uint32_t>(min_u64(buckets[k], uint64_t{1} << 31));  // hashes are below
        start = static_cast<uint32_t>(at);
      }
      at += buckets[k];
    }
    if (!job.in) return;
    top = job.tops[slot];
    Sums sums;
    sums.second = job.sums[slot].second;
    if (top < kInfBits && lane + 1 < clusters_of(job.scheme))
      threshold = threshold_of(job.scheme, rms_of(top, sums, item.piece.count), lane);
  }
  // The bucket of element e of a block; all lanes ask at once.
  __device__ __forceinline__ uint32_t bucket(const Item& item, uint32_t e, uint32_t code) const {
    const uint32_t index = static_cast<uint32_t>((item.piece.first_block + item.number) * kBlock + e);
    return __shfl_sync(kFull, start, code) + bkdr(index) % __shfl_sync(kFull, modulus, code);
  }
};

template <int kBits, bool kFeedback>
__global__ void __launch_bounds__(256)
    hash_add(const __grid_constant__ CudaJob job, const __grid_constant__ CasqWork work) {
  __shared__ uint8_t bytes[8][kBlock];
  const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  Check check;
  HashPlace at;
  for (uint64_t i = blockIdx.x * 8ull + warp; i < job.items; i += gridDim.x * 8ull) {
    const Item item = item_of(job, i);
    const CudaPiece& piece = item.piece;
    const uint32_t n = static_cast<uint32_t>(min_u64(kBlock, piece.count - item.number * kBlock));
    at.go(job, item, lane);
    if (at.top >= kInfBits) {
      encode_marked<kBits, kFeedback>(job, piece, item.number, n, lane);
      continue;
    }
    const Grid grid = grid_for(at.top);
    const uint64_t first_bucket = work.first_bucket[item.slot];
    float x[32];
    load_block<kFeedback>(job, piece, item.number, lane, x);
    BlockCodes<kBits> codes;
    codes.classify(x, at.threshold);
    codes.store(job, piece, item.number, n, lane, bytes[warp], check);
#pragma unroll
    for (int row = 0; row < 32; ++row) {
      const uint32_t e = row * 32 + lane;
      const uint64_t b = first_bucket + at.bucket(item, e, codes.at(row));
      const int64_t value = __float2int_rn(x[row] * grid.pre * grid.grid * power_of_two(kHashDigits));
      if (e >= n) continue;
      atomicAdd(work.sums + b, static_cast<unsigned long long>(value));
      atomicAdd(work.counts + b, 1u);
    }
  }
  check.flush(job.check);
}

// The tables of whole tensors; the thread blocks of one blockIdx.x share one table.
__global__ void __launch_bounds__(256)
    hash_means(const __grid_constant__ CudaJob job, const __grid_constant__ CasqWork work) {
  Check check;
  for (uint32_t p = blockIdx.x; p < job.piece_count; p += gridDim.x) {
    const CudaPiece piece = job.pieces[p];
    const uint64_t scales = piece.region + scales_offset(job.scheme, piece.count),
                   buckets = buckets_of(job.scheme, piece.count);
    const uint64_t words = casq_table_words(job.scheme, piece.count);
    const uint32_t top = job.tops[p];
    const bool marked = top >= kInfBits;
    const double step = marked ? 0.0 : grid_step(top);
    for (uint64_t w = blockIdx.y * 256ull + threadIdx.x; w < words; w += gridDim.y * 256ull) {
      uint32_t word = 0;
      if (w == 0) {
        word = marked ? kMarker : top;
      } else if (!marked) {
        const uint64_t b = work.first_bucket[p] + (w - 1) % buckets;
        const uint32_t count = work.counts[b];
        word = w <= buckets ? float_bits(hash_mean(static_cast<int64_t>(work.sums[b]), count, step)) : count;
      }
      job.body[scales + w] = word;
      check.loose += word_part(word, scales + w);
    }
  }
  check.flush(job.check);
}

template <int kBits>
__global__ void __launch_bounds__(256) hash_residuals(const __grid_constant__ CudaJob job) {
  const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  HashPlace at;
  for (uint64_t i = blockIdx.x * 8ull + warp; i < job.items; i += gridDim.x * 8ull) {
    const Item item = item_of(job, i);
    const CudaPiece& piece = item.piece;
    const uint32_t n = static_cast<uint32_t>(min_u64(kBlock, piece.count - item.number * kBlock));
    at.go(job, item, lane);
    if (at.top >= kInfBits || job.before[piece.tensor] == nullptr) continue;  // hash_add has kept what was there
    const uint32_t* const means = job.body + piece.region + scales_offset(job.scheme, piece.count) + 1;
    float x[32];
    load_block<true>(job, piece, item.number, lane, x);
    BlockCodes<kBits> codes;
    codes.classify(x, at.threshold);
#pragma unroll
    for (int row = 0; row < 32; ++row) {
      const uint32_t e = row * 32 + lane, b = at.bucket(item, e, codes.at(row));
      if (e < n) store_residual(job, piece, item.number * kBlock + e, (x[row] - bits_float(means[b])) * job.unscale);
    }
  }
}

__global__ void __launch_bounds__(256) hash_check(const __grid_constant__ CudaJob job) {
  Check check;
  uint32_t problem = 0;
  for (uint32_t p = blockIdx.x; p < job.piece_count; p += gridDim.x) {
    const CudaPiece piece = job.pieces[p];
    const uint64_t scales = piece.region + scales_offset(job.scheme, piece.count),
                   buckets = buckets_of(job.scheme, piece.count);
    const uint64_t words = casq_table_words(job.scheme, piece.count);
    const bool marked = job.body[scales] == kMarker;
    for (uint64_t w = blockIdx.y * 256ull + threadIdx.x; w < words; w += gridDim.y * 256ull) {
      const uint32_t word = job.body[scales + w];
      check.loose += word_part(word, scales + w);
      if (w == 0 && !marked && word >= kInfBits) problem |= kBadScales;
      if (w > 0 && (marked ? word != 0 : w <= buckets && !finite_bits(word))) problem |= kBadBuckets;
    }
  }
  report(job, problem, check);
}

template <int kBits>
__global__ void __launch_bounds__(256) hash_decode(const __grid_constant__ CudaJob job) {
  const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  Check check;
  HashPlace at;
  uint32_t problem = 0;
  for (uint64_t i = blockIdx.x * 8ull + warp; i < job.items; i += gridDim.x * 8ull) {
    const Item item = item_of(job, i);
    const CudaPiece& piece = item.piece;
    const uint32_t n = static_cast<uint32_t>(min_u64(kBlock, piece.count - item.number * kBlock));
    at.go(job, item, lane);
    const uint32_t* const scales = job.body + piece.region + scales_offset(job.scheme, piece.count);
    const bool marked = scales[0] == kMarker;
    BlockCodes<kBits> codes;
    problem |= codes.load(job, piece, item.number, n, lane, check);
#pragma unroll
    for (int row = 0; row < 32; ++row) {
      const uint32_t e = row * 32 + lane, b = at.bucket(item, e, codes.at(row));
      if (e < n)
        store_value(job.out[piece.tensor], job.dtype, job.add, item.number * kBlock + e,
                    bits_float(marked ? kMarker : scales[1 + b]));
    }
  }
  report(job, problem, check);
}
