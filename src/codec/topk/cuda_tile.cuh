// SPDX-License-Identifier: Apache-2.0
// The strongest values of tiles on a GPU. A thread block of 32 warps holds a tile in registers, warp w its block w. A
// sample guesses a magnitude that a little more than k values reach. Those few go to shared memory in the order of
// their indices, and the k-th strongest is narrowed down among them bit by bit. Where the guess fails, or values tie at
// the threshold, the same search runs over all values.
//
// Included by cuda.cu inside an anonymous namespace, after cuda_kept.cuh.

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

// What the warps of a thread block share while they choose from a tile.
struct TopkShared {
  uint32_t sums[64];                 // BlockSum
  uint32_t counts[32];               // of each warp: the largest magnitude, then how many of its values are kept
  uint32_t others[32];               // of each warp: candidates, or values at the threshold
  uint32_t candidates[kCandidates];  // values that reach the guess, in the order of their indices
  uint16_t places[kCandidates];      // and their indices
};

// What is common to the steps of one tile.
struct TopkTile {
  KeptUnit u;
  uint32_t k, top, lane, warp;
  uint32_t
      lanes_before;  // a bit for every lower lane: a vote masked by it counts what stands before this lane in a row
};

// A magnitude that a little more than k values should reach. One value in 32 is looked at; 8 more than expected, and a
// quarter, make a miss rare. The lowest bits of the guess do not matter.
__device__ __forceinline__ uint32_t guess_magnitude(const TopkTile& t, const float (&x)[32]) {
  const uint32_t mine = float_bits(x[0]) & 0x7fffffffu, rank = t.k / 32 + t.k / 128 + 8;
  uint32_t guess = 0;
  for (int bit = 30; bit >= 14; --bit) {
    const uint32_t trial = guess | 1u << bit;
    if (trial > t.top) continue;
    if (__syncthreads_count(mine >= trial) >= rank) guess = trial;
  }
  return guess;
}

// Counts the values that reach the guess. Every warp's count stays in shared.others, which is where its candidates
// begin.
__device__ __forceinline__ uint32_t count_candidates(const TopkTile& t, const float (&x)[32], uint32_t guess,
                                                     TopkShared& shared) {
  uint32_t here = 0;
#pragma unroll
  for (int row = 0; row < 32; ++row) here += (float_bits(x[row]) & 0x7fffffffu) >= guess;
  here = __reduce_add_sync(kFull, here);
  if (t.lane == 0) shared.others[t.warp] = here;
  __syncthreads();
  return __reduce_add_sync(kFull, shared.others[t.lane]);
}

// The candidates to shared memory. Rows are taken in order and a vote says the place within a row, so that candidates
// stand in the order of their indices.
__device__ __forceinline__ void gather_candidates(const TopkTile& t, const float (&x)[32], uint32_t guess,
                                                  TopkShared& shared) {
  uint32_t at = __reduce_add_sync(kFull, t.lane < t.warp ? shared.others[t.lane] : 0);
#pragma unroll
  for (int row = 0; row < 32; ++row) {
    const uint32_t bits = float_bits(x[row]);
    const bool in = (bits & 0x7fffffffu) >= guess;
    const uint32_t votes = __ballot_sync(kFull, in);
    if (in) {
      shared.candidates[at + __popc(votes & t.lanes_before)] = bits;
      shared.places[at + __popc(votes & t.lanes_before)] = static_cast<uint16_t>(t.warp * kBlock + row * 32 + t.lane);
    }
    at += __popc(votes);
  }
  __syncthreads();
}

struct TopkThreshold {
  uint32_t magnitude, reached;  // the largest magnitude that k candidates or more reach, and how many do
};

// search_all() among the `reach` candidates only: each thread holds a few of them.
__device__ __forceinline__ TopkThreshold search_candidates(const TopkTile& t, uint32_t guess, uint32_t reach,
                                                           const TopkShared& shared, BlockSum& sum) {
  uint32_t mag[kCandidates / 1024];
#pragma unroll
  for (int c = 0; c < kCandidates / 1024; ++c)
    mag[c] = c * 1024 + threadIdx.x < reach ? shared.candidates[c * 1024 + threadIdx.x] & 0x7fffffffu : 0;
  TopkThreshold found{0, reach};
  for (int bit = 30; bit >= 0; --bit) {
    const uint32_t trial = found.magnitude | 1u << bit;
    if (trial > t.top) continue;
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
    if (count >= t.k) found = {trial, count};
  }
  return found;
}

// Calls take(j, bits, index) for the candidates that reach the threshold, of which there are exactly k, 1024 candidates
// at a time. What take() writes may be the memory of candidates up to the j-th.
template <class Take>
__device__ __forceinline__ void take_candidates(const TopkTile& t, uint32_t threshold, uint32_t reach,
                                                TopkShared& shared, Take take) {
  uint32_t base = 0;
  for (uint32_t c = 0; c * 1024 < reach; ++c) {
    const uint32_t j = c * 1024 + threadIdx.x;
    const uint32_t bits = j < reach ? shared.candidates[j] : 0, index = j < reach ? shared.places[j] : 0;
    const bool keep = j < reach && (bits & 0x7fffffffu) >= threshold;
    const uint32_t votes = __ballot_sync(kFull, keep);
    if (t.lane == 0) shared.counts[t.warp] = __popc(votes);
    __syncthreads();
    const uint32_t first = base + __reduce_add_sync(kFull, t.lane < t.warp ? shared.counts[t.lane] : 0);
    base += __reduce_add_sync(kFull, shared.counts[t.lane]);
    if (keep) take(first + __popc(votes & t.lanes_before), bits, index);
    __syncthreads();
  }
}

