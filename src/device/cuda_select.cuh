// SPDX-License-Identifier: Apache-2.0
// Selection of the strongest values on a GPU. Tiles: a thread block of 32 warps holds a tile in registers, narrows the k-th
// strongest magnitude down bit by bit, first over all values, then over the few that are left, and writes what is
// kept in the order of the indices. Whole tensors: three counting passes over memory find the magnitude, a
// scan over blocks finds everybody's place.
//
// Checksums are linear in the words, so the two 16-bit indices of a word are added by whoever writes them.
//
// Included by codec/cuda_kernels.cu after cuda_driver.cuh.

struct Kept {
  uint64_t words;  // of the unit, in the body
  uint64_t k;
  bool wide;
};

__device__ __forceinline__ Kept kept_of(const CudaJob& job, const CudaPiece& piece, uint64_t unit, uint64_t elements) {
  const uint64_t size = unit_elements(job.scheme, piece.count);
  return {piece.region + unit * selected_words(job.scheme, piece.count, size), kept(job.scheme, elements), wide_indices(job.scheme, piece.count)};
}

__device__ __forceinline__ void write_kept(const CudaJob& job, const Kept& u, uint64_t j, uint32_t bits, uint32_t index, Check& check) {
  job.body[u.words + j] = bits;
  check.loose += word_part(bits, u.words + j);
  if (u.wide) {
    job.body[u.words + u.k + j] = index;
    check.loose += word_part(index, u.words + u.k + j);
    return;
  }
  uint16_t* indices = reinterpret_cast<uint16_t*>(job.body + u.words + u.k);
  indices[j] = static_cast<uint16_t>(index);
  if (j + 1 == u.k && j % 2 == 0) indices[j + 1] = 0;
  check.loose += word_part(index << (j % 2 * 16), u.words + u.k + j / 2);
}

// Where the kept values of one warp's block go: `at` is the place of its first, `equals` how many at the threshold it may
// keep. Clears what is kept, so that x becomes the residual.
__device__ __forceinline__ void emit_block(const CudaJob& job, const Kept& u, uint64_t begin_in_unit, uint32_t lane, float (&x)[32], uint64_t n,
                                           uint32_t threshold, uint64_t at, uint64_t equals, Check& check) {
  const uint32_t before = (1u << lane) - 1;
#pragma unroll
  for (int row = 0; row < 32; ++row) {
    const uint32_t bits = float_bits(x[row]), magnitude = bits & 0x7fffffffu;
    const bool inside = row * kLane + lane < n;
    const uint32_t equal = __ballot_sync(kFull, inside && magnitude == threshold);
    const bool keep_equal = (equal >> lane & 1) && __popc(equal & before) < equals;
    const bool keep = inside && (magnitude > threshold || keep_equal);
    const uint32_t all = __ballot_sync(kFull, keep);
    const uint32_t kept_equal = __popc(__ballot_sync(kFull, keep_equal));
    if (keep) {
      write_kept(job, u, at + __popc(all & before), bits, static_cast<uint32_t>(begin_in_unit + row * kLane + lane), check);
      x[row] = 0;
    }
    at += __popc(all);
    equals -= kept_equal;
  }
}

template <bool kFeedback>
__device__ __forceinline__ void finish_block(const CudaJob& job, const CudaPiece& piece, uint64_t block, uint32_t lane, float (&x)[32], bool marked) {
  if (!kFeedback || job.before[piece.tensor] == nullptr) return;
#pragma unroll
  for (int row = 0; row < 32; ++row)
    store_residual(job, piece, block * kBlock + row * kLane + lane, marked ? bits_float(kMarker) : x[row] * job.unscale);
}

// A sum over the thread block; every thread gets it. Two barriers.
__device__ __forceinline__ uint32_t block_sum(uint32_t value, uint32_t* shared) {
  const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  value = __reduce_add_sync(kFull, value);
  if (lane == 0) shared[warp] = value;
  __syncthreads();
  const uint32_t total = __reduce_add_sync(kFull, shared[lane]);
  __syncthreads();
  return total;
}

constexpr uint32_t kCandidates = 4096;

