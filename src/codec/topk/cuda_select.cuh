// SPDX-License-Identifier: Apache-2.0
// Selection of the strongest values on a GPU. Tiles: a thread block of 32 warps holds a tile in registers; a sample guesses a
// magnitude that a little more than k values reach, those few go to shared memory in the order of their indices, and the
// k-th strongest is narrowed down among them bit by bit. Where the guess fails or values tie at the threshold, the same
// search runs over all values. Whole tensors: three counting passes over memory find the magnitude, a scan over
// blocks finds everybody's place.
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
  return {piece.region + unit * selected_words(job.scheme, piece.count, size), kept(job.scheme, elements),
          wide_indices(job.scheme, piece.count)};
}

__device__ __forceinline__ void write_kept(const CudaJob& job, const Kept& u, uint64_t j, uint32_t bits, uint32_t index,
                                           Check& check) {
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
__device__ __forceinline__ void emit_block(const CudaJob& job, const Kept& u, uint64_t begin_in_unit, uint32_t lane,
                                           float (&x)[32], uint64_t n, uint32_t threshold, uint64_t at, uint64_t equals,
                                           Check& check) {
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
      write_kept(job, u, at + __popc(all & before), bits, static_cast<uint32_t>(begin_in_unit + row * kLane + lane),
                 check);
      x[row] = 0;
    }
    at += __popc(all);
    equals -= kept_equal;
  }
}

template <bool kFeedback>
__device__ __forceinline__ void finish_block(const CudaJob& job, const CudaPiece& piece, uint64_t block, uint32_t lane,
                                             float (&x)[32], bool marked) {
  if constexpr (kFeedback) {
    if (job.before[piece.tensor] == nullptr) return;
#pragma unroll
    for (int row = 0; row < 32; ++row)
      store_residual(job, piece, block * kBlock + row * kLane + lane,
                     marked ? bits_float(kMarker) : x[row] * job.unscale);
  }
}

// A sum over the thread block; every thread gets it. One barrier: the two halves of `shared` take turns.
struct BlockSum {
  uint32_t* shared;  // [64]
  uint32_t turn = 0;
  __device__ __forceinline__ uint32_t operator()(uint32_t value) {
    const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    uint32_t* half = shared + turn;
    turn ^= 32;
    value = __reduce_add_sync(kFull, value);
    if (lane == 0) half[warp] = value;
    __syncthreads();
    return __reduce_add_sync(kFull, half[lane]);
  }
};

constexpr uint32_t kCandidates = 4096;

// The largest threshold that at least k values reach, over the whole tile.
__device__ __forceinline__ uint32_t search_all(const float (&x)[32], uint32_t top, uint32_t k, BlockSum& sum) {
  uint32_t threshold = 0;
  for (int bit = 30; bit >= 0; --bit) {
    const uint32_t trial = threshold | 1u << bit;
    if (trial > top) continue;
    uint32_t count = 0;
#pragma unroll
    for (int row = 0; row < 32; ++row) count += (float_bits(x[row]) & 0x7fffffffu) >= trial;
    if (sum(count) >= k) threshold = trial;
  }
  return threshold;
}

