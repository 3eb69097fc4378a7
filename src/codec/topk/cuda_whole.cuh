// SPDX-License-Identifier: Apache-2.0
// The strongest values of whole tensors on a GPU. Three counting passes over memory find the magnitude of the k-th
// strongest, eleven, ten and ten bits at a time; one more counts the kept values of every block, a scan over the blocks
// turns counts into places, and the last pass writes.
//
// Included by cuda.cu inside an anonymous namespace, after cuda_kept.cuh.

// The search for the magnitude of one tensor: the digits that are known, the bits they take, and how many of the values
// with these digits are still to be kept.
struct TopkSearch {
  uint32_t prefix, known;
  unsigned long long left;
  uint32_t histogram[2048];  // of the next digit
};

// Workspace of a group. A whole tensor's items are its blocks, so that first_item of a piece is also its first entry in
// block_counts.
struct TopkWork {
  TopkSearch* search = nullptr;   // of each piece
  uint2* block_counts = nullptr;  // of each block: values above and at the threshold, then their prefix sums
};

__global__ void select_begin(const __grid_constant__ CudaJob job, const __grid_constant__ TopkWork work) {
  for (uint32_t p = blockIdx.x; p < job.piece_count; p += gridDim.x) {
    TopkSearch& state = work.search[p];
    for (uint32_t d = threadIdx.x; d < 2048; d += blockDim.x) state.histogram[d] = 0;
    if (threadIdx.x == 0) {
      state.prefix = state.known = 0;
      state.left = topk_kept(job.scheme, job.pieces[p].count);
    }
  }
}

template <bool kFeedback>
__global__ void __launch_bounds__(256)
    select_count(const __grid_constant__ CudaJob job, const __grid_constant__ TopkWork work, int shift, int width) {
  __shared__ uint32_t histogram[2048];
  for (uint32_t d = threadIdx.x; d < 2048; d += 256) histogram[d] = 0;
  __syncthreads();
  const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  uint32_t slot = 0xffffffffu;
  // The eight warps of a thread block stay on one piece at a time, so that they can share the histogram.
  for (uint64_t base = blockIdx.x * 8ull; base < job.items; base += gridDim.x * 8ull)
    for (uint64_t i = base; i < base + 8 && i < job.items; ++i) {
      const Item item = item_of(job, i);
      if (item.slot != slot) {
        __syncthreads();
        if (slot != 0xffffffffu)
          for (uint32_t d = threadIdx.x; d < 2048; d += 256) {
            if (histogram[d]) atomicAdd(&work.search[slot].histogram[d], histogram[d]);
            histogram[d] = 0;
          }
        slot = item.slot;
        __syncthreads();
      }
      if (i - base != warp % 8) continue;
      const TopkSearch& state = work.search[slot];
      const uint32_t prefix = state.prefix, known = state.known;
      float x[32];
      load_block<kFeedback>(job, item.piece, item.number, lane, x);
      const uint64_t n = min_u64(kBlock, item.piece.count - item.number * kBlock);
#pragma unroll
      for (int row = 0; row < 32; ++row) {
        const uint32_t magnitude = float_bits(x[row]) & 0x7fffffffu;
        if (row * kLane + lane < n && (magnitude & known) == prefix)
          atomicAdd(&histogram[(magnitude >> shift) & ((1u << width) - 1)], 1u);
      }
    }
  __syncthreads();
  if (slot != 0xffffffffu)
    for (uint32_t d = threadIdx.x; d < 2048; d += 256)
      if (histogram[d]) atomicAdd(&work.search[slot].histogram[d], histogram[d]);
}

__global__ void select_digit(const __grid_constant__ CudaJob job, const __grid_constant__ TopkWork work, int shift,
                             int width) {
  for (uint32_t p = blockIdx.x; p < job.piece_count; p += gridDim.x) {
    TopkSearch& state = work.search[p];
    if (threadIdx.x == 0 && job.pieces[p].count > 0) {
      uint32_t digit = (1u << width) - 1;
      while (state.histogram[digit] < state.left) state.left -= state.histogram[digit--];
      state.prefix |= digit << shift;
      state.known |= ((1u << width) - 1) << shift;
    }
    __syncthreads();
    for (uint32_t d = threadIdx.x; d < 2048; d += blockDim.x) state.histogram[d] = 0;
  }
}

