// SPDX-License-Identifier: Apache-2.0
// The kernels that nearly all bytes go through: full blocks whose parameters are the same for the whole block. They do
// what cuda_driver.cuh does in general, with as little as possible besides: a warp keeps the addresses of its tensor in
// registers from block to block, asks the cache for its next block while it works on this one, and saves up the
// checksums of scales until there is one for every lane.
//
// Included by the files of kernels after cuda_driver.cuh.

// The blocks of a warp: runs of neighbours, which are mostly of one tensor (share_out).
struct Walk {
  uint64_t at, next_run;
  uint32_t left;

  __device__ __forceinline__ Walk(const CudaJob& job, uint32_t thread_block) {
    const uint64_t warp = thread_block * 8ull + (threadIdx.x >> 5), busy = job.busy * 8ull;
    at = warp * job.run - job.aside * min_u64(warp, busy);
    left = job.run - (warp < busy ? job.aside : 0);
    next_run = (job.main_blocks * 8ull + warp) * job.run - job.aside * busy;
    if (left == 0) start_run(job);
  }
  __device__ __forceinline__ uint64_t next() const { return left > 1 ? at + 1 : next_run; }
  __device__ __forceinline__ void go(const CudaJob& job) {
    ++at;
    if (--left == 0) start_run(job);
  }
  __device__ __forceinline__ void start_run(const CudaJob& job) {
    at = next_run;
    next_run += job.main_blocks * 8ull * job.run;
    left = job.run;
  }
};

// The tensor that a warp is at.
struct TensorPlace {
  uint32_t slot = 0xffffffffu;
  uint64_t first_item = 0, full = 0;  // full: blocks that are not partial
  const void *in = nullptr, *before = nullptr;
  void *after = nullptr, *out = nullptr;
  uint64_t key = 0, first_block = 0, region = 0, scales = 0;  // scales: body index of the piece's scales

  uint32_t next = 0;  // the slot of the item to come, asked for one item ahead

  __device__ __forceinline__ void prefetch_slot(const CudaJob& job, uint64_t item) {
    if (job.piece_count > 1 && item < job.items) next = __ldg(job.item_piece + item);
  }
  __device__ __forceinline__ void go(const CudaJob& job) {
    if (next == slot) return;
    slot = next;
    const CudaPiece piece = job.pieces[slot];
    const uint32_t tensor = job.first_pointer + slot;  // not piece.tensor, which would have to arrive first
    first_item = piece.first_item;
    full = piece.count / kBlock;
    region = piece.region;
    scales = region + scales_offset(job.scheme, piece.count);
    if (job.out) out = job.out[tensor];
    if (!job.in) return;
    in = job.in[tensor];
    key = job.keys[tensor];
    first_block = piece.first_block;
    if (!job.feedback) return;
    before = job.before[tensor];
    after = job.after[tensor];
  }
};

// Scale words wait, one per lane, and are summed 32 at a time.
struct ScaleSums {
  uint64_t index = 0;
  uint32_t word = 0, held = 0;
  __device__ __forceinline__ void add(uint32_t lane, uint32_t value, uint64_t at, Check& check) {
    if (lane == held) {
      word = value;
      index = at;
    }
    if (++held == 32) flush(check);
  }
  __device__ __forceinline__ void flush(Check& check) {
    if (held) check.loose += word_part(word, index);
    word = held = 0;
  }
};

__device__ __forceinline__ void load_full(const void* data, DType dtype, uint64_t at, float (&x)[32]) {
  if (dtype == DType::f32) {
    const float* from = static_cast<const float*>(data) + at;
#pragma unroll
    for (int row = 0; row < 32; ++row) x[row] = __ldcs(from + row * 32);
  } else {
    const unsigned short* from = static_cast<const unsigned short*>(data) + at;
#pragma unroll
    for (int row = 0; row < 32; ++row) {
      const uint16_t h = __ldcs(from + row * 32);
      x[row] = dtype == DType::f16 ? f16_to_f32(h) : bf16_to_f32(h);
    }
  }
}

// The values of a warp's blocks, one after another. kAhead: f32 input aligned to 16 bytes, no feedback. Blocks then
// come through shared memory, copied there without passing through registers while the block before them is worked on;
// else the cache is asked for the next block.
template <bool kFeedback, bool kAhead>
struct BlockLoader {
  float* buffer;                  // kAhead: room for two blocks
  uint64_t ahead = ~uint64_t{0};  // the item that is on its way to shared memory
  uint32_t turn = 0;              // the half of the buffer that holds this block

