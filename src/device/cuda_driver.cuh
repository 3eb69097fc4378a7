// SPDX-License-Identifier: Apache-2.0
// The CUDA driver: the same work as cpu_driver-inl.h, one warp per block of 1024 elements. Thread t is lane t of the
// block's grid: it holds the 32 values of its lane in registers, so every load and store of a row is one 128-byte
// access of the warp, packing is shifts within a thread, and the tensor is read once.
//
// Units up to a block live in one warp. Units above it (large buckets, tiles) live in one thread block of 32 warps,
// which share statistics through shared memory (cuda_chunks.cuh). Whole-tensor units take separate passes with integer
// atomics.
//
// Included by the files of kernels inside an anonymous namespace, after the bodies and cuda_head.cuh.

// Each of these needs the ones before it.
// clang-format off
#include "device/cuda_load.cuh"
#include "device/cuda_stats.cuh"
#include "device/cuda_pack.cuh"
// clang-format on

// --- one block ---------------------------------------------------------------------------------------------------

// The bits of a code: the body's, or the scheme's.
template <class B>
__device__ __forceinline__ int code_bits(const Scheme& s) {
  return B::kCodeBits ? B::kCodeBits : s.bits;
}

// 4 KiB to shared memory by one warp, without waiting. The compiler shall not know how the addresses came about: it
// would make each of the eight anew, where a constant in the instruction does.
__device__ __forceinline__ void copy_block(const float* from, float* to, uint32_t lane) {
  from += lane * 4;
  asm volatile("" : "+l"(from));
  size_t shift = lane * 4;
  asm volatile("" : "+l"(shift));
  to += shift;
#pragma unroll
  for (int j = 0; j < 8; ++j) __pipeline_memcpy_async(to + j * 128, from + j * 128, 16);
  __pipeline_commit();
}

// A full block of a warp: where its words go, and what its random bits come from.
struct BlockPlace {
  uint32_t* words;  // of this lane
  uint32_t row0;    // the block's first row of the checksum
  uint64_t key;     // block_key()
};

// The rows of a full block, for every kernel that encodes one: random bits, codes, residuals in place of x, packing.
// The two 16-bit halves of a random word serve two rows. `params(row)` gives the parameters of a row. kTiny: the body
// multiplies by `pre` itself; else values come lifted already, and `lower` brings them back for the residual (1 where
// there is nothing to bring back: the multiplication then vanishes).
template <class B, bool kTiny, bool kFeedback, class Params>
__device__ __forceinline__ void encode_rows(const CudaJob& job, const BlockPlace& at, uint32_t lane, float (&x)[32],
                                            float lower, const Params& params, Check& check) {
  constexpr int kBits = B::kCodeBits;
  const uint32_t key1 = static_cast<uint32_t>(at.key >> 32);
  uint32_t counter = lane * kWeyl + static_cast<uint32_t>(at.key);
  const uint32_t last = job.scheme.nearest ? 0 : kMixLast, mask = job.scheme.nearest ? 0x80008000u : job.mask;
  uint32_t rnd = 0, word = 0;
  uint32_t codes[kBits ? 1 : 32];
#pragma unroll
  for (int row = 0; row < 32; ++row) {
    const int place = row * kBits % 32, q = row * kBits / 32;
    uint32_t r16 = 0;
    if constexpr (B::kRandom) {
      if (row % 2 == 0) {
        rnd = random_mix(counter, key1, last) ^ mask;
        counter += 32 * kWeyl;
        r16 = rnd & 0xffffu;
      } else {
        r16 = rnd >> 16;
      }
    }
    const UnitParams& p = params(row);
    const uint32_t code = B::template encode<ScalarLane, kTiny>(x[row], p, r16);
    if constexpr (kFeedback) x[row] = (x[row] * lower - B::template decode<ScalarLane>(code, p)) * job.unscale;
    if constexpr (kBits == 0) {
      codes[row] = code;
      continue;
    }
    word = place == 0 ? code : word + (code << place);  // disjoint bits: the sum is the or, in one instruction
    if (place + kBits >= 32) {
      at.words[q * 32] = word;
      check.row(word, at.row0 + q);
      word = place + kBits > 32 ? code >> (32 - place) : 0;
    }
  }
  if constexpr (kBits == 0) pack_block(job.scheme.bits, codes, at.words, at.row0, check);
}

