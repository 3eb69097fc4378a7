// SPDX-License-Identifier: Apache-2.0
// Which kernel takes which job, for any body.
//
// Included by the files of kernels inside an anonymous namespace, after the drivers.

#include "device/cuda_grid.cuh"

unsigned tail_blocks(const CudaJob& job) { return job.tails ? limited(job.piece_count, 1) : 0; }

struct CudaEncodeCall {
  const CudaJob& job;
  cudaStream_t stream;
  template <class B>
  void run() {
    // The statistics of whole tensors are complete by now.
    if (job.scheme.unit == 0) launch<whole_scales<B>>(job, job.piece_count, 128, 128, stream);
    if constexpr (B::kCodeBits <= 8) {
      if (chunked(job.scheme)) {
        if (job.feedback)
          launch<encode_chunks<B, true>>(job, job.items, 1, 1024, stream);
        else
          launch<encode_chunks<B, false>>(job, job.items, 1, 1024, stream);
        return;
      }
    }
    if (job.feedback)
      run_blocks<B, true>();
    else
      run_blocks<B, false>();
  }
  template <class B, bool kFeedback>
  void run_blocks() {
    if (!block_wise(job.scheme)) {
      launch<encode_blocks<B, kFeedback, false>>(job, job.items, 8, 256, stream);
      return;
    }
    if (job.tails) launch<encode_blocks<B, kFeedback, true>>(job, job.piece_count, 1, 256, stream);
    if constexpr (!kFeedback) {
      if (job.dtype == DType::f32 && job.aligned) {
        launch<encode_full_blocks<B, false, true>, 8 * 2 * kBlock * sizeof(float)>(job, job.items, 8, 256, stream);
        return;
      }
    }
    launch<encode_full_blocks<B, kFeedback, false>>(job, job.items, 8, 256, stream);
  }
};

struct CudaDecodeCall {
  const CudaJob& job;
  cudaStream_t stream;
  template <class B>
  void run() {
    const unsigned head = job.head.expected ? 1 : 0;
    if (!block_wise(job.scheme)) {
      launch<decode_blocks<B>>(job, block_count(job), 8, 256, stream, head);
      return;
    }
    if constexpr (B::kCodeBits == 1 || B::kCodeBits == 2 || B::kCodeBits == 4) {
      if (job.aligned && job.dtype == DType::f32 && !job.add) {
        launch<decode_full_blocks<B, true>>(job, block_count(job), 8, 256, stream, tail_blocks(job) + head);
        return;
      }
    }
    launch<decode_full_blocks<B, false>>(job, block_count(job), 8, 256, stream, tail_blocks(job) + head);
  }
};