  // The block of item i of the job; item `next` is the warp's next one.
  __device__ __forceinline__ void load(const CudaJob& job, const TensorPlace& place, uint64_t i, uint64_t next,
                                       uint32_t lane, float (&x)[32]) {
    const uint64_t block = i - place.first_item, then = next - place.first_item;
    if constexpr (kAhead)
      load_ahead(place, i, next, lane, x);
    else
      load_full(place.in, job.dtype, block * kBlock + lane, x);
    if (kFeedback && place.before) {
      float e[32];
      load_full(place.before, job.residual, block * kBlock + lane, e);
#pragma unroll
      for (int row = 0; row < 32; ++row) x[row] = x[row] + e[row] * job.loss_scale;
    }
    if (!kAhead && then < place.full) {
      prefetch_block(place.in, job.dtype, then, lane);
      if (kFeedback && place.before) prefetch_block(place.before, job.residual, then, lane);
    }
  }

  __device__ __forceinline__ void load_ahead(const TensorPlace& place, uint64_t i, uint64_t next, uint32_t lane,
                                             float (&x)[32]) {
    const float* in = static_cast<const float*>(place.in);
    const uint64_t block = i - place.first_item, then = next - place.first_item;
    if (ahead != i) copy_block(in + block * kBlock, buffer + turn * kBlock, lane);
    if (then < place.full) {
      copy_block(in + then * kBlock, buffer + (turn ^ 1) * kBlock, lane);
      ahead = next;
      __pipeline_wait_prior(1);
    } else {
      __pipeline_wait_prior(0);
    }
    __syncwarp();  // a lane reads what others have copied
#pragma unroll
    for (int row = 0; row < 32; ++row) x[row] = buffer[turn * kBlock + row * 32 + lane];
    turn ^= 1;
    __syncwarp();  // before the next copy overwrites it
  }
};

// Bodies that look levels up find them in shared memory, whose addresses cost half of global ones.
template <class B>
__device__ __forceinline__ void fetch_table(const Scheme& s, float* table) {
  if constexpr (B::kTableFloats > 0) {
    for (uint32_t i = threadIdx.x; i < B::kTableFloats; i += blockDim.x) table[i] = __ldg(s.table + i);
    __syncthreads();
  }
}

template <class B, bool kFeedback, bool kAhead>
__global__ void __launch_bounds__(256, 2) encode_full_blocks(const __grid_constant__ CudaJob job) {
  const int bits = code_bits<B>(job.scheme);
  const uint32_t lane = threadIdx.x & 31;
  const Scheme& scheme = job.scheme;
  Check check;
  if (blockIdx.x < job.busy) {
    __shared__ UnitParams rows[8][32];
    encode_any<B, kFeedback, true>(job, blockIdx.x, job.busy, rows, check);
  }
  ScaleSums scale_sums;
  TensorPlace place;
  __shared__ float table[B::kTableFloats + 1];
  fetch_table<B>(scheme, table);
  GW_DYNAMIC_SHARED(float4, ahead_blocks);  // kAhead: two blocks per warp
  BlockLoader<kFeedback, kAhead> loader{reinterpret_cast<float*>(ahead_blocks) + (threadIdx.x >> 5) * 2 * kBlock};
  Walk walk(job, blockIdx.x);
  place.prefetch_slot(job, walk.at);
  for (; walk.at < job.items; walk.go(job)) {
    place.go(job);
    place.prefetch_slot(job, walk.next());
    const uint64_t block = walk.at - place.first_item;
    if (block >= place.full) continue;
    float x[32];
    loader.load(job, place, walk.at, walk.next(), lane, x);

    UnitParams p;
    bool marked = false;
    if (scheme.scale_words != 0) {
      if (scheme.unit == 0) {
        p = job.params[place.slot];
        marked = float_bits(p.a) == kMarker;
      } else {
        const uint32_t top = block_max(x);
        Sums sums;
        if (scheme.sums != SumKind::none && top < kInfBits) sums = warp_sums(scheme.sums, x, grid_for(top));
        uint32_t scales[2];
        B::make_scales(scheme, top, sums, kBlock, scales);
#pragma unroll
        for (uint32_t w = 0; w < 2; ++w) {
          if (w >= scheme.scale_words) continue;
          const uint64_t index = place.scales + block * scheme.scale_words + w;
          if (lane == 0) job.body[index] = scales[w];
          scale_sums.add(lane, scales[w], index, check);
        }
        p = B::make_params(scheme, scales);
        marked = scales[0] == kMarker;
      }
    }
    if constexpr (B::kTableFloats > 0) p.table = table;
    const BlockPlace at{job.body + place.region + block * kLane * bits + lane,
                        static_cast<uint32_t>(place.region / kLane + block * bits),
                        block_key(place.key, place.first_block + block)};
    encode_full<B, kFeedback>(job, at, lane, x, p, marked, check);
    if (kFeedback && place.after) store_residuals(job, place.before, place.after, block * kBlock + lane, x);
  }
  scale_sums.flush(check);
  check.flush(job.check);
}