// A full block of one unit; x becomes the residual with feedback.
template <class B, bool kFeedback>
__device__ __forceinline__ void encode_full(const CudaJob& job, const BlockPlace& at, uint32_t lane, float (&x)[32],
                                            UnitParams p, bool marked, Check& check) {
  if (marked) {
#pragma unroll
    for (int row = 0; row < 32; ++row) x[row] = 0;
    asm volatile("");  // so that it stays a branch, not a choice for each value
  }
  if (B::kLifts && p.pre != 1.0f) {
#pragma unroll
    for (int row = 0; row < 32; ++row) x[row] *= p.pre;
    if (B::kClips) p.limit *= p.pre;
  }
  // A power of two: exact both ways. Lifted values were clipped against p.limit, which was lifted as well.
  const float lower = 1.0f / p.pre;
  const auto the_one = [&](int) -> const UnitParams& { return p; };
  encode_rows<B, false, kFeedback>(job, at, lane, x, lower, the_one, check);
}

// The residuals of a full block. A NaN means that the unit was marked and keeps what it had.
__device__ __forceinline__ void store_residuals(const CudaJob& job, const void* before, void* after, uint64_t at,
                                                const float (&x)[32]) {
  if (job.residual == DType::f32) {
    float* to = static_cast<float*>(after) + at;
    const float* was = static_cast<const float*>(before) + at;
#pragma unroll
    for (int row = 0; row < 32; ++row) __stcs(to + row * 32, x[row] != x[row] ? was[row * 32] : x[row]);
  } else {
    uint16_t* to = static_cast<uint16_t*>(after) + at;
    const uint16_t* was = static_cast<const uint16_t*>(before) + at;
#pragma unroll
    for (int row = 0; row < 32; ++row) to[row * 32] = x[row] != x[row] ? was[row * 32] : f32_to_bf16(x[row]);
  }
}

// A row of the last, partial block: codes follow one another from bit 0 on, so the 32 codes of a row fill `bits` words,
// which the first `bits` lanes collect from their neighbours. A marked unit is encoded as zeros.
template <class B, bool kFeedback>
__device__ void encode_tail_row(const CudaJob& job, const CudaPiece& piece, uint64_t block, uint32_t row, uint32_t lane,
                                const UnitParams& p, Check& check) {
  const int bits = code_bits<B>(job.scheme);
  const uint64_t at = block * kBlock + row * kLane + lane;
  const uint64_t tail = piece.region + full_words(job.scheme, piece.count), words = tail_words(job.scheme, piece.count);
  const void* before = kFeedback ? job.before[piece.tensor] : nullptr;
  float value = 0;
  if (at < piece.count) {
    value = widen_at(job.in[piece.tensor], job.dtype, at);
    if (before) value = value + widen_at(before, job.residual, at) * job.loss_scale;
  }
  if (job.scheme.scale_words != 0 && float_bits(p.a) == kMarker) value = 0;
  uint32_t r16 = 0x8000u;
  if (B::kRandom && !job.scheme.nearest) {
    const uint64_t key = block_key(job.keys[piece.tensor], piece.first_block + block);
    const uint32_t h = random_word(key, row / 2 * 32 + lane) ^ job.mask;
    r16 = row % 2 ? h >> 16 : h & 0xffffu;
  }
  uint32_t code = B::template encode<ScalarLane, true>(value, p, r16);
  if (before) store_residual(job, piece, at, (value - B::template decode<ScalarLane>(code, p)) * job.unscale);
  if (at >= piece.count) code = 0;
  if (B::kCodeBits == 0 && bits == 0) return;
  uint32_t word = 0;
  const int first = static_cast<int>(lane) * 32 / bits;  // the first code with a bit in this lane's word
#pragma unroll
  for (int s = 0; s <= (32 + bits - 1) / bits; ++s) {
    const int from = first + s, shift = from * bits - static_cast<int>(lane) * 32;
    const uint32_t c = __shfl_sync(kFull, code, from & 31);
    if (from < 32 && shift < 32) word |= shift >= 0 ? c << shift : c >> -shift;
  }
  const uint64_t to = uint64_t{row} * bits + lane;
  if (static_cast<int>(lane) < bits && to < words) {
    job.body[tail + to] = word;
    check.loose += word_part(word, tail + to);
  }
}