template <bool kFeedback>
__global__ void __launch_bounds__(1024) select_tiles(const __grid_constant__ CudaJob job) {
  __shared__ uint32_t sums[64], counts[32], equals_of[32], candidates[kCandidates];
  __shared__ uint16_t places[kCandidates];
  const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x >> 5, before = (1u << lane) - 1;
  BlockSum sum{sums};
  Check check;
  for (uint64_t i = blockIdx.x; i < job.items; i += gridDim.x) {
    const Item item = item_of(job, i);
    const CudaPiece& piece = item.piece;
    const uint64_t tile = item.number, block = tile * 32 + warp, elements = min_u64(kTile, piece.count - tile * kTile);
    const uint64_t n = block * kBlock < piece.count ? min_u64(kBlock, piece.count - block * kBlock) : 0;
    const Kept u = kept_of(job, piece, tile, elements);
    const uint32_t k = static_cast<uint32_t>(u.k);
    float x[32] = {};
    if (n) load_block<kFeedback>(job, piece, block, lane, x);
    if ((block + 32ull * gridDim.x + 1) * kBlock <= piece.count) {  // the next tile, into the cache
      const uint64_t next = (block + 32ull * gridDim.x) * kBlock + lane * 32;
      prefetch(static_cast<const char*>(job.in[piece.tensor]) + next * (job.dtype == DType::f32 ? 4 : 2));
    }
    const uint32_t top_here = block_max(x);
    if (lane == 0) counts[warp] = top_here;
    __syncthreads();
    const uint32_t top = __reduce_max_sync(kFull, counts[lane]);
    if (top >= kInfBits) {
      for (uint64_t j = threadIdx.x; j < u.k; j += 1024)
        write_kept(job, u, j, j == 0 ? kMarker : 0, static_cast<uint32_t>(j), check);
      if (n) finish_block<kFeedback>(job, piece, block, lane, x, true);
      __syncthreads();
      continue;
    }

    uint32_t threshold = 0, reach = 0;
    bool few = false;
    if (elements == kTile && k < kTile / 16) {
      // One value in 32 is looked at; 8 more than expected, and a quarter, make a miss rare.
      const uint32_t mine = float_bits(x[0]) & 0x7fffffffu, rank = k / 32 + k / 128 + 8;
      uint32_t guess = 0;
      for (int bit = 30; bit >= 14; --bit) {
        const uint32_t trial = guess | 1u << bit;
        if (trial > top) continue;
        if (__syncthreads_count(mine >= trial) >= rank) guess = trial;
      }
      uint32_t here = 0;
#pragma unroll
      for (int row = 0; row < 32; ++row) here += (float_bits(x[row]) & 0x7fffffffu) >= guess;
      here = __reduce_add_sync(kFull, here);
      if (lane == 0) equals_of[warp] = here;
      __syncthreads();
      reach = __reduce_add_sync(kFull, equals_of[lane]);
      few = guess > 0 && reach >= k && reach <= kCandidates;
      if (few) {
        uint32_t at = __reduce_add_sync(kFull, lane < warp ? equals_of[lane] : 0);
#pragma unroll
        for (int row = 0; row < 32; ++row) {
          const uint32_t bits = float_bits(x[row]);
          const bool in = (bits & 0x7fffffffu) >= guess;
          const uint32_t votes = __ballot_sync(kFull, in);
          if (in) {
            candidates[at + __popc(votes & before)] = bits;
            places[at + __popc(votes & before)] = static_cast<uint16_t>(warp * kBlock + row * 32 + lane);
          }
          at += __popc(votes);
        }
        __syncthreads();
        uint32_t mag[kCandidates / 1024];
#pragma unroll
        for (int c = 0; c < kCandidates / 1024; ++c)
          mag[c] = c * 1024 + threadIdx.x < reach ? candidates[c * 1024 + threadIdx.x] & 0x7fffffffu : 0;
        uint32_t total = reach;
        for (int bit = 30; bit >= 0; --bit) {
          const uint32_t trial = threshold | 1u << bit;
          if (trial > top) continue;
          uint32_t count;
          if (trial <= guess) {
            count = reach;
          } else if (reach <= 1024) {
            count = __syncthreads_count(mag[0] >= trial);
          } else {
            count = 0;
#pragma unroll
            for (int c = 0; c < kCandidates / 1024; ++c) count += mag[c] >= trial;
            count = sum(count);
          }
          if (count >= k) {
            threshold = trial;
            total = count;
          }
        }
        few = total == k;  // else values tie at the threshold
        if (few) {
          uint32_t base = 0;
          for (uint32_t c = 0; c * 1024 < reach; ++c) {
            const uint32_t j = c * 1024 + threadIdx.x;
            const uint32_t bits = j < reach ? candidates[j] : 0;
            const bool keep = j < reach && (bits & 0x7fffffffu) >= threshold;
            const uint32_t votes = __ballot_sync(kFull, keep);
            if (lane == 0) counts[warp] = __popc(votes);
            __syncthreads();
            const uint32_t first = base + __reduce_add_sync(kFull, lane < warp ? counts[lane] : 0);
            base += __reduce_add_sync(kFull, counts[lane]);
            if (keep) write_kept(job, u, first + __popc(votes & before), bits, places[j], check);
            __syncthreads();
          }
          if (kFeedback) {
#pragma unroll
            for (int row = 0; row < 32; ++row)
              if ((float_bits(x[row]) & 0x7fffffffu) >= threshold) x[row] = 0;
          }
        }
      }
    }
    if (!few) {
      threshold = search_all(x, top, k, sum);
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
      __syncthreads();
      if (lane == 0) {
        counts[warp] = above;
        equals_of[warp] = equal;
      }
      __syncthreads();
      const uint32_t all_above = __reduce_add_sync(kFull, counts[lane]);
      const uint32_t above_before = __reduce_add_sync(kFull, lane < warp ? counts[lane] : 0);
      const uint32_t equal_before = __reduce_add_sync(kFull, lane < warp ? equals_of[lane] : 0);
      const uint32_t wanted = k - all_above;  // equals that are kept
      const uint32_t equals = equal_before < wanted ? wanted - equal_before : 0;
      if (n)
        emit_block(job, u, warp * kBlock, lane, x, n, threshold, above_before + min(equal_before, wanted), equals,
                   check);
    }
    if (n) finish_block<kFeedback>(job, piece, block, lane, x, false);
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
        if (row * kLane + lane < n && (magnitude & known) == prefix)
          atomicAdd(&histogram[(magnitude >> shift) & ((1u << width) - 1)], 1u);
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
    emit_block(job, u, block * kBlock, lane, x, n, state.prefix, before.x + min_u64(before.y, state.left), equals,
               check);
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
      check.loose +=
          u.wide ? word_part(index, u.words + u.k + j) : word_part(index << (j % 2 * 16), u.words + u.k + j / 2);
      if (marked ? (j > 0 && value != 0) : !finite_bits(value)) problem |= kBadValues;
      if (marked ? index != j : index >= elements || (j > 0 && index <= index_at(indices, u.wide, j - 1)))
        problem |= kBadIndices;
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
