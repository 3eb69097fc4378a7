// SPDX-License-Identifier: Apache-2.0
// Stands in for the product's file of this name: how kernels are started on an emulated GPU. Few thread blocks, so that
// each of them takes several items, one after another in the same shared memory.

inline unsigned limited(uint64_t wanted, int per_sm) {
  return static_cast<unsigned>(std::max<uint64_t>(1, std::min<uint64_t>(wanted, per_sm > 2 ? 3 : 2)));
}

template <auto kKernel, class... Args>
void enqueue(dim3 blocks, unsigned threads, unsigned, cudaStream_t, const Args&... args) {
  emulated::run(blocks, threads, [&] { kKernel(args...); });
}

template <auto kKernel, unsigned kShared = 0, class... More>
void launch(CudaJob job, uint64_t items, unsigned items_per_block, unsigned threads, cudaStream_t stream,
            unsigned extra = 0, const More&... more) {
  static_assert(kShared == 0, "dynamic shared memory is not emulated");
  job.main_blocks = limited(div_up(items, items_per_block), 1);
  enqueue<kKernel>({job.main_blocks + extra}, threads, 0, stream, job, more...);
}