template <bool kFeedback>
__global__ void __launch_bounds__(1024) select_tiles(const __grid_constant__ CudaJob job) {
  __shared__ uint32_t shared[32], above_of[32], equal_of[32], candidates[kCandidates], candidate_count;
  const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  Check check;
  for (uint64_t i = blockIdx.x; i < job.items; i += gridDim.x) {
    const Item item = item_of(job, i);
    const CudaPiece& piece = item.piece;
    const uint64_t tile = item.number, block = tile * 32 + warp, elements = min_u64(kTile, piece.count - tile * kTile);
    const uint64_t n = block * kBlock < piece.count ? min_u64(kBlock, piece.count - block * kBlock) : 0;
    const Kept u = kept_of(job, piece, tile, elements);
    float x[32] = {};
    if (n) load_block<kFeedback>(job, piece, block, lane, x);
    const uint32_t top_here = rows_max<32>(x);
    if (lane == 0) shared[warp] = top_here;
    if (threadIdx.x == 0) candidate_count = 0;
    __syncthreads();
    const uint32_t top = __reduce_max_sync(kFull, shared[lane]);
    __syncthreads();
    if (top >= kInfBits) {
      for (uint64_t j = threadIdx.x; j < u.k; j += 1024) write_kept(job, u, j, j == 0 ? kMarker : 0, static_cast<uint32_t>(j), check);
      if (n) finish_block<kFeedback>(job, piece, block, lane, x, true);
      continue;
    }
    // The largest threshold that at least k values reach. `reach` counts the values at or above it.
    const uint32_t k = static_cast<uint32_t>(u.k);
    uint32_t threshold = 0, reach = static_cast<uint32_t>(elements);
    int bit = 30;
    for (; bit >= 0 && reach > kCandidates; --bit) {
      const uint32_t trial = threshold | 1u << bit;
      if (trial > top) continue;
      uint32_t count = 0;
#pragma unroll
      for (int row = 0; row < 32; ++row) count += (float_bits(x[row]) & 0x7fffffffu) >= trial;
      count = block_sum(count, shared);
      if (count >= k) {
        threshold = trial;
        reach = count;
      }
    }
    if (bit >= 0 && threshold > 0) {  // few are left (zeros beyond the tile's end are not among them): put them in shared memory
#pragma unroll
      for (int row = 0; row < 32; ++row) {
        const uint32_t magnitude = float_bits(x[row]) & 0x7fffffffu;
        const uint32_t votes = __ballot_sync(kFull, magnitude >= threshold);
        if (votes == 0) continue;
        uint32_t at = 0;
        if (lane == 0) at = atomicAdd(&candidate_count, __popc(votes));
        at = __shfl_sync(kFull, at, 0) + __popc(votes & ((1u << lane) - 1));
        if (magnitude >= threshold) candidates[at] = magnitude;
      }
      __syncthreads();
      uint32_t mine[kCandidates / 1024];
#pragma unroll
      for (int c = 0; c < kCandidates / 1024; ++c) mine[c] = c * 1024 + threadIdx.x < reach ? candidates[c * 1024 + threadIdx.x] : 0;
      for (; bit >= 0; --bit) {
        const uint32_t trial = threshold | 1u << bit;
        if (trial > top) continue;
        uint32_t count = 0;
#pragma unroll
        for (int c = 0; c < kCandidates / 1024; ++c) count += mine[c] >= trial;
        count = block_sum(count, shared);
        if (count >= k) threshold = trial;
      }
    } else {
      for (; bit >= 0; --bit) {
        const uint32_t trial = threshold | 1u << bit;
        if (trial > top) continue;
        uint32_t count = 0;
#pragma unroll
        for (int row = 0; row < 32; ++row) count += (float_bits(x[row]) & 0x7fffffffu) >= trial;
        count = block_sum(count, shared);
        if (count >= k) threshold = trial;
      }
    }
    // Everybody's place: how many are kept in the blocks before, all above the threshold and the first equals.
    uint32_t above = 0, equal = 0;
#pragma unroll
    for (int row = 0; row < 32; ++row) {
      const uint32_t magnitude = float_bits(x[row]) & 0x7fffffffu;
      above += magnitude > threshold;
      equal += row * kLane + lane < n && magnitude == threshold;
    }
    above = __reduce_add_sync(kFull, above);
    equal = __reduce_add_sync(kFull, equal);
    if (lane == 0) {
      above_of[warp] = above;
      equal_of[warp] = equal;
    }
    __syncthreads();
    const uint32_t all_above = __reduce_add_sync(kFull, above_of[lane]);
    const uint32_t above_before = __reduce_add_sync(kFull, lane < warp ? above_of[lane] : 0);
    const uint32_t equal_before = __reduce_add_sync(kFull, lane < warp ? equal_of[lane] : 0);
    const uint32_t wanted = k - all_above;  // equals that are kept
    const uint32_t equals = equal_before < wanted ? wanted - equal_before : 0;
    if (n) {
      emit_block(job, u, warp * kBlock, lane, x, n, threshold, above_before + min(equal_before, wanted), equals, check);
      finish_block<kFeedback>(job, piece, block, lane, x, false);
    }
    __syncthreads();
  }
  check.flush(job.check);
}

