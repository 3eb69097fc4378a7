// SPDX-License-Identifier: Apache-2.0
// How kernels are started, and how many thread blocks they get.
//
// Included by the files of kernels inside an anonymous namespace, after cuda_load.cuh.

// What is asked of a GPU once, for each GPU of the process by itself. Several threads may ask at once.
struct OncePerDevice {
  std::atomic<int> known[64] = {};  // 0: not yet

  template <class Ask>
  int get(Ask ask) {
    int device = 0;
    cuda_throw(cudaGetDevice(&device), "device");
    if (device >= 64) return ask(device);
    int value = known[device].load(std::memory_order_relaxed);
    if (value == 0) known[device].store(value = ask(device), std::memory_order_relaxed);
    return value;
  }
};

int device_attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  cuda_throw(cudaDeviceGetAttribute(&value, which, device), "device");
  return value;
}

int multiprocessors() {
  static OncePerDevice count;
  return count.get([](int device) { return device_attribute(cudaDevAttrMultiProcessorCount, device); });
}

unsigned limited(uint64_t wanted, int per_sm) {
  return static_cast<unsigned>(std::max<uint64_t>(
      1, std::min<uint64_t>(wanted, static_cast<uint64_t>(multiprocessors()) * std::max(per_sm, 1))));
}

// Kernels for full blocks (cuda_fast.cuh) take runs that are as long as possible, up to kMostRun, and such that all
// warps get the same. A tail takes a thread block about as long as kTailCosts blocks take its warps.
void share_out(CudaJob& job, uint64_t blocks, unsigned warps_per_block) {
  constexpr uint64_t kMostRun = 32, kTailCosts = 4;
  job.busy = job.tails ? std::min(job.piece_count, job.main_blocks) : 0;
  const uint64_t warps = uint64_t{job.main_blocks} * warps_per_block;
  const uint64_t each = div_up(blocks + job.busy * kTailCosts * warps_per_block, warps);
  job.run = static_cast<uint32_t>(div_up(each, div_up(each, job.piece_count == 1 ? 1 : kMostRun)));
  job.aside = static_cast<uint32_t>(min_u64(kTailCosts, job.run));
}

// The most shared memory that a thread block may have on this GPU.
unsigned most_shared() {
  static OncePerDevice bytes;
  return static_cast<unsigned>(
      bytes.get([](int device) { return device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device); }));
}

// Kernels get at most 48 KiB of dynamic shared memory unless they are allowed more. They are allowed all that there is,
// and once: the limit is the process's, so one that followed the size of each launch could be lowered by a thread while
// another one launches.
template <auto kKernel>
void allow_shared() {
  static OncePerDevice allowed;
  allowed.get([](int) {
    cudaFuncAttributes kernel{};
    cuda_throw(cudaFuncGetAttributes(&kernel, kKernel), "shared memory");
    const int most = static_cast<int>(most_shared() - kernel.sharedSizeBytes);
    cuda_throw(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most), "shared memory");
    return most;
  });
}

// How many thread blocks of a kernel a multiprocessor holds, with so much shared memory each. Before the kernel is
// started, because it may then use more than 48 KiB.
template <auto kKernel>
int per_multiprocessor(unsigned threads, size_t shared) {
  int blocks = 1;
  if (shared > 0) allow_shared<kKernel>();
  cuda_throw(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kKernel, static_cast<int>(threads), shared),
             "occupancy");
  return blocks;
}

// Enough thread blocks to fill the device, no more: kernels walk over their items, and each adds one partial sum.
// `extra` thread blocks come before those, for the head of a message. `more` are further arguments of the kernel.
template <auto kKernel, unsigned kShared = 0, class... More>
void launch(CudaJob job, uint64_t items, unsigned items_per_block, unsigned threads, cudaStream_t stream,
            unsigned extra = 0, const More&... more) {
  static OncePerDevice known;
  const int per_sm = known.get([&](int) { return per_multiprocessor<kKernel>(threads, kShared); });
  const unsigned room = limited(~uint64_t{0}, per_sm);
  job.main_blocks = std::min(limited(div_up(items, items_per_block), per_sm), room > extra ? room - extra : 1);
  share_out(job, items, items_per_block);
  enqueue<kKernel>(job.main_blocks + extra, threads, kShared, stream, job, more...);
}