__device__ __forceinline__ void write_scales(const CudaJob& job, const CudaPiece& piece, uint64_t unit,
                                             const uint32_t* scales, Check& check) {
  const uint64_t at = piece.region + scales_offset(job.scheme, piece.count) + unit * job.scheme.scale_words;
  for (uint32_t w = 0; w < job.scheme.scale_words; ++w) {
    job.body[at + w] = scales[w];
    check.loose += word_part(scales[w], at + w);
  }
}

// Encodes a block whose parameters are `one`, or rows[0], rows[spread], ... in shared memory; x becomes the residual
// with feedback. Of a partial block only the rows row0, row0 + step, ... are done.
template <class B, bool kFeedback>
__device__ __forceinline__ void encode_block(const CudaJob& job, const CudaPiece& piece, uint64_t block, uint32_t lane,
                                             float (&x)[32], bool is_one, const UnitParams& one, UnitParams* rows,
                                             bool marked, Check& check, uint32_t row0 = 0, uint32_t step = 1) {
  const bool tail = piece.count - block * kBlock < kBlock;
  const uint32_t spread = is_one ? 0 : 1;
  if (is_one && (tail || one.pre != 1.0f)) {  // these paths read row by row
    if (lane == 0) rows[0] = one;
    is_one = false;
  }
  __syncwarp();
  if (tail) {
    for (uint32_t row = row0; row * kLane < piece.count - block * kBlock; row += step)
      encode_tail_row<B, kFeedback>(job, piece, block, row, lane, rows[row * spread], check);
    __syncwarp();
    return;
  }
  if (marked) {
#pragma unroll
    for (int row = 0; row < 32; ++row)
      if (float_bits(is_one ? one.a : rows[row * spread].a) == kMarker) x[row] = 0;
  }
  const int bits = code_bits<B>(job.scheme);
  const BlockPlace at{job.body + piece.region + block * kLane * bits + lane,
                      static_cast<uint32_t>(piece.region / kLane + block * bits),
                      block_key(job.keys[piece.tensor], piece.first_block + block)};
  const auto of_row = [&](int row) -> const UnitParams& { return rows[row * spread]; };
  const auto the_one = [&](int) -> const UnitParams& { return one; };
  if (is_one)
    encode_rows<B, false, kFeedback>(job, at, lane, x, 1.0f, the_one, check);
  else
    encode_rows<B, true, kFeedback>(job, at, lane, x, 1.0f, of_row, check);
  if (kFeedback && job.before[piece.tensor] != nullptr) {
    const uint64_t first = block * kBlock + lane;
#pragma unroll
    for (int row = 0; row < 32; ++row) store_residual(job, piece, first + row * 32, x[row]);
  }
  __syncwarp();
}

// --- kernels: units up to a block, and whole-tensor units whose parameters are known ------------------------------

