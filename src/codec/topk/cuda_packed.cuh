// SPDX-License-Identifier: Apache-2.0
// Packed tiles of topk on a GPU, from registers to the message. A thread block chooses from its tile as cuda_tile.cuh
// does. Then a bit in a register says of each of a thread's 32 values whether it is kept. Up to 4096 kept values at a
// time, all of them where the quick way found them, stand in shared memory in the order of their indices: there a warp
// takes 32 in a row, whose codes of b bits fill b whole words.
//
// Included by cuda.cu inside an anonymous namespace, after cuda_tile.cuh and cuda_levels.cuh.

constexpr uint32_t kHighWords = 2048;  // of Elias and Fano's string of bits, at most: k = 32768 takes 65535 bits

struct PackShared {
  TopkShared choice;  // `candidates` and `places` then hold what is kept
  uint32_t totals[2][kTotals][32];
  float magnitudes[128];  // of the levels
  uint32_t high[kHighWords];
};

// How the values of a tile become codes.
struct PackLevels {
  Grid grid;
  float from, times;
  uint32_t top, bits;
  __device__ __forceinline__ uint32_t code(float x) const {
    using Steps = LevelSteps<ScalarLane>;
    return Steps::nearest(Steps::units(x, grid), from, times, top) | float_bits(x) >> 31 << (bits - 1);
  }
};

// A packed tile under way.
struct PackTile {
  const CudaJob& job;
  const PackedUnit& u;
  uint32_t lane;
  bool marked;
  Check& check;

  __device__ __forceinline__ void put(uint32_t* to, uint32_t word) const {
    *to = word;
    check.loose += word_part(word, static_cast<uint64_t>(to - job.body));
  }
  // Half word j of 16 bits, if `in`; a warp calls this for 32 in a row, of which the first is even. Beyond the last one
  // `half` is 0.
  __device__ __forceinline__ void put_half(uint32_t* words, uint32_t j, bool in, uint32_t half) const {
    const uint32_t next = __shfl_down_sync(kFull, half, 1);
    if (in && j % 2 == 0) put(words + j / 2, half | next << 16);
  }
  // 32 codes in a row, the first of them number j, to the first `count` of `words`.
  __device__ __forceinline__ void put_codes(uint32_t* words, uint64_t count, uint32_t j, uint32_t code,
                                            uint32_t bits) const {
    uint32_t mine = 0, from = lane / bits, shift = lane % bits;  // bit 32 * w + lane is that bit of that lane's code
    for (uint32_t w = 0; w < bits; ++w) {
      const uint32_t word = __ballot_sync(kFull, __shfl_sync(kFull, code, from) >> shift & 1);
      if (lane == w) mine = word;
      from += 32 / bits;
      shift += 32 % bits;
      if (shift >= bits) {
        shift -= bits;
        ++from;
      }
    }
    const uint32_t at = j / 32 * bits + lane;
    if (lane < bits && at < count) put(words + at, mine);
  }

  // Value j and its place, if `in`; again a warp calls this for 32 in a row.
  __device__ __forceinline__ void put_value(const PackLevels& levels, uint32_t j, bool in, float x) const {
    const uint32_t first = j == 0 ? u.marker() : 0;  // a marked unit has no other value
    if (u.bits == 32) {
      if (in) put(u.values + j, marked ? first : float_bits(x));
    } else if (u.bits == 16) {
      put_half(u.values, j, in, !in ? 0 : marked ? first : nearest_bf16(x));
    } else {
      put_codes(u.values, u.value_count, j - lane, in && !marked ? levels.code(x) : 0, u.bits);
    }
  }
  __device__ __forceinline__ void put_place(uint32_t j, bool in, uint32_t index, uint32_t* high) const {
    if (u.form.kind == kRawPlaces) put_half(u.places, j, in, index);
    if (u.form.kind != kCodedPlaces) return;
    const uint32_t low = low_place_bits(u.form.elements, u.k), bit = (index >> low) + j;
    if (low) put_codes(u.places, div_up(u.k * low, 32), j - lane, index & ((1u << low) - 1), low);
    if (in) atomicOr(high + bit / 32, 1u << bit % 32);
  }

