// SPDX-License-Identifier: Apache-2.0
// casq's tiles on a GPU. layout.h has the layout and the rules.
//
// A thread block of 32 warps holds a tile in registers, warp w its block w. Lane r of a warp counts the clusters of row
// r, sums over rows, warps and clusters say where a cluster's elements begin, and a vote among the lanes says how many
// stand before one in its row. So every element knows its place when the tile is sorted by cluster. The encoder puts
// the values there, in shared memory; a bucket is a run of them, so with running sums in place of the values its sum is
// one subtraction.
//
// What exists once per cluster is kept in the lanes: lane k looks after cluster k.
//
// Included by cuda.cu inside an anonymous namespace, after cuda_codes.cuh.

// --- ranks in a tile -----------------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t inclusive(uint32_t value, uint32_t lane) {
#pragma unroll
  for (uint32_t d = 1; d < 32; d <<= 1) {
    const uint32_t up = __shfl_up_sync(kFull, value, d);
    if (lane >= d) value += up;
  }
  return value;
}

// The clusters' turns when buckets are given out: the i-th is order of lane i, and cluster k is the turn of lane k.
struct ClusterTurns {
  uint32_t order = 0, turn = 31;
};
template <int kBits>
__device__ __forceinline__ ClusterTurns turns_of(const Scheme& scheme, uint32_t lane) {
  ClusterTurns t;
  if (lane < 1u << kBits) t.order = cluster_word(scheme, lane);
  for (int i = 0; i < 1 << kBits; ++i)
    if (__shfl_sync(kFull, t.order, i) == lane) t.turn = i;
  return t;
}

template <int kBits>
struct TileRanks {
  static constexpr int kCount = 1 << kBits, kPairs = kCount / 2;
  static constexpr uint32_t kRows = 32 * 32 * kPairs;  // words of shared memory for the rows of a tile
  // Of cluster `lane`: elements, those of the clusters before it, buckets, those of the clusters before it.
  uint32_t count, first, buckets, first_bucket;
  uint32_t factor;       // the least integer not below buckets / count * 2^31
  const uint16_t* rows;  // per row and cluster of this warp: elements that come before