// The parameters of the units in a block that holds several, one entry of `rows` per row; returns whether any unit is
// marked. The statistics of a unit end up in the lane of its last row, so that all units then work side by side.
// `writes`: this warp writes their scales.
template <class B>
__device__ __forceinline__ bool params_of_units(const CudaJob& job, const CudaPiece& piece, uint64_t block, uint64_t n,
                                                uint32_t lane, const float (&x)[32], bool writes, UnitParams* rows,
                                                Check& check) {
  const uint32_t unit_rows = job.scheme.unit / kLane, last = lane | (unit_rows - 1);
  uint32_t top = 0, running = 0;
#pragma unroll
  for (int row = 0; row < 32; ++row) {
    running = max(running, float_bits(x[row]) & 0x7fffffffu);
    if (((row + 1) & (unit_rows - 1)) == 0) {
      const uint32_t all = __reduce_max_sync(kFull, running);
      if (lane == row) top = all;
      running = 0;
    }
  }
  Sums sums;
  if (job.scheme.sums == SumKind::squares) {  // the only sums of units below a block
    uint32_t squares = 0;
#pragma unroll
    for (int row = 0; row < 32; ++row) {
      const Grid grid = grid_for(__shfl_sync(kFull, top, row | (unit_rows - 1)));
      const float t = x[row] * grid.pre * grid.grid;
      squares +=
          float_bits(x[row]) << 1 < kInfBits << 1 ? static_cast<uint32_t>(__float2int_rn(t * t * kSquareScale)) : 0;
      if (((row + 1) & (unit_rows - 1)) == 0) {
        const uint32_t all = __reduce_add_sync(kFull, squares);
        if (lane == row) sums.second = all;
        squares = 0;
      }
    }
  }
  const uint32_t first_row = lane & ~(unit_rows - 1);
  uint32_t marked = 0;
  if (lane == last && first_row * kLane < n) {
    uint32_t scales[2];
    B::make_scales(job.scheme, top, sums, min_u64(job.scheme.unit, n - first_row * kLane), scales);
    if (writes) write_scales(job, piece, (block * kBlock + first_row * kLane) / job.scheme.unit, scales, check);
    const UnitParams p = B::make_params(job.scheme, scales);
    for (uint32_t row = first_row; row <= lane; ++row) rows[row] = p;
    marked = scales[0] == kMarker;
  }
  return __any_sync(kFull, marked);
}

// Any block of any unit up to a block, by thread block `self` of `all`. kTails: only the partial blocks, one a piece,
// whose rows the eight warps share: all look at the whole of it, the first writes the scales.
template <class B, bool kFeedback, bool kTails>
__device__ void encode_any(const CudaJob& job, uint32_t self, uint32_t all, UnitParams (&shared_rows)[8][32],
                           Check& check) {
  const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  UnitParams* rows = shared_rows[warp];
  const uint64_t start = kTails ? self : self * 8ull + warp, stride = kTails ? all : all * 8ull;
  const bool writer = lane == 0 && (!kTails || warp == 0);
  for (uint64_t i = start; i < (kTails ? job.piece_count : job.items); i += stride) {
    const Item item = kTails ? tail_of(job, i) : item_of(job, i);
    const CudaPiece& piece = item.piece;
    if (kTails && item.number * kBlock == piece.count) continue;
    const uint64_t block = item.number, n = min_u64(kBlock, piece.count - block * kBlock);
    float x[32];
    load_block<kFeedback>(job, piece, block, lane, x);

    UnitParams one;
    bool is_one = true, marked = false;
    uint32_t scales[2];
    if (job.scheme.unit == 0) {
      one = job.params[item.slot];
      marked = float_bits(one.a) == kMarker;
    } else if (job.scheme.unit == kBlock) {
      const uint32_t top = block_max(x);
      Sums sums;
      if (job.scheme.sums != SumKind::none && top < kInfBits) sums = warp_sums(job.scheme.sums, x, grid_for(top));
      B::make_scales(job.scheme, top, sums, n, scales);
      if (writer) write_scales(job, piece, block, scales, check);
      one = B::make_params(job.scheme, scales);
      marked = scales[0] == kMarker;
    } else if (job.scheme.scale_words != 0) {
      is_one = false;
      marked = params_of_units<B>(job, piece, block, n, lane, x, !kTails || warp == 0, rows, check);
    }
    encode_block<B, kFeedback>(job, piece, block, lane, x, is_one, one, rows, marked, check, kTails ? warp : 0,
                               kTails ? 8 : 1);
  }
}

template <class B, bool kFeedback>
__global__ void __launch_bounds__(256) encode_blocks(const __grid_constant__ CudaJob job) {
  __shared__ UnitParams rows[8][32];
  Check check;
  encode_any<B, kFeedback, false>(job, blockIdx.x, gridDim.x, rows, check);
  check.flush(job.check);
}

// --- kernels: scales of whole-tensor units -------------------------------------------------------------------------