// --- whole tensors -------------------------------------------------------------------------------------------------

__global__ void select_begin(const __grid_constant__ CudaJob job) {
  for (uint32_t p = blockIdx.x; p < job.piece_count; p += gridDim.x) {
    CudaSelect& state = job.select[p];
    for (uint32_t d = threadIdx.x; d < 2048; d += blockDim.x) state.histogram[d] = 0;
    if (threadIdx.x == 0) {
      state.prefix = state.known = 0;
      state.left = kept(job.scheme, job.pieces[p].count);
    }
  }
}

template <bool kFeedback>
__global__ void __launch_bounds__(256) select_count(const __grid_constant__ CudaJob job, int shift, int width) {
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
            if (histogram[d]) atomicAdd(&job.select[slot].histogram[d], histogram[d]);
            histogram[d] = 0;
          }
        slot = item.slot;
        __syncthreads();
      }
      if (i - base != warp % 8) continue;
      const CudaSelect& state = job.select[slot];
      const uint32_t prefix = state.prefix, known = state.known;
      float x[32];
      load_block<kFeedback>(job, item.piece, item.number, lane, x);
      const uint64_t n = min_u64(kBlock, item.piece.count - item.number * kBlock);
#pragma unroll
      for (int row = 0; row < 32; ++row) {
        const uint32_t magnitude = float_bits(x[row]) & 0x7fffffffu;
        if (row * kLane + lane < n && (magnitude & known) == prefix) atomicAdd(&histogram[(magnitude >> shift) & ((1u << width) - 1)], 1u);
      }
    }
  __syncthreads();
  if (slot != 0xffffffffu)
    for (uint32_t d = threadIdx.x; d < 2048; d += 256)
      if (histogram[d]) atomicAdd(&job.select[slot].histogram[d], histogram[d]);
}