  // Counts the tile, of which this warp's block has n elements. kSorted: `rows` has places in the tile when it is
  // sorted by cluster, else ranks in the cluster. Counts stay below 2^16, so they go in pairs.
  template <bool kSorted>
  __device__ __forceinline__ void make(const BlockCodes<kBits>& codes, uint32_t n, uint32_t budget,
                                       const ClusterTurns& turns, uint32_t* totals, uint32_t* all_rows) {
    const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    uint32_t plane[kBits], own[kPairs], sum[kPairs];
    codes.planes(lane, plane);
    const uint32_t inside = n >= lane * 32 + 32 ? kFull : n > lane * 32 ? (1u << (n - lane * 32)) - 1 : 0;
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      uint32_t here = inside;
#pragma unroll
      for (int j = 0; j < kBits; ++j) here &= k >> j & 1 ? plane[j] : ~plane[j];
      own[k / 2] = k % 2 ? own[k / 2] | __popc(here) << 16 : __popc(here);
    }
#pragma unroll
    for (int p = 0; p < kPairs; ++p) {
      sum[p] = inclusive(own[p], lane);
      if (lane == 31) totals[warp * kPairs + p] = sum[p];
    }
    __syncthreads();
    uint32_t all = 0, before = 0;  // of pair lane % kPairs
    for (uint32_t w = lane / kPairs; w < 32; w += 32 / kPairs) {
      const uint32_t pair = totals[w * kPairs + lane % kPairs];
      all += pair;
      before += w < warp ? pair : 0;
    }
#pragma unroll
    for (int d = kPairs; d < 32; d <<= 1) {
      all += __shfl_xor_sync(kFull, all, d);
      before += __shfl_xor_sync(kFull, before, d);
    }
    count = __shfl_sync(kFull, all, lane / 2) >> (lane % 2 * 16) & 0xffffu;
    if (lane >= kCount) count = 0;
    first = inclusive(count, lane) - count;
    uint32_t* const mine = all_rows + warp * 32 * kPairs;
    __syncwarp();
#pragma unroll
    for (int p = 0; p < kPairs; ++p) {
      uint32_t base = sum[p] - own[p] + __shfl_sync(kFull, before, p);
      if (kSorted) base += __shfl_sync(kFull, first, 2 * p) + (__shfl_sync(kFull, first, 2 * p + 1) << 16);
      mine[lane * kPairs + p] = base;
    }
    __syncwarp();
    rows = reinterpret_cast<const uint16_t*>(mine);
    allocate(budget, turns, lane);
  }

  // allocate_rank(), all clusters at once: one gets what the budget leaves when those whose turn is earlier have been
  // filled up.
  __device__ __forceinline__ void allocate(uint32_t budget, const ClusterTurns& turns, uint32_t lane) {
    const uint32_t used = __popc(__ballot_sync(kFull, count > 0)), room = budget > used ? budget - used : 0;
    const uint32_t elements = __shfl_sync(kFull, count, turns.order),
                   want = lane < kCount && elements > 1 ? elements - 1 : 0;
    const uint32_t earlier = inclusive(want, lane) - want, more = earlier < room ? min(want, room - earlier) : 0;
    const uint32_t given = __shfl_sync(kFull, more, turns.turn);
    buckets = lane < kCount && count > 0 ? 1 + given : 0;
    first_bucket = inclusive(buckets, lane) - buckets;
    // buckets * 2^31 / count in two steps of 32 bits.
    const uint32_t by = count ? count : 1, high = (buckets << 16) / by, low = ((buckets << 16) - high * by) << 15;
    factor = (high << 15) + low / by + (low % by != 0);
  }

  // Where the element of this lane in a row comes; `word` begins with its code.
  __device__ __forceinline__ uint32_t place(uint32_t word, int row, uint32_t lane) const {
    uint32_t alike = (1u << lane) - 1;
#pragma unroll
    for (int j = 0; j < kBits; ++j) {
      const bool bit = word >> j & 1;
      const uint32_t votes = __ballot_sync(kFull, bit);
      alike &= bit ? votes : ~votes;
    }
    return rows[row * kCount + (word & (kCount - 1u))] + __popc(alike);
  }
  // rank * buckets / count: rank and count are at most 2^15, so what the factor is too large by never reaches the next
  // integer.
  __device__ __forceinline__ uint32_t bucket(uint32_t code, uint32_t rank) const {
    return __shfl_sync(kFull, first_bucket, code) + __umulhi(2 * rank, __shfl_sync(kFull, factor, code));
  }
};

// A tile in its piece and in the body.
struct CasqTile {
  uint64_t block;                     // this warp's
  uint32_t n;                         // ... elements
  uint32_t elements, buckets, pairs;  // pairs: words of means
  uint64_t table;                     // body index of its table
  __device__ __forceinline__ CasqTile(const CudaJob& job, const Item& item) {
    const uint64_t count = item.piece.count, begin = item.number * kTile;
    block = item.number * 32 + (threadIdx.x >> 5);
    n = block * kBlock < count ? static_cast<uint32_t>(min_u64(kBlock, count - block * kBlock)) : 0;
    elements = static_cast<uint32_t>(min_u64(kTile, count - begin));
    buckets = static_cast<uint32_t>(buckets_of(job.scheme, elements));
    pairs = (buckets + 1) / 2;
    table = item.piece.region + scales_offset(job.scheme, count) + item.number * casq_table_words(job.scheme, kTile);
  }
};

// --- tiles: encoding -----------------------------------------------------------------------------------------------

// Threads walk over runs of 32 places; this order lets the 32 of a warp do so without meeting in a bank.
__device__ __forceinline__ uint32_t bank_free(uint32_t place) { return place ^ (place >> 5 & 31); }