template <class B>
__global__ void whole_scales(const __grid_constant__ CudaJob job) {
  Check check;
  for (uint32_t p = blockIdx.x * blockDim.x + threadIdx.x; p < job.piece_count; p += gridDim.x * blockDim.x) {
    const CudaPiece piece = job.pieces[p];
    if (piece.count == 0) continue;
    const Sums sums{static_cast<int64_t>(job.sums[p].first), job.sums[p].second, job.sums[p].negative};
    uint32_t scales[2];
    B::make_scales(job.scheme, job.tops[p], sums, piece.count, scales);
    write_scales(job, piece, 0, scales, check);
    job.params[p] = B::make_params(job.scheme, scales);
  }
  check.flush(job.check);
}

// --- decoding ------------------------------------------------------------------------------------------------------

// The parameters of the rows of a block that is decoded. Lane l looks after row l.
template <class B>
struct RowParams {
  UnitParams mine;        // of this lane's row
  uint32_t my_scale = 0;  // its first scale word
  UnitParams p;           // of the row taken last

  // Returns status bits. A unit is summed and checked where its first row is, by the warp that is told to.
  __device__ __forceinline__ uint32_t load(const CudaJob& job, const CudaPiece& piece, uint64_t block, uint64_t n,
                                           uint32_t lane, bool checks, Check& check) {
    const Scheme& scheme = job.scheme;
    const uint64_t begin = block * kBlock + lane * kLane, unit = unit_elements(scheme, piece.count);
    if (scheme.scale_words == 0) return 0;
    uint32_t problem = 0;
    if (lane * kLane < n) {
      const uint64_t u = begin / unit;
      const uint64_t at = piece.region + scales_offset(scheme, piece.count) + u * scheme.scale_words;
      uint32_t scales[2] = {0, 0};
      for (uint32_t w = 0; w < scheme.scale_words; ++w) scales[w] = job.body[at + w];
      if (begin == u * unit && checks) {
        if (!B::scales_valid(scheme, scales)) problem = kBadScales;
        for (uint32_t w = 0; w < scheme.scale_words; ++w) check.loose += word_part(scales[w], at + w);
      }
      mine = B::make_params(scheme, scales);
      my_scale = scales[0];
    }
    take(scheme, 0);
    return problem;
  }
  // All lanes ask at once. Where decoding reads two numbers only, those are handed over; else parameters are made anew.
  __device__ __forceinline__ void take(const Scheme& scheme, int row) {
    if constexpr (!B::kTwoParams) {
      const uint32_t scales[2] = {__shfl_sync(kFull, my_scale, row), 0};
      p = B::make_params(scheme, scales);
    } else {
      p.a = __shfl_sync(kFull, mine.a, row);
      p.b = __shfl_sync(kFull, mine.b, row);
    }
  }
};

// A full block; returns what B::check() has seen. is_one: one unit fills the block.
template <class B>
__device__ __forceinline__ uint32_t decode_full(const CudaJob& job, const CudaPiece& piece, uint64_t block,
                                                uint32_t lane, bool is_one, RowParams<B>& params, Check& check) {
  constexpr int kBits = B::kCodeBits;
  const int bits = code_bits<B>(job.scheme);
  const uint32_t* words = job.body + piece.region + block * kLane * bits + lane;
  const uint64_t row0 = piece.region / kLane + block * bits;
  uint32_t w[kBits ? kBits : 32];  // words, or codes
  if constexpr (kBits == 0) {
    unpack_block(bits, words, static_cast<uint32_t>(row0), w, check);
  } else {
#pragma unroll
    for (int q = 0; q < kBits; ++q) w[q] = __ldcs(words + q * 32);
#pragma unroll
    for (int q = 0; q < kBits; ++q) check.row(w[q], row0 + q);
  }
  void* const out = job.out[piece.tensor];
  const uint64_t at = block * kBlock + lane;
  const bool plain = job.dtype == DType::f32 && !job.add;
  float* to = static_cast<float*>(out) + at;
  uint32_t seen = 0;
#pragma unroll
  for (int row = 0; row < 32; ++row) {
    constexpr uint32_t kMask = kBits == 32 ? 0xffffffffu : (1u << (kBits % 32)) - 1;
    const int place = row * kBits % 32, q = row * kBits / 32;
    uint32_t code = w[kBits ? q : row];
    if constexpr (kBits != 0) {
      code >>= place;
      if (place + kBits > 32) code |= w[q + 1 < kBits ? q + 1 : q] << (32 - place & 31);
      code &= kMask;
    }
    seen = B::template check<ScalarLane>(seen, code);
    if (!is_one) params.take(job.scheme, row);
    const float value = B::template decode<ScalarLane>(code, params.p);
    if (plain)
      __stcs(to + row * 32, value);
    else
      store_value(out, job.dtype, job.add, at + row * 32, value);
  }
  return seen;
}

