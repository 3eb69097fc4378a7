// SPDX-License-Identifier: Apache-2.0
// Which kernel takes which job, for any body.
//
// Included by the files of kernels inside an anonymous namespace, after the drivers.

#include "device/cuda_grid.cuh"

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
          run_chunks<B, true>();
        else
          run_chunks<B, false>();
        return;
      }
    }
    if (job.feedback)
      run_blocks<B, true>();
    else
      run_blocks<B, false>();
  }
  template <class B, bool kFeedback>
  void run_chunks() {
    constexpr unsigned kAhead = 32 * kBlock * sizeof(float), kElse = 4096;
    if (job.dtype == DType::f32 && job.aligned && kAhead + kElse <= most_shared())
      launch<encode_chunks<B, kFeedback, true>, kAhead>(job, job.items, 1, 1024, stream);
    else
      launch<encode_chunks<B, kFeedback, false>>(job, job.items, 1, 1024, stream);
  }
  template <class B, bool kFeedback>
  void run_blocks() {
    if (!block_wise(job.scheme)) {
      launch<encode_blocks<B, kFeedback>>(job, job.items, 8, 256, stream);
      return;
    }
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
        launch<decode_full_blocks<B, true>>(job, block_count(job), 8, 256, stream, head);
        return;
      }
    }
    launch<decode_full_blocks<B, false>>(job, block_count(job), 8, 256, stream, head);
  }
};
