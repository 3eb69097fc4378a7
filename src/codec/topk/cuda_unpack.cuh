// SPDX-License-Identifier: Apache-2.0
// Decoding packed tiles of topk on a GPU. Whatever form the places have, they become a bit for each element in shared
// memory. The bits before an element that is kept are the number of its value, so one pass writes the whole tile.
//
// The words may come from anywhere. A place that no encoder writes sets no bit, and a value is read only if the unit
// has so many.
//
// Included by cuda.cu inside an anonymous namespace, after cuda_packed.cuh.

struct UnpackShared {
  uint32_t kept[kTile / 32];    // a bit for each element
  uint32_t before[kTile / 32];  // how many are kept in front of a word
  uint32_t high[kHighWords];    // Elias and Fano's string of bits
  uint32_t counts[2][32];       // of the warps, for the two sums over the string and over the elements
  uint32_t problems[32];        // of the warps
  float magnitudes[128];        // of the levels
};

// How much stands in front of this thread, and in all of them. One barrier.
struct BlockPrefix {
  uint32_t before, all;
  __device__ __forceinline__ BlockPrefix(uint32_t value, uint32_t* counts) {
    const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    uint32_t sum = value;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
      const uint32_t lower = __shfl_up_sync(kFull, sum, d);
      if (lane >= d) sum += lower;
    }
    if (lane == 31) counts[warp] = sum;
    __syncthreads();
    all = __reduce_add_sync(kFull, counts[lane]);
    before = __reduce_add_sync(kFull, lane < warp ? counts[lane] : 0) + sum - value;
  }
};

// A unit under way: each thread goes through some of its words and notes what is wrong with them.
struct UnpackTile {
  const CudaJob& job;
  const PackedUnit& u;
  bool marked;
  Check& check;
  uint32_t problem;

  __device__ __forceinline__ uint32_t take(const uint32_t* from) {
    const uint32_t word = *from;
    check.loose += word_part(word, static_cast<uint64_t>(from - job.body));
    return word;
  }
  __device__ __forceinline__ void expect(bool right, uint32_t otherwise) {
    if (!right) problem |= otherwise;
  }

  __device__ __forceinline__ void take_scales() {
    if (threadIdx.x >= u.scale_count) return;
    const uint32_t scale = take(u.scales + threadIdx.x);
    expect(marked ? threadIdx.x == 0 || scale == 0 : scale < kInfBits, kBadScales);
  }
  __device__ __forceinline__ void take_values() {
    const uint32_t used = u.k * u.bits % 32;  // of the last word, if not all
    for (uint32_t w = threadIdx.x; w < u.value_count; w += 1024) {
      const uint32_t word = take(u.values + w);
      if (marked) {
        expect(word == (w == 0 && u.bits > 8 ? u.marker() : 0), kBadValues);
        continue;
      }
      if (u.bits == 32) expect(finite_bits(word), kBadValues);
      if (u.bits == 16) {
        expect((word & 0x7fffu) < 0x7f80u, kBadValues);
        expect(2 * w + 1 >= u.k || (word >> 16 & 0x7fffu) < 0x7f80u, kBadValues);
      }
      expect(w + 1 < u.value_count || used == 0 || word >> used == 0, kBadPadding);
    }
  }

  __device__ __forceinline__ void set_kept(uint32_t index, UnpackShared& shared) {
    if (index < u.form.elements)
      atomicOr(shared.kept + index / 32, 1u << index % 32);
    else
      problem |= kBadIndices;
  }
  __device__ __forceinline__ void take_raw(UnpackShared& shared) {
    for (uint32_t w = threadIdx.x; w < u.place_count; w += 1024) {
      const uint32_t pair = take(u.places + w), even = pair & 0xffffu, odd = pair >> 16;
      expect(w == 0 || even > u.places[w - 1] >> 16, kBadIndices);
      set_kept(even, shared);
      if (2 * w + 1 < u.k) {
        expect(odd > even, kBadIndices);
        set_kept(odd, shared);
      } else {
        expect(odd == 0, kBadIndices);
      }
    }
  }
  __device__ __forceinline__ void take_bitmap(UnpackShared& shared) {
    const uint32_t w = threadIdx.x, used = u.form.elements % 32;
    if (w >= u.place_count) return;
    shared.kept[w] = take(u.places + w);
    expect(w + 1 < u.place_count || used == 0 || shared.kept[w] >> used == 0, kBadIndices);
  }
  // Each thread takes the indices of 64 bits of the string. Neighbours that share their upper part are neighbours in
  // the string, too: only these can fail to ascend.
  __device__ __forceinline__ void take_coded(UnpackShared& shared) {
    const uint32_t low = low_place_bits(u.form.elements, u.k), low_bits = u.k * low, low_words = (low_bits + 31) / 32;
    const uint32_t used = low_bits % 32, high_bits = high_place_bits(u.form.elements, u.k);
    for (uint32_t w = threadIdx.x; w < low_words; w += 1024) {
      const uint32_t word = take(u.places + w);
      expect(w + 1 < low_words || used == 0 || word >> used == 0, kBadIndices);
    }
    for (uint32_t w = threadIdx.x; w < kHighWords; w += 1024)
      shared.high[w] = w < u.place_count - low_words ? take(u.places + low_words + w) : 0;
    __syncthreads();
    const uint32_t first = 2 * threadIdx.x;
    const uint64_t mine = uint64_t{shared.high[first + 1]} << 32 | shared.high[first];
    const BlockPrefix prefix(static_cast<uint32_t>(__popcll(mine)), shared.counts[0]);
    bool after_one = first > 0 && shared.high[first - 1] >> 31;
    uint32_t j = prefix.before, last = 0xffffffffu;
    for (uint64_t left = mine; left; left &= left - 1, ++j) {
      const uint32_t place = static_cast<uint32_t>(__ffsll(static_cast<long long>(left))) - 1;
      const uint32_t bit = first * 32 + place;
      if (j >= u.k || bit >= high_bits) {
        problem |= kBadIndices;
        break;
      }
      const uint32_t lower = low ? string_bits(u.places, uint64_t{j} * low, low) : 0;
      if (place == 0 ? after_one : place == last + 1)
        expect(low > 0 && lower > string_bits(u.places, uint64_t{j - 1} * low, low), kBadIndices);
      last = place;
      set_kept((bit - j) << low | lower, shared);
    }
  }