  // The values from `first` on, `count` of them, which stand in shared memory; `first` is a multiple of 32.
  __device__ __forceinline__ void put_kept(const PackLevels& levels, PackShared& shared, uint32_t first,
                                           uint32_t count) const {
    for (uint32_t base = threadIdx.x & ~31u; base < count; base += 1024) {
      const uint32_t i = base + lane;
      const bool in = i < count;
      put_value(levels, first + i, in, in ? bits_float(shared.choice.candidates[i]) : 0.0f);
      put_place(first + i, in, in ? shared.choice.places[i] : 0, shared.high);
    }
  }

  // What stands in front of the values.
  __device__ __forceinline__ void put_scales(const KeptFit& fit, uint32_t top, uint32_t absmax) const {
    if (u.scale_count > 0) put(u.scales, marked ? u.marker() : low_scale(fit, absmax));
    if (u.scale_count > 1) put(u.scales + 1, marked ? 0 : rise_scale(fit, top, absmax));
  }
};

// A bit for each row: what this thread keeps of its block. A marked tile keeps its first k elements.
__device__ __forceinline__ uint32_t kept_rows(const TopkTile& t, const float (&x)[32], uint64_t n, BlockKept block,
                                              bool marked) {
  uint32_t kept = 0;
  uint64_t equals = block.equals;
#pragma unroll
  for (int row = 0; row < 32; ++row) {
    const bool keep = marked ? t.warp * kBlock + row * kLane + t.lane < t.k
                             : keep_in_row(float_bits(x[row]) & 0x7fffffffu, row * kLane + t.lane < n, block.threshold,
                                           t.lanes_before, equals);
    kept |= uint32_t{keep} << row;
  }
  return kept;
}

// Those of the kept values whose numbers are first to first + 4095 to shared memory; `at` is the number of the first
// one of this warp.
__device__ __forceinline__ void gather_kept(const TopkTile& t, const float (&x)[32], uint32_t kept, uint32_t at,
                                            uint32_t first, TopkShared& shared) {
#pragma unroll
  for (int row = 0; row < 32; ++row) {
    const bool keep = kept >> row & 1;
    const uint32_t votes = __ballot_sync(kFull, keep), i = at + __popc(votes & t.lanes_before) - first;
    if (keep && i < kCandidates) {
      shared.candidates[i] = float_bits(x[row]);
      shared.places[i] = static_cast<uint16_t>(t.warp * kBlock + row * kLane + t.lane);
    }
    at += __popc(votes);
  }
}

// What of a kept value is not sent.
__device__ __forceinline__ float left_out(const PackedUnit& u, const PackLevels& levels, const float* magnitudes,
                                          float x) {
  if (u.bits == 32) return 0.0f;
  const float sent = u.bits == 16 ? bits_float(nearest_bf16(x) << 16) : level_value(magnitudes, levels.code(x), u.bits);
  return x - sent;
}