// The words of a full block that a thread decodes, one lane of every row. They are asked for before the parameters are
// known, so that the two waits overlap. Of 32-bit codes only half fit in registers; the second half comes when the
// first is done.
template <class B>
struct LaneWords {
  static constexpr int kBits = B::kCodeBits;
  static constexpr int kHeld = kBits == 0 ? 32 : kBits <= 16 ? kBits : 16;  // words at a time; kBits 0: codes
  uint32_t w[kHeld];

  __device__ __forceinline__ void load(const CudaJob& job, const uint32_t* words, uint32_t row0, uint32_t lane,
                                       Check& check) {
    if constexpr (kBits == 0) {
      unpack_block(job.scheme.bits, words + lane, row0, w, check);
    } else {
#pragma unroll
      for (int q = 0; q < kHeld; ++q) w[q] = __ldcs(words + q * 32 + lane);
    }
  }

  // The block that begins at element `first`. Returns what B::check() has seen.
  __device__ __forceinline__ uint32_t decode(const CudaJob& job, void* out, uint64_t first, const uint32_t* words,
                                             uint32_t row0, uint32_t lane, const UnitParams& p, Check& check) {
    constexpr uint32_t kMask = kBits == 32 ? 0xffffffffu : (1u << (kBits % 32)) - 1;
    const bool plain = job.dtype == DType::f32 && !job.add;
    const uint64_t at = first + lane;
    float* to = static_cast<float*>(out) + at;
    uint32_t seen = 0;
    if constexpr (kBits != 0) {
#pragma unroll
      for (int q = 0; q < kHeld; ++q) check.row(w[q], row0 + q);
    }
#pragma unroll
    for (int row = 0; row < 32; ++row) {
      const int shift = row * kBits % 32, q = kBits ? row * kBits / 32 : row;
      if constexpr (kBits == 32) {
        if (row == 16) {
#pragma unroll
          for (int k = 0; k < 16; ++k) w[k] = __ldcs(words + (16 + k) * 32 + lane);
#pragma unroll
          for (int k = 0; k < 16; ++k) check.row(w[k], row0 + 16 + k);
        }
      }
      uint32_t code = w[q % kHeld] >> shift;
      if (shift + kBits > 32) code |= w[(q + 1) % kHeld] << ((32 - shift) & 31);
      if constexpr (kBits != 0) code &= kMask;
      seen = B::template check<ScalarLane>(seen, code);
      const float value = B::template decode<ScalarLane>(code, p);
      if (plain)
        __stcs(to + row * 32, value);
      else
        store_value(out, job.dtype, job.add, at + row * 32, value);
    }
    return seen;
  }
  __device__ __forceinline__ void finish(uint32_t, Check&) const {}
};

// The same by quads: a thread takes four neighbouring lanes of every fourth row instead of one lane of every row, so
// that its results go out 16 bytes at a time. For codes of 1, 2 or 4 bits: four rows share a word, and few words are
// held. The output is f32, aligned and not added to.
template <class B>
struct QuadWords {
  static constexpr int kBits = B::kCodeBits;
  uint4 w[kBits];
  unsigned long long sums[4] = {0, 0, 0, 0};  // of this thread's four lanes, over all blocks

  __device__ __forceinline__ void load(const CudaJob&, const uint32_t* words, uint32_t, uint32_t lane, Check&) {
#pragma unroll
    for (int q = 0; q < kBits; ++q) w[q] = __ldcs(reinterpret_cast<const uint4*>(words + q * 32) + (lane & 7));
  }

