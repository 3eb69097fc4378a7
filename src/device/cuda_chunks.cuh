// SPDX-License-Identifier: Apache-2.0
// Encoding of units of several blocks (large buckets, tiles): a thread block of 32 warps takes a chunk of 32 blocks at
// a time, and its warps share the statistics of a unit through shared memory.
//
// Included by the files of kernels inside an anonymous namespace, after cuda_driver.cuh.

// What a warp knows of its own block, for the other warps of the chunk.
struct ChunkPart {
  uint32_t top;
  int32_t first;
  uint32_t second, negative;
};

// The sums of the warps whose parts are `mine` in some lanes and zero in the others. 32 parts of 32 bits do not fit
// into 32 bits, so halves are summed.
__device__ __forceinline__ Sums sum_of_parts(const ChunkPart& mine) {
  const auto sum = [](uint32_t part) { return __reduce_add_sync(kFull, part); };
  Sums sums;
  sums.first = int64_t{static_cast<int32_t>(sum(static_cast<uint32_t>(mine.first >> 16)))} * 65536 +
               sum(static_cast<uint32_t>(mine.first) & 0xffffu);
  sums.second = (uint64_t{sum(mine.second >> 16)} << 16) + sum(mine.second & 0xffffu);
  sums.negative = sum(mine.negative);
  return sums;
}

// The whole of a partial block of a unit with these scales, by one warp; returns its part of the checksum. It is rare,
// and apart from the rest it takes no registers from it.
template <class B, bool kFeedback>
__device__ __noinline__ unsigned long long encode_partial(const CudaJob& job, uint32_t slot, uint64_t block,
                                                          uint32_t scale, uint32_t second_scale) {
  const CudaPiece piece = job.pieces[slot];
  const uint32_t scales[2] = {scale, second_scale};
  const UnitParams p = B::make_params(job.scheme, scales);
  Check check;
  for (uint32_t row = 0; row * kLane < piece.count - block * kBlock; ++row)
    encode_tail_row<B, kFeedback>(job, piece, block, row, threadIdx.x & 31, p, check);
  return check.loose;
}

// Where a chunk lies. What it is made of is copied to shared memory three chunks ahead, without waiting, one word a
// lane.
struct ChunkPlace {
  CudaPiece piece;
  const void* in;
  uint64_t key;
  const void* before;
  void* after;

  template <bool kFeedback>
  __device__ __forceinline__ void fetch(const CudaJob& job, uint32_t slot, uint32_t lane) {
    constexpr uint32_t kOfPiece = sizeof(CudaPiece) / 8;
    static_assert(sizeof(CudaPiece) % 8 == 0 && sizeof(ChunkPlace) == sizeof(CudaPiece) + 32);
    const uint32_t tensor = job.first_pointer + slot;
    const void* from = nullptr;
    if (lane < kOfPiece) from = reinterpret_cast<const uint64_t*>(job.pieces + slot) + lane;
    if (lane == kOfPiece) from = job.in + tensor;
    if (lane == kOfPiece + 1) from = job.keys + tensor;
    if (kFeedback && lane == kOfPiece + 2) from = job.before + tensor;
    if (kFeedback && lane == kOfPiece + 3) from = job.after + tensor;
    if (from) __pipeline_memcpy_async(reinterpret_cast<uint64_t*>(this) + lane, from, 8);
    __pipeline_commit();
  }
  // The block of warp w of chunk i, and whether it is full.
  __device__ __forceinline__ uint64_t block(uint64_t i, uint32_t w) const { return (i - piece.first_item) * 32 + w; }
  __device__ __forceinline__ bool is_full(uint64_t block) const { return (block + 1) * kBlock <= piece.count; }
};