// The tile's values become the sums of all before them; one more entry has the sum of all. Modulo 2^32, as the
// differences fit.
__device__ __forceinline__ void run_sums(uint32_t* values, uint32_t elements, uint32_t* parts) {
  const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x >> 5, begin = threadIdx.x * 32;
  const uint32_t here = begin < elements ? min(32u, elements - begin) : 0;
  uint32_t total = 0;
#pragma unroll 8
  for (uint32_t j = 0; j < here; ++j) total += values[begin + (j ^ lane)];
  const uint32_t sum = inclusive(total, lane);
  if (lane == 31) parts[warp] = sum;
  __syncthreads();
  uint32_t run = sum - total + __reduce_add_sync(kFull, lane < warp ? parts[lane] : 0u);
#pragma unroll 8
  for (uint32_t j = 0; j < here; ++j) {
    const uint32_t value = values[begin + (j ^ lane)];
    values[begin + (j ^ lane)] = run;
    run += value;
  }
  if (here && begin + here == elements) values[bank_free(elements)] = run;
  __syncthreads();
}

// Means of the buckets 2w and 2w + 1, for the w of every lane of the warp.
template <int kBits>
__device__ __forceinline__ uint32_t mean_pair(const TileRanks<kBits>& ranks, uint32_t digits, const uint32_t* sums,
                                              uint32_t w) {
  uint32_t word = 0;
#pragma unroll 1
  for (uint32_t half = 0; half < 2; ++half) {
    const uint32_t b = 2 * w + half;
    uint32_t k = 0;  // the cluster; beyond the last one for buckets that are not used
    for (int i = 0; i < TileRanks<kBits>::kCount; ++i)
      k += b >= __shfl_sync(kFull, ranks.first_bucket + ranks.buckets, i);
    const uint32_t n = __shfl_sync(kFull, ranks.count, k), m = __shfl_sync(kFull, ranks.buckets, k),
                   j = b - __shfl_sync(kFull, ranks.first_bucket, k);
    const uint32_t first = __shfl_sync(kFull, ranks.first, k), d = __shfl_sync(kFull, digits, k);
    if (k >= TileRanks<kBits>::kCount) continue;
    const uint32_t from = (j * n + m - 1) / m, to = (j * n + n + m - 1) / m;
    const int32_t sum = static_cast<int32_t>(sums[bank_free(first + to)] - sums[bank_free(first + from)]);
    word |= uint32_t{mean_code(sum, to - from, d)} << half * 16;
  }
  return word;
}

// Gradient and residual of rows row0, row0 + 1, ... of this warp's block, added up; zero beyond its end. All loads come
// before all that is done with them, so that they wait together.
template <int kRows>
__device__ __forceinline__ void sums_of_rows(const CudaJob& job, const CudaPiece& piece, const CasqTile& tile,
                                             uint32_t row0, uint32_t lane, float (&x)[kRows]) {
  const void *const in = job.in[piece.tensor], *const before = job.before[piece.tensor];
  const uint64_t at = tile.block * kBlock + row0 * 32 + lane;
  if (tile.n == kBlock && job.dtype == DType::f32 && job.residual == DType::f32) {
    const float *const g = static_cast<const float*>(in) + at, *const e = static_cast<const float*>(before) + at;
    float kept[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) x[r] = g[r * 32];
#pragma unroll
    for (int r = 0; r < kRows; ++r) kept[r] = e[r * 32];
#pragma unroll
    for (int r = 0; r < kRows; ++r) x[r] = x[r] + kept[r] * job.loss_scale;
  } else {
#pragma unroll 1
    for (int r = 0; r < kRows; ++r) {
      const float sum =
          (row0 + r) * 32 + lane < tile.n
              ? widen_at(in, job.dtype, at + r * 32) + widen_at(before, job.residual, at + r * 32) * job.loss_scale
              : 0.0f;
#pragma unroll
      for (int i = 0; i < kRows; ++i)
        x[i] = i == r ? sum : x[i];  // an index that is not constant would move x to memory
    }
  }
}

