// SPDX-License-Identifier: Apache-2.0
// One launch for many spans: as many as fit travel as the kernel's argument, so nothing is copied to the device first.
// A span gets as many thread blocks as its length asks for, so that a few large tensors among many small ones leave no
// thread blocks without work.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "device/cuda_enqueue.cuh"
#include "device/cuda_job.h"

namespace gradwire {

constexpr unsigned kPackThreads = 256;
constexpr uint64_t kPackTurns = 4,  // items of a thread in a small pack
    kPackBlocks = 4096;             // of a launch, about: a thread takes more items in a large pack

template <class Span>
struct Pack {
  static constexpr size_t kSpans = 3584 / (sizeof(Span) + sizeof(uint32_t));  // arguments of a kernel have 4 KB
  Span spans[kSpans];
  uint32_t ends[kSpans];  // thread blocks of the spans up to this one

  // The span of this thread block, and the items that this thread takes: from `at` on, every `step`-th.
  struct Turn {
    const Span& span;
    uint64_t at, step;
  };
  __device__ __forceinline__ Turn turn() const {
    uint32_t low = 0, high = kSpans - 1;  // the first whose end lies behind this block
    while (low < high) {
      const uint32_t middle = (low + high) / 2;
      if (ends[middle] > blockIdx.x)
        high = middle;
      else
        low = middle + 1;
    }
    const uint32_t begin = low ? ends[low - 1] : 0;
    return {spans[low], (blockIdx.x - begin) * uint64_t{kPackThreads} + threadIdx.x,
            (ends[low] - begin) * uint64_t{kPackThreads}};
  }
};

// launch(pack, blocks) for the spans that are not empty, a pack at a time. `each`: elements that make an item.
template <class Span, class Launch>
void in_packs(int index, std::span<const Span> spans, uint64_t each, Launch&& launch) {
  cuda_throw(cudaSetDevice(index), "cudaSetDevice");
  Pack<Span> pack{};
  size_t n = 0;
  uint64_t elements = 0;
  const auto flush = [&] {
    if (n == 0) return;
    const uint64_t turns = std::max(kPackTurns, elements / each / (kPackThreads * kPackBlocks)),
                   of_block = kPackThreads * turns * each;
    uint32_t blocks = 0;
    for (size_t i = 0; i < Pack<Span>::kSpans; ++i) {
      if (i < n) blocks += static_cast<uint32_t>((pack.spans[i].count + of_block - 1) / of_block);
      pack.ends[i] = blocks;
    }
    launch(pack, blocks);
    cuda_throw(cudaGetLastError(), "kernel launch");
    n = 0;
    elements = 0;
  };
  for (const Span& span : spans) {
    if (span.count == 0) continue;
    pack.spans[n++] = span;
    elements += span.count;
    if (n == Pack<Span>::kSpans) flush();
  }
  flush();
}

}  // namespace gradwire