__global__ void select_digit(const __grid_constant__ CudaJob job, int shift, int width) {
  for (uint32_t p = blockIdx.x; p < job.piece_count; p += gridDim.x) {
    CudaSelect& state = job.select[p];
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
__global__ void __launch_bounds__(256) select_places(const __grid_constant__ CudaJob job) {
  const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  for (uint64_t i = blockIdx.x * 8ull + warp; i < job.items; i += gridDim.x * 8ull) {
    const Item item = item_of(job, i);
    const uint32_t threshold = job.select[item.slot].prefix;
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
    if (lane == 0) job.block_counts[item.piece.first_block_slot + item.number] = {above, equal};
  }
}

// Exclusive sums over the blocks of each piece, 1024 at a time. Counts stay below 2^32.
__global__ void __launch_bounds__(1024) select_scan(const __grid_constant__ CudaJob job) {
  __shared__ uint2 warps[32];
  const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  for (uint32_t p = blockIdx.x; p < job.piece_count; p += gridDim.x) {
    const CudaPiece piece = job.pieces[p];
    const uint64_t blocks = div_up(piece.count, kBlock);
    uint2 carry{0, 0};
    for (uint64_t base = 0; base < blocks; base += 1024) {
      const uint64_t b = base + threadIdx.x;
      uint2* counts = job.block_counts + piece.first_block_slot;
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
__global__ void __launch_bounds__(256) select_emit(const __grid_constant__ CudaJob job) {
  const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  Check check;
  for (uint64_t i = blockIdx.x * 8ull + warp; i < job.items; i += gridDim.x * 8ull) {
    const Item item = item_of(job, i);
    const CudaPiece& piece = item.piece;
    const Kept u = kept_of(job, piece, 0, piece.count);
    const uint64_t block = item.number, n = min_u64(kBlock, piece.count - block * kBlock);
    float x[32];
    load_block<kFeedback>(job, piece, block, lane, x);
    if (job.tops[item.slot] >= kInfBits) {
      for (uint64_t j = block * kBlock + lane; j < min_u64(u.k, block * kBlock + n); j += 32)
        write_kept(job, u, j, j == 0 ? kMarker : 0, static_cast<uint32_t>(j), check);
      finish_block<kFeedback>(job, piece, block, lane, x, true);
      continue;
    }
    const CudaSelect& state = job.select[item.slot];
    const uint2 before = job.block_counts[piece.first_block_slot + block];
    const uint64_t equals = before.y < state.left ? state.left - before.y : 0;
    emit_block(job, u, block * kBlock, lane, x, n, state.prefix, before.x + min_u64(before.y, state.left), equals, check);
    finish_block<kFeedback>(job, piece, block, lane, x, false);
  }
  check.flush(job.check);
}

// --- decoding ------------------------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t index_at(const uint32_t* indices, bool wide, uint64_t j) {
  return wide ? indices[j] : reinterpret_cast<const uint16_t*>(indices)[j];
}

// Zeros (or NaN for a marked unit) first; select_scatter puts the values.
__global__ void __launch_bounds__(256) select_fill(const __grid_constant__ CudaJob job) {
  const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  for (uint64_t i = blockIdx.x * 8ull + warp; i < block_count(job); i += gridDim.x * 8ull) {
    const Item item = block_of(job, i);
    const CudaPiece& piece = item.piece;
    const uint64_t block = item.number;
    if (block * kBlock >= piece.count) continue;
    const uint64_t unit = job.scheme.unit ? block / 32 : 0, size = unit_elements(job.scheme, piece.count);
    const Kept u = kept_of(job, piece, unit, min_u64(size, piece.count - unit * size));
    const bool marked = job.body[u.words] == kMarker;
    if (job.add && !marked) continue;
    const float fill = marked ? bits_float(kMarker) : 0.0f;
    for (uint64_t e = block * kBlock + lane; e < min_u64(piece.count, (block + 1) * kBlock); e += 32)
      store_value(job.out[piece.tensor], job.dtype, job.add, e, fill);
  }
}

// A thread block a unit; the entries of a whole tensor are shared by blockIdx.y.
__global__ void __launch_bounds__(256) select_scatter(const __grid_constant__ CudaJob job) {
  Check check;
  uint32_t problem = 0;
  const uint64_t units = job.scheme.unit ? job.items : job.piece_count;
  for (uint64_t i = blockIdx.x; i < units; i += gridDim.x) {
    const uint32_t slot = job.scheme.unit ? (job.piece_count == 1 ? 0 : job.item_piece[i]) : static_cast<uint32_t>(i);
    const CudaPiece piece = job.pieces[slot];
    if (piece.count == 0) continue;
    const uint64_t size = unit_elements(job.scheme, piece.count), unit = job.scheme.unit ? i - piece.first_item : 0;
    const uint64_t elements = min_u64(size, piece.count - unit * size);
    const Kept u = kept_of(job, piece, unit, elements);
    const uint32_t *values = job.body + u.words, *indices = values + u.k;
    const bool marked = values[0] == kMarker;
    for (uint64_t j = blockIdx.y * 256ull + threadIdx.x; j < u.k; j += gridDim.y * 256ull) {
      const uint32_t value = values[j], index = index_at(indices, u.wide, j);
      check.loose += word_part(value, u.words + j);
      check.loose += u.wide ? word_part(index, u.words + u.k + j) : word_part(index << (j % 2 * 16), u.words + u.k + j / 2);
      if (marked ? (j > 0 && value != 0) : !finite_bits(value)) problem |= kBadValues;
      if (marked ? index != j : index >= elements || (j > 0 && index <= index_at(indices, u.wide, j - 1))) problem |= kBadIndices;
      if (!u.wide && j + 1 == u.k && j % 2 == 0) {
        const uint32_t rest = reinterpret_cast<const uint16_t*>(indices)[j + 1];
        check.loose += word_part(rest << 16, u.words + u.k + j / 2);
        if (rest) problem |= kBadIndices;
      }
      if (!marked && index < elements)
        store_value(job.out[piece.tensor], job.dtype, job.add, unit * size + index, bits_float(value));
    }
  }
  problem = __reduce_or_sync(kFull, problem);
  if (problem && (threadIdx.x & 31) == 0) atomicOr(job.status, problem);
  check.flush(job.check);
}
