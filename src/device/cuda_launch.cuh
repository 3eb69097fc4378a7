// SPDX-License-Identifier: Apache-2.0
// Which kernel takes which job, for any body, and with how many thread blocks.
//
// Included by the files of kernels inside an anonymous namespace, after the drivers.

int multiprocessors() {
  static const int count = [] {
    int device = 0, sms = 1;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
    return sms;
  }();
  return count;
}

unsigned limited(uint64_t wanted, int per_sm) {
  return static_cast<unsigned>(std::max<uint64_t>(
      1, std::min<uint64_t>(wanted, static_cast<uint64_t>(multiprocessors()) * std::max(per_sm, 1))));
}

// Enough thread blocks to fill the device, no more: kernels walk over their items, and add one partial sum each.
// `extra` thread blocks come before those, for tails and for the head of a message.
template <auto kKernel, unsigned kShared = 0>
void launch(CudaJob job, uint64_t items, unsigned items_per_block, unsigned threads, cudaStream_t stream,
            unsigned extra = 0) {
  static const int per_sm = [&] {
    int blocks = 1;
    if (kShared > 0)
      cuda_throw(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared), "shared memory");
    cuda_throw(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kKernel, threads, kShared), "occupancy");
    return blocks;
  }();
  const unsigned room = limited(~uint64_t{0}, per_sm);
  job.main_blocks = std::min(limited(div_up(items, items_per_block), per_sm), room > extra ? room - extra : 1);
  kKernel<<<job.main_blocks + extra, threads, kShared, stream>>>(job);
  cuda_throw(cudaGetLastError(), "kernel launch");
}

unsigned tail_blocks(const CudaJob& job) { return job.tails ? limited(job.piece_count, 1) : 0; }

struct EncodeCall {
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

struct DecodeCall {
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