template <bool kFeedback>
__global__ void __launch_bounds__(256)
    select_places(const __grid_constant__ CudaJob job, const __grid_constant__ TopkWork work) {
  const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  for (uint64_t i = blockIdx.x * 8ull + warp; i < job.items; i += gridDim.x * 8ull) {
    const Item item = item_of(job, i);
    const uint32_t threshold = work.search[item.slot].prefix;
    const uint64_t n = min_u64(kBlock, item.piece.count - item.number * kBlock);
    float x[32];
    load_block<kFeedback>(job, item.piece, item.number, lane, x);
    uint32_t above = 0, equal = 0;
#pragma unroll
    for (int row = 0; row < 32; ++row) {
      const uint32_t magnitude = float_bits(x[row]) & 0x7fffffffu;
      above += row * kLane + lane < n && magnitude > threshold;
      equal += row * kLane + lane < n && magnitude == threshold;
    }
    above = __reduce_add_sync(kFull, above);
    equal = __reduce_add_sync(kFull, equal);
    if (lane == 0) work.block_counts[item.piece.first_item + item.number] = {above, equal};
  }
}

// Exclusive sums over the blocks of each piece, 1024 at a time. Counts stay below 2^32.
__global__ void __launch_bounds__(1024)
    select_scan(const __grid_constant__ CudaJob job, const __grid_constant__ TopkWork work) {
  __shared__ uint2 warps[32];
  const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  for (uint32_t p = blockIdx.x; p < job.piece_count; p += gridDim.x) {
    const CudaPiece piece = job.pieces[p];
    const uint64_t blocks = div_up(piece.count, kBlock);
    uint2 carry{0, 0};
    for (uint64_t base = 0; base < blocks; base += 1024) {
      const uint64_t b = base + threadIdx.x;
      uint2* counts = work.block_counts + piece.first_item;
      const uint2 own = b < blocks ? counts[b] : uint2{0, 0};
      uint2 sum = own;
#pragma unroll
      for (int d = 1; d < 32; d <<= 1) {
        const uint32_t sx = __shfl_up_sync(kFull, sum.x, d), sy = __shfl_up_sync(kFull, sum.y, d);
        if (lane >= d) {
          sum.x += sx;
          sum.y += sy;
        }
      }
      if (lane == 31) warps[warp] = sum;
      __syncthreads();
      uint2 before = carry, all = carry;
      for (uint32_t w = 0; w < 32; ++w) {
        if (w < warp) {
          before.x += warps[w].x;
          before.y += warps[w].y;
        }
        all.x += warps[w].x;
        all.y += warps[w].y;
      }
      if (b < blocks) counts[b] = {before.x + sum.x - own.x, before.y + sum.y - own.y};
      carry = all;
      __syncthreads();
    }
  }
}

template <bool kFeedback>
__global__ void __launch_bounds__(256)
    select_emit(const __grid_constant__ CudaJob job, const __grid_constant__ TopkWork work) {
  const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  Check check;
  for (uint64_t i = blockIdx.x * 8ull + warp; i < job.items; i += gridDim.x * 8ull) {
    const Item item = item_of(job, i);
    const CudaPiece& piece = item.piece;
    const KeptUnit u = kept_of(job, piece, 0, piece.count);
    const uint64_t block = item.number, n = min_u64(kBlock, piece.count - block * kBlock);
    float x[32];
    load_block<kFeedback>(job, piece, block, lane, x);
    if (job.tops[item.slot] >= kInfBits) {
      for (uint64_t j = block * kBlock + lane; j < min_u64(u.k, block * kBlock + n); j += 32)
        write_kept(job, u, j, j == 0 ? kMarker : 0, static_cast<uint32_t>(j), check);
      finish_block<kFeedback>(job, piece, block, lane, x, true);
      continue;
    }
    const TopkSearch& state = work.search[item.slot];
    const uint2 before = work.block_counts[piece.first_item + block];
    const uint64_t equals = before.y < state.left ? state.left - before.y : 0;
    emit_block(job, u, block * kBlock, lane, x, n, state.prefix, before.x + min_u64(before.y, state.left), equals,
               check);
    finish_block<kFeedback>(job, piece, block, lane, x, false);
  }
  check.flush(job.check);
}