// One tile, loaded into x; with feedback x becomes the residual.
template <bool kFeedback>
__device__ __forceinline__ void pack_tile(const PackTile& p, const TopkTile& t, float (&x)[32], uint64_t n,
                                          PackShared& shared, BlockSum& sum, BlockTotals& totals) {
  const PackedUnit& u = p.u;
  const bool leveled = u.bits <= 8 && !p.marked, coded = u.form.kind == kCodedPlaces;
  const uint32_t top = leveled ? u.top() : 0;
  const Grid grid = grid_for(t.top);
  FewKept found;
  const bool few = !p.marked && expects_few(t, u.form.elements) && find_few(t, x, shared.choice, sum, found);
  KeptFit fit;
  uint32_t kept = 0;
  if (coded)  // seen by all once the next barrier is behind them, which comes before the first place
    for (uint32_t w = threadIdx.x; w < kHighWords; w += 1024) shared.high[w] = 0;
  if (few) {
    take_candidates(t, found.threshold, found.reach, shared.choice, [&](uint32_t j, uint32_t bits, uint32_t index) {
      shared.choice.candidates[j] = bits;
      shared.choice.places[j] = static_cast<uint16_t>(index);
    });
#pragma unroll
    for (int row = 0; row < 32; ++row) kept |= uint32_t{(float_bits(x[row]) & 0x7fffffffu) >= found.threshold} << row;
    if (leveled) {
      const uint32_t j = threadIdx.x;  // k is below 2048
      const float mine[2] = {bits_float(shared.choice.candidates[j]), bits_float(shared.choice.candidates[j + 1024])};
      fit = fit_levels(mine, uint32_t{j < t.k} | uint32_t{j + 1024 < t.k} << 1, grid, t.k, top, totals);
    }
  } else {
    BlockKept block{};
    if (!p.marked) block = find_any(t, x, n, shared.choice, sum);
    kept = kept_rows(t, x, n, block, p.marked);
    if (leveled) fit = fit_levels(x, kept, grid, t.k, top, totals);
  }
  const PackLevels levels{grid, fit.from(), fit.times(), top, u.bits};
  if (threadIdx.x == 0) p.put_scales(fit, top, t.top);
  if (kFeedback && leveled && threadIdx.x <= top)
    shared.magnitudes[threadIdx.x] =
        level_magnitude(threadIdx.x, top, bits_float(low_scale(fit, t.top)), bits_float(rise_scale(fit, top, t.top)));
  if (few) {
    p.put_kept(levels, shared, 0, t.k);
    __syncthreads();
  } else {
    uint32_t here[1] = {static_cast<uint32_t>(__popc(kept))};
    here[0] = __reduce_add_sync(kFull, here[0]);
    __syncthreads();  // the counts of the search are done with
    if (t.lane == 0) shared.choice.counts[t.warp] = here[0];
    __syncthreads();
    const uint32_t at = __reduce_add_sync(kFull, t.lane < t.warp ? shared.choice.counts[t.lane] : 0);
    for (uint32_t first = 0; first < t.k; first += kCandidates) {
      if (at < first + kCandidates && at + here[0] > first) gather_kept(t, x, kept, at, first, shared.choice);
      __syncthreads();
      p.put_kept(levels, shared, first, min(kCandidates, t.k - first));
      __syncthreads();
    }
  }
  if (coded) {
    const uint64_t low_words = div_up(u.k * low_place_bits(u.form.elements, u.k), 32);
    for (uint64_t w = threadIdx.x; w < u.place_count - low_words; w += 1024)
      p.put(u.places + low_words + w, shared.high[w]);
  }
  if (u.form.kind == kBitmapPlaces) {
    uint32_t mine = 0;
#pragma unroll
    for (int row = 0; row < 32; ++row) {
      const uint32_t votes = __ballot_sync(kFull, kept >> row & 1);
      if (t.lane == row) mine = votes;
    }
    if (t.warp * 32 + t.lane < u.place_count) p.put(u.places + t.warp * 32 + t.lane, mine);
  }
  if (kFeedback) {
#pragma unroll
    for (int row = 0; row < 32; ++row)
      if (kept >> row & 1 && !p.marked) x[row] = left_out(u, levels, shared.magnitudes, x[row]);
  }
}

template <bool kFeedback>
__global__ void __launch_bounds__(1024, 1) pack_tiles(const __grid_constant__ CudaJob job) {
  __shared__ PackShared shared;
  TopkTile t;
  t.lane = threadIdx.x & 31;
  t.warp = threadIdx.x >> 5;
  t.lanes_before = (1u << t.lane) - 1;
  BlockSum sum{shared.choice.sums};
  BlockTotals totals{shared.totals};
  Check check;
  for (uint64_t i = blockIdx.x; i < job.items; i += gridDim.x) {
    const Item item = item_of(job, i);
    const CudaPiece& piece = item.piece;
    const uint64_t block = item.number * 32 + t.warp, elements = min_u64(kTile, piece.count - item.number * kTile);
    const uint64_t n = block * kBlock < piece.count ? min_u64(kBlock, piece.count - block * kBlock) : 0;
    t.u = kept_of(job, piece, item.number, elements);
    t.k = static_cast<uint32_t>(t.u.k);
    float x[32] = {};
    load_tile<kFeedback>(job, piece, block, n, t, x, shared.choice);
    const PackedUnit unit(job.scheme, elements, job.body + t.u.words);
    const PackTile pack{job, unit, t.lane, t.top >= kInfBits, check};
    pack_tile<kFeedback>(pack, t, x, n, shared, sum, totals);
    if (n) finish_block<kFeedback>(job, piece, block, t.lane, x, pack.marked);
    __syncthreads();  // no thread is still in this tile: work ahead on the next one would take registers
  }
  check.flush(job.check);
}