struct FewKept {
  uint32_t threshold, reach;  // k of the `reach` candidates reach the threshold
};

// The quick way: false if the guess failed, or if values tie at the threshold.
__device__ __forceinline__ bool find_few(const TopkTile& t, const float (&x)[32], TopkShared& shared, BlockSum& sum,
                                         FewKept& found) {
  const uint32_t guess = guess_magnitude(t, x), reach = count_candidates(t, x, guess, shared);
  if (guess == 0 || reach < t.k || reach > kCandidates) return false;
  gather_candidates(t, x, guess, shared);
  const TopkThreshold threshold = search_candidates(t, guess, reach, shared, sum);
  found = {threshold.magnitude, reach};
  return threshold.reached == t.k;
}

// Where the quick way is worth trying.
__device__ __forceinline__ bool expects_few(const TopkTile& t, uint64_t elements) {
  return elements == kTile && t.k < kTile / 16;
}

// With feedback, x becomes the residual.
template <bool kFeedback>
__device__ __forceinline__ bool select_few(const CudaJob& job, const TopkTile& t, float (&x)[32], TopkShared& shared,
                                           BlockSum& sum, Check& check) {
  FewKept few;
  if (!find_few(t, x, shared, sum, few)) return false;
  take_candidates(t, few.threshold, few.reach, shared,
                  [&](uint32_t j, uint32_t bits, uint32_t index) { write_kept(job, t.u, j, bits, index, check); });
  if (kFeedback) {
#pragma unroll
    for (int row = 0; row < 32; ++row)
      if ((float_bits(x[row]) & 0x7fffffffu) >= few.threshold) x[row] = 0;
  }
  return true;
}

// What a warp keeps of its block: all above the threshold, and the first `equals` of those at it.
struct BlockKept {
  uint32_t threshold, at, equals;  // at: the place of the first one in the unit
};

// The sure way, over all n values of this warp's block.
__device__ __forceinline__ BlockKept find_any(const TopkTile& t, const float (&x)[32], uint64_t n, TopkShared& shared,
                                              BlockSum& sum) {
  const uint32_t threshold = search_all(x, t.top, t.k, sum);
  uint32_t above = 0, equal = 0;
#pragma unroll
  for (int row = 0; row < 32; ++row) {
    const uint32_t magnitude = float_bits(x[row]) & 0x7fffffffu;
    above += magnitude > threshold;
    equal += row * kLane + t.lane < n && magnitude == threshold;
  }
  above = __reduce_add_sync(kFull, above);
  equal = __reduce_add_sync(kFull, equal);
  __syncthreads();
  if (t.lane == 0) {
    shared.counts[t.warp] = above;
    shared.others[t.warp] = equal;
  }
  __syncthreads();
  const uint32_t all_above = __reduce_add_sync(kFull, shared.counts[t.lane]);
  const uint32_t above_before = __reduce_add_sync(kFull, t.lane < t.warp ? shared.counts[t.lane] : 0);
  const uint32_t equal_before = __reduce_add_sync(kFull, t.lane < t.warp ? shared.others[t.lane] : 0);
  const uint32_t wanted = t.k - all_above;  // how many at the threshold are kept
  return {threshold, above_before + min(equal_before, wanted), equal_before < wanted ? wanted - equal_before : 0};
}

// Loads a tile into registers and finds its largest magnitude.
template <bool kFeedback>
__device__ __forceinline__ void load_tile(const CudaJob& job, const CudaPiece& piece, uint64_t block, uint64_t n,
                                          TopkTile& t, float (&x)[32], TopkShared& shared) {
  if (n) load_block<kFeedback>(job, piece, block, t.lane, x);
  prefetch_tile<false>(job, piece, block, t.lane);
  const uint32_t top_here = block_max(x);
  if (t.lane == 0) shared.counts[t.warp] = top_here;
  __syncthreads();
  t.top = __reduce_max_sync(kFull, shared.counts[t.lane]);
}

template <bool kFeedback>
__global__ void __launch_bounds__(1024) select_tiles(const __grid_constant__ CudaJob job) {
  __shared__ TopkShared shared;
  TopkTile t;
  t.lane = threadIdx.x & 31;
  t.warp = threadIdx.x >> 5;
  t.lanes_before = (1u << t.lane) - 1;
  BlockSum sum{shared.sums};
  Check check;
  for (uint64_t i = blockIdx.x; i < job.items; i += gridDim.x) {
    const Item item = item_of(job, i);
    const CudaPiece& piece = item.piece;
    const uint64_t block = item.number * 32 + t.warp, elements = min_u64(kTile, piece.count - item.number * kTile);
    const uint64_t n = block * kBlock < piece.count ? min_u64(kBlock, piece.count - block * kBlock) : 0;
    t.u = kept_of(job, piece, item.number, elements);
    t.k = static_cast<uint32_t>(t.u.k);
    float x[32] = {};
    load_tile<kFeedback>(job, piece, block, n, t, x, shared);
    const bool marked = t.top >= kInfBits;
    if (marked) {
      for (uint64_t j = threadIdx.x; j < t.u.k; j += 1024)
        write_kept(job, t.u, j, j == 0 ? kMarker : 0, static_cast<uint32_t>(j), check);
    } else if (!expects_few(t, elements) || !select_few<kFeedback>(job, t, x, shared, sum, check)) {
      const BlockKept kept = find_any(t, x, n, shared, sum);
      if (n) emit_block(job, t.u, t.warp * kBlock, t.lane, x, n, kept.threshold, kept.at, kept.equals, check);
    }
    if (n) finish_block<kFeedback>(job, piece, block, t.lane, x, marked);
    __syncthreads();  // the next tile uses the same shared memory
  }
  check.flush(job.check);
}