// The rows first_row, first_row + step, ... of a partial block of n elements; returns what B::check() has seen.
template <class B>
__device__ __forceinline__ uint32_t decode_tail(const CudaJob& job, const CudaPiece& piece, uint64_t block, uint64_t n,
                                                uint32_t lane, uint32_t first_row, uint32_t step, bool is_one,
                                                RowParams<B>& params, uint32_t& problem, Check& check) {
  const int bits = code_bits<B>(job.scheme);
  const uint32_t* region = job.body + piece.region;
  const uint64_t tail = full_words(job.scheme, piece.count), words = tail_words(job.scheme, piece.count);
  for (uint64_t j = lane + first_row * 32; j < words; j += step * 32) {
    const uint32_t word = region[tail + j];
    check.loose += word_part(word, piece.region + tail + j);
    const uint32_t used = static_cast<uint32_t>(min_u64(32, n * bits - j * 32));
    if (used < 32 && word >> used) problem |= kBadPadding;
  }
  uint32_t seen = 0;
#pragma unroll 1
  for (uint32_t row = first_row; row * kLane < n; row += step) {
    if (!is_one) params.take(job.scheme, static_cast<int>(row));
    const uint64_t e = row * kLane + lane, bit = e * bits;
    if (e >= n) continue;
    uint64_t pair = bits ? region[tail + bit / 32] : 0;
    if (bit % 32 + bits > 32) pair |= static_cast<uint64_t>(region[tail + bit / 32 + 1]) << 32;
    const uint32_t code = static_cast<uint32_t>((pair >> (bit % 32)) & ((uint64_t{1} << bits) - 1));
    seen = B::template check<ScalarLane>(seen, code);
    store_value(job.out[piece.tensor], job.dtype, job.add, block * kBlock + e,
                B::template decode<ScalarLane>(code, params.p));
  }
  return seen;
}

// Any block of any unit, by thread block `self` of `all`; returns status bits. kTails: only the partial blocks, one per
// piece, whose rows the eight warps share.
template <class B, bool kTails>
__device__ uint32_t decode_any(const CudaJob& job, uint32_t self, uint32_t all, Check& check) {
  const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const Scheme& scheme = job.scheme;
  uint32_t problem = 0;
  const uint64_t start = kTails ? self : self * 8ull + warp, stride = kTails ? all : all * 8ull;
  const uint32_t first_row = kTails ? warp : 0, step = kTails ? 8 : 1;
  for (uint64_t i = start; i < (kTails ? job.piece_count : block_count(job)); i += stride) {
    const Item item = kTails ? tail_of(job, i) : block_of(job, i);
    const CudaPiece& piece = item.piece;
    if (item.number * kBlock >= piece.count) continue;
    const uint64_t block = item.number, n = min_u64(kBlock, piece.count - block * kBlock);
    const bool is_one = scheme.scale_words == 0 || unit_elements(scheme, piece.count) >= kBlock;
    RowParams<B> params;
    problem |= params.load(job, piece, block, n, lane, !kTails || warp == 0, check);
    const uint32_t seen =
        n == kBlock ? decode_full(job, piece, block, lane, is_one, params, check)
                    : decode_tail(job, piece, block, n, lane, first_row, step, is_one, params, problem, check);
    if (B::bad(seen, scheme)) problem |= kBadCodes;
  }
  return problem;
}

template <class B>
__global__ void __launch_bounds__(256) decode_blocks(const __grid_constant__ CudaJob job) {
  Check check;
  const uint32_t head = job.head.expected ? 1 : 0;  // the first thread block looks at the head
  const uint32_t problem =
      blockIdx.x < head ? check_head(job) : decode_any<B, false>(job, blockIdx.x - head, gridDim.x - head, check);
  report(job, problem, check);
}