// The residuals of this warp's block, a few rows at a time. Values are read again: to keep them all the while takes
// more registers than there are.
template <int kBits>
__device__ __forceinline__ void leave_residuals(const CudaJob& job, const CudaPiece& piece, const CasqTile& tile,
                                                const BlockCodes<kBits>& codes, const TileRanks<kBits>& ranks,
                                                const float* values) {
  constexpr int kField = BlockCodes<kBits>::kField, kRows = kField <= 2 ? 8 : 4, kTurns = 32 / kField / kRows;
  const uint32_t lane = threadIdx.x & 31;
#pragma unroll
  for (int q = 0; q < kField; ++q) {
    uint32_t word = codes.word[q];
#pragma unroll 1
    for (int turn = 0; turn < kTurns; ++turn) {
      const int row0 = (q * kTurns + turn) * kRows;
      float x[kRows];
      sums_of_rows(job, piece, tile, row0, lane, x);
#pragma unroll
      for (int r = 0; r < kRows; ++r, word >>= kField & 31) {
        const uint32_t e = (row0 + r) * 32 + lane;
        const uint32_t code = word & ((1u << kBits) - 1), place = ranks.place(word, row0 + r, lane);
        const uint32_t bucket = ranks.bucket(code, place - __shfl_sync(kFull, ranks.first, code));
        if (e < tile.n) store_residual(job, piece, tile.block * kBlock + e, (x[r] - values[bucket]) * job.unscale);
      }
    }
  }
}

template <int kBits>
constexpr uint32_t kEncodeShared = (kTile + 4 + TileRanks<kBits>::kRows) * sizeof(uint32_t);

// What the warps of a thread block share while they encode a tile. The dynamic part holds the values in the order of
// the clusters (one more than a tile has), then the rows of all warps.
template <int kBits>
struct CasqShared {
  uint32_t tops[32], squares[32], parts[32];       // of each warp
  uint32_t totals[32 * TileRanks<kBits>::kPairs];  // of each warp: elements of every cluster, in pairs
  ClusterTurns turns[32];
};

// The values of the tile, and the largest magnitude of every warp's block. The next tile is asked for on the way.
template <int kBits, bool kFeedback>
__device__ __forceinline__ void load_tile(const CudaJob& job, uint64_t i, float (&x)[32], CasqShared<kBits>& shared) {
  const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const Item item = item_of(job, i);
  const CasqTile tile(job, item);
  if (tile.n) load_block<kFeedback>(job, item.piece, tile.block, lane, x);
  prefetch_tile<kFeedback>(job, item.piece, tile.block, lane);
  const uint32_t top_here = block_max(x);
  if (lane == 0) shared.tops[warp] = top_here;
}

template <int kBits, bool kFeedback>
__device__ __forceinline__ void encode_marked_tile(const CudaJob& job, uint64_t i, Check& check) {
  const Item item = item_of(job, i);
  const CasqTile tile(job, item);
  for (uint32_t w = threadIdx.x; w <= tile.pairs; w += 1024) job.body[tile.table + w] = w == 0 ? kMarker : 0;
  if (threadIdx.x == 0) check.loose += word_part(kMarker, tile.table);
  encode_marked<kBits, kFeedback>(job, item.piece, tile.block, tile.n, threadIdx.x & 31);
}

// Thresholds from the sums of squares of all warps, then the codes, into the message, and the places of the elements.
// Returns how many elements this warp's block has.
template <int kBits>
__device__ __forceinline__ uint32_t classify_tile(const CudaJob& job, uint64_t i, uint32_t top, float (&x)[32],
                                                  CasqShared<kBits>& shared, uint32_t* sums, uint32_t* all_rows,
                                                  BlockCodes<kBits>& codes, TileRanks<kBits>& ranks, Check& check) {
  const uint32_t lane = threadIdx.x & 31;
  const Item item = item_of(job, i);
  const CasqTile tile(job, item);
  // 32 words of 32 bits may add up to more: halves are added apart.
  Sums all;
  all.second = (uint64_t{__reduce_add_sync(kFull, shared.squares[lane] >> 16)} << 16) +
               __reduce_add_sync(kFull, shared.squares[lane] & 0xffffu);
  // Division and root in double precision want registers. Half of the values make room for them in shared memory; left
  // to itself, the compiler would use local memory, which is slower.
  volatile float* const aside = reinterpret_cast<float*>(sums) + threadIdx.x;
#pragma unroll
  for (int row = 16; row < 32; ++row) aside[row * 1024] = x[row];
  const float cut = lane + 1 < 1u << kBits ? threshold_of(job.scheme, rms_of(top, all, tile.elements), lane) : 0.0f;
#pragma unroll
  for (int row = 16; row < 32; ++row) x[row] = aside[row * 1024];
  codes.classify(x, cut);
  if (tile.n) codes.store(job, item.piece, tile.block, tile.n, lane, reinterpret_cast<uint8_t*>(sums), check);
  ranks.template make<true>(codes, tile.n, tile.buckets, shared.turns[lane], shared.totals, all_rows);
  return tile.n;
}