// kAhead: f32 input aligned to 16 bytes. A thread block fills a multiprocessor and its warps wait for one another, so
// nothing else would hide the time that memory takes: the next chunk is copied to shared memory while this one is
// worked on.
//
// Shared memory is used in turns, so that one barrier a chunk (two with sums) is enough: behind it nobody is at the
// chunk before, and what warp 0 had fetched when it arrived is there for all.
//
// One thread block a multiprocessor is asked for by name, because nvcc otherwise gives one of these kernels half of the
// registers that this leaves it.
template <class B, bool kFeedback, bool kAhead>
__global__ void __launch_bounds__(1024, 1) encode_chunks(const __grid_constant__ CudaJob job) {
  __shared__ ChunkPart both_parts[2][32];
  __shared__ ChunkPlace places[4];
  GW_DYNAMIC_SHARED(float4, ahead_blocks);  // kAhead: a block per warp
  const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const uint32_t span = job.scheme.unit / kBlock, first = warp / span * span;  // the warps of this warp's unit
  const bool with_mine = lane / span == warp / span;                           // the warp `lane`
  float* const buffer = reinterpret_cast<float*>(ahead_blocks) + warp * kBlock;
  const auto slot_of = [&](uint64_t i) {
    return job.piece_count == 1 || i >= job.items ? 0 : __ldg(job.item_piece + i);
  };
  const auto send_for = [&](const ChunkPlace& place, uint64_t i) {
    const uint64_t block = place.block(i, warp);
    if (i >= job.items || !place.is_full(block)) return;
    if constexpr (kAhead)
      copy_block(static_cast<const float*>(place.in) + block * kBlock, buffer, lane);
    else
      prefetch_block(place.in, job.dtype, block, lane);
    if (kFeedback && place.before) prefetch_block(place.before, job.residual, block, lane);
  };
  Check check;
  uint32_t slot_ahead = 0;  // warp 0: of the fourth chunk from here
  if (warp == 0) {
    for (uint32_t c = 0; c < 3; ++c)
      places[c].fetch<kFeedback>(job, slot_of(blockIdx.x + c * uint64_t{gridDim.x}), lane);
    slot_ahead = slot_of(blockIdx.x + 3ull * gridDim.x);
    __pipeline_wait_prior(0);
  }
  __syncthreads();
  send_for(places[0], blockIdx.x);
  uint32_t turn = 0;
  for (uint64_t i = blockIdx.x; i < job.items; i += gridDim.x, ++turn) {
    const ChunkPlace& place = places[turn % 4];
    ChunkPart(&parts)[32] = both_parts[turn % 2];
    const CudaPiece& piece = place.piece;
    const uint64_t block = place.block(i, warp);
    const bool here = block * kBlock < piece.count;
    float x[32] = {};
    __pipeline_wait_prior(0);
    if constexpr (kAhead) {
      if (!place.is_full(block)) {
        const float* from = static_cast<const float*>(place.in);
#pragma unroll 1
        for (uint32_t at = lane; at < kBlock; at += 32)
          buffer[at] = block * kBlock + at < piece.count ? from[block * kBlock + at] : 0.0f;
      }
      __syncwarp();  // a lane reads what others have copied
#pragma unroll
      for (int row = 0; row < 32; ++row) x[row] = buffer[row * 32 + lane];
      __syncwarp();  // before the next copy overwrites it
      if (kFeedback && here) add_residuals(job, piece, place.before, block, lane, x);
    } else if (here) {
      load_block<kFeedback>(job, piece, block, lane, x);
    }
    send_for(places[(turn + 1) % 4], i + gridDim.x);
    ChunkPart mine{block_max(x), 0, 0, 0};
    if (lane == 0) parts[warp].top = mine.top;
    __syncthreads();
    if (warp == 0) {
      places[(turn + 3) % 4].fetch<kFeedback>(job, slot_ahead, lane);
      slot_ahead = slot_of(i + 4ull * gridDim.x);
    }
    mine.top = __reduce_max_sync(kFull, with_mine ? parts[lane].top : 0);
    Sums sums;
    if (job.scheme.sums != SumKind::none) {
      if (mine.top < kInfBits) sums = warp_sums(job.scheme.sums, x, grid_for(mine.top));
      if (lane == 0) {
        parts[warp].first = static_cast<int32_t>(sums.first);
        parts[warp].second = static_cast<uint32_t>(sums.second);
        parts[warp].negative = static_cast<uint32_t>(sums.negative);
      }
      __syncthreads();
      sums = sum_of_parts(with_mine ? parts[lane] : ChunkPart{});
    }
    if (!here) continue;
    const uint64_t unit = block / span, begin = unit * job.scheme.unit;
    uint32_t scales[2] = {0, 0};
    B::make_scales(job.scheme, mine.top, sums, min_u64(job.scheme.unit, piece.count - begin), scales);
    if (lane == 0 && warp == first) write_scales(job, piece, unit, scales, check);
    if (!place.is_full(block)) {
      check.loose += encode_partial<B, kFeedback>(job, piece.tensor - job.first_pointer, block, scales[0], scales[1]);
      continue;
    }
    const UnitParams p = B::make_params(job.scheme, scales);
    const int bits = code_bits<B>(job.scheme);
    const BlockPlace at{job.body + piece.region + block * kLane * bits + lane,
                        static_cast<uint32_t>(piece.region / kLane + block * bits),
                        block_key(place.key, piece.first_block + block)};
    encode_full<B, kFeedback>(job, at, lane, x, p, scales[0] == kMarker, check);
    if (kFeedback && place.before) store_residuals(job, place.before, place.after, block * kBlock + lane, x);
  }
  __pipeline_wait_prior(0);
  check.flush(job.check);
}
