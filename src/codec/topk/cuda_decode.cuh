// SPDX-License-Identifier: Apache-2.0
// Decoding topk on a GPU: zeros first, then the kept values to their places.
//
// Included by cuda.cu inside an anonymous namespace, after cuda_kept.cuh.

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
    const KeptUnit u = kept_of(job, piece, unit, min_u64(size, piece.count - unit * size));
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
    const KeptUnit u = kept_of(job, piece, unit, elements);
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