  // What stands for element number j of those that are kept.
  __device__ __forceinline__ float value(uint32_t j, const UnpackShared& shared) const {
    if (j >= u.k) return 0.0f;
    if (u.bits == 32) return bits_float(u.values[j]);
    if (u.bits == 16) return bits_float((u.values[j / 2] >> (j % 2 * 16) & 0xffffu) << 16);
    return level_value(shared.magnitudes, string_bits(u.values, uint64_t{j} * u.bits, u.bits), u.bits);
  }
};

// The field that a CPU would name: the first in the order of the unit.
__device__ __forceinline__ uint32_t first_problem(uint32_t problems) {
  for (const uint32_t one : {kBadScales, kBadValues, kBadPadding})
    if (problems & one) return one;
  return problems;
}

// Word w of a string that begins with k bits that are set: the places of a marked unit.
__device__ __forceinline__ uint32_t first_bits(uint32_t k, uint32_t w) {
  return k >= (w + 1) * 32 ? 0xffffffffu : k <= w * 32 ? 0 : (1u << k % 32) - 1;
}

__global__ void __launch_bounds__(1024) unpack_tiles(const __grid_constant__ CudaJob job) {
  __shared__ UnpackShared shared;
  const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  Check check;
  for (uint64_t i = blockIdx.x; i < job.items; i += gridDim.x) {
    const Item item = item_of(job, i);
    const CudaPiece& piece = item.piece;
    const uint64_t begin = item.number * kTile, elements = min_u64(kTile, piece.count - begin);
    const PackedUnit u(job.scheme, elements, job.body + kept_of(job, piece, item.number, elements).words);
    UnpackTile tile{job, u, u.marked(), check, 0};
    shared.kept[threadIdx.x] = 0;
    if (u.bits <= 8 && threadIdx.x <= u.top())
      shared.magnitudes[threadIdx.x] =
          level_magnitude(threadIdx.x, u.top(), bits_float(u.scales[0]), u.bits > 1 ? bits_float(u.scales[1]) : 0.0f);
    tile.take_scales();
    tile.take_values();
    __syncthreads();
    if (u.form.kind == kRawPlaces)
      tile.take_raw(shared);
    else if (u.form.kind == kBitmapPlaces)
      tile.take_bitmap(shared);
    else
      tile.take_coded(shared);
    __syncthreads();
    const uint32_t kept = shared.kept[threadIdx.x];
    const BlockPrefix prefix(static_cast<uint32_t>(__popc(kept)), shared.counts[1]);
    shared.before[threadIdx.x] = prefix.before;
    tile.expect(prefix.all == u.k, kBadIndices);
    tile.expect(!tile.marked || kept == first_bits(static_cast<uint32_t>(u.k), threadIdx.x), kBadIndices);
    const uint32_t problems = __reduce_or_sync(kFull, tile.problem);
    if (lane == 0) shared.problems[warp] = problems;
    __syncthreads();
    if (warp == 0) {
      const uint32_t problem = __reduce_or_sync(kFull, shared.problems[lane]);
      if (problem && lane == 0) atomicOr(job.status, first_problem(problem));
    }
    const float fill = tile.marked ? bits_float(kMarker) : 0.0f;
#pragma unroll 4
    for (uint32_t row = 0; row < 32; ++row) {
      const uint32_t w = warp * 32 + row, word = shared.kept[w], at = w * 32 + lane;
      if (at >= elements) break;
      float x = fill;
      if (!tile.marked && word >> lane & 1)
        x = tile.value(shared.before[w] + __popc(word & ((1u << lane) - 1)), shared);
      store_value(job.out[piece.tensor], job.dtype, job.add, begin + at, x);
    }
    __syncthreads();  // the next tile uses the same shared memory
  }
  check.flush(job.check);
}