  __device__ __forceinline__ uint32_t decode(const CudaJob&, void* out, uint64_t first, const uint32_t*, uint32_t row0,
                                             uint32_t lane, const UnitParams& p, Check&) {
    constexpr uint32_t kMask = (1u << kBits) - 1;
    const uint32_t r = lane >> 3;  // of four rows, this thread's
    uint32_t seen = 0;
#pragma unroll
    for (int q = 0; q < kBits; ++q) {
      if (r == q % 4) {  // each word is summed by one of the four threads that hold it
        const uint32_t weight = row_weight(row0 + q);
        sums[0] += static_cast<unsigned long long>(w[q].x) * weight;
        sums[1] += static_cast<unsigned long long>(w[q].y) * weight;
        sums[2] += static_cast<unsigned long long>(w[q].z) * weight;
        sums[3] += static_cast<unsigned long long>(w[q].w) * weight;
      }
      w[q].x >>= r * kBits;
      w[q].y >>= r * kBits;
      w[q].z >>= r * kBits;
      w[q].w >>= r * kBits;
    }
    float4* to = reinterpret_cast<float4*>(static_cast<float*>(out) + first) + lane;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int q = 4 * j * kBits / 32, shift = 4 * j * kBits % 32;
      const uint32_t x = w[q].x >> shift & kMask, y = w[q].y >> shift & kMask, z = w[q].z >> shift & kMask,
                     v = w[q].w >> shift & kMask;
      seen = B::template check<ScalarLane>(B::template check<ScalarLane>(seen, x), y);
      seen = B::template check<ScalarLane>(B::template check<ScalarLane>(seen, z), v);
      __stcs(to + j * 32, float4{B::template decode<ScalarLane>(x, p), B::template decode<ScalarLane>(y, p),
                                 B::template decode<ScalarLane>(z, p), B::template decode<ScalarLane>(v, p)});
    }
    return seen;
  }
  // Once all blocks are done.
  __device__ __forceinline__ void finish(uint32_t lane, Check& check) const {
    for (uint32_t c = 0; c < 4; ++c) check.loose += sums[c] * lane_weight((lane & 7) * 4 + c);
  }
};

template <class B, bool kQuads>
struct HeldWords {
  using Type = LaneWords<B>;
};
template <class B>
struct HeldWords<B, true> {
  using Type = QuadWords<B>;
};

template <class B, bool kQuads>
__global__ void __launch_bounds__(256, 4) decode_full_blocks(const __grid_constant__ CudaJob job) {
  const int bits = code_bits<B>(job.scheme);
  const uint32_t lane = threadIdx.x & 31;
  const uint64_t blocks = block_count(job);
  const Scheme& scheme = job.scheme;
  Check check;
  const uint32_t head = job.head.expected ? 1 : 0;  // the first thread block looks at the head
  if (blockIdx.x < head) return report(job, check_head(job), check);
  const uint32_t self = blockIdx.x - head;
  uint32_t problem = 0;
  if (self < job.busy) problem = decode_any<B, true>(job, self, job.busy, check);
  __shared__ float table[B::kTableFloats + 1];
  fetch_table<B>(scheme, table);
  ScaleSums scale_sums;
  TensorPlace place;
  typename HeldWords<B, kQuads>::Type held;
  const uint32_t shift = chunked(scheme) ? 5 : 0;  // from blocks to items
  Walk walk(job, self);
  place.prefetch_slot(job, walk.at >> shift);
  for (; walk.at < blocks; walk.go(job)) {
    place.go(job);
    place.prefetch_slot(job, walk.next() >> shift);
    const uint64_t block = walk.at - (place.first_item << shift);
    if (block >= place.full) continue;
    const uint32_t* words = job.body + place.region + block * kLane * bits;
    const uint32_t row0 = static_cast<uint32_t>(place.region / kLane + block * bits);

    held.load(job, words, row0, lane, check);
    UnitParams p;
    if (scheme.scale_words != 0) {
      const uint64_t unit = scheme.unit == 0 ? 0 : block >> job.unit_shift;
      uint32_t scales[2] = {0, 0};
      scales[0] = __ldg(job.body + place.scales + unit * scheme.scale_words);
      if (scheme.scale_words > 1) scales[1] = __ldg(job.body + place.scales + unit * scheme.scale_words + 1);
      if (scheme.unit == 0 ? block == 0 : unit << job.unit_shift == block) {
        if (!B::scales_valid(scheme, scales)) problem |= kBadScales;
#pragma unroll
        for (uint32_t w = 0; w < 2; ++w)
          if (w < scheme.scale_words)
            scale_sums.add(lane, scales[w], place.scales + unit * scheme.scale_words + w, check);
      }
      p = B::make_params(scheme, scales);
    }
    if constexpr (B::kTableFloats > 0) p.table = table;
    const uint32_t seen = held.decode(job, place.out, block * kBlock, words, row0, lane, p, check);
    if (B::bad(seen, scheme)) problem |= kBadCodes;
  }
  held.finish(lane, check);
  scale_sums.flush(check);
  report(job, problem, check);
}
