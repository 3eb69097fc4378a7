// SPDX-License-Identifier: Apache-2.0
// The kept values of a unit of topk on a GPU, from registers to the message, and what is left as the residual.
//
// Checksums are linear in the words, so that the two 16-bit indices of a word can be added by the threads that write
// them, each for itself.
//
// Included by cuda.cu inside an anonymous namespace, after cuda_pack.cuh.

struct KeptUnit {
  uint64_t words;  // of the unit, in the body
  uint64_t k;
  bool wide;
};

__device__ __forceinline__ KeptUnit kept_of(const CudaJob& job, const CudaPiece& piece, uint64_t unit,
                                            uint64_t elements) {
  const uint64_t size = unit_elements(job.scheme, piece.count);
  return {piece.region + unit * topk_unit_words(job.scheme, piece.count, size), topk_kept(job.scheme, elements),
          wide_indices(job.scheme, piece.count)};
}

__device__ __forceinline__ void write_kept(const CudaJob& job, const KeptUnit& u, uint64_t j, uint32_t bits,
                                           uint32_t index, Check& check) {
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

// Whether a value is kept: all above the threshold are, and of those at it the first `equals`, which is counted down.
// The warp asks for a row at once; lanes_before has a bit for every lower lane.
__device__ __forceinline__ bool keep_in_row(uint32_t magnitude, bool inside, uint32_t threshold, uint32_t lanes_before,
                                            uint64_t& equals) {
  const bool equal = inside && magnitude == threshold;
  const uint32_t votes = __ballot_sync(kFull, equal);
  const bool keep_equal = equal && __popc(votes & lanes_before) < equals;
  equals -= __popc(__ballot_sync(kFull, keep_equal));
  return keep_equal || (inside && magnitude > threshold);
}

// Where the kept values of one warp's block go: `at` is the place of its first, `equals` how many at the threshold it
// may keep. Clears what is kept, so that x becomes the residual.
__device__ __forceinline__ void emit_block(const CudaJob& job, const KeptUnit& u, uint64_t begin_in_unit, uint32_t lane,
                                           float (&x)[32], uint64_t n, uint32_t threshold, uint64_t at, uint64_t equals,
                                           Check& check) {
  const uint32_t before = (1u << lane) - 1;
#pragma unroll
  for (int row = 0; row < 32; ++row) {
    const uint32_t bits = float_bits(x[row]);
    const bool keep = keep_in_row(bits & 0x7fffffffu, row * kLane + lane < n, threshold, before, equals);
    const uint32_t all = __ballot_sync(kFull, keep);
    if (keep) {
      write_kept(job, u, at + __popc(all & before), bits, static_cast<uint32_t>(begin_in_unit + row * kLane + lane),
                 check);
      x[row] = 0;
    }
    at += __popc(all);
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