// Every value, as an integer on the grid of its cluster, to its place in the tile when it is sorted by cluster.
template <int kBits>
__device__ __forceinline__ void sort_values(const BlockCodes<kBits>& codes, const TileRanks<kBits>& ranks, uint32_t n,
                                            Grid grid, uint32_t digits, const float (&x)[32], uint32_t* sums) {
  const uint32_t lane = threadIdx.x & 31;
  const float scale = power_of_two(digits);
#pragma unroll
  for (int row = 0; row < 32; ++row) {
    const uint32_t to = ranks.place(codes.at_front(row), row, lane);
    const float value = x[row] * grid.pre * grid.grid * __shfl_sync(kFull, scale, codes.at(row));
    if (row * 32 + lane < n) sums[bank_free(to)] = static_cast<uint32_t>(__float2int_rn(value));
  }
}

// The table of the tile, from the running sums.
template <int kBits>
__device__ __forceinline__ void write_table(const CudaJob& job, const CasqTile& tile, const TileRanks<kBits>& ranks,
                                            uint32_t digits, uint32_t top, const uint32_t* sums, Check& check) {
  const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  uint32_t* const means = job.body + tile.table + 1;
  for (uint32_t base = warp * 32; base < tile.pairs; base += 1024) {
    const uint32_t w = base + lane, word = mean_pair(ranks, digits, sums, w);
    if (w < tile.pairs) {
      means[w] = word;
      check.loose += word_part(word, tile.table + 1 + w);
    }
  }
  if (threadIdx.x == 0) {
    job.body[tile.table] = top;
    check.loose += word_part(top, tile.table);
  }
}

// The means of the tile as a receiver reads them, in place of the sums. A thread reads the words that it has just
// written.
__device__ __forceinline__ void read_table(const CudaJob& job, const CasqTile& tile, uint32_t top, float* values) {
  const uint32_t* const means = job.body + tile.table + 1;
  const double step = grid_step(top);
  for (uint32_t w = threadIdx.x; w < tile.pairs; w += 1024) {
    const uint32_t word = means[w];
    values[2 * w] = mean_value(static_cast<uint16_t>(word & 0xffffu), step);
    values[2 * w + 1] = mean_value(static_cast<uint16_t>(word >> 16), step);
  }
}

// A thread block per tile. Registers are short: what is known of the tile is looked up again after barriers instead of
// being kept.
template <int kBits, bool kFeedback>
__global__ void __launch_bounds__(1024) encode_tiles(const __grid_constant__ CudaJob job) {
  GW_DYNAMIC_SHARED(uint32_t, tile_shared);
  __shared__ CasqShared<kBits> shared;
  uint32_t *const sums = tile_shared, *const all_rows = tile_shared + kTile + 4;
  const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  if (warp == 0) shared.turns[lane] = turns_of<kBits>(job.scheme, lane);
  Check check;
  for (uint64_t i = blockIdx.x; i < job.items; i += gridDim.x) {
    float x[32] = {};
    load_tile<kBits, kFeedback>(job, i, x, shared);
    __syncthreads();
    const uint32_t top = __reduce_max_sync(kFull, shared.tops[lane]);
    if (top >= kInfBits) {
      encode_marked_tile<kBits, kFeedback>(job, i, check);
      __syncthreads();
      continue;
    }
    const Grid grid = grid_for(top);
    const uint32_t squares_here = static_cast<uint32_t>(warp_sums_of<SumKind::squares>(x, grid).second);
    if (lane == 0) shared.squares[warp] = squares_here;
    __syncthreads();
    BlockCodes<kBits> codes;
    TileRanks<kBits> ranks;
    const uint32_t n = classify_tile(job, i, top, x, shared, sums, all_rows, codes, ranks, check);
    const uint32_t digits = sum_digits(ranks.count, ranks.buckets);
    sort_values(codes, ranks, n, grid, digits, x, sums);
    __syncthreads();

    const Item item = item_of(job, i);
    const CasqTile tile(job, item);
    run_sums(sums, tile.elements, shared.parts);
    write_table(job, tile, ranks, digits, top, sums, check);
    if (kFeedback && job.before[item.piece.tensor] != nullptr) {
      __syncthreads();
      float* const values = reinterpret_cast<float*>(sums);
      read_table(job, tile, top, values);
      __syncthreads();
      leave_residuals(job, item.piece, tile, codes, ranks, values);
    }
  }
  check.flush(job.check);
}

