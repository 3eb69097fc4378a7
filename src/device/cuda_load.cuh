// SPDX-License-Identifier: Apache-2.0
// How the CUDA drivers find the blocks of a job, and read and write a caller's tensors: element types, error feedback
// on the way in, residuals on the way out.
//
// Included by the files of kernels inside an anonymous namespace, after cuda_head.cuh.

struct Item {
  uint32_t slot;  // of the piece in its group
  CudaPiece piece;
  uint64_t number;  // of the item in its piece
};

__device__ __forceinline__ Item item_of(const CudaJob& job, uint64_t i) {
  const uint32_t slot = job.piece_count == 1 ? 0 : __ldg(job.item_piece + i);
  Item item{slot, job.pieces[slot], 0};
  item.number = i - item.piece.first_item;
  return item;
}

// The i-th block of the job (of block_count()); `number` is its number in the piece, which may lie beyond the piece's
// end.
__device__ __forceinline__ Item block_of(const CudaJob& job, uint64_t i) {
  if (!chunked(job.scheme)) return item_of(job, i);
  Item item = item_of(job, i / 32);
  item.number = item.number * 32 + i % 32;
  return item;
}

// The partial block at the end of a piece; beyond its end if there is none.
__device__ __forceinline__ Item tail_of(const CudaJob& job, uint64_t slot) {
  Item item{static_cast<uint32_t>(slot), job.pieces[slot], 0};
  item.number = item.piece.count / kBlock;
  return item;
}

__device__ __forceinline__ float widen_at(const void* data, DType dtype, uint64_t i) {
  if (dtype == DType::f32) return __ldcs(static_cast<const float*>(data) + i);
  const uint16_t h = __ldcs(static_cast<const unsigned short*>(data) + i);
  return dtype == DType::f16 ? f16_to_f32(h) : bf16_to_f32(h);
}

// Adds what error feedback has kept of a block: `before`, or null.
__device__ __forceinline__ void add_residuals(const CudaJob& job, const CudaPiece& piece, const void* before,
                                              uint64_t block, uint32_t lane, float (&x)[32]) {
  const uint64_t at = block * kBlock + lane;
  if (before == nullptr) return;
  if (piece.count - block * kBlock >= kBlock && job.residual == DType::f32) {
    const float* from = static_cast<const float*>(before) + at;
#pragma unroll
    for (int row = 0; row < 32; ++row) x[row] = x[row] + __ldcs(from + row * 32) * job.loss_scale;
  } else {
#pragma unroll
    for (int row = 0; row < 32; ++row)
      if (at + row * 32 < piece.count) x[row] = x[row] + widen_at(before, job.residual, at + row * 32) * job.loss_scale;
  }
}

// A block's values, feedback added; zero beyond the tensor's end.
template <bool kFeedback>
__device__ __forceinline__ void load_block(const CudaJob& job, const CudaPiece& piece, uint64_t block, uint32_t lane,
                                           float (&x)[32]) {
  const uint64_t at = block * kBlock + lane;
  const void* in = job.in[piece.tensor];
  if (piece.count - block * kBlock >= kBlock && job.dtype == DType::f32) {
    const float* from = static_cast<const float*>(in) + at;
#pragma unroll
    for (int row = 0; row < 32; ++row) x[row] = __ldcs(from + row * 32);
  } else {
#pragma unroll
    for (int row = 0; row < 32; ++row)
      x[row] = at + row * 32 < piece.count ? widen_at(in, job.dtype, at + row * 32) : 0.0f;
  }
  if constexpr (kFeedback) add_residuals(job, piece, job.before[piece.tensor], block, lane, x);
}

__device__ __forceinline__ void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// A full block, one line per lane.
__device__ __forceinline__ void prefetch_block(const void* data, DType dtype, uint64_t block, uint32_t lane) {
  prefetch(static_cast<const char*>(data) + (block * kBlock + lane * 32) * (dtype == DType::f32 ? 4 : 2));
}

// Asks the cache for the block that this warp takes in the next tile of its thread block, one line per lane. Tiles are
// handed out to thread blocks in turn. kFeedback: for its residuals as well.
template <bool kFeedback>
__device__ __forceinline__ void prefetch_tile(const CudaJob& job, const CudaPiece& piece, uint64_t block,
                                              uint32_t lane) {
  if ((block + 32ull * gridDim.x + 1) * kBlock > piece.count) return;
  const uint64_t next = block + 32ull * gridDim.x;
  prefetch_block(job.in[piece.tensor], job.dtype, next, lane);
  if (kFeedback && job.before[piece.tensor] != nullptr)
    prefetch_block(job.before[piece.tensor], job.residual, next, lane);
}

// r holds (x - decoded) * unscale; where that is NaN the unit was marked and keeps what it had.
__device__ __forceinline__ void store_residual(const CudaJob& job, const CudaPiece& piece, uint64_t at, float r) {
  if (at >= piece.count) return;
  const bool marked = (float_bits(r) & 0x7fffffffu) > kInfBits;
  if (job.residual == DType::f32) {
    float* after = static_cast<float*>(job.after[piece.tensor]);
    __stcs(after + at, marked ? static_cast<const float*>(job.before[piece.tensor])[at] : r);
  } else {
    uint16_t* after = static_cast<uint16_t*>(job.after[piece.tensor]);
    after[at] = marked ? static_cast<const uint16_t*>(job.before[piece.tensor])[at] : f32_to_bf16(r);
  }
}

__device__ __forceinline__ void store_value(void* out, DType dtype, bool add, uint64_t i, float value) {
  if (dtype == DType::f32) {
    float* to = static_cast<float*>(out) + i;
    if (add)
      *to = *to + value;
    else
      __stcs(to, value);
  } else {
    static_cast<uint16_t*>(out)[i] = dtype == DType::f16 ? f32_to_f16(value) : f32_to_bf16(value);
  }
}
