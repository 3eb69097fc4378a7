// SPDX-License-Identifier: Apache-2.0
// How kernels are started, and how many thread blocks they get.
//
// Included by the files of kernels inside an anonymous namespace, after cuda_load.cuh.

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

template <auto kKernel, class... Args>
void enqueue(dim3 blocks, unsigned threads, unsigned shared, cudaStream_t stream, const Args&... args) {
  kKernel<<<blocks, threads, shared, stream>>>(args...);
  cuda_throw(cudaGetLastError(), "kernel launch");
}

// Enough thread blocks to fill the device, no more: kernels walk over their items, and each adds one partial sum.
// `extra` thread blocks come before those, for tails and for the head of a message. `more` are further arguments of the
// kernel.
template <auto kKernel, unsigned kShared = 0, class... More>
void launch(CudaJob job, uint64_t items, unsigned items_per_block, unsigned threads, cudaStream_t stream,
            unsigned extra = 0, const More&... more) {
  static const int per_sm = [&] {
    int blocks = 1;
    if (kShared > 0)
      cuda_throw(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared), "shared memory");
    cuda_throw(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kKernel, threads, kShared), "occupancy");
    return blocks;
  }();
  const unsigned room = limited(~uint64_t{0}, per_sm);
  job.main_blocks = std::min(limited(div_up(items, items_per_block), per_sm), room > extra ? room - extra : 1);
  enqueue<kKernel>(job.main_blocks + extra, threads, kShared, stream, job, more...);
}