// --- tiles: decoding -----------------------------------------------------------------------------------------------

template <int kBits>
__global__ void __launch_bounds__(1024) decode_tiles(const __grid_constant__ CudaJob job) {
  GW_DYNAMIC_SHARED(uint32_t, tile_shared);  // rows, then the means of the buckets
  __shared__ uint32_t totals[32 * TileRanks<kBits>::kPairs];
  float* const values = reinterpret_cast<float*>(tile_shared + TileRanks<kBits>::kRows);
  const uint32_t lane = threadIdx.x & 31;
  const ClusterTurns turns = turns_of<kBits>(job.scheme, lane);
  Check check;
  uint32_t problem = 0;
  for (uint64_t i = blockIdx.x; i < job.items; i += gridDim.x) {
    const Item item = item_of(job, i);
    const CudaPiece& piece = item.piece;
    const CasqTile tile(job, item);
    BlockCodes<kBits> codes;
    if (tile.n) problem |= codes.load(job, piece, tile.block, tile.n, lane, check);
    const uint32_t top = job.body[tile.table];
    const bool marked = top == kMarker, bad = !marked && top >= kInfBits;
    if (threadIdx.x == 0) check.loose += word_part(top, tile.table);
    if (bad) problem |= kBadScales;
    const double step = marked || bad ? 0.0 : grid_step(top);
    for (uint32_t w = threadIdx.x; w < tile.pairs; w += 1024) {
      const uint32_t word = __ldcs(job.body + tile.table + 1 + w);
      const uint16_t low = static_cast<uint16_t>(word & 0xffffu), high = static_cast<uint16_t>(word >> 16);
      check.loose += word_part(word, tile.table + 1 + w);
      if (marked ? word != 0 : !mean_is_valid(low) || (2 * w + 1 < tile.buckets && !mean_is_valid(high)))
        problem |= kBadBuckets;
      if (!marked && 2 * w + 1 == tile.buckets && high != 0) problem |= kBadPadding;
      values[2 * w] = mean_value(low, step);
      values[2 * w + 1] = mean_value(high, step);
    }
    void* const out = job.out[piece.tensor];
    const uint64_t at = tile.block * kBlock + lane;
    if (marked) {
      for (uint32_t e = lane; e < tile.n; e += 32)
        store_value(out, job.dtype, job.add, tile.block * kBlock + e, bits_float(kMarker));
    } else {
      TileRanks<kBits> ranks;
      ranks.template make<false>(codes, tile.n, tile.buckets, turns, totals, tile_shared);
      const bool plain = job.dtype == DType::f32 && !job.add && tile.n == kBlock;
      float* const to = static_cast<float*>(out) + at;
#pragma unroll
      for (int row = 0; row < 32; ++row) {
        const uint32_t bucket = ranks.bucket(codes.at(row), ranks.place(codes.at_front(row), row, lane));
        if (plain)
          __stcs(to + row * 32, values[bucket]);
        else if (row * 32 + lane < tile.n)
          store_value(out, job.dtype, job.add, at + row * 32, values[bucket]);
      }
    }
    __syncthreads();
  }
  report(job, problem, check);
}
